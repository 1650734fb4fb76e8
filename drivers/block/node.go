package block

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/drivers/block/device"
	"github.com/csi-prepare/csi-prepare/drivers/block/filesystem"
	"github.com/csi-prepare/csi-prepare/drivers/server"
)

// NodeGetInfo implements csi.NodeServer.
func (d *Driver) NodeGetInfo(context.Context, *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	return &csi.NodeGetInfoResponse{NodeId: d.config.NodeID, AccessibleTopology: d.topology()}, nil
}

// NodeGetCapabilities implements csi.NodeServer.
func (d *Driver) NodeGetCapabilities(context.Context, *csi.NodeGetCapabilitiesRequest) (*csi.NodeGetCapabilitiesResponse, error) {
	types := []csi.NodeServiceCapability_RPC_Type{
		csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME,
		csi.NodeServiceCapability_RPC_GET_VOLUME_STATS,
		csi.NodeServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
	}
	if d.files != nil {
		types = append(types, csi.NodeServiceCapability_RPC_EXPAND_VOLUME)
	}
	resp := &csi.NodeGetCapabilitiesResponse{}
	for _, t := range types {
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

// volumePath finds the stage of a volume by a volume_path, which is its
// staging path or the prepare_path of a preparation.
func (d *Driver) volumePath(volumeID, path string) (volumeEntry, stage, error) {
	for _, err := range []error{server.Required("volume_id", volumeID), server.Required("volume_path", path)} {
		if err != nil {
			return volumeEntry{}, stage{}, err
		}
	}
	e, err := d.usable(volumeID)
	if err != nil {
		return e, stage{}, server.Status(err)
	}
	s, _, err := d.stages.Get(stageKey(volumeID))
	there := s.Done && s.Path == path
	if err == nil && s.Done && !there {
		there, err = d.preparations.PreparedAt(volumeID, path)
	}
	if err != nil {
		return e, s, server.Status(err)
	}
	if !there {
		return e, s, status.Error(codes.NotFound, "volume_path: the volume is neither staged nor prepared at this path; NodeListPreparedVolumes shows both")
	}
	return e, s, nil
}

// NodeGetVolumeStats implements csi.NodeServer. It waits for no other call.
func (d *Driver) NodeGetVolumeStats(ctx context.Context, req *csi.NodeGetVolumeStatsRequest) (*csi.NodeGetVolumeStatsResponse, error) {
	e, s, err := d.volumePath(req.GetVolumeId(), req.GetVolumePath())
	if err != nil {
		return nil, err
	}
	if s.Type == "" {
		return &csi.NodeGetVolumeStatsResponse{Usage: []*csi.VolumeUsage{{Unit: csi.VolumeUsage_BYTES, Total: e.Value.Capacity}}}, nil
	}
	// A filesystem that does not answer holds up one thread, and no call.
	done := d.measuring.DoChan(e.Key.Volume, func() (any, error) { return d.measure(e, s) })
	select {
	case r := <-done:
		if r.Err != nil {
			return nil, server.Status(r.Err)
		}
		u := r.Val.(filesystem.Usage)
		return &csi.NodeGetVolumeStatsResponse{Usage: []*csi.VolumeUsage{
			{Unit: csi.VolumeUsage_BYTES, Total: u.Total, Used: u.Total - u.Free, Available: u.Available},
			{Unit: csi.VolumeUsage_INODES, Total: u.Files, Used: u.Files - u.FilesFree, Available: u.FilesFree},
		}}, nil
	case <-ctx.Done():
		return nil, server.Status(fmt.Errorf("the filesystem does not answer: %w", ctx.Err()))
	}
}

// measure asks the filesystem where it is mounted, and reads its superblock
// where it is not.
func (d *Driver) measure(e volumeEntry, s stage) (filesystem.Usage, error) {
	dev, err := d.openStaged(e.Key.Volume, s, unix.O_RDONLY)
	if err != nil {
		return filesystem.Usage{}, err
	}
	defer dev.Close()
	number, err := d.numberOf(e.Key.Volume, s)
	if err != nil {
		return filesystem.Usage{}, err
	}
	mounted, err := filesystem.Mounted(number, s.Type)
	if err != nil {
		return filesystem.Usage{}, err
	}
	if !mounted {
		return filesystem.ReadUsage(dev, s.Type)
	}
	v, err := filesystem.Open(dev, s.Type, s.viewParameters()...)
	if err != nil {
		return filesystem.Usage{}, err
	}
	u, err := v.Usage()
	return u, errors.Join(err, v.Close())
}

// openStaged opens the device of a staged volume.
func (d *Driver) openStaged(volumeID string, s stage, flags int) (*os.File, error) {
	if s.Loop == nil {
		number, err := d.numberOf(volumeID, s)
		if err != nil {
			return nil, err
		}
		return d.nodes.Open(number, flags)
	}
	dev, err := d.nodes.OpenLoop(*s.Loop, flags)
	if err == nil && dev == nil {
		err = status.Errorf(codes.FailedPrecondition, "volume_id: %v, somebody detached it; call NodePrepareVolume or NodeStageVolume again", device.ErrGone)
	}
	return dev, err
}

// ControllerExpandVolume implements csi.ControllerServer: it enlarges the
// file, also while it is in use. NodeExpandVolume lets the device and the
// filesystem follow, or the next NodeStageVolume.
func (d *Driver) ControllerExpandVolume(ctx context.Context, req *csi.ControllerExpandVolumeRequest) (*csi.ControllerExpandVolumeResponse, error) {
	if d.files == nil {
		return nil, status.Error(codes.Unimplemented, "disks cannot be expanded")
	}
	if err := server.Required("volume_id", req.GetVolumeId()); err != nil {
		return nil, err
	}
	if req.GetCapacityRange() == nil {
		return nil, server.Invalid("capacity_range", "is required", "set it")
	}
	if err := checkRange(req.GetCapacityRange()); err != nil {
		return nil, err
	}
	if c := req.GetVolumeCapability(); c != nil {
		if err := server.CheckCapability("volume_capability", c); err != nil {
			return nil, err
		}
	}
	return server.Single(ctx, &d.byVolume, req.GetVolumeId(), func(context.Context) (*csi.ControllerExpandVolumeResponse, error) {
		size, err := d.enlarge(req.GetVolumeId(), req.GetCapacityRange())
		if err != nil {
			return nil, refusal(err)
		}
		return &csi.ControllerExpandVolumeResponse{CapacityBytes: size, NodeExpansionRequired: true}, nil
	})
}

func (d *Driver) enlarge(id string, r *csi.CapacityRange) (int64, error) {
	e, err := d.usable(id)
	if err != nil {
		return 0, err
	}
	size, err := d.fileSize(r, e.Value.Capacity)
	if err != nil || size == e.Value.Capacity {
		return size, err
	}
	f, err := d.files.open(volumeFiles, id, e.Value.Inode, unix.O_RDWR)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	before("enlarge the file")
	if err := f.Truncate(size); err != nil {
		return 0, fmt.Errorf("enlarge the file of the volume: %w", err)
	}
	if err := f.Sync(); err != nil {
		return 0, err
	}
	e.Value.Capacity = size
	return size, d.volumes.Put(e.Key, e.Value)
}

// NodeExpandVolume implements csi.NodeServer.
func (d *Driver) NodeExpandVolume(ctx context.Context, req *csi.NodeExpandVolumeRequest) (*csi.NodeExpandVolumeResponse, error) {
	if d.files == nil {
		return nil, status.Error(codes.Unimplemented, "disks cannot be expanded")
	}
	if err := checkRange(req.GetCapacityRange()); err != nil {
		return nil, err
	}
	if _, _, err := d.volumePath(req.GetVolumeId(), req.GetVolumePath()); err != nil {
		return nil, err
	}
	return server.Single(ctx, &d.byVolume, req.GetVolumeId(), func(ctx context.Context) (*csi.NodeExpandVolumeResponse, error) {
		e, s, err := d.volumePath(req.GetVolumeId(), req.GetVolumePath())
		if err == nil {
			err = d.follow(ctx, e, s, req.GetCapacityRange())
		}
		if err != nil {
			return nil, refusal(err)
		}
		return &csi.NodeExpandVolumeResponse{CapacityBytes: e.Value.Capacity}, nil
	})
}

// follow lets the devices of a volume, and the filesystem, take the size of
// its file.
func (d *Driver) follow(ctx context.Context, e volumeEntry, s stage, r *csi.CapacityRange) error {
	if !within(r, e.Value.Capacity) {
		return status.Errorf(codes.OutOfRange, "capacity_range: the volume has %d bytes; call ControllerExpandVolume first", e.Value.Capacity)
	}
	uses, err := d.uses.OfVolume(e.Key.Volume)
	if err != nil {
		return err
	}
	dev, err := d.openStaged(e.Key.Volume, s, unix.O_RDWR)
	if err != nil {
		return err
	}
	defer dev.Close()
	before("enlarge the device")
	if err := d.nodes.Resize(*s.Loop); err != nil {
		return err
	}
	for _, u := range uses {
		if u.Value.Loop == nil {
			continue
		}
		if err := d.nodes.Resize(*u.Value.Loop); err != nil && !errors.Is(err, device.ErrGone) {
			return err
		}
	}
	if s.Type == "" {
		return nil
	}
	before("grow the filesystem")
	err = filesystem.Grow(ctx, dev, s.Loop.Number, s.Type, s.viewParameters()...)
	if errors.Is(err, filesystem.ErrPrivilege) {
		return status.Error(codes.FailedPrecondition, "volume_id: "+err.Error())
	}
	return err
}
