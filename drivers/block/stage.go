package block

import (
	"context"
	"os"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/drivers/block/device"
	"github.com/csi-prepare/csi-prepare/drivers/block/filesystem"
	"github.com/csi-prepare/csi-prepare/drivers/server"
)

// stage is the record of a staged volume, for one boot. Staging attaches the
// volume's file and makes or checks its filesystem; nothing is made at the
// staging path, which is a key and no more.
type stage struct {
	Path string `json:"path"`
	// Type of the filesystem, empty for a block volume.
	Type filesystem.Type `json:"type,omitempty"`
	// Copied is true if another volume may have the same filesystem UUID.
	Copied bool `json:"copied,omitempty"`
	// Loop is the device of a volume that is a file.
	Loop *device.Loop `json:"loop,omitempty"`
	// Done is true from the end of NodeStageVolume to the beginning of
	// NodeUnstageVolume. In between a crash leaves something to end.
	Done bool `json:"done"`
}

func stageKey(volumeID string) server.Key { return server.Key{Volume: volumeID} }

// viewParameters are flags without which the filesystem may not be mounted.
func (s stage) viewParameters() []string {
	if s.Copied && s.Type == filesystem.XFS {
		return []string{"nouuid"} // xfs refuses to mount one UUID twice
	}
	return nil
}

// NodeStageVolume implements csi.NodeServer.
func (d *Driver) NodeStageVolume(ctx context.Context, req *csi.NodeStageVolumeRequest) (*csi.NodeStageVolumeResponse, error) {
	for _, err := range []error{
		server.Required("volume_id", req.GetVolumeId()),
		server.AbsolutePath("staging_target_path", req.GetStagingTargetPath()),
		server.CheckCapability("volume_capability", req.GetVolumeCapability()),
	} {
		if err != nil {
			return nil, err
		}
	}
	return server.Single(ctx, &d.byVolume, req.GetVolumeId(), func(ctx context.Context) (*csi.NodeStageVolumeResponse, error) {
		if err := d.stage(ctx, req); err != nil {
			return nil, refusal(err)
		}
		return &csi.NodeStageVolumeResponse{}, nil
	})
}

func (d *Driver) stage(ctx context.Context, req *csi.NodeStageVolumeRequest) error {
	const field = "volume_capability"
	e, err := d.usable(req.GetVolumeId())
	if err != nil {
		return err
	}
	c := req.GetVolumeCapability()
	if reason := d.supported(c); reason != "" {
		return status.Errorf(codes.FailedPrecondition, "%s.%s", field, reason)
	}
	key := stageKey(req.GetVolumeId())
	s, known, err := d.stages.Get(key)
	if err != nil {
		return err
	}
	if known {
		if err := sameStage(s, req); err != nil {
			return err
		}
	} else {
		s = stage{Path: req.GetStagingTargetPath(), Copied: e.Value.Source != nil}
	}
	if s.Done {
		if _, err := readOptions(field, c, s.Type, false); err != nil {
			return err
		}
		_, err := d.deviceOf(ctx, e, &s)
		return err
	}
	err = d.stageDevice(ctx, &e, &s, c)
	if err != nil {
		// Whatever it was, a repeat begins anew.
		err = also(err, d.endStage(context.WithoutCancel(ctx), key, s))
	}
	return err
}

// sameStage refuses a call that differs from the one that staged.
func sameStage(s stage, req *csi.NodeStageVolumeRequest) error {
	c := req.GetVolumeCapability()
	if s.Path != req.GetStagingTargetPath() {
		return status.Error(codes.FailedPrecondition, "staging_target_path: the volume is staged at another path; use that, or call NodeUnstageVolume with it first")
	}
	t := filesystem.Type(c.GetMount().GetFsType())
	if s.Done && ((c.GetBlock() != nil) != (s.Type == "") || t != "" && t != s.Type) {
		return status.Error(codes.AlreadyExists, "volume_capability: the volume is staged for another access type or filesystem type; call NodeUnstageVolume first")
	}
	return nil
}

// stageDevice attaches the device, brings it to the state the capability asks
// for, and records that.
func (d *Driver) stageDevice(ctx context.Context, e *volumeEntry, s *stage, c *csi.VolumeCapability) error {
	number, err := d.deviceOf(ctx, *e, s)
	if err != nil {
		return err
	}
	if err := d.settle(ctx, e, number.Number); err != nil {
		return err
	}
	if c.GetBlock() != nil {
		// What a consumer of the device does with the filesystem on it is its
		// own business.
		if e.Value.Format != nil {
			e.Value.Format = nil
			if err := d.volumes.Put(e.Key, e.Value); err != nil {
				return err
			}
		}
		s.Type = ""
	} else if s.Type, err = d.ensureFilesystem(ctx, e, number.Number, c); err != nil {
		return err
	}
	if _, err := readOptions("volume_capability", c, s.Type, false); err != nil {
		return err
	}
	s.Done = true
	return d.stages.Put(stageKey(e.Key.Volume), *s)
}

// deviceOf returns the device of a volume that is staged or about to be, and
// attaches it where it is not, or no more: somebody may have detached it.
func (d *Driver) deviceOf(ctx context.Context, e volumeEntry, s *stage) (device.Loop, error) {
	if e.Value.Disk != nil {
		id, err := d.locate(*e.Value.Disk)
		if err == nil && !s.Done {
			err = d.stages.Put(stageKey(e.Key.Volume), *s)
		}
		return device.Loop{Number: id.Number, Diskseq: id.Diskseq}, err
	}
	backing, err := d.files.open(volumeFiles, e.Key.Volume, e.Value.Inode, unix.O_RDWR)
	if err != nil {
		return device.Loop{}, err
	}
	defer backing.Close()
	record := func(l *device.Loop) error {
		s.Loop = l
		return d.stages.Put(stageKey(e.Key.Volume), *s)
	}
	return d.attached(ctx, backing, s.Loop, false, record)
}

// attached returns the loop device l of a file, or attaches one. The record is
// on disk before the device is, with the mark that finds it.
func (d *Driver) attached(ctx context.Context, backing *os.File, l *device.Loop, readonly bool, record func(*device.Loop) error) (device.Loop, error) {
	if l != nil {
		there, err := d.nodes.Attached(*l)
		if err != nil {
			return *l, err
		}
		if there && l.Diskseq != 0 {
			return *l, nil
		}
		found, there, err := d.nodes.Find(*l)
		if err != nil {
			return *l, err
		}
		if there {
			return found, record(&found)
		}
		d.log.Warn("a loop device of this driver is gone; the file is attached anew", "was", l.Number)
	}
	if err := d.unusedByOthers(backing); err != nil {
		return device.Loop{}, err
	}
	fresh, err := device.NewLoop(d.owner, backing, readonly)
	if err != nil {
		return fresh, err
	}
	if err := record(&fresh); err != nil {
		return fresh, err
	}
	before("attach")
	fresh, err = d.nodes.Attach(ctx, fresh, backing)
	if err != nil {
		return fresh, err
	}
	return fresh, record(&fresh)
}

// NodeUnstageVolume implements csi.NodeServer.
func (d *Driver) NodeUnstageVolume(ctx context.Context, req *csi.NodeUnstageVolumeRequest) (*csi.NodeUnstageVolumeResponse, error) {
	for _, err := range []error{
		server.Required("volume_id", req.GetVolumeId()),
		server.AbsolutePath("staging_target_path", req.GetStagingTargetPath()),
	} {
		if err != nil {
			return nil, err
		}
	}
	return server.Single(ctx, &d.byVolume, req.GetVolumeId(), func(ctx context.Context) (*csi.NodeUnstageVolumeResponse, error) {
		if err := d.unstage(ctx, req); err != nil {
			return nil, refusal(err)
		}
		return &csi.NodeUnstageVolumeResponse{}, nil
	})
}

func (d *Driver) unstage(ctx context.Context, req *csi.NodeUnstageVolumeRequest) error {
	key := stageKey(req.GetVolumeId())
	s, known, err := d.stages.Get(key)
	if err != nil {
		return err
	}
	if !known {
		// A volume that never was is NOT_FOUND, one that is not staged is OK.
		e, err := d.find(req.GetVolumeId())
		if err == nil && e.Key.Volume == "" {
			err = errNoVolume
		}
		return err
	}
	if s.Path != req.GetStagingTargetPath() {
		return status.Error(codes.FailedPrecondition, "staging_target_path: the volume is staged at another path; use that")
	}
	prepared, err := d.preparations.Prepared(req.GetVolumeId())
	if err != nil {
		return err
	}
	if prepared {
		return status.Error(codes.FailedPrecondition, "volume_id: the volume is prepared; call NodeUnprepareVolume first, NodeListPreparedVolumes shows where")
	}
	if s.Loop == nil {
		if err := d.unstageDisk(req.GetVolumeId()); err != nil {
			return err
		}
	}
	return d.endStage(ctx, key, s)
}

func (d *Driver) unstageDisk(volumeID string) error {
	e, err := d.find(volumeID)
	if err != nil || e.Value.Disk == nil {
		return err
	}
	if _, err := d.locate(*e.Value.Disk); err != nil {
		d.log.Warn("unstaged a disk that is gone", "volume_id", volumeID, "error", err)
		return nil
	}
	return d.releaseDisk(e)
}

// endStage detaches the device of a stage, whatever the record knows of it,
// and then forgets it. Where the device is in use all stays as it was.
func (d *Driver) endStage(ctx context.Context, key server.Key, s stage) error {
	if s.Loop != nil {
		done := s.Done
		if done {
			// A crash from here on is not to leave a stage without a device.
			s.Done = false
			if err := d.stages.Put(key, s); err != nil {
				return err
			}
		}
		before("detach")
		if err := d.nodes.Detach(ctx, *s.Loop); err != nil {
			if done {
				s.Done = true
				return also(err, d.stages.Put(key, s))
			}
			return err
		}
	}
	return d.stages.Delete(key)
}
