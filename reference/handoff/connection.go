package handoff

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"time"

	"google.golang.org/grpc/codes"

	pb "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// connection is one process of the Plugin, as the CO sees it.
type connection struct {
	*net.UnixConn
	l    *Listener
	peer Peer

	// Guarded by l.mu.
	calls  map[*Call]struct{}   // pending calls it spoke in
	serves map[*handle]struct{} // what it serves or is about to

	dropped int // of run alone: messages of no pending call
}

// run reads and answers until the peer or the CO ends the connection.
func (k *connection) run() {
	defer k.end()
	_ = k.SetReadDeadline(time.Now().Add(k.l.config.Silence))
	for {
		m, files, err := receive(k.UnixConn)
		if err == nil {
			err = k.answer(m, files)
		}
		if err != nil {
			if !errors.Is(err, io.EOF) && !errors.Is(err, net.ErrClosed) {
				k.l.config.Log.Warn("handoff: connection closed", "pid", k.peer.PID, "uid", k.peer.UID, "error", err)
			}
			return
		}
	}
}

func (k *connection) end() {
	_ = k.Close()
	k.l.mu.Lock()
	defer k.l.mu.Unlock()
	delete(k.l.connections, k)
	for h := range k.serves {
		delete(k.serves, h)
		k.l.lost(h)
	}
}

// closeIfIdle closes a connection that serves nothing and has no pending
// call. The caller holds l.mu.
func (k *connection) closeIfIdle() {
	if len(k.calls) > 0 {
		return
	}
	for h := range k.serves {
		if h.phase == serving {
			return // one that is yet to be served has missed its call
		}
	}
	_ = k.Close()
}

// answer takes one packet and sends its one reply. It owns the files. An
// error ends the connection.
func (k *connection) answer(m *pb.HandoffMessage, files []*os.File) error {
	if want := carried(m); len(files) != want {
		closeAll(files)
		return &ProtocolError{Rule: "a message has the descriptors of its kind: none, or one of offer and deposit"}
	}
	key := Key{VolumeID: m.GetVolumeId(), PrepareID: m.GetPrepareId()}
	call := k.l.admit(k, key, m.GetToken())
	if call == nil {
		closeAll(files)
		return k.drop()
	}
	_ = k.SetReadDeadline(time.Time{})

	var file *os.File
	if len(files) == 1 {
		file = files[0]
	}
	reply, device, err := k.step(call, m, file)
	var refusal *Refusal
	switch {
	case err == nil:
	case errors.As(err, &refusal) && refusal.Code != codes.OK:
		reply = &pb.HandoffReply{Code: int32(refusal.Code), Message: refusal.Message}
		if k.l.config.Refused != nil {
			k.l.config.Refused(key, refusal)
		}
	case errors.Is(err, ErrClosed):
		return err
	case errors.Is(err, context.DeadlineExceeded):
		reply = &pb.HandoffReply{Code: int32(codes.DeadlineExceeded), Message: "the CO's step took too long"}
	default:
		k.l.config.Log.Warn("handoff: step failed", "preparation", key.String(), "handle", m.GetHandleId(), "error", err)
		reply = &pb.HandoffReply{Code: int32(codes.Internal), Message: "the CO could not do it; its log has the reason"}
	}
	_ = k.SetWriteDeadline(time.Now().Add(k.l.config.Silence))
	return send(k.UnixConn, &pb.HandoffMessage{
		VolumeId: key.VolumeID, PrepareId: key.PrepareID, HandleId: m.GetHandleId(), Token: m.GetToken(),
		Body: &pb.HandoffMessage_Reply{Reply: reply},
	}, device)
}

// drop ignores a message that is of no pending call. A process that serves
// keeps its connection, up to a limit: ending it would say that the CO is
// gone. Anybody else is cut off without an explanation.
func (k *connection) drop() error {
	k.dropped++
	k.l.mu.Lock()
	serves := len(k.serves) > 0
	k.l.mu.Unlock()
	if serves && k.dropped <= maxMessages {
		return nil
	}
	return &ProtocolError{Rule: "a message belongs to a pending call"}
}

// step does what one message asks. The file is closed or kept in a handle
// when it returns. A device is sent along with the reply and stays the
// handle's.
func (k *connection) step(c *Call, m *pb.HandoffMessage, file *os.File) (_ *pb.HandoffReply, device *os.File, err error) {
	ok := new(pb.HandoffReply)
	if unknown(m.ProtoReflect()) || m.GetBody() == nil {
		if file != nil {
			_ = file.Close()
		}
		return nil, nil, refuse(codes.Unimplemented, "a message, or a field of it, that this CO does not know")
	}
	id := m.GetHandleId()
	switch b := m.GetBody().(type) {
	case *pb.HandoffMessage_Offer:
		return ok, nil, k.offer(c, id, file)
	case *pb.HandoffMessage_FuseRequest:
		device, err := k.fuseRequest(c, id, fuseRequest(b.FuseRequest))
		return ok, device, err
	case *pb.HandoffMessage_Serving:
		return ok, nil, k.serving(c, id, Session{b.Serving.GetFuseInit(), b.Serving.GetState()})
	case *pb.HandoffMessage_Resume:
		s, device, err := k.resume(c, id)
		return &pb.HandoffReply{FuseInit: s.Init, State: s.State}, device, err
	case *pb.HandoffMessage_Deposit:
		return ok, nil, k.deposit(c, id, file, Session{b.Deposit.GetFuseInit(), b.Deposit.GetState()})
	default:
		return nil, nil, refuse(codes.InvalidArgument, "a Plugin does not send this message")
	}
}

func (k *connection) offer(c *Call, id string, file *os.File) error {
	if err := isMountRoot(file); err != nil {
		_ = file.Close()
		return err
	}
	h := newHandle()
	h.mount, h.phase = file, serving
	close(h.left)
	k.l.mu.Lock()
	defer k.l.mu.Unlock()
	if err := c.reserve(id, h); err != nil {
		_ = file.Close()
		return err
	}
	return nil
}

func (k *connection) fuseRequest(c *Call, id string, r FUSERequest) (*os.File, error) {
	if k.l.config.Mount == nil {
		return nil, refuse(codes.Unimplemented, "this CO makes no FUSE mounts")
	}
	if err := r.Check(); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(c.ctx, k.l.config.Step)
	defer cancel()
	h, isNew, err := k.claim(ctx, c, id, r)
	if err != nil || !isNew {
		return nil, err
	}
	device, mount, err := k.l.config.Mount(ctx, c.key, r)

	k.l.mu.Lock()
	defer k.l.mu.Unlock()
	if err != nil {
		if !c.ended {
			c.release(id)
		}
		return nil, err
	}
	if c.ended {
		_ = device.Close()
		_ = mount.Close()
		return nil, ErrClosed
	}
	h.device, h.mount = device, mount
	return device, nil
}

// claim makes id the name of a new handle, or of the one that preparations
// with this share_key have together.
func (k *connection) claim(ctx context.Context, c *Call, id string, r FUSERequest) (h *handle, isNew bool, err error) {
	l := k.l
	l.mu.Lock()
	defer l.mu.Unlock()
	name := shared{c.key.VolumeID, r.ShareKey}
	for r.ShareKey != "" {
		held := l.shared[name]
		if held == nil {
			break
		}
		switch {
		case !held.request.equal(r):
			return nil, false, refuse(codes.FailedPrecondition, "share_key: the mount of that key was made with other parameters")
		case held.phase != mounting:
			return held, false, c.reserve(id, held)
		case held.server == k:
			return nil, false, refuse(codes.FailedPrecondition, "share_key: this connection has yet to serve the mount of that key")
		}
		l.mu.Unlock()
		select {
		case <-held.left:
		case <-ctx.Done():
		}
		l.mu.Lock()
		if ctx.Err() != nil {
			return nil, false, ctx.Err()
		}
	}
	h = newHandle()
	h.fuse, h.request = true, r
	if err := c.reserve(id, h); err != nil {
		return nil, false, err
	}
	if r.ShareKey != "" {
		h.share = name
		l.shared[name] = h
	}
	k.take(h)
	return h, true, nil
}

func (k *connection) serving(c *Call, id string, s Session) error {
	k.l.mu.Lock()
	defer k.l.mu.Unlock()
	h := k.l.handles[c.key][id]
	switch {
	case c.ended:
		return ErrClosed
	case h == nil:
		return refuse(codes.NotFound, "handle_id: no fuse_request or resume of this call has it")
	case h.server != k || h.mount == nil:
		return refuse(codes.FailedPrecondition, "serving comes over the connection that got the device")
	}
	if err := s.check("serving", h.request.Resumable); err != nil {
		return err
	}
	k.l.serve(h, k, s)
	return nil
}

func (k *connection) resume(c *Call, id string) (Session, *os.File, error) {
	l := k.l
	l.mu.Lock()
	defer l.mu.Unlock()
	h := l.handles[c.key][id]
	if h != nil && h.server != nil && h.server != k {
		// A successor may be faster than the news of the death it follows.
		gone := h.gone
		l.mu.Unlock()
		select {
		case <-gone:
		case <-time.After(l.config.Silence):
		case <-c.ctx.Done():
		}
		l.mu.Lock()
		h = l.handles[c.key][id]
	}
	switch {
	case c.ended:
		return Session{}, nil, ErrClosed
	case h == nil || !h.fuse:
		return Session{}, nil, refuse(codes.NotFound, "handle_id: the CO holds no FUSE mount of that name")
	case h.phase == ended:
		return Session{}, nil, refuse(codes.FailedPrecondition, "the connection has ended")
	case !h.request.Resumable:
		return Session{}, nil, refuse(codes.FailedPrecondition, "it was not requested as resumable")
	case h.phase != orphaned:
		return Session{}, nil, refuse(codes.FailedPrecondition, "another connection serves it")
	}
	h.phase = resuming
	k.take(h)
	return h.session, h.device, nil
}

func (k *connection) deposit(c *Call, id string, device *os.File, s Session) error {
	l := k.l
	refused := func(err error) error {
		_ = device.Close()
		return err
	}
	if l.config.Adopt == nil {
		return refused(refuse(codes.Unimplemented, "this CO takes no deposits"))
	}
	if err := IsFUSEDevice(device); err != nil {
		return refused(refuse(codes.InvalidArgument, "deposit: %v", err))
	}
	if err := s.check("deposit", false); err != nil {
		return refused(err)
	}
	l.mu.Lock()
	done, err := k.depositAgain(c, id, device, s)
	l.mu.Unlock()
	if done {
		return err
	}
	ctx, cancel := context.WithTimeout(c.ctx, l.config.Step)
	defer cancel()
	mount, err := l.config.Adopt(ctx, c.key, id, device)
	if err != nil {
		return refused(err)
	}

	l.mu.Lock()
	defer l.mu.Unlock()
	if done, err := k.depositAgain(c, id, device, s); done {
		_ = mount.Close()
		return err
	}
	h := newHandle()
	// Whoever cannot tell INIT is not able to have it repeated.
	h.fuse, h.request.Resumable = true, len(s.Init) > 0
	h.device, h.mount = device, mount
	if err := c.reserve(id, h); err != nil {
		_ = mount.Close()
		return refused(err)
	}
	l.serve(h, k, s)
	return nil
}

// depositAgain is for a deposit of a connection that the CO holds: for this
// preparation, whose call was under way when another one brought it, or for
// another preparation of the volume that shares the mount. The caller holds
// l.mu; the device is closed if it is done.
func (k *connection) depositAgain(c *Call, id string, device *os.File, s Session) (done bool, err error) {
	l := k.l
	h := l.holds(c.key.VolumeID, device)
	if h == nil {
		return false, nil
	}
	defer func() { _ = device.Close() }()
	if h.request.Resumable != (len(s.Init) > 0) {
		return true, refuse(codes.FailedPrecondition, "deposit.fuse_init: is to be set for a mount that was requested as resumable, and for no other")
	}
	if l.handles[c.key][id] != h {
		if err := c.reserve(id, h); err != nil {
			return true, err
		}
	}
	l.serve(h, k, s)
	return true, nil
}

// holds finds the handle of the volume whose connection a device is of. Both
// are held, so that neither number can have come to mean another connection.
// The caller holds l.mu.
func (l *Listener) holds(volumeID string, device *os.File) *handle {
	number, err := ConnectionOf(device)
	if err != nil {
		return nil
	}
	for key, byID := range l.handles {
		for _, h := range byID {
			if key.VolumeID != volumeID || !h.fuse || h.mount == nil || h.phase == ended {
				continue
			}
			if other, err := connectionBehind(h.mount); err == nil && other == number {
				return h
			}
		}
	}
	return nil
}
