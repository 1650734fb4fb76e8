// Package attach serves a FUSE connection on a device that somebody else
// opened and mounted, from its beginning or from the middle of its life.
//
// The protocol is go-fuse's; the reading and writing are not. A go-fuse server
// has no way to begin in the middle, since a kernel asks INIT once, and there
// is a reason why the buffers have to be our own: a process that is killed in
// the very moment in which the kernel copies a request to a page of it that is
// not in memory costs that request. The page cannot be brought in any more, and
// the kernel answers the application with EIO instead of asking a successor
// (fuse_dev_do_read, Linux 6.18). So requests are read into memory that is
// present from the start, and locked where the limit allows it.
package attach

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// Of linux/fuse.h.
const (
	opInit       = 26
	opForget     = 2
	opBatch      = 42 // BATCH_FORGET
	notifyResend = 7
	headerIn     = 40
	headerOut    = 16
	maxInit      = 4096 // of an INIT request, with room for later versions
)

const (
	// readers wait for requests at one time; workers, they included, are
	// busy with requests.
	readers = 2
	workers = 24
	// room is what a buffer has besides data: a header, arguments, names.
	room = 3 * 4096
)

// Server serves one connection.
type Server struct {
	device   int // a copy of its own
	fs       fuse.RawFileSystem
	protocol *fuse.ProtocolServer
	log      func(format string, args ...any)
	size     int

	reading atomic.Int32
	working atomic.Int32
	all     sync.WaitGroup
	ended   atomic.Pointer[error]

	mu     sync.Mutex
	idle   []*buffers
	memory [][]byte // of all buffers
}

// buffers of one worker: memory that is present.
type buffers struct{ in, out []byte }

// Start serves a connection that nobody has served yet. It waits for INIT,
// which is there already if the device was mounted before it was handed over,
// and returns the request: Resume needs it.
//
// The device stays the caller's and may be closed. The server is to be run
// with Serve.
func Start(ctx context.Context, device *os.File, fs fuse.RawFileSystem, o fuse.MountOptions) (*Server, []byte, error) {
	s, err := newServer(device, fs, o)
	if err != nil {
		return nil, nil, err
	}
	init, err := s.readInit(ctx)
	if err == nil {
		var answer []byte
		if answer, err = s.negotiate(init); err == nil {
			_, err = unix.Write(s.device, answer)
		}
	}
	if err != nil {
		s.release()
		return nil, nil, fmt.Errorf("attach: INIT: %w", err)
	}
	return s, init, nil
}

// Resume serves a connection that a process which is gone has served. The
// filesystem has to answer for the nodes and handles that process gave to the
// kernel, and o has to be what it was then. Requests that process had read and
// not answered come again: each operation may be run a second time. Linux 6.9.
func Resume(device *os.File, fs fuse.RawFileSystem, o fuse.MountOptions, init []byte) (*Server, error) {
	s, err := newServer(device, fs, o)
	if err != nil {
		return nil, err
	}
	if err = checkInit(init); err == nil {
		if _, err = s.negotiate(init); err == nil {
			resend := binary.NativeEndian.AppendUint32(nil, headerOut)
			resend = binary.NativeEndian.AppendUint32(resend, notifyResend)
			resend = binary.NativeEndian.AppendUint64(resend, 0)
			_, err = unix.Write(s.device, resend)
		}
	}
	if err != nil {
		s.release()
		return nil, fmt.Errorf("attach: resume: %w", err)
	}
	return s, nil
}

func newServer(device *os.File, fs fuse.RawFileSystem, o fuse.MountOptions) (*Server, error) {
	o.MaxWrite = maxWrite(o)
	s := &Server{device: -1, fs: fs, size: o.MaxWrite}
	s.protocol = fuse.NewProtocolServer(fs, &o)
	s.log = func(string, ...any) {}
	if o.Logger != nil {
		s.log = o.Logger.Printf
	}
	raw, err := device.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("attach: %w", err)
	}
	cerr := raw.Control(func(fd uintptr) { s.device, err = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 0) })
	if err := errors.Join(cerr, err); err != nil {
		return nil, fmt.Errorf("attach: copy the device: %w", err)
	}
	// As many as wait at first. More are made when they are needed.
	for range readers + 1 {
		b, err := s.newBuffers()
		if err != nil {
			s.release()
			return nil, fmt.Errorf("attach: buffers: %w", err)
		}
		s.idle = append(s.idle, b)
	}
	return s, nil
}

func (s *Server) newBuffers() (*buffers, error) {
	size := s.size + room
	both := reserved.take(2 * size)
	if both == nil {
		var err error
		if both, err = present(2 * size); err != nil {
			return nil, err
		}
	}
	b := &buffers{in: both[:size:size], out: both[size:]}
	s.memory = append(s.memory, both)
	return b, nil
}

// present makes memory that is there.
func present(size int) ([]byte, error) {
	m, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_POPULATE)
	if err != nil {
		return nil, os.NewSyscallError("mmap", err)
	}
	// Present it is now. Locked it stays so under memory pressure; without
	// the right to lock it most likely does.
	_ = unix.Mlock(m)
	return m, nil
}

// reserve is memory made by Reserve.
type reserve struct {
	mu     sync.Mutex
	memory [][]byte
}

var reserved reserve

func (r *reserve) take(size int) []byte {
	r.mu.Lock()
	defer r.mu.Unlock()
	if n := len(r.memory); n > 0 && len(r.memory[n-1]) == size {
		m := r.memory[n-1]
		r.memory = r.memory[:n-1]
		return m
	}
	return nil
}

// Reserve makes the memory that a Server with these options begins with, so
// that Start and Resume need not.
func Reserve(o fuse.MountOptions) error {
	size := 2 * (maxWrite(o) + room)
	for range readers + 1 {
		m, err := present(size)
		if err != nil {
			return fmt.Errorf("attach: buffers: %w", err)
		}
		reserved.mu.Lock()
		reserved.memory = append(reserved.memory, m)
		reserved.mu.Unlock()
	}
	return nil
}

func maxWrite(o fuse.MountOptions) int {
	if o.MaxWrite == 0 {
		return 128 << 10
	}
	return o.MaxWrite
}

func (s *Server) release() {
	for _, m := range s.memory {
		_ = unix.Munmap(m)
	}
	s.idle, s.memory = nil, nil
	if s.device >= 0 {
		_ = unix.Close(s.device)
		s.device = -1
	}
}

// negotiate has the protocol answer INIT.
func (s *Server) negotiate(init []byte) ([]byte, error) {
	out := make([]byte, maxInit)
	n, code := s.protocol.HandleRequest([][]byte{init}, [][]byte{out})
	if !code.Ok() || n < headerOut {
		return nil, fmt.Errorf("it is not answered: %v", code)
	}
	if errno := int32(binary.NativeEndian.Uint32(out[4:])); errno != 0 {
		return nil, fmt.Errorf("it is refused: %w", unix.Errno(-errno))
	}
	return out[:n], nil
}

// readInit waits for the first request of a connection and reads it.
func (s *Server) readInit(ctx context.Context) ([]byte, error) {
	buf := s.idle[0].in
	for {
		if err := ctx.Err(); err != nil {
			return nil, context.Cause(ctx)
		}
		fds := []unix.PollFd{{Fd: int32(s.device), Events: unix.POLLIN}}
		ready, err := unix.Poll(fds, int((50 * time.Millisecond).Milliseconds()))
		switch {
		case err == unix.EINTR || err == nil && ready == 0:
			continue
		case err != nil:
			return nil, err
		case fds[0].Revents&unix.POLLIN == 0:
			return nil, unix.ENODEV // never mounted, or the mount is gone
		}
		n, err := unix.Read(s.device, buf)
		switch err {
		case nil:
			return append([]byte(nil), buf[:n]...), checkInit(buf[:n])
		case unix.EINTR, unix.EAGAIN, unix.ENOENT:
		default:
			return nil, err
		}
	}
}

// checkInit tells an INIT request from anything else.
func checkInit(b []byte) error {
	if len(b) < headerIn || len(b) > maxInit ||
		binary.NativeEndian.Uint32(b) != uint32(len(b)) || binary.NativeEndian.Uint32(b[4:]) != opInit {
		return errors.New("it is no INIT request")
	}
	return nil
}

// Serve answers requests until the last mount is gone or the connection was
// aborted, which is no error, and every request that was read is answered. It
// is called once, and lets go of the device at the end.
func (s *Server) Serve() error {
	s.spawn()
	s.all.Wait()
	s.release()
	s.fs.OnUnmount()
	if err := s.ended.Load(); err != nil {
		return fmt.Errorf("attach: %w", *err)
	}
	return nil
}

// spawn adds a worker unless there are enough.
func (s *Server) spawn() {
	if s.working.Add(1) > workers {
		s.working.Add(-1)
		return
	}
	s.all.Go(s.work)
}

func (s *Server) take() *buffers {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n := len(s.idle); n > 0 {
		b := s.idle[n-1]
		s.idle = s.idle[:n-1]
		return b
	}
	b, err := s.newBuffers()
	if err != nil {
		s.log("attach: %v", err)
		return nil
	}
	return b
}

func (s *Server) give(b *buffers) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.idle = append(s.idle, b)
}

// work reads and answers in turn. A worker that has read a request and finds
// that nobody reads any more sees to it that somebody does; one that finds
// enough readers when it is done ends.
func (s *Server) work() {
	b := s.take()
	defer func() {
		if b != nil {
			s.give(b)
		}
		s.working.Add(-1)
	}()
	for b != nil {
		if s.reading.Add(1) > readers {
			s.reading.Add(-1)
			return
		}
		n, err := unix.Read(s.device, b.in)
		nobody := s.reading.Add(-1) == 0
		switch err {
		case nil:
		case unix.EINTR, unix.EAGAIN, unix.ENOENT: // ENOENT: it was interrupted
			continue
		case unix.ENODEV, unix.ECONNABORTED:
			return
		default:
			s.ended.Store(&err)
			return
		}
		// What needs no answer takes no time: whoever read it reads on.
		if op := binary.NativeEndian.Uint32(b.in[4:]); nobody && op != opForget && op != opBatch {
			s.spawn()
		}
		s.answer(b, n)
	}
}

func (s *Server) answer(b *buffers, n int) {
	m, code := s.protocol.HandleRequest([][]byte{b.in[:n]}, [][]byte{b.out})
	if !code.Ok() { // it did not fit: go-fuse has logged it and answers nothing
		m = headerOut
		binary.NativeEndian.PutUint32(b.out, headerOut)
		binary.NativeEndian.PutUint32(b.out[4:], uint32(-int32(code)))
		copy(b.out[8:16], b.in[8:16])
	}
	if m == 0 {
		return
	}
	for {
		_, err := unix.Write(s.device, b.out[:m])
		switch err {
		case unix.EINTR, unix.EAGAIN:
			continue
		case nil, unix.ENOENT, unix.ENODEV: // interrupted, or the mount is gone
		default:
			s.log("attach: answer to operation %d: %v", binary.NativeEndian.Uint32(b.in[4:]), err)
		}
		return
	}
}
