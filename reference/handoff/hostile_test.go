package handoff

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	pb "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

func offer(key Key, token []byte, id string) *pb.HandoffMessage {
	return &pb.HandoffMessage{
		VolumeId: key.VolumeID, PrepareId: key.PrepareID, HandleId: id, Token: token,
		Body: &pb.HandoffMessage_Offer{Offer: &pb.HandoffOffer{}},
	}
}

func fuse(key Key, token []byte, id string) *pb.HandoffMessage {
	m := offer(key, token, id)
	m.Body = &pb.HandoffMessage_FuseRequest{FuseRequest: request.proto()}
	return m
}

// throw sends bytes and descriptors as they are.
func throw(t *testing.T, c *net.UnixConn, data []byte, files ...*os.File) {
	t.Helper()
	var control []byte
	if len(files) > 0 {
		var fds []int
		for _, f := range files {
			fds = append(fds, int(f.Fd()))
		}
		control = unix.UnixRights(fds...)
	}
	if _, _, err := c.WriteMsgUnix(data, control, nil); err != nil && !errors.Is(err, unix.EPIPE) && !errors.Is(err, unix.ECONNRESET) {
		t.Fatal(err)
	}
	closeAll(files)
}

func encode(t *testing.T, m *pb.HandoffMessage) []byte {
	t.Helper()
	data, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func files(t *testing.T, n int) []*os.File {
	var fs []*os.File
	for range n {
		fs = append(fs, detachedTmpfs(t))
	}
	return fs
}

// Each of these gets its connection closed without an answer, and everything
// that came with it as well.
func TestHostilePackets(t *testing.T) {
	for name, attack := range map[string]func(t *testing.T, r *rig, c *Call, k *net.UnixConn){
		"an offer without a descriptor": func(t *testing.T, r *rig, c *Call, k *net.UnixConn) {
			throw(t, k, encode(t, offer(preparation, c.token, "h")))
		},
		"an offer with two": func(t *testing.T, r *rig, c *Call, k *net.UnixConn) {
			throw(t, k, encode(t, offer(preparation, c.token, "h")), files(t, 2)...)
		},
		"an offer with 253": func(t *testing.T, r *rig, c *Call, k *net.UnixConn) {
			throw(t, k, encode(t, offer(preparation, c.token, "h")), files(t, 253)...)
		},
		"a request with one": func(t *testing.T, r *rig, c *Call, k *net.UnixConn) {
			throw(t, k, encode(t, fuse(preparation, c.token, "h")), files(t, 1)...)
		},
		"no token": func(t *testing.T, r *rig, c *Call, k *net.UnixConn) {
			throw(t, k, encode(t, offer(preparation, nil, "h")), files(t, 1)...)
		},
		"a wrong token": func(t *testing.T, r *rig, c *Call, k *net.UnixConn) {
			throw(t, k, encode(t, offer(preparation, bytes.Repeat([]byte{1}, 32), "h")), files(t, 1)...)
		},
		"the token of another call": func(t *testing.T, r *rig, c *Call, k *net.UnixConn) {
			other := r.begin(Key{"v1", "p2"})
			defer other.Drop()
			throw(t, k, encode(t, offer(preparation, other.token, "h")), files(t, 1)...)
			if got := r.answer(k); got != nil {
				t.Errorf("answered: %v", got)
			}
		},
		"an unknown preparation": func(t *testing.T, r *rig, c *Call, k *net.UnixConn) {
			throw(t, k, encode(t, offer(Key{"v1", "p9"}, c.token, "h")), files(t, 1)...)
		},
		"the token of an ended call": func(t *testing.T, r *rig, c *Call, k *net.UnixConn) {
			old := c.Token()
			c.Drop()
			again := r.begin(preparation)
			defer again.Drop()
			next := r.raw()
			defer next.Close()
			throw(t, next, encode(t, offer(preparation, old, "h")), files(t, 1)...)
			if got := r.answer(next); got != nil {
				t.Errorf("answered: %v", got)
			}
		},
		"garbage": func(t *testing.T, r *rig, c *Call, k *net.UnixConn) {
			throw(t, k, []byte("\xff\xff\xff\xff"), files(t, 1)...)
		},
		"an empty packet with a descriptor": func(t *testing.T, r *rig, c *Call, k *net.UnixConn) {
			throw(t, k, nil, files(t, 1)...)
		},
		"a packet that is too long": func(t *testing.T, r *rig, c *Call, k *net.UnixConn) {
			m := offer(preparation, c.token, "h")
			m.HandleId = string(bytes.Repeat([]byte("a"), MaxMessage))
			throw(t, k, encode(t, m), files(t, 1)...)
		},
		"silence": func(t *testing.T, r *rig, c *Call, k *net.UnixConn) {},
		"a flood": func(t *testing.T, r *rig, c *Call, k *net.UnixConn) {
			for i := range 1000 {
				throw(t, k, encode(t, offer(preparation, c.token, fmt.Sprint(i))), files(t, 1)...)
				_ = k.SetReadDeadline(time.Now().Add(20 * time.Second))
				_, fs, err := receive(k)
				closeAll(fs)
				if err != nil {
					return
				}
			}
			t.Error("1000 messages of one call were answered")
		},
		"a request, then gone": func(t *testing.T, r *rig, c *Call, k *net.UnixConn) {
			throw(t, k, encode(t, fuse(preparation, c.token, "h")))
			k.Close()
		},
		"gone at once": func(t *testing.T, r *rig, c *Call, k *net.UnixConn) { k.Close() },
		"gone before serving": func(t *testing.T, r *rig, c *Call, k *net.UnixConn) {
			throw(t, k, encode(t, fuse(preparation, c.token, "h")))
			if got := r.answer(k); got.GetCode() != 0 {
				t.Errorf("answer: %v", got)
			}
			k.Close()
			r.settle(0)
			_, err := c.Finish("h")
			wantHandleError(t, err, ErrNotDelivered)
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, func(c *Config) { c.Silence = 100 * time.Millisecond })
			before := openDescriptors(t)
			c := r.begin(preparation)
			k := r.raw()
			attack(t, r, c, k)
			if k.SetReadDeadline(time.Now().Add(20*time.Second)) == nil {
				if got := r.answer(k); got != nil {
					t.Errorf("answered: %v", got)
				}
			}
			k.Close()
			c.Drop()
			r.settle(0)
			// Others are served as before.
			c = r.begin(preparation)
			conn := r.serve(c, "h", request)
			finish(t, c, "h")
			conn.Close()
			r.notice()
			r.Release(preparation)
			r.settle(0)
			waitDescriptors(t, before+1) // the device this test holds
		})
	}
}

// waitDescriptors waits for the goroutines that close them.
func waitDescriptors(t *testing.T, want int) {
	t.Helper()
	got := 0
	for range 500 {
		if got = openDescriptors(t); got <= want {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Errorf("%d descriptors are open, %d before", got, want)
}

// Each of these comes with a good token and is told what is wrong.
func TestRefusedMessages(t *testing.T) {
	regular, err := os.Create(t.TempDir() + "/file")
	if err != nil {
		t.Fatal(err)
	}
	defer regular.Close()
	directory, err := os.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer directory.Close()
	fd, err := unix.Open(t.TempDir(), unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	path := os.NewFile(uintptr(fd), "path")
	defer path.Close()

	for name, c := range map[string]struct {
		message func(c *Call) *pb.HandoffMessage
		file    *os.File
		want    codes.Code
	}{
		"a regular file":          {func(c *Call) *pb.HandoffMessage { return offer(preparation, c.token, "h") }, regular, codes.InvalidArgument},
		"a directory":             {func(c *Call) *pb.HandoffMessage { return offer(preparation, c.token, "h") }, directory, codes.InvalidArgument},
		"an O_PATH descriptor":    {func(c *Call) *pb.HandoffMessage { return offer(preparation, c.token, "h") }, path, codes.InvalidArgument},
		"a bad handle_id":         {func(c *Call) *pb.HandoffMessage { return offer(preparation, c.token, "a/b") }, detachedTmpfs(t), codes.InvalidArgument},
		"no body":                 {func(c *Call) *pb.HandoffMessage { m := fuse(preparation, c.token, "h"); m.Body = nil; return m }, nil, codes.Unimplemented},
		"serving of nothing":      {func(c *Call) *pb.HandoffMessage { return servingMessage(c, "h") }, nil, codes.NotFound},
		"a reply from the plugin": {replyMessage, nil, codes.InvalidArgument},
		"an unknown arm": {func(c *Call) *pb.HandoffMessage {
			m := fuse(preparation, c.token, "h")
			m.Body = nil
			m.ProtoReflect().SetUnknown([]byte{0xfa, 0x01, 0x00}) // field 31
			return m
		}, nil, codes.Unimplemented},
		"an unknown field below": {func(c *Call) *pb.HandoffMessage {
			m := fuse(preparation, c.token, "h")
			m.GetFuseRequest().ProtoReflect().SetUnknown([]byte{0xfa, 0x01, 0x00})
			return m
		}, nil, codes.Unimplemented},
		"a foreign parameter": {func(c *Call) *pb.HandoffMessage {
			m := fuse(preparation, c.token, "h")
			m.GetFuseRequest().Parameters = []*pb.FsParameter{{Key: "fd", Value: &pb.FsParameter_Text{Text: "3"}}}
			return m
		}, nil, codes.InvalidArgument},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, nil)
			call := r.begin(preparation)
			k := r.raw()
			if err := send(k, c.message(call), c.file); err != nil {
				t.Fatal(err)
			}
			got := r.answer(k)
			if codes.Code(got.GetCode()) != c.want || got.GetMessage() == "" {
				t.Errorf("answer: %v, want %v", got, c.want)
			}
			call.Drop()
			r.settle(0)
		})
	}
}

func servingMessage(c *Call, id string) *pb.HandoffMessage {
	m := fuse(preparation, c.token, id)
	m.Body = &pb.HandoffMessage_Serving{Serving: &pb.HandoffServing{}}
	return m
}

func replyMessage(c *Call) *pb.HandoffMessage {
	m := fuse(preparation, c.token, "h")
	m.Body = &pb.HandoffMessage_Reply{Reply: &pb.HandoffReply{}}
	return m
}

func TestServingComesFromWhoGotTheDevice(t *testing.T) {
	r := newRig(t, nil)
	c := r.begin(preparation)
	conn := r.dial(c)
	device, err := conn.RequestFUSE(t.Context(), "f", request)
	if err != nil {
		t.Fatal(err)
	}
	defer device.Close()
	if err := r.dial(c).Serving(t.Context(), "f", Session{}); code(err) != codes.FailedPrecondition {
		t.Errorf("got %v", err)
	}
}

func TestTheSessionIsBounded(t *testing.T) {
	r := newRig(t, nil)
	c := r.begin(preparation)
	conn := r.dial(c)
	device, err := conn.RequestFUSE(t.Context(), "f", resumable())
	if err != nil {
		t.Fatal(err)
	}
	defer device.Close()
	for _, s := range []Session{{}, {Init: make([]byte, 100), State: make([]byte, MaxSession)}} {
		if err := conn.Serving(t.Context(), "f", s); code(err) != codes.InvalidArgument {
			t.Errorf("got %v", err)
		}
	}
}

func TestHandlesOfACallAreLimited(t *testing.T) {
	r := newRig(t, nil)
	c := r.begin(preparation)
	conn := r.dial(c)
	for i := range MaxHandles + 1 {
		err := conn.Offer(t.Context(), fmt.Sprint(i), detachedTmpfs(t))
		if want := map[bool]codes.Code{true: codes.ResourceExhausted}[i == MaxHandles]; code(err) != want {
			t.Errorf("offer %d: %v", i, err)
		}
	}
}

func TestDescriptorsOfADriverAreLimited(t *testing.T) {
	r := newRig(t, nil)
	refused := false
	for i := 0; i < MaxDescriptors && !refused; i++ {
		c := r.begin(Key{"v", fmt.Sprint(i)})
		conn := r.dial(c)
		err := conn.Offer(t.Context(), "h", detachedTmpfs(t))
		if refused = code(err) == codes.ResourceExhausted; !refused {
			if err != nil {
				t.Fatal(err)
			}
			finish(t, c, "h")
		}
	}
	if !refused || r.Descriptors() > MaxDescriptors {
		t.Errorf("refused %v, %d descriptors", refused, r.Descriptors())
	}
}

func TestNobodyIsHeardWithoutAPendingCall(t *testing.T) {
	r := newRig(t, nil)
	if got := r.answer(r.raw()); got != nil {
		t.Errorf("answered: %v", got)
	}
}

func TestALatePacketOfAServerIsDropped(t *testing.T) {
	r := newRig(t, nil)
	c := r.begin(preparation)
	conn := r.serve(c, "f", request)
	finish(t, c, "f")
	late := files(t, 1)
	throw(t, conn.conn, encode(t, offer(preparation, c.token, "late")), late...)
	r.settle(2) // still served, nothing new
	c = r.begin(preparation)
	if err := func() error { conn.token = c.token; return conn.Offer(t.Context(), "h", detachedTmpfs(t)) }(); err != nil {
		t.Errorf("the server's connection is not heard in the next call: %v", err)
	}
	finish(t, c, "f", "h")
	for range maxMessages + 1 {
		throw(t, conn.conn, encode(t, offer(preparation, c.token, "late")), files(t, 1)...)
	}
	if n := r.notice(); n.HandleID != "f" {
		t.Errorf("a server that floods is cut off: %+v", n)
	}
}

// hostileCO answers one message with whatever reply makes of it.
func hostileCO(t *testing.T, reply func(k *net.UnixConn, m *pb.HandoffMessage)) *Conn {
	t.Helper()
	path := shortDir(t) + "/s"
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Net: "unixpacket", Name: path})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		k, err := l.AcceptUnix()
		if err != nil {
			return
		}
		defer k.Close()
		m, files, err := receive(k)
		closeAll(files)
		if err != nil {
			return
		}
		reply(k, m)
		_, files, _ = receive(k)
		closeAll(files)
	}()
	conn, err := Dial(t.Context(), path, preparation, bytes.Repeat([]byte{7}, 32))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close(); l.Close(); <-done })
	return conn
}

func TestThePluginChecksTheReply(t *testing.T) {
	ok := func(m *pb.HandoffMessage) *pb.HandoffMessage {
		m.Body = &pb.HandoffMessage_Reply{Reply: &pb.HandoffReply{}}
		return m
	}
	for name, reply := range map[string]func(k *net.UnixConn, m *pb.HandoffMessage){
		"no device":    func(k *net.UnixConn, m *pb.HandoffMessage) { throw(t, k, encode(t, ok(m))) },
		"two devices":  func(k *net.UnixConn, m *pb.HandoffMessage) { throw(t, k, encode(t, ok(m)), openFUSE(t), openFUSE(t)) },
		"another file": func(k *net.UnixConn, m *pb.HandoffMessage) { throw(t, k, encode(t, ok(m)), files(t, 1)...) },
		"another id": func(k *net.UnixConn, m *pb.HandoffMessage) {
			m.HandleId = "g"
			throw(t, k, encode(t, ok(m)), openFUSE(t))
		},
		"another token": func(k *net.UnixConn, m *pb.HandoffMessage) { m.Token = nil; throw(t, k, encode(t, ok(m)), openFUSE(t)) },
		"not a reply":   func(k *net.UnixConn, m *pb.HandoffMessage) { throw(t, k, encode(t, m), openFUSE(t)) },
		"a refusal with a device": func(k *net.UnixConn, m *pb.HandoffMessage) {
			m = ok(m)
			m.GetReply().Code = 9
			throw(t, k, encode(t, m), openFUSE(t))
		},
		"garbage": func(k *net.UnixConn, m *pb.HandoffMessage) { throw(t, k, []byte{0xff}, openFUSE(t)) },
	} {
		t.Run(name, func(t *testing.T) {
			before := openDescriptors(t)
			conn := hostileCO(t, reply)
			_, err := conn.RequestFUSE(t.Context(), "f", request)
			var p *ProtocolError
			if !errors.As(err, &p) {
				t.Errorf("got %v, want a ProtocolError", err)
			}
			conn.Close()
			waitDescriptors(t, before+1) // the listener
		})
	}
}

func FuzzDecode(f *testing.F) {
	for _, m := range []*pb.HandoffMessage{offer(preparation, []byte("token"), "h"), fuse(preparation, []byte("token"), "h")} {
		data, err := proto.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	f.Add([]byte("\xff"))
	f.Fuzz(func(t *testing.T, data []byte) {
		m, err := decode(data)
		if err != nil {
			return
		}
		unknown(m.ProtoReflect())
		carried(m)
		if r := m.GetFuseRequest(); r != nil {
			if q := fuseRequest(r); q.Check() == nil && !q.equal(fuseRequest(q.proto())) {
				t.Errorf("%+v changes on its way", q)
			}
		}
	})
}

func TestAThousandCallsLeaveNothing(t *testing.T) {
	r := newRig(t, nil)
	before := 0
	for i := range 1001 {
		if i == 1 {
			before = openDescriptors(t)
		}
		c := r.begin(preparation)
		conn, err := Dial(t.Context(), r.Path(), preparation, c.Token())
		if err != nil {
			t.Fatal(err)
		}
		device, err := conn.RequestFUSE(t.Context(), "f", resumable())
		if err != nil {
			t.Fatal(err)
		}
		if err := conn.Serving(t.Context(), "f", session); err != nil {
			t.Fatal(err)
		}
		device.Close()
		finish(t, c, "f")
		r.Release(preparation)
		conn.Close()
	}
	r.settle(0)
	waitDescriptors(t, before)
}
