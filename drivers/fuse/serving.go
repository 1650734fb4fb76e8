package fuse

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strings"
	"sync/atomic"
	"time"

	gofuse "github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/drivers/fuse/attach"
	"github.com/csi-prepare/csi-prepare/drivers/fuse/loopback"
	"github.com/csi-prepare/csi-prepare/reference/handoff"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
)

// subtype is shown as the type fuse.csi-prepare.
const subtype = "csi-prepare"

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

// process serves one connection.
type process struct {
	log *slog.Logger
	// name is the connection's: the ids of its handles begin with it.
	name     string
	begun    bool
	request  handoff.FUSERequest
	session  handoff.Session
	device   *os.File // nil if this process mounted by itself
	conn     *handoff.Conn
	fs       *loopback.FS
	kill     func()        // ends the program, if there is one
	finished chan struct{} // closed when the mount is gone, or the program
}

// ServeInherited is a serving process: it takes orders at the listening socket
// that is its descriptor 3, and returns when the mount it serves is gone. If
// it has had no order when the other end of descriptor 4, a pipe, is closed,
// it ends the program.
//
// Arguments are of this package's own making: they have it become a Program,
// or be the fusermount of one.
func ServeInherited(log *slog.Logger, arguments ...string) error {
	switch {
	case len(arguments) == 0:
	case arguments[0] == askFusermount:
		return fusermount()
	case arguments[0] == becomeProgram:
		return execPrivate(arguments[1:])
	default:
		return fmt.Errorf("argument %q: there are none but this program's own", arguments[0])
	}
	unix.Umask(0) // modes are the consumer's kernel's to choose
	raiseFileLimit(log)
	warm(log)
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
		first := !p.begun
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
		if p.begun {
			return answer{}, errors.New("this process serves already")
		}
		err := p.begin(ctx, o)
		p.begun = err == nil
		return answer{Handle: o.Handle}, err
	case !p.begun:
		return answer{}, errors.New("this process serves nothing yet")
	case p.gone():
		if o.Act == end && p.kill != nil {
			// It has nothing to serve any more, and had the time to see that.
			time.AfterFunc(settle/2, p.kill)
		}
		return answer{Gone: true}, nil
	case o.Act == join:
		return p.join(ctx, o)
	case o.Act == deposit:
		return p.deposit(ctx, o)
	}
	return answer{Handle: p.name}, nil
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
	p.name = connectionOf(o.Handle)
	p.request = request(o)
	if o.Target != "" {
		return p.mount(o)
	}
	p.conn, err = dial(ctx, o)
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
		p.device, err = p.conn.RequestFUSE(ctx, o.Handle, p.request)
		if err == nil && p.device == nil {
			err = errors.New("the CO has the mount of this key, and its server is another's")
		}
	}
	if err != nil {
		return err
	}
	if len(o.Program) > 0 {
		err = p.program(ctx, o)
	} else {
		err = p.attach(ctx, o, s)
	}
	if err != nil {
		return err
	}
	if err := p.conn.Serving(ctx, o.Handle, p.session); err != nil {
		if p.kill != nil {
			p.kill()
		}
		return err
	}
	p.watch(p.conn)
	return nil
}

func dial(ctx context.Context, o order) (*handoff.Conn, error) {
	return handoff.Dial(ctx, o.Socket, handoff.Key{VolumeID: o.Volume, PrepareID: o.Prepare}, o.Token)
}

// request is what is asked of the CO, and asked again to share it.
func request(o order) handoff.FUSERequest {
	r := handoff.FUSERequest{
		Subtype:    subtype,
		RootMode:   unix.S_IFDIR | 0o777,
		UserID:     o.UID,
		GroupID:    o.GID,
		Resumable:  len(o.Program) == 0,
		Parameters: []mountspec.Parameter{{Key: "default_permissions"}, {Key: "allow_other"}},
	}
	if o.Share {
		r.ShareKey = "volume"
	}
	return r
}

// attach serves the directory on the device.
func (p *process) attach(ctx context.Context, o order, s state) (err error) {
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
	return nil
}

// join gets the preparation of the order a share of the mount that is served.
func (p *process) join(ctx context.Context, o order) (answer, error) {
	conn, err := dial(ctx, o)
	if err != nil {
		return answer{}, err
	}
	defer func() { _ = conn.Close() }() // the connection of the server is another
	o.Handle = handleOf(p.name, join)
	device, err := conn.RequestFUSE(ctx, o.Handle, p.request)
	if err != nil || device == nil {
		return answer{Handle: o.Handle}, err
	}
	// The CO has restarted and made a mount that nobody is to serve: it goes
	// with this connection.
	_ = device.Close()
	return p.deposit(ctx, o)
}

// deposit gives a CO that has restarted the device.
func (p *process) deposit(ctx context.Context, o order) (answer, error) {
	conn, err := dial(ctx, o)
	if err != nil {
		return answer{}, err
	}
	handle := handleOf(p.name, deposit)
	if err := conn.Deposit(ctx, handle, p.device, p.session); err != nil {
		_ = conn.Close()
		return answer{}, err
	}
	_ = p.conn.Close()
	p.conn = conn
	p.watch(conn)
	return answer{Handle: handle}, nil
}

// handleOf makes an id for a handle of a connection: one that a CO cannot have
// by another way already.
func handleOf(connection string, a act) string {
	return connection + "." + string(a) + "-" + strings.ToLower(rand.Text()[:8])
}

func connectionOf(handle string) string {
	name, _, _ := strings.Cut(handle, ".")
	return name
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

// gone says whether the mount is gone.
func (p *process) gone() bool {
	select {
	case <-p.finished:
		return true
	default:
	}
	if p.device == nil {
		return false
	}
	_, gone, _ := p.poll()
	return gone
}

// poll says whether the device has a request that nobody has read, and whether
// its mount is gone: it tells by an error.
func (p *process) poll() (pending, gone bool, err error) {
	raw, err := p.device.SyscallConn()
	if err != nil {
		return false, false, err
	}
	fds := []unix.PollFd{{Events: unix.POLLIN}}
	cerr := raw.Control(func(fd uintptr) {
		fds[0].Fd = int32(fd)
		if err = ignoringEINTR(func() error { _, err := unix.Poll(fds, 0); return err }); err != nil {
			fds[0].Revents = 0
		}
	})
	return fds[0].Revents&unix.POLLIN != 0, fds[0].Revents&unix.POLLERR != 0, errors.Join(cerr, err)
}

func ignoringEINTR(call func() error) error {
	for {
		if err := call(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
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
