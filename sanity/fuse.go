package sanity

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/csi-prepare/csi-prepare/reference/fusemount"
	"github.com/csi-prepare/csi-prepare/reference/handoff"
	"github.com/csi-prepare/csi-prepare/reference/kernel"
	"github.com/csi-prepare/csi-prepare/reference/master"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
	"github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// failover is how long the suite waits for a server's successor, before it ends
// the connection.
const failover = 3 * time.Second

// channel is the suite's end of the side channel to a plugin that returns
// HANDLE or FUSE. Calls go through it without knowing: it makes each of them a
// pending call, and takes the handles of its answer.
type channel struct {
	dir string
	uid int

	listener atomic.Pointer[handoff.Listener]

	mu sync.Mutex
	// handles are those of calls that were OK, by their ids.
	handles map[handoff.Key]map[string]handoff.Handle
	masters map[handoff.Key][]*master.Mount // of handles that were received
	// missing says, of a call that was OK, which id it named in vain.
	missing map[handoff.Key]error
	// refused is what a server asked for in vain, by the last time.
	refused map[handoff.Key]*handoff.Refusal
	servers map[handoff.Key]served
	// adopting is where a spec has attached its mounts, for a deposit.
	adopting func(ctx context.Context, device *os.File) (*os.File, error)
}

// served is who serves a FUSE mount, and over which connection.
type served struct {
	pid        int
	started    string // of the process, by /proc
	connection uint32
}

// handsOver reports whether the plugin returns what crosses the channel.
func (s *Suite) handsOver() bool { return s.features[KindHandle] || s.features[KindFUSE] }

// openChannel listens for the plugin, once it is known to want that.
func (s *Suite) openChannel() error {
	c := s.clients.channel
	c.dir, c.uid = filepath.Join(s.dir, "handoff"), s.peerUID()
	s.furniture = append(s.furniture, "handoff")
	return c.listen()
}

func newChannel() *channel {
	return &channel{
		handles: map[handoff.Key]map[string]handoff.Handle{}, masters: map[handoff.Key][]*master.Mount{},
		missing: map[handoff.Key]error{}, refused: map[handoff.Key]*handoff.Refusal{}, servers: map[handoff.Key]served{},
	}
}

func (c *channel) listen() error {
	l, err := handoff.Listen(handoff.Config{
		Directory: c.dir, UID: c.uid, GID: -1,
		Mount: fusemount.Policy{ServerPermissions: true}.Mount,
		Adopt: func(ctx context.Context, _ handoff.Key, _ string, device *os.File) (*os.File, error) {
			c.mu.Lock()
			adopt := c.adopting
			c.mu.Unlock()
			if adopt == nil {
				return nil, errors.New("the suite has attached no mount of it")
			}
			return adopt(ctx, device)
		},
		Abort: fusemount.Abort,
		Refused: func(key handoff.Key, r *handoff.Refusal) {
			c.mu.Lock()
			defer c.mu.Unlock()
			c.refused[key] = r
		},
		Failover: failover,
		Log:      slog.New(slog.NewTextHandler(io.Discard, nil)),
	})
	if err != nil {
		return fmt.Errorf("listening for handles: %w", err)
	}
	c.listener.Store(l)
	return nil
}

// restart does what the end of a CO does: everything it held is closed.
func (c *channel) restart() error {
	c.close()
	return c.listen()
}

func (c *channel) close() {
	l := c.listener.Swap(nil)
	if l == nil {
		return
	}
	c.mu.Lock()
	for key := range c.handles {
		c.forget(key)
	}
	c.mu.Unlock()
	_ = l.Close() // nothing of it is used any more
}

// intercept gives calls that may bring handles what they need for that.
func (c *channel) intercept(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	l := c.listener.Load()
	switch r := req.(type) {
	case *prepareRequest:
		if l == nil || r.GetHandleSocket() != "" || !wantsHandles(r) {
			break
		}
		return c.prepare(ctx, l, r, func(r *prepareRequest) error {
			return invoke(ctx, method, r, reply, cc, opts...)
		}, reply)
	case *unprepareRequest:
		if l == nil {
			break
		}
		key := handoff.Key{VolumeID: r.GetVolumeId(), PrepareID: r.GetPrepareId()}
		l.Release(key)
		c.mu.Lock()
		c.forget(key)
		c.mu.Unlock()
	}
	return invoke(ctx, method, req, reply, cc, opts...)
}

func wantsHandles(r *prepareRequest) bool {
	return slices.ContainsFunc(r.GetPerformer().GetKinds(), func(k preparev1alpha1.MountKind) bool {
		return k == preparev1alpha1.MountKind_MOUNT_KIND_HANDLE || k == preparev1alpha1.MountKind_MOUNT_KIND_FUSE
	})
}

func (c *channel) prepare(ctx context.Context, l *handoff.Listener, r *prepareRequest, invoke func(*prepareRequest) error, reply any) error {
	key := handoff.Key{VolumeID: r.GetVolumeId(), PrepareID: r.GetPrepareId()}
	call, err := l.Begin(ctx, key)
	if err != nil {
		return err
	}
	defer call.Drop()
	r = proto.Clone(r).(*prepareRequest)
	r.HandleSocket, r.HandoffToken, r.HeldHandles = l.Path(), call.Token(), call.Held()
	if err := invoke(r); err != nil {
		return err
	}
	answer, ok := reply.(*prepareResponse)
	if !ok {
		return nil
	}
	var ids []string
	for _, s := range answer.GetMountSpecs() {
		if id := s.GetHandle().GetHandleId() + s.GetFuse().GetHandleId(); id != "" {
			ids = append(ids, id)
		}
	}
	handles, err := call.Finish(ids...)
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.missing, key)
	if err != nil {
		c.missing[key] = err
		return nil
	}
	c.handles[key] = map[string]handoff.Handle{} // those of before may be of a dead server
	for _, h := range handles {
		c.handles[key][h.ID] = h
		if h.FUSE {
			c.servers[key] = whoServes(h)
		}
	}
	return nil
}

// forget lets go of a preparation. The caller holds c.mu.
func (c *channel) forget(key handoff.Key) {
	for _, m := range c.masters[key] {
		_ = m.Close() // it was only cloned from
	}
	delete(c.masters, key)
	delete(c.handles, key)
	delete(c.missing, key)
}

func whoServes(h handoff.Handle) served {
	w := served{pid: int(h.Server.PID), started: startOf(int(h.Server.PID))}
	if facts, err := kernel.FactsOf(int(h.Mount.Fd()), "", true); err == nil {
		w.connection = facts.DevMinor
	}
	return w
}

// stillServes reports whether the process that served still has the device.
func (w served) stillServes() bool {
	if w.pid == 0 || w.started == "" || startOf(w.pid) != w.started {
		return false
	}
	return slices.Contains(connectionsOf(w.pid), w.connection)
}

// handlesOf returns what the answer to a request needs of the channel, or fails
// the spec: an id nobody delivered, or a mount nobody serves.
func (t *trial) handlesOf(r *prepareRequest, specs []mountspec.Spec) map[string]*master.Mount {
	c := t.clients.channel
	key := handoff.Key{VolumeID: r.GetVolumeId(), PrepareID: r.GetPrepareId()}
	c.mu.Lock()
	missing, handles := c.missing[key], c.handles[key]
	c.mu.Unlock()
	if missing != nil {
		t.fail(brokenBy(missing), "a handle of the answer that was delivered, and is served", missing.Error())
	}
	masters := map[string]*master.Mount{}
	for _, s := range specs {
		switch k := s.Kind.(type) {
		case *mountspec.FUSE:
			h, ok := handles[k.ID]
			if !ok {
				t.fail(requirement.HandleDelivered, "a handle that was handed over under that id", fmt.Sprintf("the answer names %q, and nothing came under it", k.ID))
			}
			t.proven(h)
			masters[k.ID] = master.Made(h.Mount)
		case *mountspec.Handle:
			masters[k.ID] = t.received(key, handles[k.ID], k.FSType, s.Attributes.Recursive)
		}
	}
	return masters
}

// brokenBy is the requirement that a handle which is not usable breaks.
func brokenBy(err error) requirement.ID {
	if errors.Is(err, handoff.ErrNotServing) {
		return requirement.FUSEServed
	}
	return requirement.HandleDelivered
}

// proven wants a server that answers.
func (t *trial) proven(h handoff.Handle) {
	ctx, cancel := context.WithTimeout(t.ctx, t.config.Timeout)
	defer cancel()
	err := fusemount.Prove(ctx, h.Mount)
	if err == nil {
		return
	}
	if errors.Is(err, fusemount.ErrUnanswered) {
		_ = fusemount.Abort(t.ctx, h.Mount) // whoever waits is let go
	}
	t.kernel = err.Error()
	t.fail(requirement.FUSEServed, "a mount whose server answers", "asking for the attributes of its root fails")
}

// received takes a handle into a namespace of the suite's, once.
func (t *trial) received(key handoff.Key, h handoff.Handle, fsType string, submounts bool) *master.Mount {
	if h.Mount == nil {
		end(couldNotRun("the suite holds no mount of a handle"))
	}
	m, err := master.Receive(t.ctx, h.Mount, master.Expected{FSType: fsType, Submounts: submounts})
	var refused *master.RefusedError
	if errors.As(err, &refused) {
		t.fail(requirement.HandleFSType, "a detached mount of type "+fsType, refused.Reason)
	}
	t.sysfail("taking a handle", err)
	c := t.clients.channel
	c.mu.Lock()
	defer c.mu.Unlock()
	c.masters[key] = append(c.masters[key], m)
	return m
}

// serverOf returns who serves the FUSE mount of a request.
func (t *trial) serverOf(r *prepareRequest) served {
	c := t.clients.channel
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.servers[handoff.Key{VolumeID: r.GetVolumeId(), PrepareID: r.GetPrepareId()}]
}

// handleOf returns the FUSE mount of a request.
func (t *trial) handleOf(r *prepareRequest) (handoff.Handle, bool) {
	c := t.clients.channel
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, h := range c.handles[handoff.Key{VolumeID: r.GetVolumeId(), PrepareID: r.GetPrepareId()}] {
		if h.FUSE {
			return h, true
		}
	}
	return handoff.Handle{}, false
}

// killServer kills the process that serves the FUSE mount of a request, if that
// is one that may be killed, and waits until the suite has noticed.
func (t *trial) killServer(r *prepareRequest) {
	w := t.serverOf(r)
	h, ok := t.handleOf(r)
	switch {
	case !ok:
		t.unsupported("the volume was not answered with a FUSE mount")
	case t.process == nil:
		end(couldNotRun("the server is not the suite's to kill; --exec 'CMD …' lets the suite start the plugin"))
	case w.pid == 0 || startOf(w.pid) != w.started:
		end(couldNotRun("the process that serves is not known, or out of sight"))
	case w.pid == t.pid():
		end(couldNotRun("the process that serves is the one behind the CSI socket, which breaks %s", requirement.FUSEOutlivesRPC))
	}
	t.sysfail("killing the server", unix.Kill(w.pid, unix.SIGKILL))
	select {
	case <-h.Gone:
	case <-time.After(t.config.Timeout):
		t.fail(requirement.HandoffConnectionStays, "that the connection of a server ends with it", "the process was killed and its connection is open")
	}
}
