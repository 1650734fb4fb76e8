package fusemount

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/handoff"
	"github.com/csi-prepare/csi-prepare/reference/kernel"
)

// ErrUnanswered says that a server did not answer in time.
var ErrUnanswered = errors.New("fusemount: the server does not answer")

// Prove asks the server behind mount for the attributes of its root, past
// every cache, and returns nil once it has answered. A connection that has
// ended is unix.ENOTCONN.
//
// When ctx ends first, the error is ErrUnanswered, and a thread is left behind
// that goes on waiting and keeps the mount: nothing ends the wait for a server
// that has taken the request and keeps it, short of the end of the process. So
// whoever gets ErrUnanswered calls Abort; unless the server has died and a
// successor is to come, which will answer.
func Prove(ctx context.Context, mount *os.File) error {
	raw, err := mount.SyscallConn()
	if err != nil {
		return err
	}
	answered := make(chan error, 1)
	go func() {
		var st unix.Statx_t
		var err error
		cerr := raw.Control(func(fd uintptr) {
			for {
				err = unix.Statx(int(fd), "", unix.AT_EMPTY_PATH|unix.AT_STATX_FORCE_SYNC, unix.STATX_BASIC_STATS, &st)
				if err != unix.EINTR {
					return
				}
			}
		})
		answered <- errors.Join(cerr, err)
	}()
	select {
	case err := <-answered:
		if err != nil {
			return fmt.Errorf("fusemount: asking the server: %w", err)
		}
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%w: %w", ErrUnanswered, context.Cause(ctx))
	}
}

// Abort ends the connection behind mount: whoever waits for its server gets
// ENOTCONN, as does everybody later. It never waits for the server. It fits
// handoff.Config.Abort.
//
// Connections have numbers, which the kernel gives again. This one is read
// from the mount, whose descriptor keeps it from being given to another; the
// control filesystem is a detached mount, seen by nobody.
func Abort(_ context.Context, mount *os.File) error {
	raw, err := mount.SyscallConn()
	if err != nil {
		return err
	}
	cerr := raw.Control(func(fd uintptr) { err = abort(int(fd)) })
	if err := errors.Join(cerr, err); err != nil {
		return fmt.Errorf("fusemount: abort: %w", err)
	}
	return nil
}

func abort(mount int) error {
	number, err := ofMount(mount)
	if err != nil {
		return err
	}
	c, err := OpenControl(number)
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	return c.Abort()
}

// Control ends one connection, and never another: it stays that of its
// connection when the number is given to a new one. It keeps neither the
// connection nor a mount, so that a server sees the end of its last mount.
type Control struct {
	file *os.File // nil if the connection had ended
}

// OpenControl opens the control of the connection with a number: the minor
// device number of a mount of it. The caller sees to it that the mount is there
// before and after the call, since only so long the number is that connection's.
func OpenControl(number uint32) (*Control, error) {
	fs, err := kernel.OpenFS("fusectl")
	if err != nil {
		return nil, err
	}
	defer func() { _ = fs.Close() }()
	if err := fs.Create(); err != nil {
		return nil, err
	}
	control, err := fs.Mount(unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOEXEC)
	if err != nil {
		return nil, err
	}
	defer unix.Close(control)
	name := strconv.FormatUint(uint64(number), 10) + "/abort"
	fd, err := unix.Openat(control, name, unix.O_WRONLY|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
	if errors.Is(err, unix.ENOENT) {
		return &Control{}, nil // an ended connection has no entry
	}
	if err != nil {
		return nil, &os.PathError{Op: "openat", Path: name, Err: err}
	}
	return &Control{os.NewFile(uintptr(fd), "abort")}, nil
}

// Abort ends the connection, as the function Abort does. One that has ended is
// no error.
func (c *Control) Abort() error {
	if c.file == nil {
		return nil
	}
	_, err := c.file.WriteString("1")
	return err
}

// Close lets go of the control.
func (c *Control) Close() error {
	if c.file == nil {
		return nil
	}
	return c.file.Close()
}

// ofMount is the number of the connection behind a mount: the minor number of
// its device. The server is not asked.
func ofMount(mount int) (uint32, error) {
	var st unix.Statx_t
	err := unix.Statx(mount, "", unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC, unix.STATX_TYPE, &st)
	if err != nil {
		return 0, &os.SyscallError{Syscall: "statx", Err: err}
	}
	if st.Dev_major != 0 {
		return 0, fmt.Errorf("device %d:%d is not that of a FUSE connection", st.Dev_major, st.Dev_minor)
	}
	return st.Dev_minor, nil
}

// Same reports whether the connection behind mount is the one whose device
// is given, as /proc/self/fdinfo has it. Both are held, so neither number can
// have come to mean another connection.
func Same(device, mount *os.File) (bool, error) {
	raw, err := mount.SyscallConn()
	if err != nil {
		return false, err
	}
	var number uint32
	cerr := raw.Control(func(fd uintptr) { number, err = ofMount(int(fd)) })
	if err := errors.Join(cerr, err); err != nil {
		return false, fmt.Errorf("fusemount: %w", err)
	}
	other, err := handoff.ConnectionOf(device)
	if err != nil {
		return false, fmt.Errorf("fusemount: %w", err)
	}
	return number == other, nil
}
