package kernel

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// empty is the path of calls that act on the descriptor itself.
var empty [1]byte

// pathPtr returns path as the kernel wants it. A path with a NUL inside is
// EINVAL.
func pathPtr(path string) (*byte, error) {
	if path == "" {
		return &empty[0], nil
	}
	return unix.BytePtrFromString(path)
}

// pathError and callError are nil for errno 0 and keep the errno reachable
// through errors.Is otherwise.
func pathError(call, path string, errno unix.Errno) error {
	if errno == 0 {
		return nil
	}
	return &os.PathError{Op: call, Path: path, Err: errno}
}

func callError(call string, errno unix.Errno) error {
	if errno == 0 {
		return nil
	}
	return &os.SyscallError{Syscall: call, Err: errno}
}

// errnoOf turns the error of an x/sys wrapper back into the number it is.
func errnoOf(err error) unix.Errno {
	if err == nil {
		return 0
	}
	var errno unix.Errno
	if errors.As(err, &errno) {
		return errno
	}
	return unix.EINVAL
}

func errnoIs(err error, errno unix.Errno) bool { return errors.Is(err, errno) }
