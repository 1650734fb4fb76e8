package block

import (
	"context"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/csi-prepare/csi-prepare/reference/handoff"
	"github.com/csi-prepare/csi-prepare/reference/master"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
	"github.com/csi-prepare/csi-prepare/reference/mountspec/wire"
	"github.com/csi-prepare/csi-prepare/reference/perform"
	prepare "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// listen opens the CO's end of the channel.
func (s *site) listen() *handoff.Listener {
	s.t.Helper()
	l, err := handoff.Listen(handoff.Config{
		Directory: s.mkdir("handoff"), UID: -1, GID: -1,
		Mount: func(context.Context, handoff.Key, handoff.FUSERequest) (_, _ *os.File, err error) {
			return nil, nil, os.ErrInvalid
		},
		Log: slog.New(slog.NewTextHandler(io.Discard, nil)),
	})
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { l.Close() })
	return l
}

// handleOnly has the CO take handles and mount nothing itself.
func handleOnly(req *prepare.NodePrepareVolumeRequest) *prepare.NodePrepareVolumeRequest {
	req.Performer.Kinds = []prepare.MountKind{prepare.MountKind_MOUNT_KIND_HANDLE}
	req.Performer.FsTypes = nil
	return req
}

// received prepares a volume and takes the handle of the answer.
func (s *site) received(l *handoff.Listener, req *prepare.NodePrepareVolumeRequest) (*prepare.MountSpec, *master.Mount, error) {
	s.t.Helper()
	call, err := l.Begin(s.t.Context(), handoff.Key{VolumeID: req.GetVolumeId(), PrepareID: req.GetPrepareId()})
	if err != nil {
		s.t.Fatal(err)
	}
	defer call.Drop()
	req.HandleSocket, req.HandoffToken, req.HeldHandles = l.Path(), call.Token(), call.Held()
	spec, err := s.tryPrepare(req)
	if err != nil {
		return nil, nil, err
	}
	handles, err := call.Finish(spec.GetHandle().GetHandleId())
	if err != nil {
		s.t.Fatalf("the handle of the answer: %v", err)
	}
	m, err := master.Receive(s.t.Context(), handles[0].Mount, master.Expected{FSType: spec.GetHandle().GetFsType()})
	if err != nil {
		s.t.Fatalf("Receive: %v", err)
	}
	s.t.Cleanup(func() { m.Close() })
	return spec, m, nil
}

// clone performs a handle at a directory.
func (s *site) clone(req *prepare.NodePrepareVolumeRequest, spec *prepare.MountSpec, m *master.Mount) (path string, undo func()) {
	s.t.Helper()
	specs, _ := wire.FromProto([]*prepare.MountSpec{spec})
	path = filepath.Join(s.dir, "clone-"+req.GetPrepareId())
	done, err := perform.Perform(s.t.Context(), perform.Target{Path: path}, specs, perform.Options{
		Request: wire.RequestFromProto(req), Policy: mountspec.Policy{CreateTarget: true},
		Masters: map[string]*master.Mount{spec.GetHandle().GetHandleId(): m},
	})
	if err != nil {
		s.t.Fatalf("Perform: %v", err)
	}
	return path, func() {
		s.t.Helper()
		if err := perform.Undo(context.WithoutCancel(s.t.Context()), nil, done.Receipts); err != nil {
			s.t.Errorf("Undo: %v", err)
		}
	}
}

// A CO that mounts no such filesystem gets a mount of it; so does one whose
// other consumers mount it themselves, and all see one volume. When they are
// gone the driver holds nothing.
func TestHandle(t *testing.T) {
	s := newSite(t)
	s.start()
	l := s.listen()
	c := mountOf("ext4", "commit=17")
	id := s.create("v", 16*mib, c)
	s.stage(id, c)

	before := mounts(t)
	first := handleOnly(s.request(id, "handle", c, false))
	spec, m, err := s.received(l, first)
	if err != nil {
		t.Fatal(err)
	}
	if spec.GetHandle().GetFsType() != "ext4" {
		t.Fatalf("got %v, want a handle of ext4", spec)
	}
	path, undo := s.clone(first, spec, m)
	if err := os.WriteFile(filepath.Join(path, "file"), []byte("by handle"), 0o600); err != nil {
		t.Error(err)
	}
	second := s.request(id, "own", c, true)
	own := s.prepare(second)
	if own.GetFilesystem() == nil {
		t.Errorf("got %v for a CO that mounts, want FILESYSTEM", own)
	}
	at, undoOwn := s.perform(second, own)
	if got, err := os.ReadFile(filepath.Join(at, "file")); string(got) != "by handle" {
		t.Errorf("the other consumer reads %q, %v", got, err)
	}
	other := handleOnly(s.request(id, "other", mountOf("ext4", "commit=23"), false))
	_, _, err = s.received(l, other)
	s.code("other parameters", err, codes.FailedPrecondition, "commit=17")

	undoOwn()
	undo()
	s.code("Unstage while prepared", s.tryUnstage(id), codes.FailedPrecondition)
	s.unprepare(second)
	if err := m.Close(); err != nil {
		t.Error(err)
	}
	l.Release(handoff.Key{VolumeID: id, PrepareID: "handle"})
	s.unprepare(first)
	if after := mounts(t); len(after) != len(before) {
		t.Errorf("mounts before: %q, after: %q", before, after)
	}
	s.unstage(id) // nobody holds the device
	s.delete(id)
}

func TestHandleNeedsAChannel(t *testing.T) {
	s := newSite(t)
	s.start()
	c := mountOf("ext4")
	id := s.create("v", 16*mib, c)
	s.stage(id, c)
	_, err := s.tryPrepare(handleOnly(s.request(id, "p", c, false)))
	s.code("no handle_socket", err, codes.FailedPrecondition, "handle_socket")
	s.unstage(id)
	s.delete(id)
}
