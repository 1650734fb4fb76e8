package sp

import (
	"context"
	"os"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// NodeGetInfo implements csi.NodeServer.
func (s *Server) NodeGetInfo(context.Context, *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	return &csi.NodeGetInfoResponse{NodeId: s.config.NodeID}, nil
}

// NodeGetCapabilities implements csi.NodeServer.
func (s *Server) NodeGetCapabilities(context.Context, *csi.NodeGetCapabilitiesRequest) (*csi.NodeGetCapabilitiesResponse, error) {
	types := []csi.NodeServiceCapability_RPC_Type{csi.NodeServiceCapability_RPC_GET_VOLUME_STATS}
	if s.config.Staging {
		types = append(types, csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME)
	}
	if !s.config.LegacyWriters {
		types = append(types, csi.NodeServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER)
	}
	answer := new(csi.NodeGetCapabilitiesResponse)
	for _, t := range types {
		answer.Capabilities = append(answer.Capabilities, &csi.NodeServiceCapability{
			Type: &csi.NodeServiceCapability_Rpc{Rpc: &csi.NodeServiceCapability_RPC{Type: t}},
		})
	}
	return answer, nil
}

// NodeStageVolume implements csi.NodeServer.
func (s *Server) NodeStageVolume(_ context.Context, r *csi.NodeStageVolumeRequest) (*csi.NodeStageVolumeResponse, error) {
	switch {
	case !s.config.Staging:
		return nil, status.Error(codes.Unimplemented, "STAGE_UNSTAGE_VOLUME is not a capability of this plugin")
	case r.GetVolumeId() == "":
		return nil, invalid("volume_id", "is required")
	case r.GetStagingTargetPath() == "":
		return nil, invalid("staging_target_path", "is required")
	case r.GetVolumeCapability() == nil:
		return nil, invalid("volume_capability", "is required")
	}
	kept := proto.CloneOf(r)
	kept.Secrets = nil

	s.mu.Lock()
	defer s.mu.Unlock()
	v := s.state.volumes[r.GetVolumeId()]
	if v == nil {
		return nil, noVolume(r.GetVolumeId())
	}
	if why := s.unsupported(r.GetVolumeCapability()); why != "" {
		return nil, status.Error(codes.FailedPrecondition, "volume_capability: "+why)
	}
	if was := s.state.staged[r.GetVolumeId()]; was != nil {
		if !proto.Equal(was, kept) {
			return nil, status.Error(codes.AlreadyExists, "volume_id: the volume is staged with other arguments")
		}
		return &csi.NodeStageVolumeResponse{}, nil
	}
	if s.config.Block {
		if err := s.stageDevice(v, r.GetVolumeCapability()); err != nil {
			return nil, err
		}
	}
	s.state.staged[r.GetVolumeId()] = kept
	return &csi.NodeStageVolumeResponse{}, s.save()
}

// NodeUnstageVolume implements csi.NodeServer.
func (s *Server) NodeUnstageVolume(_ context.Context, r *csi.NodeUnstageVolumeRequest) (*csi.NodeUnstageVolumeResponse, error) {
	switch {
	case !s.config.Staging:
		return nil, status.Error(codes.Unimplemented, "STAGE_UNSTAGE_VOLUME is not a capability of this plugin")
	case r.GetVolumeId() == "":
		return nil, invalid("volume_id", "is required")
	case r.GetStagingTargetPath() == "":
		return nil, invalid("staging_target_path", "is required")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.state.of(r.GetVolumeId())) > 0 {
		return nil, status.Error(codes.FailedPrecondition, "volume_id: the volume is prepared: unprepare it first")
	}
	if v := s.state.volumes[r.GetVolumeId()]; v != nil && s.config.Block {
		if err := s.rules.release(s, v, ""); err != nil {
			return nil, err
		}
	}
	delete(s.state.staged, r.GetVolumeId())
	return &csi.NodeUnstageVolumeResponse{}, s.save()
}

// NodeGetVolumeStats implements csi.NodeServer. There is no publish path:
// volume_path is the prepare_path or staging path of a living preparation.
func (s *Server) NodeGetVolumeStats(_ context.Context, r *csi.NodeGetVolumeStatsRequest) (*csi.NodeGetVolumeStatsResponse, error) {
	switch {
	case r.GetVolumeId() == "":
		return nil, invalid("volume_id", "is required")
	case r.GetVolumePath() == "":
		return nil, invalid("volume_path", "is required")
	}
	directory, err := s.prepared(r.GetVolumeId(), r.GetVolumePath())
	if err != nil {
		return nil, err
	}
	if s.config.Block {
		info, err := os.Stat(directory)
		if err != nil {
			return nil, internal(err)
		}
		return &csi.NodeGetVolumeStatsResponse{Usage: []*csi.VolumeUsage{{Unit: csi.VolumeUsage_BYTES, Total: info.Size()}}}, nil
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(directory, &fs); err != nil {
		return nil, status.Errorf(codes.Internal, "asking the filesystem of the volume: %v", err)
	}
	size := fs.Bsize
	return &csi.NodeGetVolumeStatsResponse{Usage: []*csi.VolumeUsage{
		{
			Unit:  csi.VolumeUsage_BYTES,
			Total: int64(fs.Blocks) * size, Available: int64(fs.Bavail) * size, Used: int64(fs.Blocks-fs.Bfree) * size,
		},
		{
			Unit:  csi.VolumeUsage_INODES,
			Total: int64(fs.Files), Available: int64(fs.Ffree), Used: int64(fs.Files - fs.Ffree),
		},
	}}, nil
}

// prepared returns the directory of a volume with a living preparation at
// path.
func (s *Server) prepared(id, path string) (string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	v := s.state.volumes[id]
	if v == nil {
		return "", noVolume(id)
	}
	for _, r := range s.state.of(id) {
		if path == r.GetPreparePath() || path == r.GetStagingTargetPath() {
			return s.directory(v), nil
		}
	}
	return "", status.Errorf(codes.NotFound, "volume_path: volume %q is not prepared at %q", id, path)
}
