package handoff

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"sync"
	"time"
)

// Config says where a CO listens for one Plugin, and how it does what only it
// can do. Functions may be called from several goroutines.
type Config struct {
	// Directory holds the socket. It is the Plugin's alone: one directory a
	// Plugin, shared with it under the same name, never a prepare_path. It is
	// made if missing, and given to UID and GID, the Plugin's on the node.
	Directory string
	UID, GID  int

	// Mount makes a detached FUSE mount on a device it opened itself, before
	// the device leaves the CO. Both files are the Listener's afterwards. The
	// context ends after Step. Nil refuses every fuse_request.
	Mount func(ctx context.Context, key Key, r FUSERequest) (device, mount *os.File, err error)

	// Adopt is asked about a device a Plugin deposits after the CO lost its
	// own: it returns a clone of a mount of the preparation whose connection
	// is that of the device, or an error. The device is borrowed, the mount
	// is the Listener's afterwards. It is not asked if the Listener has the
	// mount already, for this preparation or another of the volume. Nil
	// refuses every deposit.
	Adopt func(ctx context.Context, key Key, handleID string, device *os.File) (mount *os.File, err error)

	// Abort ends the connection behind mount, and no other, when a resumable
	// server died and none resumed within Failover: whoever waits for it gets
	// ENOTCONN. The mount is borrowed. Nil leaves it at closing the device,
	// which ends the connection only if no other process kept a copy.
	Abort func(ctx context.Context, mount *os.File) error

	// Gone is told that a serving process closed its connection: it died or
	// gave up. The preparation lives on. Nil tells nobody.
	Gone func(Notice)

	// Refused is told what a server was refused, and why. Nil tells nobody.
	Refused func(Key, *Refusal)

	// Silence is how long a connection may stay without a valid message, and
	// how long one packet may take to be sent.
	Silence time.Duration
	// Step bounds Mount, Adopt and Abort.
	Step time.Duration
	// Failover is how long a resumable server may be away.
	Failover time.Duration

	// Log gets peers, ids and reasons, never a token, state or descriptor.
	Log *slog.Logger
}

// Notice tells of the end of a serving process.
type Notice struct {
	Key      Key
	HandleID string
	// Until is when the connection will be aborted unless a process resumes
	// it. It is zero if the end is final: the mount answers ENOTCONN.
	Until time.Time
	// Err is why an abort failed, if one did.
	Err error
}

// Listener is the CO's end of the channel to one Plugin.
type Listener struct {
	config Config
	socket *socket

	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	tasks  sync.WaitGroup

	mu          sync.Mutex
	closed      bool
	calls       map[Key]map[*Call]struct{}
	connections map[*connection]struct{}
	handles     map[Key]map[string]*handle
	shared      map[shared]*handle
}

// Listen makes the socket and serves it until Close.
func Listen(c Config) (*Listener, error) {
	c.Silence = orDefault(c.Silence, DefaultSilence)
	c.Step = orDefault(c.Step, DefaultStep)
	c.Failover = orDefault(c.Failover, DefaultFailover)
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	s, err := listen(c.Directory, c.UID, c.GID)
	if err != nil {
		return nil, err
	}
	l := &Listener{
		config: c, socket: s,
		calls:       make(map[Key]map[*Call]struct{}),
		connections: make(map[*connection]struct{}),
		handles:     make(map[Key]map[string]*handle),
		shared:      make(map[shared]*handle),
	}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	l.tasks.Go(l.accept)
	return l, nil
}

func orDefault(d, otherwise time.Duration) time.Duration {
	if d == 0 {
		return otherwise
	}
	return d
}

// Path is the socket's, for handle_socket. Where the Plugin sees the
// directory under another name the CO translates.
func (l *Listener) Path() string { return l.socket.path }

// accept takes connections while calls are pending.
func (l *Listener) accept() {
	for {
		conn, err := l.socket.AcceptUnix()
		if err != nil {
			if l.ctx.Err() != nil || errors.Is(err, os.ErrClosed) {
				return
			}
			l.config.Log.Warn("handoff: accept", "error", err)
			select { // out of descriptors, most likely: not a busy loop
			case <-time.After(100 * time.Millisecond):
			case <-l.ctx.Done():
			}
			continue
		}
		k := &connection{
			UnixConn: conn, l: l, peer: peer(conn),
			calls: make(map[*Call]struct{}), serves: make(map[*handle]struct{}),
		}
		l.mu.Lock()
		refused := l.closed || len(l.calls) == 0 || l.descriptors() >= MaxDescriptors
		if !refused {
			l.connections[k] = struct{}{}
			l.tasks.Go(k.run)
		}
		l.mu.Unlock()
		if refused {
			_ = conn.Close()
		}
	}
}

// Descriptors is how many descriptors the Listener holds for its Plugin, the
// connections included.
func (l *Listener) Descriptors() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.descriptors()
}

func (l *Listener) descriptors() int {
	n := len(l.connections)
	seen := make(map[*handle]bool)
	for _, byID := range l.handles {
		for _, h := range byID {
			if seen[h] {
				continue
			}
			seen[h] = true
			if h.mount != nil {
				n++
			}
			if h.device != nil {
				n++
			}
		}
	}
	return n
}

// Release lets go of every handle of a preparation: what the last performance
// has been undone of, before NodeUnprepareVolume, since a server sees no end
// while the CO holds its mount. A mount shared with another preparation stays
// until that one is released too. Pending calls of the preparation are dropped.
func (l *Listener) Release(key Key) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for c := range l.calls[key] {
		c.end()
	}
	for id := range l.handles[key] {
		l.forget(key, id)
	}
}

// Keep lets go of every handle of a preparation but those named. It is for a
// repeat whose answer is not needed, or has replaced what was there. Between
// calls only: what a pending one brought is its own.
func (l *Listener) Keep(key Key, ids ...string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for id := range l.handles[key] {
		if !slices.Contains(ids, id) {
			l.forget(key, id)
		}
	}
}

// Close ends every call and connection, closes everything held, aborts
// nothing, and returns when all that is done. Mounts attached elsewhere live
// on; their servers may deposit their devices with the next CO.
func (l *Listener) Close() error {
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return nil
	}
	l.closed = true
	l.cancel()
	for _, pending := range l.calls {
		for c := range pending {
			c.end()
		}
	}
	for key, byID := range l.handles {
		for id := range byID {
			l.forget(key, id)
		}
	}
	for k := range l.connections {
		_ = k.Close()
	}
	l.mu.Unlock()

	err := l.socket.Close()
	l.tasks.Wait()
	if err != nil {
		return fmt.Errorf("handoff: close: %w", err)
	}
	return nil
}
