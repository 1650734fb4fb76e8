package perform

import (
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// open is openat(2), close-on-exec, repeated when a signal interrupts it.
func open(dirfd int, path string, flags int) (int, error) {
	for {
		fd, err := unix.Openat(dirfd, path, flags|unix.O_CLOEXEC, 0)
		if err == nil {
			return fd, nil
		}
		if err != unix.EINTR {
			return -1, &os.PathError{Op: "openat", Path: path, Err: err}
		}
	}
}

// walk opens path below dirfd for a kernel without openat2(2): one component
// at a time, none of which may be a link, so that there is no way out.
func walk(dirfd int, path string) (int, error) {
	at := dirfd
	for name := range strings.SplitSeq(path, "/") {
		switch name {
		case "", ".":
			continue
		case "..":
			closeWalk(at, dirfd)
			return -1, &os.PathError{Op: "walk", Path: path, Err: unix.EXDEV}
		}
		next, err := open(at, name, unix.O_PATH|unix.O_NOFOLLOW)
		closeWalk(at, dirfd)
		if err != nil {
			return -1, err
		}
		// With O_PATH and O_NOFOLLOW a link is opened itself.
		var st unix.Stat_t
		if err := unix.Fstat(next, &st); err != nil || st.Mode&unix.S_IFMT == unix.S_IFLNK {
			_ = unix.Close(next)
			if err == nil {
				err = unix.ELOOP
			}
			return -1, &os.PathError{Op: "walk", Path: path, Err: err}
		}
		at = next
	}
	if at == dirfd {
		return open(dirfd, ".", unix.O_PATH|unix.O_DIRECTORY)
	}
	return at, nil
}

func closeWalk(at, dirfd int) {
	if at != dirfd {
		_ = unix.Close(at)
	}
}
