package fuse

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync/atomic"
	"time"

	gofuse "github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/drivers/fuse/attach"
	"github.com/csi-prepare/csi-prepare/drivers/fuse/loopback"
	"github.com/csi-prepare/csi-prepare/reference/handoff"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
)

// patience is how long a serving process waits for an order to come over a
// connection, and for an order without a deadline to be done.
const patience = 30 * time.Second

// serverOptions are equal in every process that ever serves one mount: what a
// kernel was answered to INIT holds for the mount's life.
func serverOptions(log *slog.Logger) gofuse.MountOptions {
	return gofuse.MountOptions{
		MaxWrite:      128 << 10,
		MaxBackground: 12,
		IDMappedMount: true,
		EnableLocks:   false,
		Logger:        slog.NewLogLogger(log.Handler(), slog.LevelWarn),
	}
}

// process serves one preparation.
type process struct {
	log      *slog.Logger
	handle   string
	session  handoff.Session
	device   *os.File
	conn     *handoff.Conn
	fs       *loopback.FS
	finished chan struct{} // closed when the mount is gone
}

// ServeInherited is a serving process: it takes orders at the listening socket
// that is its descriptor 3, and returns when the mount it serves is gone. If
// it has had no order when the other end of descriptor 4, a pipe, is closed,
// it ends the program.
func ServeInherited(log *slog.Logger) error {
	unix.Umask(0) // modes are the consumer's kernel's to choose
	raiseFileLimit(log)
	file := os.NewFile(3, "orders")
	if file == nil {
		return errors.New("descriptor 3 has to be a listening socket: this command is for prepare-driver itself")
	}
	listener, err := net.FileListener(file)
	_ = file.Close()
	if err != nil {
		return fmt.Errorf("descriptor 3: %w", err)
	}
	orders, ok := listener.(*net.UnixListener)
	if !ok {
		return errors.New("descriptor 3: is no Unix socket")
	}
	orders.SetUnlinkOnClose(false)
	p := &process{log: log, finished: make(chan struct{})}
	var ordered atomic.Bool
	tied := os.NewFile(4, "tie")
	go func() {
		_, _ = tied.Read(make([]byte, 1))
		if !ordered.Load() {
			os.Exit(0) // whoever wanted it is gone
		}
		_ = tied.Close()
	}()
	for {
		conn, err := orders.AcceptUnix()
		if err != nil {
			select {
			case <-p.finished:
				return nil
			default:
				return fmt.Errorf("orders: %w", err)
			}
		}
		ordered.Store(true)
		first := p.fs == nil
		err = p.take(conn)
		_ = conn.Close()
		switch {
		case first && err != nil:
			return err
		case first:
			go func() {
				<-p.finished
				p.close()
				_ = orders.Close() // last: it says that nothing is left
			}()
		case err != nil:
			log.Warn("an order was not done", "error", err)
		}
	}
}

// raiseFileLimit lets as many directories be known as the hard limit allows.
func raiseFileLimit(log *slog.Logger) {
	var limit unix.Rlimit
	err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit)
	if err == nil {
		limit.Cur = limit.Max
		err = unix.Setrlimit(unix.RLIMIT_NOFILE, &limit)
	}
	if err != nil {
		log.Warn("limit of open files", "error", err)
	}
}

// take reads one order, does it, and answers.
func (p *process) take(conn *net.UnixConn) error {
	_ = conn.SetReadDeadline(time.Now().Add(patience))
	buf := make([]byte, maxPacket)
	n, err := conn.Read(buf)
	if err != nil {
		return fmt.Errorf("read an order: %w", err)
	}
	var o order
	if err := json.Unmarshal(buf[:n], &o); err != nil {
		return fmt.Errorf("an order: %w", err)
	}
	deadline := o.Deadline
	if deadline.IsZero() {
		deadline = time.Now().Add(patience)
	}
	ctx, cancel := context.WithDeadline(context.Background(), deadline)
	defer cancel()
	a, err := p.do(ctx, o)
	if err != nil {
		a = failure(err)
	}
	text, merr := json.Marshal(a)
	if merr != nil {
		return merr
	}
	if _, werr := conn.Write(text); werr != nil && err == nil {
		err = fmt.Errorf("answer: %w", werr)
	}
	return err
}

func (p *process) do(ctx context.Context, o order) (answer, error) {
	switch {
	case o.Act == start || o.Act == resume:
		if p.fs != nil {
			return answer{}, errors.New("this process serves already")
		}
		if err := p.begin(ctx, o); err != nil {
			return answer{}, err
		}
	case p.fs == nil:
		return answer{}, errors.New("this process serves nothing yet")
	case o.Act == deposit:
		if p.gone() {
			return answer{Gone: true}, nil
		}
		if err := p.deposit(ctx, o); err != nil {
			return answer{}, err
		}
	case o.Act == end && p.gone():
		return answer{Gone: true}, nil
	}
	return answer{Handle: p.handle}, nil
}

// state is what a successor needs besides INIT.
type state struct {
	Generation uint16 `json:"generation"`
}

// begin gets a device from the CO, serves it, and says so.
func (p *process) begin(ctx context.Context, o order) (err error) {
	defer func() {
		if err != nil {
			p.close()
		}
	}()
	p.handle = o.Handle
	p.conn, err = handoff.Dial(ctx, o.Socket, handoff.Key{VolumeID: o.Volume, PrepareID: o.Prepare}, o.Token)
	if err != nil {
		return err
	}
	var s state
	if o.Act == resume {
		p.device, p.session, err = p.conn.Resume(ctx, o.Handle)
		if err == nil {
			err = json.Unmarshal(p.session.State, &s)
			s.Generation++
		}
	} else {
		p.device, err = p.conn.RequestFUSE(ctx, o.Handle, handoff.FUSERequest{
			Subtype:    "csi-prepare",
			RootMode:   unix.S_IFDIR | 0o777,
			UserID:     o.UID,
			GroupID:    o.GID,
			Resumable:  true,
			Parameters: []mountspec.Parameter{{Key: "default_permissions"}, {Key: "allow_other"}},
		})
	}
	if err != nil {
		return err
	}
	if p.session.State, err = json.Marshal(s); err != nil {
		return err
	}
	p.fs, err = loopback.New(o.Data, o.Orphans, loopback.Options{UID: o.UID, GID: o.GID, Generation: s.Generation})
	if err != nil {
		return err
	}
	var server *attach.Server
	if o.Act == resume {
		server, err = attach.Resume(p.device, p.fs, serverOptions(p.log), p.session.Init)
	} else {
		server, p.session.Init, err = attach.Start(ctx, p.device, p.fs, serverOptions(p.log))
	}
	if err != nil {
		return err
	}
	go func() {
		if err := server.Serve(); err != nil {
			p.log.Error("serving ended", "error", err)
		}
		close(p.finished)
	}()
	if err := p.conn.Serving(ctx, o.Handle, p.session); err != nil {
		return err
	}
	p.watch(p.conn)
	return nil
}

// deposit gives a CO that has restarted the device.
func (p *process) deposit(ctx context.Context, o order) error {
	conn, err := handoff.Dial(ctx, o.Socket, handoff.Key{VolumeID: o.Volume, PrepareID: o.Prepare}, o.Token)
	if err != nil {
		return err
	}
	if err := conn.Deposit(ctx, p.handle, p.device, p.session); err != nil {
		_ = conn.Close()
		return err
	}
	_ = p.conn.Close()
	p.conn = conn
	p.watch(conn)
	return nil
}

// watch notes the end of the CO. There is nothing to do before its next call:
// the mounts of consumers live on, and so does this process.
func (p *process) watch(conn *handoff.Conn) {
	go func() {
		if err := conn.Wait(context.Background()); errors.Is(err, handoff.ErrClosed) {
			p.log.Info("the CO closed the connection")
		}
	}()
}

// gone says whether the mount is gone: the device tells by an error.
func (p *process) gone() bool {
	select {
	case <-p.finished:
		return true
	default:
	}
	raw, err := p.device.SyscallConn()
	if err != nil {
		return false
	}
	gone := false
	_ = raw.Control(func(fd uintptr) {
		fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		if n, err := unix.Poll(fds, 0); err == nil && n > 0 {
			gone = fds[0].Revents&unix.POLLERR != 0
		}
	})
	return gone
}

func (p *process) close() {
	if p.conn != nil {
		_ = p.conn.Close()
	}
	if p.device != nil {
		_ = p.device.Close()
	}
	if p.fs != nil {
		p.fs.Close()
	}
}
