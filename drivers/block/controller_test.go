package block

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
)

func TestCreateVolume(t *testing.T) {
	s := newSite(t)
	s.start()
	ctx := t.Context()
	for _, tt := range []struct {
		name  string
		edit  func(*csi.CreateVolumeRequest)
		code  codes.Code
		named string
	}{
		{"no name", func(r *csi.CreateVolumeRequest) { r.Name = "" }, codes.InvalidArgument, "name"},
		{"control character", func(r *csi.CreateVolumeRequest) { r.Name = "a\x01" }, codes.InvalidArgument, "name"},
		{"no capability", func(r *csi.CreateVolumeRequest) { r.VolumeCapabilities = nil }, codes.InvalidArgument, "volume_capabilities"},
		{"many nodes", func(r *csi.CreateVolumeRequest) { r.VolumeCapabilities[0].AccessMode.Mode = manyWriters }, codes.InvalidArgument, "access_mode"},
		{"negative size", func(r *csi.CreateVolumeRequest) { r.CapacityRange.RequiredBytes = -1 }, codes.InvalidArgument, "required_bytes"},
		{"contradiction", func(r *csi.CreateVolumeRequest) { r.CapacityRange.LimitBytes = 1 }, codes.InvalidArgument, "capacity_range"},
		{"no such size", func(r *csi.CreateVolumeRequest) {
			r.CapacityRange = &csi.CapacityRange{RequiredBytes: mib + 1, LimitBytes: mib + 2}
		}, codes.OutOfRange, "capacity_range"},
		{"more than there is", func(r *csi.CreateVolumeRequest) { r.CapacityRange.RequiredBytes = 1 << 60 }, codes.OutOfRange, "capacity_range"},
		{"parameter", func(r *csi.CreateVolumeRequest) { r.Parameters = map[string]string{"k": "v"} }, codes.InvalidArgument, `parameters["k"]`},
		{"no snapshot", func(r *csi.CreateVolumeRequest) { r.VolumeContentSource = (&source{Snapshot: "none"}).message() }, codes.NotFound, "snapshot"},
		{"no volume", func(r *csi.CreateVolumeRequest) { r.VolumeContentSource = (&source{Volume: "none"}).message() }, codes.NotFound, "volume"},
		{"elsewhere", func(r *csi.CreateVolumeRequest) {
			r.AccessibilityRequirements = &csi.TopologyRequirement{Requisite: []*csi.Topology{{Segments: map[string]string{TopologyKey: "other"}}}}
		}, codes.ResourceExhausted, "accessibility_requirements"},
	} {
		req := s.createRequest("refused", 8*mib, raw())
		tt.edit(req)
		s.code(tt.name, errorOf(s.controller.CreateVolume(ctx, req)), tt.code, tt.named)
	}
	if list, err := s.controller.ListVolumes(ctx, &csi.ListVolumesRequest{}); err != nil || len(list.GetEntries()) != 0 {
		t.Errorf("refused volumes are listed: %v, %v", list, err)
	}

	id := s.create("v", 8*mib+1, raw())
	info, err := os.Stat(s.file(id))
	if err != nil || info.Size() != 9*mib || info.Mode().Perm() != 0o600 || info.Sys() == nil {
		t.Errorf("the file of the volume: %v, %v", info, err)
	}
	var st unix.Stat_t
	if unix.Stat(s.file(id), &st); st.Blocks != 0 {
		t.Errorf("a new file takes %d blocks: it is not thin", st.Blocks)
	}
	if again := s.create("v", 8*mib, raw()); again != id {
		t.Error("a repeat makes another volume")
	}
	other := s.createRequest("v", 10*mib, raw())
	s.code("another size", errorOf(s.controller.CreateVolume(ctx, other)), codes.AlreadyExists, "capacity_range")
	other = s.createRequest("v", 8*mib, raw())
	other.VolumeContentSource = (&source{Volume: id}).message()
	s.code("other content", errorOf(s.controller.CreateVolume(ctx, other)), codes.AlreadyExists, "volume_content_source")
	small := s.createRequest("small", 0, raw())
	small.CapacityRange = &csi.CapacityRange{LimitBytes: 8 * mib}
	small.VolumeContentSource = (&source{Volume: id}).message()
	s.code("a copy smaller than its source", errorOf(s.controller.CreateVolume(ctx, small)), codes.OutOfRange, "capacity_range")

	capacity, err := s.controller.GetCapacity(ctx, &csi.GetCapacityRequest{VolumeCapabilities: []*csi.VolumeCapability{raw()}})
	if err != nil || capacity.GetAvailableCapacity() <= 0 || capacity.GetMaximumVolumeSize().GetValue() <= 0 {
		t.Errorf("GetCapacity: %v, %v", capacity, err)
	}
	none, err := s.controller.GetCapacity(ctx, &csi.GetCapacityRequest{AccessibleTopology: &csi.Topology{Segments: map[string]string{TopologyKey: "other"}}})
	if err != nil || none.GetAvailableCapacity() != 0 {
		t.Errorf("GetCapacity elsewhere: %v, %v", none, err)
	}
}

func TestListsInPages(t *testing.T) {
	s := newSite(t)
	stop := s.start()
	ctx := t.Context()
	want := map[string]bool{}
	var first string
	for i := range 7 {
		id := s.create(fmt.Sprint("v", i), mib, raw())
		want[id] = true
		first = id
	}
	for i := range 5 {
		if _, err := s.controller.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{Name: fmt.Sprint("s", i), SourceVolumeId: first}); err != nil {
			t.Fatal(err)
		}
	}
	stop()
	s.start()
	seen := map[string]bool{}
	for token := ""; ; {
		list, err := s.controller.ListVolumes(ctx, &csi.ListVolumesRequest{MaxEntries: 3, StartingToken: token})
		if err != nil || len(list.GetEntries()) > 3 {
			t.Fatalf("ListVolumes: %v, %v", list, err)
		}
		for _, e := range list.GetEntries() {
			if id := e.GetVolume().GetVolumeId(); seen[id] || !want[id] {
				t.Errorf("%s is listed twice, or was never created", id)
			}
			seen[e.GetVolume().GetVolumeId()] = true
		}
		if token = list.GetNextToken(); token == "" {
			break
		}
	}
	if len(seen) != len(want) {
		t.Errorf("%d of %d volumes are listed", len(seen), len(want))
	}
	s.code("a token of nobody", errorOf(s.controller.ListVolumes(ctx, &csi.ListVolumesRequest{StartingToken: "x"})), codes.Aborted, "starting_token")

	snapshots, err := s.controller.ListSnapshots(ctx, &csi.ListSnapshotsRequest{SourceVolumeId: first, MaxEntries: 3})
	if err != nil || len(snapshots.GetEntries()) != 3 || snapshots.GetNextToken() == "" {
		t.Fatalf("ListSnapshots: %v, %v", snapshots, err)
	}
	rest, err := s.controller.ListSnapshots(ctx, &csi.ListSnapshotsRequest{SourceVolumeId: first, StartingToken: snapshots.GetNextToken()})
	if err != nil || len(rest.GetEntries()) != 2 || rest.GetNextToken() != "" {
		t.Errorf("ListSnapshots, the rest: %v, %v", rest, err)
	}
	one := snapshots.GetEntries()[0].GetSnapshot()
	only, err := s.controller.ListSnapshots(ctx, &csi.ListSnapshotsRequest{SnapshotId: one.GetSnapshotId()})
	if err != nil || len(only.GetEntries()) != 1 || only.GetEntries()[0].GetSnapshot().GetSourceVolumeId() != first {
		t.Errorf("ListSnapshots of one: %v, %v", only, err)
	}
	s.code("CreateSnapshot of another volume", errorOf(s.controller.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{Name: "s0", SourceVolumeId: s.create("w", mib, raw())})), codes.AlreadyExists, "source_volume_id")
	s.code("CreateSnapshot of none", errorOf(s.controller.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{Name: "s9", SourceVolumeId: "none"})), codes.NotFound, "source_volume_id")
}

// Disks are taken blank, told from others by what they are, given to one
// volume each, and erased for the next.
func TestDisks(t *testing.T) {
	s := newSite(t)
	s.config.Dir = ""
	images := map[string]int64{"a": 16 * mib, "b": 64 * mib, "used": 32 * mib}
	for name, size := range images {
		image := filepath.Join(s.dir, "image-"+name)
		if err := os.WriteFile(image, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Truncate(image, size); err != nil {
			t.Fatal(err)
		}
		if name == "used" {
			tool(t, "mkfs.ext4", "-q", image)
		}
		link := filepath.Join(s.dir, "disk-"+name)
		if err := os.Symlink(losetup(t, image), link); err != nil {
			t.Fatal(err)
		}
		s.config.Disks = append(s.config.Disks, Disk{Name: name, Path: link})
	}
	s.config.BootID = "aaaaaaaa-0000-4000-8000-000000000001"
	stop := s.start()
	ctx := t.Context()

	id := s.create("v", 10*mib, raw())
	s.stage(id, raw())
	req := s.request(id, "p", raw(), false)
	spec := s.prepare(req)
	path, undo := s.perform(req, spec)
	data := pattern("on a disk", mib)
	writeAt(t, path, 0, data)
	if content, err := os.ReadFile(filepath.Join(s.dir, "image-a")); err != nil || !bytes.Equal(content[:mib], data) {
		t.Errorf("not on the smallest disk that fits: %v", err)
	}
	readReq := s.request(id, "reader", raw(), true)
	reader, undoReader := s.makeNode(readReq, s.prepare(readReq))
	if got := readDirect(t, reader, 0, mib); !bytes.Equal(got, data) {
		t.Error("the reader reads something else")
	}
	refusesWrites(t, reader)
	undoReader()
	s.unprepare(readReq)
	undo()
	s.unprepare(req)
	s.unstage(id)

	second := s.create("w", 0, raw())
	s.code("a third volume", errorOf(s.controller.CreateVolume(ctx, s.createRequest("x", 0, raw()))), codes.ResourceExhausted, "disk used", "ext4")
	s.code("too large", errorOf(s.controller.CreateVolume(ctx, s.createRequest("x", 1<<40, raw()))), codes.OutOfRange)
	s.code("ControllerExpandVolume", errorOf(s.controller.ControllerExpandVolume(ctx, &csi.ControllerExpandVolumeRequest{VolumeId: id, CapacityRange: &csi.CapacityRange{RequiredBytes: 1}})), codes.Unimplemented)

	// The path leads to another device of the same size: not the volume's.
	impostor := filepath.Join(s.dir, "impostor")
	if err := os.WriteFile(impostor, data, 0o600); err != nil {
		t.Fatal(err)
	}
	os.Truncate(impostor, 16*mib)
	link := filepath.Join(s.dir, "disk-a")
	right, err := os.Readlink(link)
	if err != nil {
		t.Fatal(err)
	}
	relink(t, link, losetup(t, impostor))
	s.code("NodeStageVolume over a stale link", s.tryStage(id, raw()), codes.FailedPrecondition, "disk a")
	s.code("DeleteVolume over a stale link", errorOf(s.controller.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: id})), codes.FailedPrecondition, "disk a")
	if content, err := os.ReadFile(impostor); err != nil || !bytes.Equal(content[:mib], data) {
		t.Errorf("the other device was written to: %v", err)
	}
	relink(t, link, right)

	// A disk that does not say what it is, is known for one boot.
	stop()
	s.config.BootID = "bbbbbbbb-0000-4000-8000-000000000002"
	stop = s.start()
	s.code("NodeStageVolume after a reboot", s.tryStage(id, raw()), codes.FailedPrecondition, "disk a")
	stop()
	s.config.BootID = "aaaaaaaa-0000-4000-8000-000000000001"
	s.start()

	s.delete(id)
	if content, err := os.ReadFile(filepath.Join(s.dir, "image-a")); err != nil || len(bytes.Trim(content, "\x00")) != 0 {
		t.Errorf("a deleted volume is still on its disk: %v", err)
	}
	if again := s.create("again", 10*mib, mountOf("ext4")); again == id {
		t.Error("an id is given twice")
	} else {
		path, end := s.use(again, "p", mountOf("ext4"))
		if entries, err := os.ReadDir(path); err != nil || len(entries) > 1 || strings.HasPrefix(path, "/dev") {
			t.Errorf("a new filesystem holds %v, %v", entries, err)
		}
		end()
		s.delete(again)
	}
	s.delete(second)
}

func relink(t *testing.T, link, target string) {
	t.Helper()
	if err := os.Remove(link); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(target, link); err != nil {
		t.Fatal(err)
	}
}
