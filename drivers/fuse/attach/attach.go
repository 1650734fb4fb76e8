// Package attach serves a FUSE connection with go-fuse on a device that
// somebody else opened and mounted, from its beginning or from the middle of
// its life.
//
// go-fuse has no call for the middle: a server begins by answering INIT, which
// a kernel asks once. So INIT is played to it. The server is given one end of
// a socket pair as its device, reads the recorded request there and answers
// into the pair; then the number of that end is made to be the device. That
// rests on two things go-fuse v2.12 does and does not promise: it takes a
// descriptor by number ("/dev/fd/N"), and it reads INIT when it is made, not
// when it serves. The tests of this package fail if that changes.
package attach

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// Of linux/fuse.h.
const (
	opInit       = 26
	notifyResend = 7
	headerLen    = 40
	maxInit      = 4096 // of an INIT request, with room for later versions
)

// Start serves a connection that nobody has served yet. It waits for INIT,
// which is there already if the device was mounted before it was handed over,
// and returns the request: Resume needs it.
//
// The device stays the caller's and may be closed. The server is to be run
// with Serve; it ends when the last mount is gone or the connection was
// aborted.
func Start(ctx context.Context, device *os.File, fs fuse.RawFileSystem, o fuse.MountOptions) (*fuse.Server, []byte, error) {
	request, err := readInit(ctx, device)
	if err != nil {
		return nil, nil, fmt.Errorf("attach: INIT: %w", err)
	}
	s, err := attach(device, fs, o, request, func(answer []byte) error {
		return control(device, func(fd int) error {
			_, err := unix.Write(fd, answer)
			return err
		})
	})
	return s, request, err
}

// Resume serves a connection that a process which is gone has served. The
// filesystem has to answer for the nodes and handles that process gave to the
// kernel, and o has to be what it was then. Requests that process had read and
// not answered come again: each operation may be run a second time.
func Resume(device *os.File, fs fuse.RawFileSystem, o fuse.MountOptions, init []byte) (*fuse.Server, error) {
	if err := checkInit(init); err != nil {
		return nil, fmt.Errorf("attach: the recorded INIT: %w", err)
	}
	return attach(device, fs, o, init, func([]byte) error {
		resend := binary.NativeEndian.AppendUint32(nil, 16)
		resend = binary.NativeEndian.AppendUint32(resend, notifyResend)
		resend = binary.NativeEndian.AppendUint64(resend, 0)
		return control(device, func(fd int) error {
			_, err := unix.Write(fd, resend) // since Linux 6.9
			return err
		})
	})
}

// attach makes a server and plays INIT to it. It calls ready with the answer
// after the server's descriptor has become the device.
func attach(device *os.File, fs fuse.RawFileSystem, o fuse.MountOptions, init []byte, ready func(answer []byte) error) (*fuse.Server, error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("attach: %w", os.NewSyscallError("socketpair", err))
	}
	ours, theirs := pair[0], pair[1]
	defer unix.Close(ours)
	if _, err := unix.Write(ours, init); err != nil {
		unix.Close(theirs)
		return nil, fmt.Errorf("attach: %w", os.NewSyscallError("write", err))
	}
	// NewServer closes the descriptor if it fails.
	server, err := fuse.NewServer(fs, fmt.Sprintf("/dev/fd/%d", theirs), &o)
	if err != nil {
		return nil, fmt.Errorf("attach: go-fuse: %w", err)
	}
	answer := make([]byte, maxInit)
	n, err := unix.Read(ours, answer)
	if err == nil {
		err = control(device, func(fd int) error { return unix.Dup3(fd, theirs, unix.O_CLOEXEC) })
	}
	if err == nil {
		err = ready(answer[:n])
	}
	if err != nil {
		// The number is go-fuse's now, and closed when the server, which
		// never runs, is collected as garbage.
		return nil, fmt.Errorf("attach: hand over the device: %w", err)
	}
	return server, nil
}

// readInit waits for the first request of a connection and reads it.
func readInit(ctx context.Context, device *os.File) ([]byte, error) {
	buf := make([]byte, fuse.MAX_KERNEL_WRITE+maxInit)
	for {
		var n int
		err := control(device, func(fd int) error {
			fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
			ready, err := unix.Poll(fds, int((50 * time.Millisecond).Milliseconds()))
			switch {
			case err != nil:
				return err
			case ready == 0:
				return unix.EAGAIN
			case fds[0].Revents&unix.POLLIN == 0:
				return unix.ENODEV // never mounted, or the mount is gone
			}
			n, err = unix.Read(fd, buf)
			return err
		})
		switch {
		case err == nil:
			return append([]byte(nil), buf[:n]...), checkInit(buf[:n])
		case !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR):
			return nil, err
		case ctx.Err() != nil:
			return nil, context.Cause(ctx)
		}
	}
}

// checkInit tells an INIT request from anything else.
func checkInit(b []byte) error {
	if len(b) < headerLen || len(b) > maxInit ||
		binary.NativeEndian.Uint32(b) != uint32(len(b)) || binary.NativeEndian.Uint32(b[4:]) != opInit {
		return errors.New("it is no INIT request")
	}
	return nil
}

// control runs use with the device's descriptor, which stays open meanwhile.
func control(device *os.File, use func(fd int) error) error {
	raw, err := device.SyscallConn()
	if err != nil {
		return err
	}
	cerr := raw.Control(func(fd uintptr) { err = use(int(fd)) })
	return errors.Join(cerr, err)
}
