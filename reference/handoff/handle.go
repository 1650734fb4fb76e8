package handoff

import (
	"context"
	"os"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
)

// phase is where a handle is in its life.
type phase uint8

const (
	mounting phase = iota // Mount runs, or the device was sent: not served yet
	serving               // served; an offered mount is so from the start
	orphaned              // the resumable server is gone, the device is kept
	resuming              // the device was sent to a successor
	ended                 // nobody will ever serve it again
)

// shared is the name under which preparations of one volume share a handle.
type shared struct {
	volumeID string
	key      string // share_key
}

// handle is one mount and who serves it. Every field is guarded by l.mu.
type handle struct {
	fuse    bool
	request FUSERequest
	session Session
	mount   *os.File // nil while mounting
	device  *os.File // kept beyond serving only if resumable
	phase   phase
	server  *connection // of the process that serves, or is about to

	users map[user]struct{} // more than one if shared
	share shared

	left  chan struct{} // closed when phase leaves mounting, or by forget
	gone  chan struct{} // closed when the connection of server ends
	until time.Time
	timer *time.Timer // runs while orphaned or resuming
}

type user struct {
	key Key
	id  string
}

func newHandle() *handle {
	return &handle{users: make(map[user]struct{}), left: make(chan struct{})}
}

// isClosed says so of the channels above.
func isClosed(c chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// reserve makes h the handle id of c. The caller holds l.mu.
func (c *Call) reserve(id string, h *handle) error {
	old := c.l.handles[c.key][id]
	_, brought := c.brought[id]
	switch {
	case c.ended:
		return ErrClosed
	case !handleID.MatchString(id):
		return refuse(codes.InvalidArgument, "handle_id: want 1 to 128 bytes of [A-Za-z0-9._-]")
	case brought || old != nil && old.phase != ended:
		return refuse(codes.AlreadyExists, "handle_id: the CO has one of that name")
	case len(c.brought) >= MaxHandles:
		return refuse(codes.ResourceExhausted, "a call may bring %d handles", MaxHandles)
	case c.l.descriptors()+2 > MaxDescriptors:
		return refuse(codes.ResourceExhausted, "the CO holds %d descriptors for this plugin already", MaxDescriptors)
	}
	if old != nil { // dead: its name is free again
		c.l.forget(c.key, id)
	}
	if c.l.handles[c.key] == nil {
		c.l.handles[c.key] = make(map[string]*handle)
	}
	c.l.handles[c.key][id] = h
	c.brought[id] = struct{}{}
	h.users[user{c.key, id}] = struct{}{}
	return nil
}

// release gives the id back after its step failed. The caller holds l.mu.
func (c *Call) release(id string) {
	c.l.forget(c.key, id)
	delete(c.brought, id)
}

// forget takes the name from a handle, and closes what it was the last name
// of. The caller holds l.mu.
func (l *Listener) forget(key Key, id string) {
	h := l.handles[key][id]
	if h == nil {
		return
	}
	delete(l.handles[key], id)
	if len(l.handles[key]) == 0 {
		delete(l.handles, key)
	}
	delete(h.users, user{key, id})
	if len(h.users) > 0 {
		return
	}
	l.finish(h)
	if h.mount != nil {
		_ = h.mount.Close()
		h.mount = nil
	}
	h.leave()
}

// finish makes an end of serving final. The caller holds l.mu.
func (l *Listener) finish(h *handle) {
	h.phase = ended
	if h.timer != nil {
		h.timer.Stop()
	}
	if !isClosed(h.left) {
		close(h.left)
	}
	if l.shared[h.share] == h {
		delete(l.shared, h.share)
	}
	if h.device != nil {
		_ = h.device.Close()
		h.device = nil
	}
}

// serve notes that k serves h. The caller holds l.mu.
func (l *Listener) serve(h *handle, k *connection, s Session) {
	h.session = s
	if h.timer != nil {
		h.timer.Stop()
		h.timer = nil
	}
	if !isClosed(h.left) {
		close(h.left)
	}
	h.phase = serving
	k.take(h)
	if !h.request.Resumable && h.device != nil {
		// A copy kept would turn the death of the server from an error into
		// a hang: requests wait while any device descriptor is open.
		_ = h.device.Close()
		h.device = nil
	}
}

// take makes k the connection of the process that serves h. The caller holds
// l.mu.
func (k *connection) take(h *handle) {
	switch h.server {
	case k:
	case nil:
		h.gone = make(chan struct{})
	default: // the same process over another connection: it is not gone
		delete(h.server.serves, h)
	}
	h.server = k
	k.serves[h] = struct{}{}
}

// leave parts h from the connection of its server, if it has one. The caller
// holds l.mu.
func (h *handle) leave() {
	k := h.server
	if k == nil {
		return
	}
	h.server = nil
	close(h.gone)
	delete(k.serves, h)
	k.closeIfIdle()
}

// lost notes that the connection behind h ended. The caller holds l.mu.
func (l *Listener) lost(h *handle) {
	h.server = nil
	close(h.gone)
	switch h.phase {
	case mounting: // it never served
		for u := range h.users {
			l.keep(u.key, u.id)
			l.forget(u.key, u.id)
		}
		return
	case resuming: // the timer still runs
		h.phase = orphaned
		return
	case serving:
	default:
		return
	}
	if !h.request.Resumable {
		l.finish(h)
		l.notify(h, nil)
		return
	}
	h.phase = orphaned
	h.until = time.Now().Add(l.config.Failover)
	var timer *time.Timer
	timer = time.AfterFunc(l.config.Failover, func() { l.expire(h, &timer) })
	h.timer = timer
	l.notify(h, nil)
}

// expire ends the connection of a handle nobody resumed in time.
func (l *Listener) expire(h *handle, timer **time.Timer) {
	l.mu.Lock()
	if l.closed || h.timer != *timer || h.phase != orphaned && h.phase != resuming {
		l.mu.Unlock()
		return
	}
	l.tasks.Add(1)
	defer l.tasks.Done()
	// A descriptor of its own: the connection that is aborted has to be
	// this one even if the handle is released meanwhile.
	mount, err := duplicate(h.mount)
	l.finish(h)
	h.leave()
	l.mu.Unlock()

	if err == nil && l.config.Abort != nil {
		ctx, cancel := context.WithTimeout(l.ctx, l.config.Step)
		err = l.config.Abort(ctx, mount)
		cancel()
	}
	if mount != nil {
		_ = mount.Close()
	}
	l.mu.Lock()
	h.until = time.Time{}
	l.notify(h, err)
	l.mu.Unlock()
}

func duplicate(f *os.File) (*os.File, error) {
	raw, err := f.SyscallConn()
	if err != nil {
		return nil, err
	}
	fd := -1
	if cerr := raw.Control(func(old uintptr) { fd, err = unix.FcntlInt(old, unix.F_DUPFD_CLOEXEC, 0) }); cerr != nil {
		return nil, cerr
	}
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), f.Name()), nil
}

// notify tells the CO about each preparation that uses h. The caller holds
// l.mu, so the functions run elsewhere.
func (l *Listener) notify(h *handle, err error) {
	if l.config.Gone == nil || l.closed {
		return
	}
	for u := range h.users {
		n := Notice{Key: u.key, HandleID: u.id, Until: h.until, Err: err}
		l.tasks.Go(func() { l.config.Gone(n) })
	}
}
