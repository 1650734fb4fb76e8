package handoff

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"google.golang.org/grpc/codes"

	pb "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// Conn is the Plugin's end of the channel, for the messages of one pending
// call. A process that serves FUSE keeps it open as long as it serves.
type Conn struct {
	conn  *net.UnixConn
	key   Key
	token []byte

	turn sync.Mutex // one message and its reply at a time
}

// Dial connects to the handle_socket of a pending call. The token is that
// call's. Descriptors stay the caller's in every method; each is to be closed
// once the method returned, the device being served excepted.
func Dial(ctx context.Context, path string, key Key, token []byte) (*Conn, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, "unixpacket", path)
	if err != nil {
		return nil, fmt.Errorf("handoff: connect: %w", err)
	}
	return &Conn{conn: c.(*net.UnixConn), key: key, token: bytes.Clone(token)}, nil
}

// Offer sends a detached mount as the handle of the given id. A *Refusal says
// why the CO does not take it.
func (c *Conn) Offer(ctx context.Context, handleID string, mount *os.File) error {
	_, _, err := c.ask(ctx, &pb.HandoffMessage{
		HandleId: handleID,
		Body:     &pb.HandoffMessage_Offer{Offer: new(pb.HandoffOffer)},
	}, mount, 0, 0)
	return err
}

// RequestFUSE has the CO make a FUSE mount and returns its device, INIT being
// the first request to read from it; or nil, if the CO has the mount of
// r.ShareKey already and another process serves it.
func (c *Conn) RequestFUSE(ctx context.Context, handleID string, r FUSERequest) (*os.File, error) {
	least := 1
	if r.ShareKey != "" {
		least = 0
	}
	_, device, err := c.ask(ctx, &pb.HandoffMessage{
		HandleId: handleID,
		Body:     &pb.HandoffMessage_FuseRequest{FuseRequest: r.proto()},
	}, nil, least, 1)
	return device, err
}

// Serving says that this process answers the requests of the mount. The CO
// attaches nothing before. The call may be answered afterwards.
func (c *Conn) Serving(ctx context.Context, handleID string, s Session) error {
	_, _, err := c.ask(ctx, &pb.HandoffMessage{
		HandleId: handleID,
		Body:     &pb.HandoffMessage_Serving{Serving: &pb.HandoffServing{FuseInit: s.Init, State: s.State}},
	}, nil, 0, 0)
	return err
}

// Resume asks for the device that a dead process of this Plugin served, and
// for what that one told the CO last. Serving follows.
func (c *Conn) Resume(ctx context.Context, handleID string) (*os.File, Session, error) {
	reply, device, err := c.ask(ctx, &pb.HandoffMessage{
		HandleId: handleID,
		Body:     &pb.HandoffMessage_Resume{Resume: new(pb.HandoffResume)},
	}, nil, 1, 1)
	return device, Session{Init: reply.GetFuseInit(), State: reply.GetState()}, err
}

// Deposit gives a CO that lost its own the device this process serves, with
// what a successor of this process needs. It counts as Serving.
func (c *Conn) Deposit(ctx context.Context, handleID string, device *os.File, s Session) error {
	_, _, err := c.ask(ctx, &pb.HandoffMessage{
		HandleId: handleID,
		Body:     &pb.HandoffMessage_Deposit{Deposit: &pb.HandoffDeposit{FuseInit: s.Init, State: s.State}},
	}, device, 0, 0)
	return err
}

// ask sends a message and waits for its reply, which carries between least
// and most descriptors if it is OK and none if it is not. After any error
// that is not a *Refusal the connection is of no more use and closed.
func (c *Conn) ask(ctx context.Context, m *pb.HandoffMessage, file *os.File, least, most int) (_ *pb.HandoffReply, _ *os.File, err error) {
	c.turn.Lock()
	defer c.turn.Unlock()
	defer func() {
		var r *Refusal
		if err != nil && !errors.As(err, &r) {
			_ = c.conn.Close()
		}
	}()
	_ = c.conn.SetDeadline(time.Time{})
	defer interrupt(ctx, c.conn.SetDeadline)()
	wrap := func(err error) error {
		switch {
		case ctx.Err() != nil:
			return fmt.Errorf("handoff: handle %q: %w", m.HandleId, context.Cause(ctx))
		case errors.Is(err, io.EOF):
			return fmt.Errorf("handoff: handle %q: %w by the CO", m.HandleId, ErrClosed)
		}
		return err
	}

	m.VolumeId, m.PrepareId, m.Token = c.key.VolumeID, c.key.PrepareID, c.token
	if err := send(c.conn, m, file); err != nil {
		return nil, nil, wrap(err)
	}
	answer, files, err := receive(c.conn)
	if err != nil {
		return nil, nil, wrap(err)
	}
	reply := answer.GetReply()
	if code := codes.Code(reply.GetCode()); reply != nil && code != codes.OK {
		least, most = 0, 0
		err = &Refusal{Code: code, Message: reply.GetMessage()}
	}
	switch {
	case reply == nil || answer.GetVolumeId() != m.VolumeId || answer.GetPrepareId() != m.PrepareId ||
		answer.GetHandleId() != m.HandleId || !bytes.Equal(answer.GetToken(), c.token):
		err = &ProtocolError{Rule: "the answer to a message is the reply of the same ids and token"}
	case len(files) < least || len(files) > most:
		err = &ProtocolError{Rule: fmt.Sprintf("this reply has %d to %d descriptors, not %d", least, most, len(files))}
	case len(files) == 1:
		if kerr := IsFUSEDevice(files[0]); kerr != nil {
			err = &ProtocolError{Rule: "the descriptor of a reply", Err: kerr}
		}
	}
	if err != nil {
		closeAll(files)
		return nil, nil, err
	}
	if len(files) == 0 {
		return reply, nil, nil
	}
	return reply, files[0], nil
}

// Wait returns ErrClosed when the CO is gone, having restarted most likely:
// it lost the device, and the next call is one to Deposit in. It returns the
// context's error when that ends first; the connection stays usable then.
// Whatever the CO sends meanwhile is closed and ignored.
func (c *Conn) Wait(ctx context.Context) error {
	c.turn.Lock()
	defer c.turn.Unlock()
	_ = c.conn.SetReadDeadline(time.Time{})
	defer interrupt(ctx, c.conn.SetReadDeadline)()
	for {
		_, files, err := receive(c.conn)
		closeAll(files)
		var p *ProtocolError
		switch {
		case err == nil || errors.As(err, &p):
		case ctx.Err() != nil:
			return context.Cause(ctx)
		default:
			return ErrClosed
		}
	}
}

// Close ends the connection. For the CO that means that this process serves
// nothing any more.
func (c *Conn) Close() error { return c.conn.Close() }

// interrupt has set called with a time in the past when ctx ends. The
// function it returns takes that back; afterwards set is not called any more.
func interrupt(ctx context.Context, set func(time.Time) error) (done func()) {
	called := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(called)
		_ = set(time.Unix(1, 0))
	})
	return func() {
		if !stop() {
			<-called
		}
	}
}
