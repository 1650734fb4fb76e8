package directory

import (
	"context"
	"maps"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/drivers/server"
)

// Node is the part of the Node service that is the same for all drivers: the
// node it is, and that nothing is published.
type Node struct {
	csi.UnimplementedNodeServer
	// ID of the node.
	ID string
	// TopologyKey is the key under which the topology of a volume has it;
	// empty where volumes are reached from every node.
	TopologyKey string
}

// NodeGetInfo implements csi.NodeServer.
func (n Node) NodeGetInfo(context.Context, *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	return &csi.NodeGetInfoResponse{NodeId: n.ID, AccessibleTopology: n.topology()}, nil
}

// NodeGetCapabilities implements csi.NodeServer.
func (n Node) NodeGetCapabilities(context.Context, *csi.NodeGetCapabilitiesRequest) (*csi.NodeGetCapabilitiesResponse, error) {
	resp := &csi.NodeGetCapabilitiesResponse{}
	for _, t := range []csi.NodeServiceCapability_RPC_Type{
		csi.NodeServiceCapability_RPC_GET_VOLUME_STATS,
		csi.NodeServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
	} {
		resp.Capabilities = append(resp.Capabilities, &csi.NodeServiceCapability{Type: &csi.NodeServiceCapability_Rpc{
			Rpc: &csi.NodeServiceCapability_RPC{Type: t},
		}})
	}
	return resp, nil
}

var errPublish = status.Error(codes.Unimplemented, "this plugin mounts nothing: use NodePrepareVolume and NodeUnprepareVolume of csi.prepare.v1alpha1.NodePrepare on the same endpoint")

// NodePublishVolume implements csi.NodeServer: it is UNIMPLEMENTED, which a
// plugin that serves NodePrepare may answer.
func (n Node) NodePublishVolume(context.Context, *csi.NodePublishVolumeRequest) (*csi.NodePublishVolumeResponse, error) {
	return nil, errPublish
}

// NodeUnpublishVolume implements csi.NodeServer, as NodePublishVolume.
func (n Node) NodeUnpublishVolume(context.Context, *csi.NodeUnpublishVolumeRequest) (*csi.NodeUnpublishVolumeResponse, error) {
	return nil, errPublish
}

func (n Node) topology() *csi.Topology {
	if n.TopologyKey == "" {
		return nil
	}
	return &csi.Topology{Segments: map[string]string{n.TopologyKey: n.ID}}
}

// IsHere tells whether a topology means this node.
func (n Node) IsHere(t *csi.Topology) bool {
	return maps.Equal(t.GetSegments(), n.topology().GetSegments())
}

// reachable refuses a topology that leaves out this node.
func (n Node) reachable(r *csi.TopologyRequirement) error {
	if n.TopologyKey == "" {
		return nil
	}
	for _, t := range r.GetRequisite() {
		if n.IsHere(t) {
			return nil
		}
	}
	if len(r.GetRequisite()) == 0 {
		return nil
	}
	return status.Errorf(codes.ResourceExhausted, "accessibility_requirements: volumes of this plugin are on one node, which is not among the requisite ones; add %s=%s", n.TopologyKey, n.ID)
}

// Measured finds the volume that a NodeGetVolumeStats is about. volume_path is
// the prepare_path of a preparation.
func (d *Controller[T]) Measured(req *csi.NodeGetVolumeStatsRequest) (Entry[T], error) {
	for _, err := range []error{
		server.Required("volume_id", req.GetVolumeId()),
		server.Required("volume_path", req.GetVolumePath()),
	} {
		if err != nil {
			return Entry[T]{}, err
		}
	}
	e, err := d.Usable(req.GetVolumeId())
	if err != nil {
		return e, server.Status(err)
	}
	there, err := d.preparations.PreparedAt(req.GetVolumeId(), req.GetVolumePath())
	if err == nil && !there {
		err = status.Error(codes.NotFound, "volume_path: the volume has no preparation with this prepare_path; NodeListPreparedVolumes shows those it has")
	}
	return e, server.Status(err)
}

// Usage is what a filesystem holds, as df shows it in a consumer.
func Usage(st *unix.Statfs_t) *csi.NodeGetVolumeStatsResponse {
	size := st.Frsize
	return &csi.NodeGetVolumeStatsResponse{Usage: []*csi.VolumeUsage{
		{
			Unit: csi.VolumeUsage_BYTES, Total: int64(st.Blocks) * size,
			Used: int64(st.Blocks-st.Bfree) * size, Available: int64(st.Bavail) * size,
		},
		{
			Unit: csi.VolumeUsage_INODES, Total: int64(st.Files),
			Used: int64(st.Files - st.Ffree), Available: int64(st.Ffree),
		},
	}}
}
