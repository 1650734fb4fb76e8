package kernel

import (
	"golang.org/x/sys/unix"
)

// How [OpenBeneath] and [OpenInRoot] resolve.
const (
	resolveStrict = unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS
	// openat2Attempts bounds the retries of a resolution that raced with a
	// rename or a mount elsewhere, which the kernel answers with EAGAIN.
	openat2Attempts = 128
)

// OpenBeneath opens path below the directory dirfd and follows no link of any
// kind; "..", an absolute path, or a way out is an error (EXDEV), a link is
// ELOOP. flags are open(2)'s, unix.O_PATH for a mere handle; O_CLOEXEC is
// added. Mounts below dirfd are crossed. openat2(2); Linux 5.6.
func OpenBeneath(dirfd int, path string, flags int) (int, error) {
	return Openat2(dirfd, path, unix.OpenHow{
		Flags: uint64(flags), Resolve: unix.RESOLVE_BENEATH | resolveStrict,
	})
}

// OpenInRoot opens path as if dirfd were the root directory: absolute paths and
// ".." stay inside. It follows no link of any kind; a link is ELOOP. flags are
// as for [OpenBeneath].
func OpenInRoot(dirfd int, path string, flags int) (int, error) {
	return Openat2(dirfd, path, unix.OpenHow{
		Flags: uint64(flags), Resolve: unix.RESOLVE_IN_ROOT | resolveStrict,
	})
}

// Openat2 is openat2(2), close-on-exec, tried again a bounded number of times
// where the kernel could not be sure that a concurrent rename did not lead out
// of dirfd; if it never could, the error is EAGAIN.
func Openat2(dirfd int, path string, how unix.OpenHow) (int, error) {
	how.Flags |= unix.O_CLOEXEC
	for attempt := 1; ; {
		fd, err := unix.Openat2(dirfd, path, &how)
		switch {
		case err == nil:
			return fd, nil
		case err == unix.EINTR:
		case err == unix.EAGAIN && attempt < openat2Attempts:
			attempt++
		default:
			return -1, pathError("openat2", path, errnoOf(err))
		}
	}
}
