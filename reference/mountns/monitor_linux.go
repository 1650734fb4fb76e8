package mountns

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
)

// Monitor reports mounts as they are attached and detached, in any number of
// namespaces. It is told by the kernel through fanotify (Linux 6.15); on an
// older kernel it waits for the mount tables to change and compares them. Add,
// Remove and Next may be called at the same time, but Next by one goroutine.
//
// It does not see changes of mounts that stay: remounts, attributes,
// propagation. Nor does it see detached mounts. See the package comment.
type Monitor struct {
	features kernel.Features
	group    int // fanotify, -1 on a kernel without mount events
	wake     int // eventfd that ends a wait
	buf      []byte

	mu      sync.Mutex
	closed  bool
	watched map[uint64]*watch // by namespace id
	removed bool              // events of a namespace no longer watched may come
	owner   map[uint64]uint64 // mount id to namespace id, 0 unknown; only with group
	reading sync.Mutex        // held by Next
}

// watch is one namespace. A group does not keep it alive, and neither does a
// watch that has only its id.
type watch struct {
	id     uint64
	mounts int // how many are attached; none means that the namespace is gone

	// Without mount events:
	ns        *Namespace
	mountinfo *os.File // its table; polling it says once that it has changed
	dirty     bool     // it has said so
	last      NamespaceIDs
}

// Event is a mount that came into a namespace or went from it.
type Event struct {
	// Namespace is the id of the namespace, 0 if the mount was gone again
	// before it could be found out.
	Namespace uint64
	// ID is the mount's.
	ID uint64
	// Kind says what happened.
	Kind EventKind
	// Recovered says that the event was found by comparing lists, because the
	// kernel's queue had overflown or because it has no such events. What came
	// and went in between was lost; the state is right.
	Recovered bool
}

// EventKind is what happened to a mount.
type EventKind int

// What happens to mounts. A mount that is moved within a namespace stays in it.
const (
	Attached EventKind = iota + 1
	Detached
	Moved
)

// String is attached, detached or moved.
func (k EventKind) String() string {
	switch k {
	case Attached:
		return "attached"
	case Detached:
		return "detached"
	case Moved:
		return "moved"
	}
	return fmt.Sprintf("EventKind(%d)", int(k))
}

// MonitorOption changes what [NewMonitor] makes.
type MonitorOption func(*monitorOptions)

type monitorOptions struct {
	unlimited bool
	features  kernel.Features
}

// UnlimitedQueue lets the kernel keep as many events as come until they are
// read, in its own memory. Without it the queue holds 16384 by default, and
// what is lost beyond is made up for by a comparison of full lists.
func UnlimitedQueue() MonitorOption { return func(o *monitorOptions) { o.unlimited = true } }

// WithFeatures makes the monitor do without what the features lack.
func WithFeatures(f kernel.Features) MonitorOption {
	return func(o *monitorOptions) { o.features = f }
}

// NewMonitor makes a monitor that watches nothing yet. Close it.
func NewMonitor(options ...MonitorOption) (*Monitor, error) {
	o := monitorOptions{features: kernel.Probe()}
	for _, option := range options {
		option(&o)
	}
	m := &Monitor{
		features: o.features, group: -1, buf: make([]byte, 64<<10),
		watched: map[uint64]*watch{}, owner: map[uint64]uint64{},
	}
	var err error
	if m.wake, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return nil, os.NewSyscallError("eventfd2", err)
	}
	f := o.features
	if f.MountEvents && f.Listmount && f.ListmountByNS && f.Statmount && f.UniqueID {
		if m.group, err = kernel.OpenMountEvents(o.unlimited); err != nil {
			_ = unix.Close(m.wake)
			return nil, fmt.Errorf("mountns: monitor: %w", err)
		}
	}
	return m, nil
}

// Add begins to watch a namespace: whatever is attached to or detached from it
// after Add has returned will be reported, and what happens meanwhile may be.
// The namespace may be closed then. On a kernel without mount events the
// monitor keeps it alive until Remove.
func (m *Monitor) Add(ctx context.Context, n *Namespace) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return os.ErrClosed
	}
	if m.watched[n.id] != nil {
		return nil
	}
	w := &watch{id: n.id}
	var err error
	if m.group >= 0 {
		err = m.mark(ctx, w, n)
	} else {
		err = w.open(ctx, n, m.features)
	}
	if err != nil {
		return fmt.Errorf("mountns: monitor %s: %w", n, err)
	}
	m.watched[n.id] = w
	m.interrupt() // a waiting Next must take the new one into account
	return nil
}

// mark watches first and lists then, so that nothing falls between; what is both
// listed and reported counts once.
func (m *Monitor) mark(ctx context.Context, w *watch, n *Namespace) error {
	if err := kernel.WatchMounts(m.group, n.fd); err != nil {
		return err
	}
	ids, err := n.IDs(ctx, nil)
	if err != nil {
		_ = kernel.UnwatchMounts(m.group, n.fd)
		return err
	}
	for _, id := range ids {
		m.owner[id] = w.id
	}
	w.mounts = len(ids)
	return nil
}

func (w *watch) open(ctx context.Context, n *Namespace, f kernel.Features) error {
	dup, err := unix.FcntlInt(uintptr(n.fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("fcntl", err)
	}
	if w.ns, err = adopt(dup, "namespace", f); err != nil {
		return err
	}
	w.ns.id = n.id
	err = w.ns.visit(ctx, func(t *thread) (err error) {
		w.mountinfo, err = t.openMountinfo()
		return err
	})
	if err == nil {
		w.last, err = w.ns.account(ctx)
	}
	if err != nil {
		w.close()
	}
	return err
}

func (w *watch) close() {
	if w.mountinfo != nil {
		_ = w.mountinfo.Close()
	}
	if w.ns != nil {
		_ = w.ns.Close()
	}
}

// Remove ends the watching of a namespace. One that has gone is removed by
// itself, once the events of its mounts have been returned.
func (m *Monitor) Remove(n *Namespace) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	w := m.watched[n.id]
	if w == nil || m.closed {
		return nil
	}
	m.forget(w)
	m.removed = true
	if m.group < 0 {
		m.interrupt()
		return nil
	}
	return kernel.UnwatchMounts(m.group, n.fd)
}

// forget drops a namespace and its mounts.
func (m *Monitor) forget(w *watch) {
	delete(m.watched, w.id)
	for mount, ns := range m.owner {
		if ns == w.id {
			delete(m.owner, mount)
		}
	}
	w.close()
}

// interrupt ends the wait of Next, which then looks again.
func (m *Monitor) interrupt() {
	_, _ = unix.Write(m.wake, []byte{1, 0, 0, 0, 0, 0, 0, 0})
}

// Close ends the monitor, and a Next that waits, with [os.ErrClosed].
func (m *Monitor) Close() error {
	m.mu.Lock()
	if m.closed {
		m.mu.Unlock()
		return nil
	}
	m.closed = true
	m.interrupt()
	m.mu.Unlock()

	m.reading.Lock() // until Next has left
	defer m.reading.Unlock()
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, w := range m.watched {
		w.close()
	}
	if m.group >= 0 {
		_ = unix.Close(m.group)
	}
	return unix.Close(m.wake)
}

// Next waits for events and returns at least one, in the order in which they
// happened, or the error of ctx, or [os.ErrClosed]. Events it does not return
// because ctx ended are returned by the next call.
func (m *Monitor) Next(ctx context.Context) ([]Event, error) {
	m.reading.Lock()
	defer m.reading.Unlock()
	stop := context.AfterFunc(ctx, func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		if !m.closed {
			m.interrupt()
		}
	})
	defer stop()
	for {
		m.mu.Lock()
		events, err := m.collect(ctx)
		closed := m.closed
		var fds []unix.PollFd
		var watches []*watch
		if !closed && err == nil && len(events) == 0 {
			fds, watches = m.pollFDs()
		}
		m.mu.Unlock()
		if closed {
			return nil, os.ErrClosed
		}
		if err != nil || len(events) > 0 {
			return events, err
		}
		if _, err := unix.Poll(fds, -1); err != nil && err != unix.EINTR {
			return nil, os.NewSyscallError("poll", err)
		}
		m.mu.Lock()
		for i, w := range watches {
			w.dirty = w.dirty || fds[1+i].Revents != 0
		}
		m.mu.Unlock()
		var count [8]byte
		_, _ = unix.Read(m.wake, count[:])
	}
}

// pollFDs is what to wait for: the wake-up first, then the group or the table of
// each watch.
func (m *Monitor) pollFDs() ([]unix.PollFd, []*watch) {
	fds := []unix.PollFd{{Fd: int32(m.wake), Events: unix.POLLIN}}
	if m.group >= 0 {
		return append(fds, unix.PollFd{Fd: int32(m.group), Events: unix.POLLIN}), nil
	}
	var watches []*watch
	for _, w := range m.watched {
		fds = append(fds, unix.PollFd{Fd: int32(w.mountinfo.Fd()), Events: unix.POLLPRI})
		watches = append(watches, w)
	}
	return fds, watches
}

// collect returns what has happened up to now, without waiting.
func (m *Monitor) collect(ctx context.Context) ([]Event, error) {
	if err := ctx.Err(); err != nil || m.closed {
		return nil, err
	}
	if m.group < 0 {
		return m.compareAll(ctx)
	}
	raw, overflow, err := m.read()
	if err != nil {
		return nil, err
	}
	var events []Event
	for _, r := range raw {
		events = m.interpret(events, r)
	}
	if overflow {
		events, err = m.recover(ctx, events)
	}
	return events, err
}

// read takes what is in the queue; after an overflow all that is left of it, so
// that the comparison that follows is newer than any of it.
func (m *Monitor) read() (raw []kernel.MountEvent, overflow bool, err error) {
	for {
		n, err := unix.Read(m.group, m.buf)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EAGAIN) || err == nil && n == 0:
			return raw, overflow, nil
		case err != nil:
			return raw, overflow, os.NewSyscallError("read", err)
		}
		from := len(raw)
		if raw, err = kernel.ParseMountEvents(raw, m.buf[:n]); err != nil {
			return raw, overflow, err
		}
		for _, e := range raw[from:] {
			overflow = overflow || e.Overflow
		}
		if !overflow {
			return raw, false, nil
		}
	}
}

// interpret appends what the kernel said, and keeps the account of which mount
// is where. What is known already is not told again.
func (m *Monitor) interpret(events []Event, r kernel.MountEvent) []Event {
	ns, known := m.owner[r.Mount]
	switch {
	case r.Attached && r.Detached && known:
		return append(events, Event{Namespace: ns, ID: r.Mount, Kind: Moved})
	case r.Attached && !known:
		ns = m.locate(r.Mount)
		m.owner[r.Mount] = ns
		m.count(ns, 1)
		return append(events, Event{Namespace: ns, ID: r.Mount, Kind: Attached})
	case r.Detached && known:
		delete(m.owner, r.Mount)
		m.count(ns, -1)
		return append(events, Event{Namespace: ns, ID: r.Mount, Kind: Detached})
	}
	return events
}

// count keeps the number of a namespace's mounts, and forgets the namespace with
// the last: the kernel tells of the mounts of a namespace that goes.
func (m *Monitor) count(ns uint64, change int) {
	if w := m.watched[ns]; w != nil {
		if w.mounts += change; w.mounts <= 0 {
			delete(m.watched, ns)
			m.removed = true
		}
	}
}

// locate finds the namespace a mount is in, 0 if it is in none of them any more.
func (m *Monitor) locate(mount uint64) uint64 {
	for ns := range m.watched {
		if len(m.watched) == 1 && !m.removed {
			return ns
		}
		if _, err := kernel.StatMount(ns, mount, kernel.StatBasic); err == nil {
			return ns
		}
	}
	return 0
}

// recover compares the account with full lists and appends the differences.
func (m *Monitor) recover(ctx context.Context, events []Event) ([]Event, error) {
	there := map[uint64]uint64{}
	for _, w := range m.watched {
		if err := ctx.Err(); err != nil {
			return events, err
		}
		ids, err := kernel.ListMounts(nil, w.id, kernel.Root, 0)
		if err != nil && !errors.Is(err, unix.ENOENT) { // ENOENT: the namespace is gone
			return events, fmt.Errorf("mountns: monitor: namespace %d: %w", w.id, err)
		}
		for _, id := range ids {
			there[id] = w.id
		}
		w.mounts = len(ids)
		if len(ids) == 0 {
			delete(m.watched, w.id)
			m.removed = true
		}
	}
	for id, ns := range there {
		if _, known := m.owner[id]; !known {
			events = append(events, Event{Namespace: ns, ID: id, Kind: Attached, Recovered: true})
		}
	}
	for id, ns := range m.owner {
		if _, known := there[id]; !known {
			events = append(events, Event{Namespace: ns, ID: id, Kind: Detached, Recovered: true})
		}
	}
	m.owner = there
	return events, nil
}

// compareAll is the way of a kernel without mount events: compare each
// namespace whose table has changed.
func (m *Monitor) compareAll(ctx context.Context) ([]Event, error) {
	var events []Event
	for _, w := range m.watched {
		changed, err := w.changed()
		if err != nil {
			return events, err
		}
		if !changed {
			continue
		}
		now, err := w.ns.account(ctx)
		if err != nil {
			return events, err
		}
		added, removed := w.last.diff(&now)
		w.last = now
		for _, id := range removed {
			events = append(events, Event{Namespace: w.id, ID: id, Kind: Detached, Recovered: true})
		}
		for _, id := range added {
			events = append(events, Event{Namespace: w.id, ID: id, Kind: Attached, Recovered: true})
		}
	}
	return events, nil
}

// changed says whether the table has changed since the last time it was asked.
func (w *watch) changed() (bool, error) {
	if w.dirty {
		w.dirty = false
		return true, nil
	}
	fds := []unix.PollFd{{Fd: int32(w.mountinfo.Fd()), Events: unix.POLLPRI}}
	for {
		_, err := unix.Poll(fds, 0)
		if err == nil {
			return fds[0].Revents != 0, nil
		}
		if err != unix.EINTR {
			return false, os.NewSyscallError("poll", err)
		}
	}
}
