package hostpath

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sync/singleflight"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/drivers/server"
	prepare "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// NodeGetInfo implements csi.NodeServer.
func (d *Driver) NodeGetInfo(context.Context, *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	return &csi.NodeGetInfoResponse{NodeId: d.config.NodeID, AccessibleTopology: d.topology()}, nil
}

// NodeGetCapabilities implements csi.NodeServer.
func (d *Driver) NodeGetCapabilities(context.Context, *csi.NodeGetCapabilitiesRequest) (*csi.NodeGetCapabilitiesResponse, error) {
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
func (d *Driver) NodePublishVolume(context.Context, *csi.NodePublishVolumeRequest) (*csi.NodePublishVolumeResponse, error) {
	return nil, errPublish
}

// NodeUnpublishVolume implements csi.NodeServer, as NodePublishVolume.
func (d *Driver) NodeUnpublishVolume(context.Context, *csi.NodeUnpublishVolumeRequest) (*csi.NodeUnpublishVolumeResponse, error) {
	return nil, errPublish
}

// NodeGetVolumeStats implements csi.NodeServer. volume_path is the
// prepare_path of a preparation. The figures are those of the filesystem the
// volume lies on, as df shows them in a consumer: only for a volume of a sized
// grant are they its own.
func (d *Driver) NodeGetVolumeStats(ctx context.Context, req *csi.NodeGetVolumeStatsRequest) (*csi.NodeGetVolumeStatsResponse, error) {
	if err := server.Required("volume_id", req.GetVolumeId()); err != nil {
		return nil, err
	}
	if err := server.Required("volume_path", req.GetVolumePath()); err != nil {
		return nil, err
	}
	e, ok, err := d.find(req.GetVolumeId())
	if err != nil {
		return nil, server.Status(err)
	}
	if !ok {
		return nil, errNoVolume
	}
	there, err := d.preparations.PreparedAt(req.GetVolumeId(), req.GetVolumePath())
	if err != nil {
		return nil, server.Status(err)
	}
	if !there {
		return nil, status.Error(codes.NotFound, "volume_path: the volume has no preparation with this prepare_path; NodeListPreparedVolumes shows those it has")
	}
	return shared(ctx, &d.measuring, "stats of "+e.Key.Volume, func() (*csi.NodeGetVolumeStatsResponse, error) {
		return d.stats(e)
	})
}

func (d *Driver) stats(e entry) (*csi.NodeGetVolumeStatsResponse, error) {
	g, err := d.grantOf(e.Value)
	if err != nil {
		return nil, err
	}
	fd, err := openDir(g, e.Key.Volume, unix.O_PATH)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	s, err := spaceOf(fd)
	if err != nil {
		return nil, err
	}
	return &csi.NodeGetVolumeStatsResponse{Usage: []*csi.VolumeUsage{
		{Unit: csi.VolumeUsage_BYTES, Total: s.total, Used: s.total - s.free, Available: s.available},
		{Unit: csi.VolumeUsage_INODES, Total: s.files, Used: s.files - s.filesFree, Available: s.filesFree},
	}}, nil
}

// shared runs measure unless it runs already for the same question, and waits
// for it no longer than ctx allows.
func shared[T any](ctx context.Context, group *singleflight.Group, question string, measure func() (T, error)) (T, error) {
	var none T
	done := group.DoChan(question, func() (any, error) { return measure() })
	select {
	case r := <-done:
		if r.Err != nil {
			return none, server.Status(r.Err)
		}
		return r.Val.(T), nil
	case <-ctx.Done():
		return none, server.Status(fmt.Errorf("the filesystem does not answer: %w", ctx.Err()))
	}
}

// Check implements server.Driver.
func (d *Driver) Check(_ context.Context, req *prepare.NodePrepareVolumeRequest) error {
	const field = "volume_capability"
	e, ok, err := d.find(req.GetVolumeId())
	if err != nil {
		return err
	}
	if !ok {
		return errNoVolume
	}
	c := req.GetVolumeCapability()
	if reason := supported(c); reason != "" {
		return status.Errorf(codes.FailedPrecondition, "%s.%s", field, reason)
	}
	if _, err := attributes(field, c, req.GetReadonly()); err != nil {
		return err
	}
	performer := req.GetPerformer()
	switch {
	case performer.GetKernel() != prepare.Performer_NODE:
		return status.Error(codes.FailedPrecondition, "performer.kernel: a directory of the node cannot be bound by another kernel; prepare for NODE")
	case !slices.Contains(performer.GetKinds(), prepare.MountKind_MOUNT_KIND_BIND):
		return status.Error(codes.FailedPrecondition, "performer.kinds: this plugin returns MOUNT_KIND_BIND alone; offer it")
	case !slices.Contains(performer.GetGrants(), e.Value.Grant):
		return status.Errorf(codes.FailedPrecondition, "performer.grants: the volume lies in grant %s; have the operator give that directory to the CO too, and offer it", e.Value.Grant)
	}
	return nil
}

// Specs implements server.Driver: one bind of the volume's directory.
func (d *Driver) Specs(_ context.Context, req *prepare.NodePrepareVolumeRequest) ([]*prepare.MountSpec, error) {
	e, ok, err := d.find(req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	if !ok {
		return nil, errNoVolume
	}
	g, err := d.grantOf(e.Value)
	if err != nil {
		return nil, status.Error(codes.FailedPrecondition, err.Error())
	}
	// Where the filesystem of a grant is not mounted, the directory is
	// missing: say so here, not in the consumer.
	fd, err := openDir(g, e.Key.Volume, unix.O_PATH)
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP), errors.Is(err, unix.EXDEV):
		return nil, status.Errorf(codes.FailedPrecondition, "volume_id: the directory of the volume cannot be reached: %v; is the filesystem of the grant mounted?", err)
	case err != nil:
		return nil, err
	}
	_ = unix.Close(fd)
	a, err := attributes("volume_capability", req.GetVolumeCapability(), req.GetReadonly())
	if err != nil {
		return nil, err
	}
	return []*prepare.MountSpec{{
		Kind: &prepare.MountSpec_Bind{Bind: &prepare.BindMount{Source: &prepare.PathRef{
			Base:     prepare.PathRef_GRANTED,
			Grant:    g.Name,
			Relative: volumesDir + "/" + e.Key.Volume,
		}}},
		Attributes:     a,
		IdmapSupported: true,
	}}, nil
}
