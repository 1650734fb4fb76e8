package prepare

import (
	"context"
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/csi-prepare/csi-prepare/drivers/server"
)

// node serves the calls that have to know of preparations.
type node struct {
	csi.UnimplementedNodeServer
	*service
}

// NodeUnstageVolume implements csi.NodeServer: not before the last Unprepare.
func (n *node) NodeUnstageVolume(ctx context.Context, req *csi.NodeUnstageVolumeRequest) (*csi.NodeUnstageVolumeResponse, error) {
	return unprepared(ctx, n.service, req.GetVolumeId(), func(ctx context.Context) (*csi.NodeUnstageVolumeResponse, error) {
		return n.plugin.NodeUnstageVolume(ctx, req)
	})
}

// NodeGetVolumeStats implements csi.NodeServer: where the CO means a
// preparation the plugin is asked of its publication.
func (n *node) NodeGetVolumeStats(ctx context.Context, req *csi.NodeGetVolumeStatsRequest) (*csi.NodeGetVolumeStatsResponse, error) {
	path, err := n.pluginPath(req.GetVolumeId(), req.GetVolumePath())
	if err != nil {
		return nil, err
	}
	req = proto.CloneOf(req)
	req.VolumePath = path
	return n.plugin.NodeGetVolumeStats(ctx, req)
}

// NodeExpandVolume implements csi.NodeServer, as NodeGetVolumeStats.
func (n *node) NodeExpandVolume(ctx context.Context, req *csi.NodeExpandVolumeRequest) (*csi.NodeExpandVolumeResponse, error) {
	path, err := n.pluginPath(req.GetVolumeId(), req.GetVolumePath())
	if err != nil {
		return nil, err
	}
	req = proto.CloneOf(req)
	req.VolumePath = path
	return n.plugin.NodeExpandVolume(ctx, req)
}

func (n *node) pluginPath(volumeID, path string) (string, error) {
	there, err := n.PreparedAt(volumeID, path)
	if there {
		return filepath.Join(path, targetName), err
	}
	return path, server.Status(err)
}

// controller serves the one call of the controller that has to.
type controller struct {
	csi.UnimplementedControllerServer
	*service
}

// DeleteVolume implements csi.ControllerServer: not before the last Unprepare.
func (c *controller) DeleteVolume(ctx context.Context, req *csi.DeleteVolumeRequest) (*csi.DeleteVolumeResponse, error) {
	return unprepared(ctx, c.service, req.GetVolumeId(), func(ctx context.Context) (*csi.DeleteVolumeResponse, error) {
		return c.controller.DeleteVolume(ctx, req)
	})
}

// unprepared makes a call for a volume that is not prepared.
func unprepared[T any](ctx context.Context, s *service, volumeID string, call func(context.Context) (T, error)) (T, error) {
	return server.Single(ctx, &s.flights, volumeID, func(ctx context.Context) (T, error) {
		var none T
		prepared, err := s.Prepared(volumeID)
		if err != nil {
			return none, server.Status(err)
		}
		if prepared {
			return none, status.Error(codes.FailedPrecondition, "volume_id: the volume is prepared on this node; call NodeUnprepareVolume first, NodeListPreparedVolumes shows for what")
		}
		return call(ctx)
	})
}
