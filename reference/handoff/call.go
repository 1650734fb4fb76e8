package handoff

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"errors"
	"fmt"
	"os"
	"slices"
)

// Call is one pending NodePrepareVolume call, as the channel sees it. It ends
// with Finish or Drop, or when its context does.
type Call struct {
	l     *Listener
	key   Key
	token []byte
	ctx   context.Context
	stop  func()

	// The rest is guarded by l.mu.
	ended    bool
	messages int
	brought  map[string]struct{} // ids of handles of this call
}

// Handle is a mount the CO holds for a preparation.
type Handle struct {
	ID string
	// Mount is the detached mount to clone for each consumer. It is the
	// Listener's, valid until Release.
	Mount *os.File
	// FUSE is true for a mount the CO made on request, false for one that was
	// offered: the latter is still to be verified in a private mount
	// namespace.
	FUSE bool
	// Resumable is true if operations may wait for a later process after the
	// serving one died.
	Resumable bool
	// Shared is true if another preparation of the volume has the mount too.
	Shared bool
	// Server is who serves, for diagnostics.
	Server Peer
	// Gone is closed when that process closes its connection. It is nil for
	// a mount that was offered.
	Gone <-chan struct{}
}

// Reasons of a HandleError.
var (
	// ErrNotDelivered: the id came in no message of this call and the CO
	// holds none of that name.
	ErrNotDelivered = errors.New("not delivered in this call and not held")
	// ErrNotServing: nobody said that it serves the mount, or who did is gone.
	ErrNotServing = errors.New("nobody serves it")
)

// HandleError says why an id of a mount spec names no usable handle. The CO
// unprepares and fails.
type HandleError struct {
	Key      Key
	HandleID string
	Err      error // ErrNotDelivered or ErrNotServing
}

// Error implements error.
func (e *HandleError) Error() string {
	return fmt.Sprintf("handoff: handle %q of %s: %v", e.HandleID, e.Key, e.Err)
}

// Unwrap returns the reason.
func (e *HandleError) Unwrap() error { return e.Err }

// Begin registers a call that is about to be made. When ctx ends before
// Finish, the call is dropped. Several calls of one preparation may be pending:
// each has a token of its own.
func (l *Listener) Begin(ctx context.Context, key Key) (*Call, error) {
	c := &Call{l: l, key: key, token: make([]byte, 32), brought: make(map[string]struct{})}
	_, _ = rand.Read(c.token) // it ends the program rather than fail
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil, ErrClosed
	}
	var cancel context.CancelFunc
	c.ctx, cancel = context.WithCancel(ctx)
	watched := context.AfterFunc(ctx, c.Drop)
	c.stop = func() { watched(); cancel() }
	if l.calls[key] == nil {
		l.calls[key] = make(map[*Call]struct{})
	}
	l.calls[key][c] = struct{}{}
	return c, nil
}

// Token is the handoff_token of the call: 32 random bytes, a secret.
func (c *Call) Token() []byte { return slices.Clone(c.token) }

// Held are the ids for held_handles: what the CO holds of this preparation
// and is served, or may yet be resumed.
func (c *Call) Held() []string {
	c.l.mu.Lock()
	defer c.l.mu.Unlock()
	var ids []string
	for id, h := range c.l.handles[c.key] {
		if _, now := c.brought[id]; !now && h.phase != ended {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids
}

// Finish ends a call that was answered OK with mount specs naming the given
// handle ids, and returns those handles in that order. What the call brought
// and the answer does not name is closed. If an id is unusable the call is
// dropped, with a HandleError.
func (c *Call) Finish(ids ...string) ([]Handle, error) {
	l := c.l
	l.mu.Lock()
	defer l.mu.Unlock()
	if c.ended {
		return nil, fmt.Errorf("%w: the call of %s", ErrClosed, c.key)
	}
	var handles []Handle
	for _, id := range ids {
		h := l.handles[c.key][id]
		switch {
		case h == nil:
			c.end()
			return nil, &HandleError{c.key, id, ErrNotDelivered}
		case h.phase != serving:
			c.end()
			return nil, &HandleError{c.key, id, ErrNotServing}
		}
		v := Handle{ID: id, Mount: h.mount, FUSE: h.fuse, Resumable: h.request.Resumable, Shared: len(h.users) > 1}
		if h.server != nil {
			v.Server, v.Gone = h.server.peer, h.gone
		}
		handles = append(handles, v)
	}
	for _, id := range ids {
		l.keep(c.key, id)
	}
	c.end()
	return handles, nil
}

// keep makes a handle outlive the calls that brought it. The caller holds l.mu.
func (l *Listener) keep(key Key, id string) {
	for c := range l.calls[key] {
		delete(c.brought, id)
	}
}

// Drop ends a call that failed or whose answer is not wanted: everything that
// came under its token is closed. Handles of earlier calls stay. It does
// nothing to a call that has ended.
func (c *Call) Drop() {
	c.l.mu.Lock()
	defer c.l.mu.Unlock()
	c.end()
}

// end forgets what the call brought, and the connections that have nothing
// else to do. The caller holds l.mu.
func (c *Call) end() {
	if c.ended {
		return
	}
	c.ended = true
	c.stop()
	delete(c.l.calls[c.key], c)
	if len(c.l.calls[c.key]) == 0 {
		delete(c.l.calls, c.key)
	}
	for id := range c.brought {
		c.l.forget(c.key, id)
	}
	for k := range c.l.connections {
		_, spoke := k.calls[c]
		delete(k.calls, c)
		// One that never spoke may be of another call, if there is one.
		if spoke || len(c.l.calls) == 0 {
			k.closeIfIdle()
		}
	}
}

// admit finds the pending call a message belongs to: by its ids, and then by
// its token, compared in constant time. Nil means the message is dropped.
func (l *Listener) admit(k *connection, key Key, token []byte) *Call {
	l.mu.Lock()
	defer l.mu.Unlock()
	for c := range l.calls[key] {
		if subtle.ConstantTimeCompare(c.token, token) != 1 {
			continue
		}
		if c.messages++; c.messages > maxMessages {
			return nil
		}
		k.calls[c] = struct{}{}
		return c
	}
	return nil
}
