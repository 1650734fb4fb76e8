package handoff

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/csi-prepare/csi-prepare/reference/mountspec"
	pb "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// controlSpace has room for 253 descriptors, the most one message carries
// (SCM_MAX_FD). Room for one is room for two without MSG_CTRUNC, because of
// alignment; with all of them in hand they can be counted and closed.
var controlSpace = unix.CmsgSpace(253 * 4)

// receive reads one packet. The descriptors it carried are close-on-exec and
// belong to the caller. On any error they are closed already.
func receive(conn *net.UnixConn) (*pb.HandoffMessage, []*os.File, error) {
	data, control := make([]byte, MaxMessage+1), make([]byte, controlSpace)
	n, cn, flags, _, err := conn.ReadMsgUnix(data, control)
	files, cerr := descriptors(control[:cn])
	message, err := func() (*pb.HandoffMessage, error) {
		switch {
		case errors.Is(err, io.EOF), err == nil && n == 0:
			return nil, io.EOF // an empty packet looks the same
		case err != nil:
			return nil, fmt.Errorf("handoff: receive: %w", err)
		case flags&unix.MSG_CTRUNC != 0 || cerr != nil:
			return nil, &ProtocolError{Rule: "control data was cut or is not of descriptors", Err: cerr}
		case flags&unix.MSG_TRUNC != 0 || n > MaxMessage:
			return nil, &ProtocolError{Rule: fmt.Sprintf("a message has at most %d bytes", MaxMessage)}
		}
		return decode(data[:n])
	}()
	if err != nil {
		closeAll(files)
		return nil, nil, err
	}
	return message, files, nil
}

// descriptors takes every descriptor out of control data, so that none is
// lost whatever else is wrong with the packet. The kernel wrote that data.
func descriptors(control []byte) ([]*os.File, error) {
	if len(control) == 0 {
		return nil, nil
	}
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return nil, err
	}
	var files []*os.File
	for i := range messages {
		fds, perr := unix.ParseUnixRights(&messages[i])
		if perr != nil {
			err = perr
			continue
		}
		for _, fd := range fds {
			files = append(files, os.NewFile(uintptr(fd), "handoff"))
		}
	}
	return files, err
}

// decode parses one packet strictly: fields of a later version would be lost
// without a word, so they are kept for the caller to see (see unknown).
func decode(data []byte) (*pb.HandoffMessage, error) {
	m := new(pb.HandoffMessage)
	if err := proto.Unmarshal(data, m); err != nil {
		return nil, &ProtocolError{Rule: "a packet is one HandoffMessage", Err: errors.New("it does not parse")}
	}
	return m, nil
}

// unknown reports whether m, at any depth, has fields this version does not
// know. An unknown arm of the oneof is one of those.
func unknown(m protoreflect.Message) bool {
	if len(m.GetUnknown()) > 0 {
		return true
	}
	found := false
	m.Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch {
		case f.Message() == nil:
		case f.IsList():
			for i := range v.List().Len() {
				found = found || unknown(v.List().Get(i).Message())
			}
		default:
			found = unknown(v.Message())
		}
		return !found
	})
	return found
}

// carried is how many descriptors the kind of message m has, sent by a Plugin.
func carried(m *pb.HandoffMessage) int {
	switch m.GetBody().(type) {
	case *pb.HandoffMessage_Offer, *pb.HandoffMessage_Deposit:
		return 1
	default:
		return 0
	}
}

// send writes one packet. The file, which may be nil, stays the caller's.
func send(conn *net.UnixConn, m *pb.HandoffMessage, file *os.File) error {
	data, err := proto.Marshal(m)
	if err != nil {
		return fmt.Errorf("handoff: encode: %w", err)
	}
	if len(data) > MaxMessage {
		return fmt.Errorf("handoff: a message of %d bytes: at most %d", len(data), MaxMessage)
	}
	write := func(control []byte) error {
		if _, _, err := conn.WriteMsgUnix(data, control, nil); err != nil {
			return fmt.Errorf("handoff: send: %w", err)
		}
		return nil
	}
	if file == nil {
		return write(nil)
	}
	// Control keeps the number valid while it is used: another goroutine may
	// close the file meanwhile, and numbers are given again at once.
	raw, err := file.SyscallConn()
	if err != nil {
		return fmt.Errorf("handoff: send: %w", err)
	}
	if cerr := raw.Control(func(fd uintptr) { err = write(unix.UnixRights(int(fd))) }); cerr != nil {
		return fmt.Errorf("handoff: send: %w", cerr)
	}
	return err
}

func closeAll(files []*os.File) {
	for _, f := range files {
		_ = f.Close()
	}
}

func fuseRequest(m *pb.HandoffFuseRequest) FUSERequest {
	r := FUSERequest{
		Subtype: m.GetSubtype(), RootMode: m.GetRootMode(), UserID: m.GetUserId(),
		GroupID: m.GetGroupId(), Resumable: m.GetResumable(), ShareKey: m.GetShareKey(),
	}
	for _, p := range m.GetParameters() {
		r.Parameters = append(r.Parameters, mountspec.Parameter{
			Key: p.GetKey(), Text: p.GetText(), Secret: mountspec.NewSecret(p.GetSecret()),
		})
	}
	return r
}

func (r FUSERequest) proto() *pb.HandoffFuseRequest {
	m := &pb.HandoffFuseRequest{
		Subtype: r.Subtype, RootMode: r.RootMode, UserId: r.UserID,
		GroupId: r.GroupID, Resumable: r.Resumable, ShareKey: r.ShareKey,
	}
	for _, p := range r.Parameters {
		q := &pb.FsParameter{Key: p.Key}
		if p.Text != "" {
			q.Value = &pb.FsParameter_Text{Text: p.Text}
		}
		m.Parameters = append(m.Parameters, q)
	}
	return m
}
