package hostpath

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/drivers/directory"
)

func (s *site) snapshot(name, volume string) *csi.Snapshot {
	s.t.Helper()
	resp, err := s.controller.CreateSnapshot(s.t.Context(), &csi.CreateSnapshotRequest{Name: name, SourceVolumeId: volume})
	if err != nil {
		s.t.Fatal(err)
	}
	return resp.GetSnapshot()
}

func (s *site) deleteSnapshot(id string) error {
	_, err := s.controller.DeleteSnapshot(s.t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: id})
	return err
}

func ofSnapshot(id string) *csi.VolumeContentSource {
	return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: id}}}
}

func ofVolume(id string) *csi.VolumeContentSource {
	return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: id}}}
}

func (s *site) copyOf(name string, from *csi.VolumeContentSource) (*csi.Volume, error) {
	r := createRequest(name)
	r.VolumeContentSource = from
	resp, err := s.controller.CreateVolume(s.t.Context(), r)
	return resp.GetVolume(), err
}

func (s *site) write(id, text string) {
	s.t.Helper()
	if err := os.WriteFile(filepath.Join(s.path(id), "data"), []byte(text), 0o640); err != nil {
		s.t.Fatal(err)
	}
}

func (s *site) wantData(id, want string) {
	s.t.Helper()
	if text, err := os.ReadFile(filepath.Join(s.path(id), "data")); string(text) != want {
		s.t.Errorf("data of %s: %q, %v; want %q", id, text, err, want)
	}
}

func TestSnapshotsAndCopiesHoldData(t *testing.T) {
	s := newSite(t)
	stop := s.start()
	id := s.create("original").GetVolumeId()
	s.write(id, "before")
	taken := s.snapshot("snap", id)
	if taken.GetSourceVolumeId() != id || !taken.GetReadyToUse() || time.Since(taken.GetCreationTime().AsTime()) > time.Hour {
		t.Errorf("the snapshot: %v", taken)
	}
	clone, err := s.copyOf("clone", ofVolume(id))
	s.code("clone", err, codes.OK)
	s.write(id, "after")
	restored, err := s.copyOf("restored", ofSnapshot(taken.GetSnapshotId()))
	s.code("restore", err, codes.OK)
	if restored.GetContentSource().GetSnapshot().GetSnapshotId() != taken.GetSnapshotId() || clone.GetContentSource().GetVolume().GetVolumeId() != id {
		t.Errorf("sources: %v, %v", restored.GetContentSource(), clone.GetContentSource())
	}
	s.wantData(clone.GetVolumeId(), "before")
	s.wantData(restored.GetVolumeId(), "before")
	s.write(restored.GetVolumeId(), "changed")
	s.wantData(id, "after")

	stop()
	s.start()
	// Repeats, across a restart too, are the same; others are refused.
	if again := s.snapshot("snap", id); again.GetSnapshotId() != taken.GetSnapshotId() || !again.GetCreationTime().AsTime().Equal(taken.GetCreationTime().AsTime()) {
		t.Errorf("the snapshot again: %v, was %v", again, taken)
	}
	if again, err := s.copyOf("restored", ofSnapshot(taken.GetSnapshotId())); err != nil || again.GetVolumeId() != restored.GetVolumeId() {
		t.Errorf("restored again: %v, %v", again, err)
	}
	s.wantData(restored.GetVolumeId(), "changed")
	_, err = s.copyOf("restored", nil)
	s.code("another source", err, codes.AlreadyExists, "volume_content_source")
	_, err = s.controller.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{Name: "snap", SourceVolumeId: clone.GetVolumeId()})
	s.code("another volume", err, codes.AlreadyExists, "source_volume_id")

	got, err := s.controller.GetSnapshot(t.Context(), &csi.GetSnapshotRequest{SnapshotId: taken.GetSnapshotId()})
	if err != nil || got.GetSnapshot().GetSourceVolumeId() != id {
		t.Errorf("GetSnapshot: %v, %v", got, err)
	}
	// Neither needs the other.
	s.code("delete the original", s.delete(id), codes.OK)
	s.code("delete the snapshot", s.deleteSnapshot(taken.GetSnapshotId()), codes.OK)
	s.code("again", s.deleteSnapshot(taken.GetSnapshotId()), codes.OK)
	s.wantData(restored.GetVolumeId(), "changed")
	_, err = s.controller.GetSnapshot(t.Context(), &csi.GetSnapshotRequest{SnapshotId: taken.GetSnapshotId()})
	s.code("GetSnapshot of what is deleted", err, codes.NotFound)
	_, err = s.copyOf("late", ofSnapshot(taken.GetSnapshotId()))
	s.code("a copy of what is deleted", err, codes.NotFound, "snapshot_id")
	_, err = s.copyOf("late", ofVolume(id))
	s.code("a copy of what is deleted", err, codes.NotFound, "volume_id")
	_, err = s.controller.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{Name: "late", SourceVolumeId: id})
	s.code("a snapshot of what is deleted", err, codes.NotFound, "source_volume_id")
	if left := filesIn(t, filepath.Join(s.config.Grants[0].Dir, directory.SnapshotsDir)); len(left) > 0 {
		t.Errorf("left of snapshots: %q", left)
	}
}

func filesIn(t *testing.T, dir string) []string {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(dir, "*"))
	if err != nil {
		t.Fatal(err)
	}
	return found
}

func TestNothingIsCopiedWhileItIsWritten(t *testing.T) {
	s := newSite(t)
	s.start()
	id := s.create("v").GetVolumeId()
	s.write(id, "text")
	writer := s.request(id, "writer")
	s.prepare(writer)
	_, err := s.controller.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: id})
	s.code("a snapshot of a volume with a writer", err, codes.FailedPrecondition, "volume_id")
	_, err = s.copyOf("c", ofVolume(id))
	s.code("a copy of a volume with a writer", err, codes.FailedPrecondition, "volume_id")
	s.code("unprepare", s.unprepare(writer), codes.OK)
	reader := s.request(id, "reader")
	reader.Readonly = true
	s.prepare(reader)
	taken := s.snapshot("s", id)
	c, err := s.copyOf("c", ofVolume(id))
	s.code("a copy of a volume with a reader", err, codes.OK)
	s.wantData(c.GetVolumeId(), "text")
	s.code("unprepare", s.unprepare(reader), codes.OK)
	s.code("delete the snapshot", s.deleteSnapshot(taken.GetSnapshotId()), codes.OK)
}

func TestListSnapshots(t *testing.T) {
	s := newSite(t)
	s.start()
	one, two := s.create("one").GetVolumeId(), s.create("two").GetVolumeId()
	of := map[string]string{}
	for name, volume := range map[string]string{"a": one, "b": one, "c": two} {
		of[s.snapshot(name, volume).GetSnapshotId()] = volume
	}
	list := func(r *csi.ListSnapshotsRequest) map[string]string {
		t.Helper()
		found := map[string]string{}
		for {
			resp, err := s.controller.ListSnapshots(t.Context(), r)
			if err != nil {
				t.Fatal(err)
			}
			if n := len(resp.GetEntries()); r.MaxEntries > 0 && n > int(r.MaxEntries) {
				t.Errorf("%d entries, asked for %d", n, r.MaxEntries)
			}
			for _, e := range resp.GetEntries() {
				found[e.GetSnapshot().GetSnapshotId()] = e.GetSnapshot().GetSourceVolumeId()
			}
			if r.StartingToken = resp.GetNextToken(); r.StartingToken == "" {
				return found
			}
		}
	}
	for name, found := range map[string]map[string]string{
		"all": list(&csi.ListSnapshotsRequest{}), "in pages": list(&csi.ListSnapshotsRequest{MaxEntries: 1}),
	} {
		if len(found) != 3 {
			t.Errorf("%s: %v, want %v", name, found, of)
		}
	}
	if found := list(&csi.ListSnapshotsRequest{SourceVolumeId: one}); len(found) != 2 {
		t.Errorf("of one volume: %v", found)
	}
	for id := range of {
		if found := list(&csi.ListSnapshotsRequest{SnapshotId: id}); len(found) != 1 || found[id] == "" {
			t.Errorf("of one id: %v", found)
		}
	}
	if found := list(&csi.ListSnapshotsRequest{SnapshotId: "unknown"}); len(found) != 0 {
		t.Errorf("of an unknown id: %v", found)
	}
	_, err := s.controller.ListSnapshots(t.Context(), &csi.ListSnapshotsRequest{StartingToken: "made up"})
	s.code("a token of nobody's", err, codes.Aborted)
}

// A copy that was cut off is made anew by the repeat.
func TestACutOffCopyIsRepeated(t *testing.T) {
	s := newSite(t)
	stop := s.start()
	id := s.create("v").GetVolumeId()
	s.write(id, "text")
	s.snapshot("snap", id)
	c, err := s.copyOf("c", ofVolume(id))
	s.code("copy", err, codes.OK)
	stop()
	// As a kill in the middle leaves it: the records say creating, and what
	// there is of the copies is not the whole.
	for _, kind := range []string{"volumes", "snapshots"} {
		for _, file := range filesIn(t, filepath.Join(s.config.StateDir, kind)) {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if kind == "snapshots" || strings.Contains(string(text), c.GetVolumeId()) {
				text = bytes.Replace(text, []byte(`"ready"`), []byte(`"creating"`), 1)
				if err := os.WriteFile(file, text, 0o600); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	if err := os.WriteFile(filepath.Join(s.path(c.GetVolumeId()), "half"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	s.start()
	list, err := s.controller.ListSnapshots(t.Context(), &csi.ListSnapshotsRequest{})
	if err != nil || len(list.GetEntries()) != 0 {
		t.Errorf("listed while it is not whole: %v, %v", list, err)
	}
	again, err := s.copyOf("c", ofVolume(id))
	if err != nil || again.GetVolumeId() != c.GetVolumeId() || exists(filepath.Join(s.path(c.GetVolumeId()), "half")) {
		t.Errorf("the repeat: %v, %v", again, err)
	}
	s.wantData(c.GetVolumeId(), "text")
	taken := s.snapshot("snap", id)
	r, err := s.copyOf("r", ofSnapshot(taken.GetSnapshotId()))
	if status.Code(err) != codes.OK {
		t.Fatal(err)
	}
	s.wantData(r.GetVolumeId(), "text")
}
