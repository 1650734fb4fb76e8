package sanity

import (
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

func snapshotSource(id string) *csi.VolumeContentSource {
	return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: id}}}
}

func volumeSource(id string) *csi.VolumeContentSource {
	return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: id}}}
}

func (t *trial) snapshotRequest(source string) *csi.CreateSnapshotRequest {
	return &csi.CreateSnapshotRequest{
		SourceVolumeId: source, Name: t.name("snapshot"), Parameters: t.config.SnapshotParameters, Secrets: t.config.secrets("CreateSnapshot"),
	}
}

// takeSnapshot makes the call, and deletes what came of it when the spec ends.
func (t *trial) takeSnapshot(r *csi.CreateSnapshotRequest) (*csi.Snapshot, error) {
	answer, err := t.clients.controller.CreateSnapshot(t.ctx, r)
	t.alive(err)
	if err == nil {
		id := answer.GetSnapshot().GetSnapshotId()
		t.cleanup(func() error { return wrap("DeleteSnapshot", t.deleteSnapshot(id)) })
	}
	return answer.GetSnapshot(), err
}

// snapshotOf takes a snapshot, which has to be OK for the spec to go on, and
// waits until it can be used.
func (t *trial) snapshotOf(v *volume) *csi.Snapshot {
	r := t.snapshotRequest(v.id)
	taken, err := t.takeSnapshot(r)
	t.need(requirement.CSISnapshotDescribed, err, "OK to a snapshot of a volume that nobody uses")
	ready := t.poll(t.config.Timeout, func() bool {
		if taken.GetReadyToUse() {
			return true
		}
		answer, err := t.clients.controller.CreateSnapshot(t.ctx, r)
		taken = answer.GetSnapshot()
		return err == nil && taken.GetReadyToUse()
	})
	if !ready {
		end(couldNotRun("the snapshot is not ready to use after %v", t.config.Timeout))
	}
	return taken
}

func (t *trial) deleteSnapshot(id string) error {
	_, err := t.clients.controller.DeleteSnapshot(t.ctx, &csi.DeleteSnapshotRequest{SnapshotId: id, Secrets: t.config.secrets("DeleteSnapshot")})
	return err
}

// copyOf makes a volume of a source, ready to be used.
func (t *trial) copyOf(id requirement.ID, source *csi.VolumeContentSource, of *volume) *volume {
	r := t.creation(of.capability)
	r.VolumeContentSource = source
	if of.capacity > 0 {
		r.CapacityRange = &csi.CapacityRange{RequiredBytes: of.capacity}
	}
	v, err := t.create(r)
	t.need(id, err, "OK to a volume from a source that exists")
	t.publish(v)
	t.stage(v)
	return v
}

// ready is a volume with a text in it that is neither staged nor attached.
func (t *trial) original() (v *volume, text string) {
	v = t.createdOK(t.creation(t.capability(t.defaultMode())))
	t.publish(v)
	t.stage(v)
	return v, t.filled(v)
}

func snapshotSpecs(s *section) {
	s.in(Controller)
	s.spec("CreateSnapshot without its arguments is INVALID_ARGUMENT", Covers(requirement.CSISnapshotArguments), func(t *trial) {
		v := t.createdOK(t.creation(t.capability(t.defaultMode())))
		for _, change := range []func(*csi.CreateSnapshotRequest){
			func(r *csi.CreateSnapshotRequest) { r.Name = "" },
			func(r *csi.CreateSnapshotRequest) { r.SourceVolumeId = "" },
		} {
			r := t.snapshotRequest(v.id)
			change(r)
			_, err := t.takeSnapshot(r)
			t.wantCode(requirement.CSISnapshotArguments, err, codes.InvalidArgument)
		}
	}, CreateDeleteVolume, Snapshots)
	s.spec("a snapshot is described", Covers(requirement.CSISnapshotDescribed), func(t *trial) {
		v := t.createdOK(t.creation(t.capability(t.defaultMode())))
		taken, err := t.takeSnapshot(t.snapshotRequest(v.id))
		t.wantCode(requirement.CSISnapshotDescribed, err, codes.OK)
		t.want(requirement.CSISnapshotDescribed, taken.GetSnapshotId() != "", "a snapshot_id", "none")
		t.want(requirement.CSISnapshotDescribed, taken.GetSourceVolumeId() == v.id, "source_volume_id "+v.id, "%q", taken.GetSourceVolumeId())
		t.want(requirement.CSISnapshotDescribed, taken.GetCreationTime().GetSeconds() > 0, "a creation_time", "none")
	}, CreateDeleteVolume, Snapshots)
	s.spec("a repeat takes no new snapshot", Covers(requirement.CSISnapshotSame), func(t *trial) {
		v := t.createdOK(t.creation(t.capability(t.defaultMode())))
		r := t.snapshotRequest(v.id)
		first, err := t.takeSnapshot(r)
		t.need(requirement.CSISnapshotDescribed, err, "OK")
		for range 2 {
			again, err := t.takeSnapshot(r)
			t.wantCode(requirement.CSISnapshotSame, err, codes.OK)
			t.want(requirement.CSISnapshotSame, again.GetSnapshotId() == first.GetSnapshotId(), "the snapshot of the first call: "+first.GetSnapshotId(), "%s", again.GetSnapshotId())
		}
	}, CreateDeleteVolume, Snapshots)
	s.spec("one name for a snapshot of another volume is ALREADY_EXISTS", Covers(requirement.CSISnapshotIncompatible), func(t *trial) {
		one, two := t.createdOK(t.creation(t.capability(t.defaultMode()))), t.createdOK(t.creation(t.capability(t.defaultMode())))
		r := t.snapshotRequest(one.id)
		_, err := t.takeSnapshot(r)
		t.need(requirement.CSISnapshotDescribed, err, "OK")
		r.SourceVolumeId = two.id
		_, err = t.takeSnapshot(r)
		t.wantCode(requirement.CSISnapshotIncompatible, err, codes.AlreadyExists)
	}, CreateDeleteVolume, Snapshots)
	s.spec("a volume from a snapshot has the data of its moment", Covers(requirement.CSISnapshotData, requirement.CSISnapshotKept), func(t *trial) {
		v, text := t.original()
		taken := t.snapshotOf(v)
		before := t.copyOf(requirement.CSISnapshotData, snapshotSource(taken.GetSnapshotId()), v)
		t.wantText(requirement.CSISnapshotData, before, text, "what the volume held when the snapshot was taken")
		later := t.filled(v)
		after := t.copyOf(requirement.CSISnapshotData, snapshotSource(taken.GetSnapshotId()), v)
		t.wantText(requirement.CSISnapshotKept, after, text, "what the volume held when the snapshot was taken, although it holds "+later[:len(later)-1]+" since")
	}, CreateDeleteVolume, Snapshots)
	s.spec("a copy and what it was made from are two", Covers(requirement.CSICopyIndependent), func(t *trial) {
		v, text := t.original()
		taken := t.snapshotOf(v)
		c := t.copyOf(requirement.CSISnapshotData, snapshotSource(taken.GetSnapshotId()), v)
		t.overwritten(c)
		t.wantText(requirement.CSICopyIndependent, v, text, "the volume as it was, after its copy was changed")
		again := t.copyOf(requirement.CSISnapshotData, snapshotSource(taken.GetSnapshotId()), v)
		t.wantText(requirement.CSICopyIndependent, again, text, "the snapshot as it was, after a copy was changed")
	}, CreateDeleteVolume, Snapshots)
	s.spec("a snapshot is not deleted without a snapshot_id", Covers(requirement.CSISnapshotDeleteArguments), func(t *trial) {
		t.wantCode(requirement.CSISnapshotDeleteArguments, t.deleteSnapshot(""), codes.InvalidArgument)
	}, Snapshots)
	s.spec("a snapshot that is gone is deleted again", Covers(requirement.CSISnapshotDeleteRepeated), func(t *trial) {
		v := t.createdOK(t.creation(t.capability(t.defaultMode())))
		taken := t.snapshotOf(v)
		for range 3 {
			t.wantCode(requirement.CSISnapshotDeleteRepeated, t.deleteSnapshot(taken.GetSnapshotId()), codes.OK)
		}
	}, CreateDeleteVolume, Snapshots)
	cloneSpecs(s)
	listSnapshotSpecs(s)
	groupSpecs(s)
}

// overwritten changes in place what a volume holds.
func (t *trial) overwritten(v *volume) {
	t.use(v, false, func(c *consumer) {
		if err := t.tryPut(c, t.nonce()); err != nil {
			end(couldNotRun("writing into a copy: %v", err))
		}
	})
}

func cloneSpecs(s *section) {
	s.spec("a clone has the data of its source and a life of its own", Covers(requirement.CSICloneData, requirement.CSICopyIndependent), func(t *trial) {
		v, text := t.original()
		c := t.copyOf(requirement.CSICloneData, volumeSource(v.id), v)
		t.wantText(requirement.CSICloneData, c, text, "what the source held")
		t.overwritten(c)
		t.wantText(requirement.CSICopyIndependent, v, text, "the source as it was, after the clone was changed")
	}, CreateDeleteVolume, CloneVolume)
	s.spec("a copy names its source", Covers(requirement.CSICopySourceTold), func(t *trial) {
		v := t.createdOK(t.creation(t.capability(t.defaultMode())))
		c := t.copyOf(requirement.CSICloneData, volumeSource(v.id), v)
		t.want(requirement.CSICopySourceTold, c.source.GetVolume().GetVolumeId() == v.id, "content_source with volume "+v.id, "%s", describe(c.source))
	}, CreateDeleteVolume, CloneVolume)
	s.spec("a volume from a snapshot names it", Covers(requirement.CSICopySourceTold), func(t *trial) {
		v := t.createdOK(t.creation(t.capability(t.defaultMode())))
		taken := t.snapshotOf(v)
		c := t.copyOf(requirement.CSISnapshotData, snapshotSource(taken.GetSnapshotId()), v)
		t.want(requirement.CSICopySourceTold, c.source.GetSnapshot().GetSnapshotId() == taken.GetSnapshotId(), "content_source with snapshot "+taken.GetSnapshotId(), "%s", describe(c.source))
	}, CreateDeleteVolume, Snapshots)
	for what, sourced := range map[string]struct {
		of   func(*trial) *csi.VolumeContentSource
		need Feature
	}{
		"a volume that does not exist": {func(t *trial) *csi.VolumeContentSource { return volumeSource(t.goneVolume().id) }, CloneVolume},
		"a snapshot that does not exist": {func(t *trial) *csi.VolumeContentSource {
			taken := t.snapshotOf(t.createdOK(t.creation(t.capability(t.defaultMode()))))
			t.need(requirement.CSISnapshotDeleteRepeated, t.deleteSnapshot(taken.GetSnapshotId()), "OK")
			return snapshotSource(taken.GetSnapshotId())
		}, Snapshots},
	} {
		s.spec("a copy of "+what+" is NOT_FOUND", Covers(requirement.CSICopySourceUnknown), func(t *trial) {
			r := t.creation(t.capability(t.defaultMode()))
			r.VolumeContentSource = sourced.of(t)
			_, err := t.create(r)
			t.wantCode(requirement.CSICopySourceUnknown, err, codes.NotFound)
		}, CreateDeleteVolume, sourced.need)
	}
}

// listedSnapshots returns the ids of the snapshots that a call lists.
func (t *trial) listedSnapshots(id requirement.ID, r *csi.ListSnapshotsRequest) []string {
	var ids []string
	r.Secrets = t.config.secrets("ListSnapshots")
	for range 1000 {
		answer, err := t.clients.controller.ListSnapshots(t.ctx, r)
		t.need(id, err, "OK")
		for _, e := range answer.GetEntries() {
			ids = append(ids, e.GetSnapshot().GetSnapshotId())
		}
		if r.StartingToken = answer.GetNextToken(); r.StartingToken == "" {
			break
		}
	}
	return ids
}

func listSnapshotSpecs(s *section) {
	s.spec("a snapshot is listed until it is deleted", Covers(requirement.CSIListSnapshots), func(t *trial) {
		v := t.createdOK(t.creation(t.capability(t.defaultMode())))
		one, two := t.snapshotOf(v), t.snapshotOf(v)
		listed := t.listedSnapshots(requirement.CSIListSnapshots, &csi.ListSnapshotsRequest{})
		for _, taken := range []*csi.Snapshot{one, two} {
			t.want(requirement.CSIListSnapshots, slices.Contains(listed, taken.GetSnapshotId()), "every snapshot in the list", "%s is missing", taken.GetSnapshotId())
		}
		t.need(requirement.CSISnapshotDeleteRepeated, t.deleteSnapshot(one.GetSnapshotId()), "OK")
		listed = t.listedSnapshots(requirement.CSIListSnapshots, &csi.ListSnapshotsRequest{})
		t.want(requirement.CSIListSnapshots, !slices.Contains(listed, one.GetSnapshotId()), "no deleted snapshot in the list", "%s is listed", one.GetSnapshotId())
	}, CreateDeleteVolume, Snapshots, ListSnapshots)
	s.spec("snapshots are listed by id and by volume", Covers(requirement.CSIListSnapshotsFilter), func(t *trial) {
		one, two := t.createdOK(t.creation(t.capability(t.defaultMode()))), t.createdOK(t.creation(t.capability(t.defaultMode())))
		a, b, c := t.snapshotOf(one), t.snapshotOf(one), t.snapshotOf(two)
		for _, filter := range []struct {
			r    *csi.ListSnapshotsRequest
			want []string
		}{
			{&csi.ListSnapshotsRequest{SnapshotId: a.GetSnapshotId()}, []string{a.GetSnapshotId()}},
			{&csi.ListSnapshotsRequest{SourceVolumeId: one.id}, []string{a.GetSnapshotId(), b.GetSnapshotId()}},
			{&csi.ListSnapshotsRequest{SourceVolumeId: two.id}, []string{c.GetSnapshotId()}},
			{&csi.ListSnapshotsRequest{SnapshotId: t.canary()}, nil},
		} {
			got := t.listedSnapshots(requirement.CSIListSnapshotsFilter, filter.r)
			slices.Sort(got)
			slices.Sort(filter.want)
			t.want(requirement.CSIListSnapshotsFilter, slices.Equal(got, filter.want), count(len(filter.want), "snapshot"), "%v", got)
		}
	}, CreateDeleteVolume, Snapshots, ListSnapshots)
	s.spec("the pages hold every snapshot once", Covers(requirement.CSIListSnapshotsPages), func(t *trial) {
		v := t.createdOK(t.creation(t.capability(t.defaultMode())))
		made := []*csi.Snapshot{t.snapshotOf(v), t.snapshotOf(v), t.snapshotOf(v)}
		seen := t.pages(requirement.CSIListSnapshotsPages, func(most int32, token string) (ids []string, next string, err error) {
			answer, err := t.clients.controller.ListSnapshots(t.ctx, &csi.ListSnapshotsRequest{MaxEntries: most, StartingToken: token, Secrets: t.config.secrets("ListSnapshots")})
			for _, e := range answer.GetEntries() {
				ids = append(ids, e.GetSnapshot().GetSnapshotId())
			}
			return ids, answer.GetNextToken(), err
		})
		for _, taken := range made {
			n := seen[taken.GetSnapshotId()]
			t.want(requirement.CSIListSnapshotsPages, n == 1, "each snapshot once over the pages", "%s is there %s", taken.GetSnapshotId(), count(n, "time"))
		}
	}, CreateDeleteVolume, Snapshots, ListSnapshots)
	s.spec("a starting_token of ListSnapshots it never gave is ABORTED", Covers(requirement.CSIListSnapshotsToken), func(t *trial) {
		t.snapshotOf(t.createdOK(t.creation(t.capability(t.defaultMode()))))
		_, err := t.clients.controller.ListSnapshots(t.ctx, &csi.ListSnapshotsRequest{MaxEntries: 1, StartingToken: t.canary(), Secrets: t.config.secrets("ListSnapshots")})
		t.wantCode(requirement.CSIListSnapshotsToken, err, codes.Aborted)
	}, CreateDeleteVolume, Snapshots, ListSnapshots)
	s.spec("GetSnapshot tells of the snapshot it was asked for", Covers(requirement.CSIGetSnapshot), func(t *trial) {
		v := t.createdOK(t.creation(t.capability(t.defaultMode())))
		taken := t.snapshotOf(v)
		get := func(id string) (*csi.Snapshot, error) {
			answer, err := t.clients.controller.GetSnapshot(t.ctx, &csi.GetSnapshotRequest{SnapshotId: id, Secrets: t.config.secrets("GetSnapshot")})
			return answer.GetSnapshot(), err
		}
		got, err := get(taken.GetSnapshotId())
		t.wantCode(requirement.CSIGetSnapshot, err, codes.OK)
		t.want(requirement.CSIGetSnapshot, got.GetSnapshotId() == taken.GetSnapshotId() && got.GetSourceVolumeId() == v.id, "the snapshot that was taken", "%s", describe(got))
		t.need(requirement.CSISnapshotDeleteRepeated, t.deleteSnapshot(taken.GetSnapshotId()), "OK")
		_, err = get(taken.GetSnapshotId())
		t.wantCode(requirement.CSIGetSnapshot, err, codes.NotFound)
	}, CreateDeleteVolume, Snapshots, GetSnapshot)
}

// groupSpecs are about snapshots of several volumes at one moment.
func groupSpecs(s *section) {
	take := func(t *trial, r *csi.CreateVolumeGroupSnapshotRequest) *csi.VolumeGroupSnapshot {
		answer, err := t.clients.group.CreateVolumeGroupSnapshot(t.ctx, r)
		t.alive(err)
		g := answer.GetGroupSnapshot()
		if err == nil {
			t.cleanup(func() error { return wrap("DeleteVolumeGroupSnapshot", t.deleteGroup(g)) })
		}
		t.wantCode(requirement.CSIGroupSnapshots, err, codes.OK)
		return g
	}
	pair := func(t *trial) (one, two *volume, r *csi.CreateVolumeGroupSnapshotRequest) {
		one, two = t.createdOK(t.creation(t.capability(t.defaultMode()))), t.createdOK(t.creation(t.capability(t.defaultMode())))
		return one, two, &csi.CreateVolumeGroupSnapshotRequest{
			Name: t.name("group"), SourceVolumeIds: []string{one.id, two.id}, Secrets: t.config.secrets("CreateSnapshot"),
		}
	}
	s.spec("a group has one snapshot of each volume, a repeat the same", Covers(requirement.CSIGroupSnapshots), func(t *trial) {
		one, two, r := pair(t)
		first := take(t, r)
		t.want(requirement.CSIGroupSnapshots, len(first.GetSnapshots()) == 2, "2 snapshots", "%s", count(len(first.GetSnapshots()), "snapshot"))
		sources := []string{first.GetSnapshots()[0].GetSourceVolumeId(), first.GetSnapshots()[1].GetSourceVolumeId()}
		slices.Sort(sources)
		want := []string{one.id, two.id}
		slices.Sort(want)
		t.want(requirement.CSIGroupSnapshots, slices.Equal(sources, want), "one snapshot of each volume", "of %v", sources)
		again := take(t, r)
		t.want(requirement.CSIGroupSnapshots, again.GetGroupSnapshotId() == first.GetGroupSnapshotId(), "the group of the first call: "+first.GetGroupSnapshotId(), "%s", again.GetGroupSnapshotId())
	}, CreateDeleteVolume, GroupSnapshots)
	s.spec("each snapshot of a group has the data of its volume", Covers(requirement.CSIGroupData), func(t *trial) {
		texts := map[string]string{}
		volumes := map[string]*volume{}
		r := &csi.CreateVolumeGroupSnapshotRequest{Name: t.name("group"), Secrets: t.config.secrets("CreateSnapshot")}
		for range 2 {
			v, text := t.original()
			texts[v.id], volumes[v.id] = text, v
			r.SourceVolumeIds = append(r.SourceVolumeIds, v.id)
		}
		for _, taken := range take(t, r).GetSnapshots() {
			v := volumes[taken.GetSourceVolumeId()]
			if v == nil {
				end(couldNotRun("the group is not of its volumes, which breaks %s", requirement.CSIGroupSnapshots))
			}
			c := t.copyOf(requirement.CSIGroupData, snapshotSource(taken.GetSnapshotId()), v)
			t.wantText(requirement.CSIGroupData, c, texts[v.id], "what volume "+v.id+" held")
		}
	}, CreateDeleteVolume, GroupSnapshots)
	s.spec("a group is told of until it is deleted with its snapshots", Covers(requirement.CSIGroupGet, requirement.CSIGroupDelete), func(t *trial) {
		_, _, r := pair(t)
		g := take(t, r)
		get := &csi.GetVolumeGroupSnapshotRequest{GroupSnapshotId: g.GetGroupSnapshotId(), SnapshotIds: snapshotIDs(g), Secrets: t.config.secrets("GetSnapshot")}
		answer, err := t.clients.group.GetVolumeGroupSnapshot(t.ctx, get)
		t.wantCode(requirement.CSIGroupGet, err, codes.OK)
		t.want(requirement.CSIGroupGet, answer.GetGroupSnapshot().GetGroupSnapshotId() == g.GetGroupSnapshotId() && len(answer.GetGroupSnapshot().GetSnapshots()) == len(g.GetSnapshots()),
			"the group with its snapshots", "%s", describe(answer.GetGroupSnapshot()))
		for range 2 {
			t.wantCode(requirement.CSIGroupDelete, t.deleteGroup(g), codes.OK)
		}
		_, err = t.clients.group.GetVolumeGroupSnapshot(t.ctx, get)
		t.wantCode(requirement.CSIGroupGet, err, codes.NotFound)
		if t.features[ListSnapshots] {
			listed := t.listedSnapshots(requirement.CSIListSnapshots, &csi.ListSnapshotsRequest{})
			for _, id := range snapshotIDs(g) {
				t.want(requirement.CSIGroupDelete, !slices.Contains(listed, id), "no snapshot of a deleted group", "%s is listed", id)
			}
		}
	}, CreateDeleteVolume, GroupSnapshots)
}

func snapshotIDs(g *csi.VolumeGroupSnapshot) []string {
	var ids []string
	for _, s := range g.GetSnapshots() {
		ids = append(ids, s.GetSnapshotId())
	}
	return ids
}

func (t *trial) deleteGroup(g *csi.VolumeGroupSnapshot) error {
	_, err := t.clients.group.DeleteVolumeGroupSnapshot(t.ctx, &csi.DeleteVolumeGroupSnapshotRequest{
		GroupSnapshotId: g.GetGroupSnapshotId(), SnapshotIds: snapshotIDs(g), Secrets: t.config.secrets("DeleteSnapshot"),
	})
	return err
}
