package sp

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"maps"
	"os"
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/moby/sys/mountinfo"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// ControllerGetCapabilities implements csi.ControllerServer.
func (s *Server) ControllerGetCapabilities(context.Context, *csi.ControllerGetCapabilitiesRequest) (*csi.ControllerGetCapabilitiesResponse, error) {
	types := []csi.ControllerServiceCapability_RPC_Type{
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME,
		csi.ControllerServiceCapability_RPC_LIST_VOLUMES,
	}
	if !s.config.LegacyWriters {
		types = append(types, csi.ControllerServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER)
	}
	answer := new(csi.ControllerGetCapabilitiesResponse)
	for _, t := range types {
		answer.Capabilities = append(answer.Capabilities, &csi.ControllerServiceCapability{
			Type: &csi.ControllerServiceCapability_Rpc{Rpc: &csi.ControllerServiceCapability_RPC{Type: t}},
		})
	}
	return answer, nil
}

// CreateVolume implements csi.ControllerServer. A directory has no size of
// its own: any size that is required is accepted and none is promised
// (capacity_bytes stays 0, which is "unknown"); a limit is refused.
func (s *Server) CreateVolume(_ context.Context, r *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	switch required := r.GetCapacityRange().GetRequiredBytes(); {
	case r.GetName() == "":
		return nil, invalid("name", "is required")
	case len(r.GetName()) > 128:
		return nil, invalid("name", "is longer than 128 bytes")
	case len(r.GetVolumeCapabilities()) == 0:
		return nil, invalid("volume_capabilities", "is required")
	case required < 0 || r.GetCapacityRange().GetLimitBytes() < 0:
		return nil, invalid("capacity_range", "has a negative size")
	case r.GetCapacityRange().GetLimitBytes() > 0:
		return nil, status.Error(codes.OutOfRange, "capacity_range.limit_bytes: a directory cannot be limited; leave it unset")
	case r.GetVolumeContentSource() != nil:
		return nil, invalid("volume_content_source", "is not supported: create the volume empty")
	case len(r.GetMutableParameters()) > 0:
		return nil, invalid("mutable_parameters", "is not supported: leave it unset")
	}
	for _, c := range r.GetVolumeCapabilities() {
		if why := s.unsupported(c); why != "" {
			return nil, invalid("volume_capabilities", why)
		}
	}

	s.mu.Lock()
	defer s.mu.Unlock()
	// The id says nothing of the name, which may hold any character.
	sum := sha256.Sum256([]byte(r.GetName()))
	id := hex.EncodeToString(sum[:12])
	if v := s.state.volumes[id]; v != nil {
		if v.Required != r.GetCapacityRange().GetRequiredBytes() || !maps.Equal(v.Parameters, r.GetParameters()) {
			return nil, status.Error(codes.AlreadyExists, "name: a volume of this name has another size or other parameters")
		}
		return &csi.CreateVolumeResponse{Volume: s.describe(v)}, nil
	}
	v := &volume{
		ID: id, Name: r.GetName(), Grant: s.grant(),
		Required: r.GetCapacityRange().GetRequiredBytes(), Parameters: r.GetParameters(),
	}
	if err := s.makeData(v); err != nil {
		return nil, status.Errorf(codes.Internal, "making the data of the volume: %v", err)
	}
	s.state.volumes[id] = v
	return &csi.CreateVolumeResponse{Volume: s.describe(v)}, s.save()
}

// DeleteVolume implements csi.ControllerServer.
func (s *Server) DeleteVolume(_ context.Context, r *csi.DeleteVolumeRequest) (*csi.DeleteVolumeResponse, error) {
	if r.GetVolumeId() == "" {
		return nil, invalid("volume_id", "is required")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	v := s.state.volumes[r.GetVolumeId()]
	if v == nil {
		return &csi.DeleteVolumeResponse{}, nil
	}
	if len(s.state.of(v.ID)) > 0 || s.state.staged[v.ID] != nil {
		return nil, status.Error(codes.FailedPrecondition, "volume_id: the volume is in use: unprepare and unstage it first")
	}
	if s.config.Block {
		if err := s.rules.release(s, v, ""); err != nil {
			return nil, err
		}
	}
	// A mount below would be emptied along with the volume.
	mounts, err := mountinfo.GetMounts(mountinfo.PrefixFilter(s.directory(v)))
	if err != nil {
		return nil, status.Errorf(codes.Internal, "reading the mount table: %v", err)
	}
	if len(mounts) > 0 {
		return nil, status.Errorf(codes.FailedPrecondition, "volume_id: something is mounted in the volume, at %s", mounts[0].Mountpoint)
	}
	if err := os.RemoveAll(s.directory(v)); err != nil {
		return nil, status.Errorf(codes.Internal, "removing the data of the volume: %v", err)
	}
	delete(s.state.volumes, v.ID)
	return &csi.DeleteVolumeResponse{}, s.save()
}

// ValidateVolumeCapabilities implements csi.ControllerServer.
func (s *Server) ValidateVolumeCapabilities(_ context.Context, r *csi.ValidateVolumeCapabilitiesRequest) (*csi.ValidateVolumeCapabilitiesResponse, error) {
	switch {
	case r.GetVolumeId() == "":
		return nil, invalid("volume_id", "is required")
	case len(r.GetVolumeCapabilities()) == 0:
		return nil, invalid("volume_capabilities", "is required")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	v := s.state.volumes[r.GetVolumeId()]
	if v == nil {
		return nil, noVolume(r.GetVolumeId())
	}
	for _, c := range r.GetVolumeCapabilities() {
		if why := s.unsupported(c); why != "" {
			return &csi.ValidateVolumeCapabilitiesResponse{Message: "volume_capabilities: " + why}, nil
		}
	}
	if r.GetParameters() != nil && !maps.Equal(r.GetParameters(), v.Parameters) {
		return &csi.ValidateVolumeCapabilitiesResponse{Message: "parameters: are not those of the volume"}, nil
	}
	return &csi.ValidateVolumeCapabilitiesResponse{
		Confirmed: &csi.ValidateVolumeCapabilitiesResponse_Confirmed{
			VolumeContext:      r.GetVolumeContext(),
			VolumeCapabilities: r.GetVolumeCapabilities(),
			Parameters:         r.GetParameters(),
		},
	}, nil
}

// ListVolumes implements csi.ControllerServer.
func (s *Server) ListVolumes(_ context.Context, r *csi.ListVolumesRequest) (*csi.ListVolumesResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	ids, next, err := page(maps.Keys(s.state.volumes), r.GetMaxEntries(), r.GetStartingToken())
	if err != nil {
		return nil, err
	}
	answer := &csi.ListVolumesResponse{NextToken: next}
	for _, id := range ids {
		answer.Entries = append(answer.Entries, &csi.ListVolumesResponse_Entry{Volume: s.describe(s.state.volumes[id])})
	}
	return answer, nil
}

func (s *Server) describe(v *volume) *csi.Volume {
	d := &csi.Volume{VolumeId: v.ID}
	if s.config.Block {
		d.CapacityBytes = v.size()
	}
	return d
}

func (s *Server) makeData(v *volume) error {
	if s.config.Block {
		return s.makeFile(v)
	}
	if err := os.Mkdir(s.directory(v), 0o777); err != nil && !os.IsExist(err) {
		return err
	}
	return nil
}

// directory is where the data of v lies; of a block volume it is a file.
func (s *Server) directory(v *volume) string {
	return filepath.Join(s.config.Grants[v.Grant], v.ID)
}

// unsupported says why a volume of this plugin cannot be used as asked, or
// nothing if it can. Each volume can be used in every mode: there is but one
// node.
func (s *Server) unsupported(c *csi.VolumeCapability) string {
	_, known := csi.VolumeCapability_AccessMode_Mode_name[int32(c.GetAccessMode().GetMode())]
	switch {
	case c.GetMount() == nil && c.GetBlock() == nil:
		return "has no access type"
	case c.GetMount() == nil && !s.config.Block:
		return "asks for a block device; a volume is a directory"
	case c.GetMount().GetFsType() != "" && (!s.config.Block || c.GetMount().GetFsType() != "ext4"):
		return "asks for a filesystem type; a volume is a directory of the node's filesystem"
	case !known || c.GetAccessMode().GetMode() == csi.VolumeCapability_AccessMode_UNKNOWN:
		return "has no access mode"
	default:
		return ""
	}
}

func invalid(field, why string) error {
	return status.Errorf(codes.InvalidArgument, "%s: %s", field, why)
}

func noVolume(id string) error {
	return status.Errorf(codes.NotFound, "volume_id: there is no volume %q", id)
}
