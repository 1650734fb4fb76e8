package sp

import (
	"context"
	"maps"
	"os"
	"slices"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"
)

func noSnapshot(id string) error {
	return status.Errorf(codes.NotFound, "snapshot_id: there is no snapshot %q", id)
}

// CreateSnapshot implements csi.ControllerServer.
func (p *Plain) CreateSnapshot(_ context.Context, r *csi.CreateSnapshotRequest) (*csi.CreateSnapshotResponse, error) {
	switch {
	case r.GetName() == "":
		return nil, invalid("name", "is required")
	case r.GetSourceVolumeId() == "":
		return nil, invalid("source_volume_id", "is required")
	}
	defer p.rules.lock(p)()
	id := idOf("snapshot", r.GetName())
	if was := p.state.Snapshots[id]; was != nil {
		if was.Volume != r.GetSourceVolumeId() {
			return nil, status.Error(codes.AlreadyExists, "name: the snapshot of this name is of another volume")
		}
		return &csi.CreateSnapshotResponse{Snapshot: was.describe()}, nil
	}
	s, err := p.take(id, r.GetName(), r.GetSourceVolumeId())
	if err != nil {
		return nil, err
	}
	return &csi.CreateSnapshotResponse{Snapshot: s.describe()}, p.save()
}

// take copies a volume; the caller holds the lock.
func (p *Plain) take(id, name, volume string) (*plainSnapshot, error) {
	v := p.state.Volumes[volume]
	if v == nil {
		return nil, noVolume(volume)
	}
	if err := p.rules.copy(p, p.place(id), p.place(volume)); err != nil {
		return nil, status.Errorf(codes.Internal, "copying the volume: %v", err)
	}
	s := &plainSnapshot{ID: id, Name: name, Volume: volume, Size: v.Capacity, Created: time.Now()}
	p.state.Snapshots[id] = s
	return s, nil
}

func (s *plainSnapshot) describe() *csi.Snapshot {
	return &csi.Snapshot{
		SnapshotId: s.ID, SourceVolumeId: s.Volume, SizeBytes: s.Size, CreationTime: timestamppb.New(s.Created), ReadyToUse: true, GroupSnapshotId: s.Group,
	}
}

// DeleteSnapshot implements csi.ControllerServer.
func (p *Plain) DeleteSnapshot(_ context.Context, r *csi.DeleteSnapshotRequest) (*csi.DeleteSnapshotResponse, error) {
	if r.GetSnapshotId() == "" {
		return nil, invalid("snapshot_id", "is required")
	}
	defer p.rules.lock(p)()
	if err := p.drop(r.GetSnapshotId()); err != nil {
		return nil, err
	}
	return &csi.DeleteSnapshotResponse{}, p.save()
}

func (p *Plain) drop(id string) error {
	if p.state.Snapshots[id] == nil {
		return nil
	}
	if err := os.RemoveAll(p.place(id)); err != nil {
		return status.Errorf(codes.Internal, "removing the snapshot: %v", err)
	}
	delete(p.state.Snapshots, id)
	return nil
}

// ListSnapshots implements csi.ControllerServer.
func (p *Plain) ListSnapshots(_ context.Context, r *csi.ListSnapshotsRequest) (*csi.ListSnapshotsResponse, error) {
	defer p.rules.lock(p)()
	wanted := map[string]bool{}
	for id, s := range p.state.Snapshots {
		if (r.GetSnapshotId() == "" || r.GetSnapshotId() == id) && (r.GetSourceVolumeId() == "" || r.GetSourceVolumeId() == s.Volume) {
			wanted[id] = true
		}
	}
	ids, next, err := page(maps.Keys(wanted), r.GetMaxEntries(), r.GetStartingToken())
	if err != nil {
		return nil, err
	}
	answer := &csi.ListSnapshotsResponse{NextToken: next}
	for _, id := range ids {
		answer.Entries = append(answer.Entries, &csi.ListSnapshotsResponse_Entry{Snapshot: p.state.Snapshots[id].describe()})
	}
	return answer, nil
}

// GetSnapshot implements csi.ControllerServer.
func (p *Plain) GetSnapshot(_ context.Context, r *csi.GetSnapshotRequest) (*csi.GetSnapshotResponse, error) {
	if r.GetSnapshotId() == "" {
		return nil, invalid("snapshot_id", "is required")
	}
	defer p.rules.lock(p)()
	s := p.state.Snapshots[r.GetSnapshotId()]
	if s == nil {
		return nil, noSnapshot(r.GetSnapshotId())
	}
	return &csi.GetSnapshotResponse{Snapshot: s.describe()}, nil
}

// CreateVolumeGroupSnapshot implements csi.GroupControllerServer.
func (p *Plain) CreateVolumeGroupSnapshot(_ context.Context, r *csi.CreateVolumeGroupSnapshotRequest) (*csi.CreateVolumeGroupSnapshotResponse, error) {
	switch {
	case r.GetName() == "":
		return nil, invalid("name", "is required")
	case len(r.GetSourceVolumeIds()) == 0:
		return nil, invalid("source_volume_ids", "is required")
	}
	defer p.rules.lock(p)()
	id := idOf("group", r.GetName())
	if was := p.state.Groups[id]; was != nil {
		if !slices.Equal(was.Volumes, r.GetSourceVolumeIds()) {
			return nil, status.Error(codes.AlreadyExists, "name: the group of this name is of other volumes")
		}
		return &csi.CreateVolumeGroupSnapshotResponse{GroupSnapshot: p.describeGroup(was)}, nil
	}
	for _, v := range r.GetSourceVolumeIds() {
		if p.state.Volumes[v] == nil {
			return nil, noVolume(v)
		}
	}
	g := &plainGroup{ID: id, Name: r.GetName(), Volumes: r.GetSourceVolumeIds()}
	for _, v := range g.Volumes {
		s, err := p.take(idOf("snapshot", id+v), "", v)
		if err != nil {
			return nil, err
		}
		s.Group = id
		g.Snapshots = append(g.Snapshots, s.ID)
	}
	p.state.Groups[id] = g
	return &csi.CreateVolumeGroupSnapshotResponse{GroupSnapshot: p.describeGroup(g)}, p.save()
}

func (p *Plain) describeGroup(g *plainGroup) *csi.VolumeGroupSnapshot {
	d := &csi.VolumeGroupSnapshot{GroupSnapshotId: g.ID, ReadyToUse: true, CreationTime: timestamppb.Now()}
	for _, id := range g.Snapshots {
		s := p.state.Snapshots[id]
		d.Snapshots = append(d.Snapshots, s.describe())
		d.CreationTime = timestamppb.New(s.Created)
	}
	return d
}

// DeleteVolumeGroupSnapshot implements csi.GroupControllerServer.
func (p *Plain) DeleteVolumeGroupSnapshot(_ context.Context, r *csi.DeleteVolumeGroupSnapshotRequest) (*csi.DeleteVolumeGroupSnapshotResponse, error) {
	if r.GetGroupSnapshotId() == "" {
		return nil, invalid("group_snapshot_id", "is required")
	}
	defer p.rules.lock(p)()
	if g := p.state.Groups[r.GetGroupSnapshotId()]; g != nil {
		for _, id := range g.Snapshots {
			if err := p.drop(id); err != nil {
				return nil, err
			}
		}
		delete(p.state.Groups, g.ID)
	}
	return &csi.DeleteVolumeGroupSnapshotResponse{}, p.save()
}

// GetVolumeGroupSnapshot implements csi.GroupControllerServer.
func (p *Plain) GetVolumeGroupSnapshot(_ context.Context, r *csi.GetVolumeGroupSnapshotRequest) (*csi.GetVolumeGroupSnapshotResponse, error) {
	if r.GetGroupSnapshotId() == "" {
		return nil, invalid("group_snapshot_id", "is required")
	}
	defer p.rules.lock(p)()
	g := p.state.Groups[r.GetGroupSnapshotId()]
	if g == nil {
		return nil, status.Errorf(codes.NotFound, "group_snapshot_id: there is no group %q", r.GetGroupSnapshotId())
	}
	return &csi.GetVolumeGroupSnapshotResponse{GroupSnapshot: p.describeGroup(g)}, nil
}
