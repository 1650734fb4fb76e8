package hostpath

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sync/singleflight"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/csi-prepare/csi-prepare/reference/mountspec/wire"
	prepare "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

func TestPrepareAnswersOneBind(t *testing.T) {
	s := newSite(t)
	s.start()
	id := s.create("v").GetVolumeId()
	tests := []struct {
		name     string
		mode     csi.VolumeCapability_AccessMode_Mode
		readonly bool
		flags    []string
		want     *prepare.MountAttributes
	}{
		{"plain", multiWriter, false, nil, &prepare.MountAttributes{}},
		{"readonly", multiWriter, true, nil, &prepare.MountAttributes{Readonly: true}},
		{"a reader mode", oldReader, false, nil, &prepare.MountAttributes{Readonly: true}},
		{"ro", multiWriter, false, []string{"ro"}, &prepare.MountAttributes{Readonly: true}},
		{"rw", multiWriter, false, []string{"rw"}, &prepare.MountAttributes{}},
		{
			"all flags", multiWriter, false,
			[]string{"nosuid", "nodev", "noexec", "nosymfollow", "nodiratime", "noatime", "noatime"},
			&prepare.MountAttributes{Nosuid: true, Nodev: true, Noexec: true, Nosymfollow: true, Nodiratime: true, Atime: prepare.MountAttributes_NOATIME},
		},
		{"relatime", multiWriter, false, []string{"relatime"}, &prepare.MountAttributes{Atime: prepare.MountAttributes_RELATIME}},
		{"strictatime", multiWriter, false, []string{"strictatime"}, &prepare.MountAttributes{Atime: prepare.MountAttributes_STRICTATIME}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			req := s.request(id, "p1")
			req.VolumeCapability, req.Readonly = capability(tt.mode, tt.flags...), tt.readonly
			want := []*prepare.MountSpec{{
				Kind: &prepare.MountSpec_Bind{Bind: &prepare.BindMount{Source: &prepare.PathRef{
					Base: prepare.PathRef_GRANTED, Grant: "data", Relative: "volumes/" + id,
				}}},
				Attributes:     tt.want,
				IdmapSupported: true,
			}}
			got := s.prepare(req)
			if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			if _, broken := wire.Validate(got, wire.RequestFromProto(req)); len(broken) > 0 {
				t.Errorf("rules broken: %v", broken)
			}
			if entries, err := os.ReadDir(req.PreparePath); err != nil || len(entries) > 0 {
				t.Errorf("in prepare_path: %v, %v", entries, err)
			}
			s.code("unprepare", s.unprepare(req), codes.OK)
		})
	}
}

func TestPrepareRefuses(t *testing.T) {
	s := newSite(t)
	s.start()
	id := s.create("v").GetVolumeId()
	type edit func(*prepare.NodePrepareVolumeRequest)
	flags := func(f ...string) edit {
		return func(r *prepare.NodePrepareVolumeRequest) { r.VolumeCapability.GetMount().MountFlags = f }
	}
	tests := []struct {
		name  string
		edit  edit
		want  codes.Code
		words []string
	}{
		{"unknown volume", func(r *prepare.NodePrepareVolumeRequest) { r.VolumeId = strings.Repeat("0", 32) }, codes.NotFound, []string{"volume_id"}},
		{"a path for an id", func(r *prepare.NodePrepareVolumeRequest) { r.VolumeId = "../volumes/" + id }, codes.NotFound, []string{"volume_id"}},
		{"dots for an id", func(r *prepare.NodePrepareVolumeRequest) { r.VolumeId = ".." }, codes.NotFound, nil},
		{"block", func(r *prepare.NodePrepareVolumeRequest) { r.VolumeCapability = block(multiWriter) }, codes.FailedPrecondition, []string{"access_type"}},
		{"multi-node", func(r *prepare.NodePrepareVolumeRequest) { r.VolumeCapability = capability(manyWriters) }, codes.FailedPrecondition, []string{"access_mode"}},
		{"fs type", func(r *prepare.NodePrepareVolumeRequest) { r.VolumeCapability.GetMount().FsType = "ext4" }, codes.FailedPrecondition, []string{"fs_type"}},
		{"group", func(r *prepare.NodePrepareVolumeRequest) { r.VolumeCapability.GetMount().VolumeMountGroup = "7" }, codes.InvalidArgument, []string{"volume_mount_group"}},
		{"another kernel", func(r *prepare.NodePrepareVolumeRequest) { r.Performer.Kernel = prepare.Performer_OTHER }, codes.FailedPrecondition, []string{"performer.kernel"}},
		{"another kind", func(r *prepare.NodePrepareVolumeRequest) { r.Performer.Kinds[0] = prepare.MountKind_MOUNT_KIND_HANDLE }, codes.FailedPrecondition, []string{"performer.kinds"}},
		{"unknown kinds", func(r *prepare.NodePrepareVolumeRequest) { r.Performer.Kinds[0] = 99 }, codes.FailedPrecondition, []string{"performer.kinds"}},
		{"no grant", func(r *prepare.NodePrepareVolumeRequest) { r.Performer.Grants = nil }, codes.FailedPrecondition, []string{"performer.grants", "data"}},
		{"another grant", func(r *prepare.NodePrepareVolumeRequest) { r.Performer.Grants = []string{"dat", "data2"} }, codes.FailedPrecondition, []string{"performer.grants"}},
		{"a word of the superblock", flags("data=UNSHOWN"), codes.InvalidArgument, []string{"mount_flags", `"data="`}},
		{"a restriction lifted", flags("suid"), codes.InvalidArgument, []string{`"suid"`}},
		{"bind", flags("rbind"), codes.InvalidArgument, []string{`"rbind"`}},
		{"two words in one", flags("ro,suid"), codes.InvalidArgument, []string{`"ro,suid"`}},
		{"an empty word", flags(""), codes.InvalidArgument, []string{"mount_flags"}},
		{"a context", flags("context=UNSHOWN=x"), codes.InvalidArgument, []string{`"context="`}},
		{"two atimes", flags("noatime", "relatime"), codes.InvalidArgument, []string{"contradicts"}},
		{"rw and ro", flags("rw", "ro"), codes.InvalidArgument, []string{"rw"}},
		{"rw and readonly", func(r *prepare.NodePrepareVolumeRequest) { flags("rw")(r); r.Readonly = true }, codes.InvalidArgument, []string{"rw"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			req := s.request(id, "p1")
			tt.edit(req)
			_, err := s.prepares.NodePrepareVolume(t.Context(), req)
			s.code(tt.name, err, tt.want, tt.words...)
			if err != nil && strings.Contains(err.Error(), "UNSHOWN") {
				t.Errorf("a value is shown: %v", err)
			}
			list, err := s.prepares.NodeListPreparedVolumes(t.Context(), &prepare.NodeListPreparedVolumesRequest{})
			if err != nil || len(list.GetEntries()) > 0 {
				t.Errorf("left: %v, %v", list, err)
			}
		})
	}
}

// A volume whose directory is not there, as when the filesystem of a grant is
// not mounted, is no volume to bind.
func TestPrepareWithoutTheDirectory(t *testing.T) {
	s := newSite(t)
	s.start()
	id := s.create("v").GetVolumeId()
	if err := os.Rename(s.path(id), s.path("away")); err != nil {
		t.Fatal(err)
	}
	_, err := s.prepares.NodePrepareVolume(t.Context(), s.request(id, "p1"))
	s.code("missing", err, codes.FailedPrecondition, "volume_id", "mounted")
	if err := os.Symlink("away", s.path(id)); err != nil {
		t.Fatal(err)
	}
	_, err = s.prepares.NodePrepareVolume(t.Context(), s.request(id, "p1"))
	s.code("a link", err, codes.FailedPrecondition, "volume_id")
}

func TestExclusiveAccess(t *testing.T) {
	s := newSite(t)
	s.start()
	id := s.create("v").GetVolumeId()
	first, second := s.request(id, "p1"), s.request(id, "p2")
	first.VolumeCapability = capability(singleWriter)
	second.VolumeCapability = capability(singleWriter)
	s.prepare(first)
	_, err := s.prepares.NodePrepareVolume(t.Context(), second)
	s.code("second writer", err, codes.FailedPrecondition, "access_mode")
	s.code("unprepare", s.unprepare(first), codes.OK)
	s.prepare(second)
}

func TestNodeGetVolumeStats(t *testing.T) {
	s := newSite(t)
	s.start()
	id := s.create("v").GetVolumeId()
	req := s.request(id, "p1")
	s.prepare(req)
	stats := func(id, path string) (*csi.NodeGetVolumeStatsResponse, error) {
		return s.node.NodeGetVolumeStats(t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: id, VolumePath: path})
	}
	resp, err := stats(id, req.PreparePath)
	if err != nil || len(resp.GetUsage()) != 2 {
		t.Fatalf("%v, %v", resp, err)
	}
	if b := resp.GetUsage()[0]; b.GetUnit() != csi.VolumeUsage_BYTES || b.GetTotal() <= 0 || b.GetAvailable() > b.GetTotal() {
		t.Errorf("bytes: %v", b)
	}
	for _, tt := range []struct {
		id, path, word string
		want           codes.Code
	}{
		{"", req.PreparePath, "volume_id", codes.InvalidArgument},
		{id, "", "volume_path", codes.InvalidArgument},
		{"unknown", req.PreparePath, "volume_id", codes.NotFound},
		{id, req.PreparePath + "x", "volume_path", codes.NotFound},
		{id, s.path(id), "volume_path", codes.NotFound},
	} {
		_, err := stats(tt.id, tt.path)
		s.code(tt.id+tt.path, err, tt.want, tt.word)
	}
	s.code("unprepare", s.unprepare(req), codes.OK)
	_, err = stats(id, req.PreparePath)
	s.code("after Unprepare", err, codes.NotFound)
}

// A filesystem that does not answer holds up neither the caller, who has a
// deadline, nor one thread for every call.
func TestMeasuringIsBounded(t *testing.T) {
	var group singleflight.Group
	var asked atomic.Int32
	entered, answer := make(chan struct{}), make(chan struct{})
	measure := func() (int, error) {
		asked.Add(1)
		close(entered)
		<-answer
		return 7, nil
	}
	ctx, cancel := context.WithCancel(t.Context())
	go func() { <-entered; cancel() }()
	if _, err := shared(ctx, &group, "q", measure); status.Code(err) != codes.Canceled {
		t.Errorf("got %v", err)
	}
	for range 10 {
		if _, err := shared(ctx, &group, "q", measure); status.Code(err) != codes.Canceled {
			t.Errorf("got %v", err)
		}
	}
	close(answer)
	if n := asked.Load(); n != 1 {
		t.Errorf("asked %d times", n)
	}
	got, err := shared(t.Context(), &group, "another", func() (int, error) { return 8, nil })
	if got != 8 || err != nil {
		t.Errorf("another question: %d, %v", got, err)
	}
}

func TestNodePublishIsNotServed(t *testing.T) {
	s := newSite(t)
	s.start()
	_, err := s.node.NodePublishVolume(t.Context(), &csi.NodePublishVolumeRequest{})
	s.code("publish", err, codes.Unimplemented, "NodePrepareVolume")
	_, err = s.node.NodeUnpublishVolume(t.Context(), &csi.NodeUnpublishVolumeRequest{})
	s.code("unpublish", err, codes.Unimplemented)
	_, err = s.node.NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{})
	s.code("stage", err, codes.Unimplemented)
}

// Volumes and preparations are what they were after the driver comes back, and
// preparations are gone after a reboot.
func TestRestart(t *testing.T) {
	s := newSite(t)
	s.config.BootID = "aaaaaaaa-0000-4000-8000-000000000001"
	stop := s.start()
	v := s.create("v")
	req := s.request(v.GetVolumeId(), "p1")
	req.Secrets = map[string]string{"k": "v"}
	first := s.prepare(req)
	stop()

	stop = s.start()
	if again := s.create("v"); !proto.Equal(v, again) {
		t.Errorf("volume: %v, was %v", again, v)
	}
	if diff := cmp.Diff(first, s.prepare(req), protocmp.Transform()); diff != "" {
		t.Errorf("specs:\n%s", diff)
	}
	s.code("delete", s.delete(v.GetVolumeId()), codes.FailedPrecondition)
	stop()

	s.config.BootID = "bbbbbbbb-0000-4000-8000-000000000002"
	s.start()
	list, err := s.prepares.NodeListPreparedVolumes(t.Context(), &prepare.NodeListPreparedVolumesRequest{})
	if err != nil || len(list.GetEntries()) > 0 {
		t.Errorf("after a reboot: %v, %v", list, err)
	}
	s.code("unprepare", s.unprepare(req), codes.OK)
	s.code("delete", s.delete(v.GetVolumeId()), codes.OK)
}

// A record of a volume that cannot be read stops calls for that volume and
// name, and lists; the file is named and never dropped.
func TestDamagedVolumeRecord(t *testing.T) {
	s := newSite(t)
	stop := s.start()
	v, other := s.create("v"), s.create("other")
	stop()
	files, err := filepath.Glob(filepath.Join(s.config.StateDir, "volumes", "*.json"))
	if err != nil || len(files) != 2 {
		t.Fatalf("%q, %v", files, err)
	}
	var file string
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(text), v.GetVolumeId()) {
			file = f
		}
	}
	if err := os.Truncate(file, 0); err != nil {
		t.Fatal(err)
	}
	s.start()
	_, err = s.controller.CreateVolume(t.Context(), createRequest("v"))
	s.code("create", err, codes.Internal, file)
	s.code("delete", s.delete(v.GetVolumeId()), codes.Internal, file)
	_, err = s.prepares.NodePrepareVolume(t.Context(), s.request(v.GetVolumeId(), "p1"))
	s.code("prepare", err, codes.Internal, file)
	_, err = s.controller.ListVolumes(t.Context(), &csi.ListVolumesRequest{})
	s.code("list", err, codes.Internal, file)
	if !exists(s.path(v.GetVolumeId())) || !exists(file) {
		t.Error("something of the volume was dropped")
	}
	s.prepare(s.request(other.GetVolumeId(), "p2"))
	s.create("third")
}
