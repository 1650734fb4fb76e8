package sp

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"maps"
	"os"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// plainSize is the capacity of a volume that none was asked for.
const plainSize = 1 << 30

// idOf makes an id of a name, which may hold any character.
func idOf(kind, name string) string {
	sum := sha256.Sum256([]byte(name))
	return kind + "-" + hex.EncodeToString(sum[:12])
}

func sizeFor(r *csi.CapacityRange) (int64, error) {
	required, limit := r.GetRequiredBytes(), r.GetLimitBytes()
	switch {
	case required < 0 || limit < 0:
		return 0, invalid("capacity_range", "has a negative size")
	case limit > 0 && required > limit:
		return 0, invalid("capacity_range", "requires more than its limit allows")
	case required > 0:
		return required, nil
	case limit > 0:
		return min(limit, plainSize), nil
	}
	return plainSize, nil
}

// CreateVolume implements csi.ControllerServer.
func (p *Plain) CreateVolume(_ context.Context, r *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	size, err := sizeFor(r.GetCapacityRange())
	switch {
	case r.GetName() == "":
		return nil, invalid("name", "is required")
	case len(r.GetVolumeCapabilities()) == 0:
		return nil, invalid("volume_capabilities", "is required")
	case err != nil:
		return nil, err
	}
	for _, c := range r.GetVolumeCapabilities() {
		if why := plainUnsupported(c); why != "" {
			return nil, invalid("volume_capabilities", why)
		}
	}
	defer p.rules.lock(p)()
	v := &plainVolume{
		ID: idOf("volume", r.GetName()), Name: r.GetName(), Capacity: size, Parameters: r.GetParameters(), Mutable: r.GetMutableParameters(),
		Snapshot: r.GetVolumeContentSource().GetSnapshot().GetSnapshotId(), Volume: r.GetVolumeContentSource().GetVolume().GetVolumeId(),
	}
	if was := p.state.Volumes[v.ID]; was != nil {
		low, high := r.GetCapacityRange().GetRequiredBytes(), r.GetCapacityRange().GetLimitBytes()
		if was.Capacity < low || high > 0 && was.Capacity > high || !maps.Equal(was.Parameters, v.Parameters) || was.Snapshot != v.Snapshot || was.Volume != v.Volume {
			return nil, status.Error(codes.AlreadyExists, "name: a volume of this name has another size, source or other parameters")
		}
		return &csi.CreateVolumeResponse{Volume: plainDescribe(was)}, nil
	}
	from, err := p.source(r.GetVolumeContentSource())
	if err != nil {
		return nil, err
	}
	if from == "" {
		err = os.Mkdir(p.place(v.ID), 0o777)
	} else {
		err = p.rules.copy(p, p.place(v.ID), from)
	}
	if err != nil {
		return nil, status.Errorf(codes.Internal, "making the directory of the volume: %v", err)
	}
	p.state.Volumes[v.ID] = v
	return &csi.CreateVolumeResponse{Volume: plainDescribe(v)}, p.save()
}

// source is the directory of what a volume is to be made of.
func (p *Plain) source(s *csi.VolumeContentSource) (string, error) {
	switch {
	case s.GetSnapshot() != nil:
		if p.state.Snapshots[s.GetSnapshot().GetSnapshotId()] == nil {
			return "", noSnapshot(s.GetSnapshot().GetSnapshotId())
		}
		return p.place(s.GetSnapshot().GetSnapshotId()), nil
	case s.GetVolume() != nil:
		if p.state.Volumes[s.GetVolume().GetVolumeId()] == nil {
			return "", noVolume(s.GetVolume().GetVolumeId())
		}
		return p.place(s.GetVolume().GetVolumeId()), nil
	case s != nil:
		return "", invalid("volume_content_source", "names neither a snapshot nor a volume")
	}
	return "", nil
}

func plainDescribe(v *plainVolume) *csi.Volume {
	d := &csi.Volume{VolumeId: v.ID, CapacityBytes: v.Capacity}
	switch {
	case v.Snapshot != "":
		d.ContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: v.Snapshot}}}
	case v.Volume != "":
		d.ContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: v.Volume}}}
	}
	return d
}

// plainUnsupported says why a volume cannot be used as asked.
func plainUnsupported(c *csi.VolumeCapability) string {
	mode := c.GetAccessMode().GetMode()
	_, known := csi.VolumeCapability_AccessMode_Mode_name[int32(mode)]
	switch {
	case c.GetMount() == nil && c.GetBlock() == nil:
		return "has no access type"
	case c.GetMount() == nil:
		return "asks for a block device; a volume is a directory"
	case c.GetMount().GetFsType() != "":
		return "asks for a filesystem type; a volume is a directory"
	case !known || mode == csi.VolumeCapability_AccessMode_UNKNOWN:
		return "has no access mode"
	}
	return ""
}

// DeleteVolume implements csi.ControllerServer.
func (p *Plain) DeleteVolume(_ context.Context, r *csi.DeleteVolumeRequest) (*csi.DeleteVolumeResponse, error) {
	if r.GetVolumeId() == "" {
		return nil, invalid("volume_id", "is required")
	}
	defer p.rules.lock(p)()
	if p.state.Volumes[r.GetVolumeId()] == nil {
		return &csi.DeleteVolumeResponse{}, nil
	}
	_, attached := p.state.Attached[r.GetVolumeId()]
	if attached || p.state.Staged[r.GetVolumeId()] != "" || p.published(r.GetVolumeId()) {
		return nil, status.Error(codes.FailedPrecondition, "volume_id: the volume is in use")
	}
	if err := os.RemoveAll(p.place(r.GetVolumeId())); err != nil {
		return nil, status.Errorf(codes.Internal, "removing the data of the volume: %v", err)
	}
	delete(p.state.Volumes, r.GetVolumeId())
	return &csi.DeleteVolumeResponse{}, p.save()
}

// ValidateVolumeCapabilities implements csi.ControllerServer.
func (p *Plain) ValidateVolumeCapabilities(_ context.Context, r *csi.ValidateVolumeCapabilitiesRequest) (*csi.ValidateVolumeCapabilitiesResponse, error) {
	switch {
	case r.GetVolumeId() == "":
		return nil, invalid("volume_id", "is required")
	case len(r.GetVolumeCapabilities()) == 0:
		return nil, invalid("volume_capabilities", "is required")
	}
	defer p.rules.lock(p)()
	if p.state.Volumes[r.GetVolumeId()] == nil {
		return nil, noVolume(r.GetVolumeId())
	}
	for _, c := range r.GetVolumeCapabilities() {
		if why := plainUnsupported(c); why != "" {
			return &csi.ValidateVolumeCapabilitiesResponse{Message: "volume_capabilities: " + why}, nil
		}
	}
	return &csi.ValidateVolumeCapabilitiesResponse{Confirmed: &csi.ValidateVolumeCapabilitiesResponse_Confirmed{
		VolumeContext: r.GetVolumeContext(), VolumeCapabilities: r.GetVolumeCapabilities(), Parameters: r.GetParameters(),
	}}, nil
}

// ListVolumes implements csi.ControllerServer.
func (p *Plain) ListVolumes(_ context.Context, r *csi.ListVolumesRequest) (*csi.ListVolumesResponse, error) {
	defer p.rules.lock(p)()
	ids, next, err := page(maps.Keys(p.state.Volumes), r.GetMaxEntries(), r.GetStartingToken())
	if err != nil {
		return nil, err
	}
	answer := &csi.ListVolumesResponse{NextToken: next}
	for _, id := range ids {
		answer.Entries = append(answer.Entries, &csi.ListVolumesResponse_Entry{Volume: plainDescribe(p.state.Volumes[id])})
	}
	return answer, nil
}

// ControllerGetVolume implements csi.ControllerServer.
func (p *Plain) ControllerGetVolume(_ context.Context, r *csi.ControllerGetVolumeRequest) (*csi.ControllerGetVolumeResponse, error) {
	if r.GetVolumeId() == "" {
		return nil, invalid("volume_id", "is required")
	}
	defer p.rules.lock(p)()
	v := p.state.Volumes[r.GetVolumeId()]
	if v == nil {
		return nil, noVolume(r.GetVolumeId())
	}
	return &csi.ControllerGetVolumeResponse{Volume: plainDescribe(v), Status: &csi.ControllerGetVolumeResponse_VolumeStatus{}}, nil
}

// ControllerModifyVolume implements csi.ControllerServer.
func (p *Plain) ControllerModifyVolume(_ context.Context, r *csi.ControllerModifyVolumeRequest) (*csi.ControllerModifyVolumeResponse, error) {
	switch {
	case r.GetVolumeId() == "":
		return nil, invalid("volume_id", "is required")
	case len(r.GetMutableParameters()) == 0:
		return nil, invalid("mutable_parameters", "is required")
	}
	defer p.rules.lock(p)()
	v := p.state.Volumes[r.GetVolumeId()]
	if v == nil {
		return nil, noVolume(r.GetVolumeId())
	}
	v.Mutable = r.GetMutableParameters()
	return &csi.ControllerModifyVolumeResponse{}, p.save()
}

// ControllerExpandVolume implements csi.ControllerServer.
func (p *Plain) ControllerExpandVolume(_ context.Context, r *csi.ControllerExpandVolumeRequest) (*csi.ControllerExpandVolumeResponse, error) {
	switch {
	case r.GetVolumeId() == "":
		return nil, invalid("volume_id", "is required")
	case r.GetCapacityRange() == nil:
		return nil, invalid("capacity_range", "is required")
	}
	size, err := sizeFor(r.GetCapacityRange())
	if err != nil {
		return nil, err
	}
	defer p.rules.lock(p)()
	v := p.state.Volumes[r.GetVolumeId()]
	if v == nil {
		return nil, noVolume(r.GetVolumeId())
	}
	if limit := r.GetCapacityRange().GetLimitBytes(); limit > 0 && v.Capacity > limit {
		return nil, status.Error(codes.OutOfRange, "capacity_range.limit_bytes: the volume is larger, and does not shrink")
	}
	v.Capacity = max(v.Capacity, size)
	return &csi.ControllerExpandVolumeResponse{CapacityBytes: v.Capacity, NodeExpansionRequired: true}, p.save()
}

// GetCapacity implements csi.ControllerServer.
func (p *Plain) GetCapacity(context.Context, *csi.GetCapacityRequest) (*csi.GetCapacityResponse, error) {
	return &csi.GetCapacityResponse{AvailableCapacity: 64 << 40}, nil
}

// ControllerPublishVolume implements csi.ControllerServer.
func (p *Plain) ControllerPublishVolume(_ context.Context, r *csi.ControllerPublishVolumeRequest) (*csi.ControllerPublishVolumeResponse, error) {
	switch {
	case !p.config.Attach:
		return nil, status.Error(codes.Unimplemented, "PUBLISH_UNPUBLISH_VOLUME is not a capability of this plugin")
	case r.GetVolumeId() == "":
		return nil, invalid("volume_id", "is required")
	case r.GetNodeId() == "":
		return nil, invalid("node_id", "is required")
	case r.GetVolumeCapability() == nil:
		return nil, invalid("volume_capability", "is required")
	}
	defer p.rules.lock(p)()
	if p.state.Volumes[r.GetVolumeId()] == nil {
		return nil, noVolume(r.GetVolumeId())
	}
	if r.GetNodeId() != p.config.NodeID {
		return nil, status.Error(codes.NotFound, "node_id: there is no such node")
	}
	if readonly, attached := p.state.Attached[r.GetVolumeId()]; attached && readonly != r.GetReadonly() {
		return nil, status.Error(codes.AlreadyExists, "readonly: the volume is published to the node with another one")
	}
	p.state.Attached[r.GetVolumeId()] = r.GetReadonly()
	return &csi.ControllerPublishVolumeResponse{PublishContext: map[string]string{"slot": r.GetVolumeId()}}, p.save()
}

// ControllerUnpublishVolume implements csi.ControllerServer.
func (p *Plain) ControllerUnpublishVolume(_ context.Context, r *csi.ControllerUnpublishVolumeRequest) (*csi.ControllerUnpublishVolumeResponse, error) {
	if r.GetVolumeId() == "" {
		return nil, invalid("volume_id", "is required")
	}
	defer p.rules.lock(p)()
	delete(p.state.Attached, r.GetVolumeId())
	return &csi.ControllerUnpublishVolumeResponse{}, p.save()
}
