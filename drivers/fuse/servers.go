package fuse

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/reference/handoff"
)

// serversDir is where the sockets and the logs of serving processes lie.
const serversDir = "servers"

// settle is how long a process whose mount is gone may take to notice.
const settle = time.Second

// servers are the serving processes, as the process behind the CSI socket
// knows them: by their sockets alone, so that it may be another process than
// the one that started them. For one preparation there is one call at a time.
type servers struct {
	dir     *os.File
	program []string
	log     *slog.Logger

	mu       sync.Mutex
	spare    []*spawned // started beforehand, since that takes the longest
	starting bool
	closed   bool
	closing  chan struct{}
	tasks    sync.WaitGroup
}

const (
	// spares is how many processes wait for an order.
	spares = 2
	// pause is how long a call that has taken one has for itself, before its
	// successor takes processor time for its start.
	pause = 100 * time.Millisecond
)

func openServers(c Config) (*servers, error) {
	path := filepath.Join(c.StateDir, serversDir)
	if err := os.Mkdir(path, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, fmt.Errorf("make the directory of serving processes: %w", err)
	}
	dir, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("directory of serving processes: %w", err)
	}
	s := &servers{dir: dir, program: c.Server, log: c.Log, closing: make(chan struct{})}
	if len(s.program) == 0 {
		s.program = []string{"/proc/self/exe", commandName, serveName}
	}
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return nil, errors.Join(err, dir.Close())
	}
	for _, name := range names { // of a driver that was killed
		if strings.HasPrefix(name, sparePrefix) {
			if err := os.Remove(s.path(name)); err != nil {
				return nil, errors.Join(err, dir.Close())
			}
		}
	}
	s.replenish(0)
	return s, nil
}

func nameOf(volumeID, prepareID string) string { return digest(volumeID) + "." + digest(prepareID) }

// sharedName is that of the server which preparations of a volume share.
func sharedName(volumeID string) string { return digest(volumeID) + ".shared" }

// path names a file of a serving process in a way that fits a socket address,
// however long the path of the state directory is.
func (s *servers) path(name string) string {
	return fmt.Sprintf("/proc/self/fd/%d/%s", s.dir.Fd(), name)
}

// serve sees to it that a process serves the preparation o names, and returns
// the id of its handle.
//
//	held by the CO   a process serves   what it takes
//	yes              yes                nothing
//	no               yes                it deposits: the CO has restarted
//	no               yes, shared        it asks for its mount, for the CO to
//	                                    count, or deposits
//	yes              no                 a successor resumes: the process died
//	no               no                 a new process starts
func (s *servers) serve(ctx context.Context, o order, held []string) (string, error) {
	socket := s.path(o.server() + ".sock")
	switch {
	case len(held) > 0:
		o.Act, o.Handle = report, held[0]
	case o.Share:
		o.Act = join
	default:
		o.Act = deposit
	}
	a, err := tell(ctx, socket, o)
	of := func(handle string) bool { return connectionOf(handle) == a.Handle }
	switch i := slices.IndexFunc(held, of); {
	case errors.Is(err, errGone):
	case err != nil:
		return "", err
	case o.Act == report && i >= 0:
		return held[i], nil
	case o.Act != report && a.err() == nil && !a.Gone:
		return a.Handle, nil
	case o.Act == join && !a.Gone:
		return "", a.err() // others use it
	default:
		// What it serves is nothing the CO knows of, or takes: it ends when
		// the CO has let go of that.
		s.log.Warn("a server is replaced", "volume", o.Volume, "prepare", o.Prepare, "act", o.Act, "gone", a.Gone, "error", a.err())
		if err := s.end(ctx, o.server()); err != nil {
			return "", err
		}
	}

	if len(held) > 0 && len(o.Program) == 0 {
		o.Act = resume
		a, err := s.start(ctx, o)
		var refused *handoff.Refusal
		if err == nil || !errors.As(err, &refused) {
			return a.Handle, err
		}
		s.log.Warn("a mount cannot be resumed and is replaced", "volume", o.Volume, "prepare", o.Prepare, "error", err)
	}
	o.Act, o.Handle = start, newConnection()
	a, err = s.start(ctx, o)
	return a.Handle, err
}

// newConnection names a connection, which is the id of its first handle too.
func newConnection() string { return "fuse-" + strings.ToLower(rand.Text()[:16]) }

// start gives a process its first order.
func (s *servers) start(ctx context.Context, o order) (answer, error) {
	name := o.server()
	defer s.replenish(pause)
	for {
		p, fresh, err := s.take()
		if err != nil {
			return answer{}, err
		}
		for _, suffix := range suffixes {
			if err := os.Rename(s.path(p.name+suffix), s.path(name+suffix)); err != nil {
				p.discard()
				return answer{}, fmt.Errorf("name a serving process: %w", err)
			}
		}
		a, err := tell(ctx, s.path(name+".sock"), o)
		_ = p.tie.Close() // it has its order, or is killed
		if err == nil {
			err = a.err()
		}
		switch {
		case err == nil:
			return a, nil
		case !errors.Is(err, errGone):
		case fresh:
			err = status.Errorf(codes.Unavailable, "the serving process ended at once; repeat the call; the last it wrote: %s", s.lastWords(name))
		default: // the spare was no more
			continue
		}
		_ = p.cmd.Process.Kill() // it may be in the middle of what has failed
		return answer{}, err
	}
}

// spawned is a process that has had no order.
type spawned struct {
	cmd  *exec.Cmd
	name string
	// tie keeps it waiting: a process that has no order when the other end
	// of it is closed, by the end of this process at the latest, ends.
	tie *os.File
	s   *servers
}

// discard ends a process that is not wanted.
func (p *spawned) discard() {
	_ = p.tie.Close()
	_ = p.cmd.Process.Kill()
	_ = p.s.removeFiles(p.name)
}

var suffixes = []string{".sock", ".log"} // of a process, spare or not

func (s *servers) removeFiles(name string) error {
	for _, suffix := range append(suffixes, targetSuffix) {
		if err := unix.Unlink(s.path(name + suffix)); err != nil && err != unix.ENOENT {
			return fmt.Errorf("remove %s of a serving process: %w", suffix, err)
		}
	}
	return nil
}

// take returns a process that waits for its first order: the spare one, or a
// fresh one.
func (s *servers) take() (p *spawned, fresh bool, err error) {
	s.mu.Lock()
	if len(s.spare) > 0 {
		p, s.spare = s.spare[0], s.spare[1:]
	}
	s.mu.Unlock()
	if p != nil {
		return p, false, nil
	}
	p, err = s.spawn()
	return p, true, err
}

// replenish starts spare processes in the background, after a while.
func (s *servers) replenish(after time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.starting || s.closed {
		return
	}
	s.starting = true
	s.tasks.Go(func() {
		select {
		case <-time.After(after):
		case <-s.closing:
		}
		for s.wanting() {
			p, err := s.spawn()
			s.mu.Lock()
			switch {
			case err != nil:
				s.log.Warn("no spare serving process", "error", err)
				s.starting = false
			case s.closed:
				p.discard()
			default:
				s.spare = append(s.spare, p)
			}
			s.mu.Unlock()
			if err != nil {
				return
			}
		}
	})
}

// wanting tells whether another spare process is to be started; if none is,
// nobody starts them any more.
func (s *servers) wanting() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.starting = !s.closed && len(s.spare) < spares
	return s.starting
}

// close ends the spare processes. Those that serve go on.
func (s *servers) close() error {
	s.mu.Lock()
	s.closed = true
	close(s.closing)
	for _, p := range s.spare {
		p.discard()
	}
	s.spare = nil
	s.mu.Unlock()
	s.tasks.Wait()
	return s.dir.Close()
}

// sparePrefix is that of files of processes that have no preparation yet.
const sparePrefix = "spare-"

// spawn starts a process.
func (s *servers) spawn() (_ *spawned, err error) {
	name := sparePrefix + strings.ToLower(rand.Text())
	defer func() {
		if err != nil {
			_ = s.removeFiles(name)
		}
	}()
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Net: "unixpacket", Name: s.path(name + ".sock")})
	if err != nil {
		return nil, fmt.Errorf("socket of a serving process: %w", err)
	}
	l.SetUnlinkOnClose(false)
	listening, err := l.File()
	_ = l.Close() // the process has it, and an address without a listener is refused
	if err != nil {
		return nil, err
	}
	defer listening.Close()
	log, err := os.OpenFile(s.path(name+".log"), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	tied, tie, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer tied.Close()

	cmd := exec.Command(s.program[0], s.program[1:]...)
	cmd.ExtraFiles = []*os.File{listening, tied}
	cmd.Stderr = log
	cmd.Dir = "/"
	// A session of its own: what ends this process by its group or terminal
	// does not end that one.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		_ = tie.Close()
		return nil, fmt.Errorf("start a serving process: %w", err)
	}
	go func() {
		err := cmd.Wait()
		s.log.Info("serving process ended", "pid", cmd.Process.Pid, "error", err)
	}()
	return &spawned{cmd: cmd, name: name, tie: tie, s: s}, nil
}

// has tells whether there is a server of that name, or what is left of one.
func (s *servers) has(name string) bool {
	var st unix.Stat_t
	return unix.Lstat(s.path(name+".sock"), &st) == nil
}

// lastWords is the end of a process's log.
func (s *servers) lastWords(name string) string {
	text, err := os.ReadFile(s.path(name + ".log"))
	if err != nil {
		return err.Error()
	}
	return strings.TrimSpace(string(text[max(0, len(text)-500):]))
}

// end returns once no process serves under the name: it ends with its mount.
// One whose mount lives is FAILED_PRECONDITION.
func (s *servers) end(ctx context.Context, name string) error {
	if err := s.unmount(name); err != nil {
		return err
	}
	patience := time.Now().Add(settle)
	for {
		_, err := tell(ctx, s.path(name+".sock"), order{Act: end})
		if errors.Is(err, errGone) {
			break
		}
		if err != nil {
			return err
		}
		if time.Now().After(patience) {
			return status.Error(codes.FailedPrecondition, "prepare_id: the FUSE connection lives; unmount what is left of it and close the CO's own mount, or abort the connection, and repeat")
		}
		select {
		case <-time.After(2 * time.Millisecond):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return s.removeFiles(name)
}
