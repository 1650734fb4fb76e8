package block

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/csi-prepare/csi-prepare/drivers/block/filesystem"
	"github.com/csi-prepare/csi-prepare/drivers/server"
)

// sourceSize is the least size of a volume that copies s.
func (d *Driver) sourceSize(s *source) (int64, error) {
	switch {
	case s == nil:
		return 0, nil
	case s.Snapshot != "":
		e, err := d.usableSnapshot(s.Snapshot)
		return e.Value.Size, err
	}
	e, err := d.usable(s.Volume)
	return e.Value.Capacity, err
}

func (d *Driver) usableSnapshot(id string) (snapshotEntry, error) {
	e, err := d.findSnapshot(id)
	if err == nil && e.Value.Phase != ready {
		err = errNoSnapshot
	}
	return e, err
}

func (d *Driver) copySnapshot(ctx context.Context, to *os.File, id string) (*format, error) {
	e, err := d.usableSnapshot(id)
	if err != nil {
		return nil, err
	}
	from, err := d.files.open(snapshotFiles, id, e.Value.Inode, unix.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer from.Close()
	shared, err := reflink(to, from)
	if err == nil && !shared {
		err = copyData(ctx, to, from)
	}
	return e.Value.Format, err
}

// copyVolume copies a volume as it is at one moment. The caller has its
// flight. Where blocks cannot be shared, copying takes longer than a moment
// and a volume that is prepared is refused.
func (d *Driver) copyVolume(ctx context.Context, to *os.File, id string) (*format, error) {
	e, err := d.usable(id)
	if err != nil {
		return nil, err
	}
	from, err := d.files.open(volumeFiles, id, e.Value.Inode, unix.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer from.Close()
	if err := d.unusedByOthers(from); err != nil {
		return nil, err
	}
	s, staged, err := d.stages.Get(stageKey(id))
	if err != nil {
		return nil, err
	}
	if staged {
		if err := d.flush(s); err != nil {
			return nil, err
		}
	}
	shared, err := reflink(to, from)
	switch {
	case err != nil, shared:
	case staged:
		err = d.copyStaged(ctx, to, from, id, s)
	default:
		err = copyData(ctx, to, from)
	}
	return e.Value.Format, err
}

// copyStaged copies a volume that is staged and that nobody has prepared or
// mounted: nobody will meanwhile, as the caller has its flight and the device is
// claimed.
func (d *Driver) copyStaged(ctx context.Context, to, from *os.File, id string, s stage) error {
	prepared, err := d.preparations.Prepared(id)
	if err != nil {
		return err
	}
	if prepared {
		return status.Errorf(codes.FailedPrecondition, "volume_id: the volume is prepared, and the filesystem of %s cannot share blocks: a copy would mix what is written meanwhile; call NodeUnprepareVolume first", d.config.Dir)
	}
	dev, err := d.openStaged(id, s, unix.O_RDWR) // its number is no other's now
	if err != nil {
		return err
	}
	defer dev.Close()
	claimed, err := d.nodes.Claim(s.Loop.Number, unix.O_RDWR)
	if err != nil {
		return err
	}
	defer claimed.Close()
	if err := claimed.Sync(); err != nil {
		return err
	}
	return copyData(ctx, to, from)
}

// flush brings to the file what the filesystem and the device hold back, so
// that all that a consumer knows to be written is in a copy.
func (d *Driver) flush(s stage) error {
	if s.Loop == nil {
		return nil
	}
	dev, err := d.nodes.OpenLoop(*s.Loop, unix.O_RDWR)
	if err != nil || dev == nil {
		return err
	}
	defer dev.Close()
	if s.Type != "" {
		mounted, err := filesystem.Mounted(s.Loop.Number, s.Type)
		if err != nil {
			return err
		}
		if mounted {
			v, err := filesystem.Open(dev, s.Type, s.viewParameters()...)
			if err != nil {
				return err
			}
			err = errors.Join(v.Sync(), v.Close())
			if err != nil {
				return err
			}
		}
	}
	return dev.Sync()
}

// CreateSnapshot implements csi.ControllerServer. Of a volume in use it holds
// what a crash at that moment would leave.
func (d *Driver) CreateSnapshot(ctx context.Context, req *csi.CreateSnapshotRequest) (*csi.CreateSnapshotResponse, error) {
	if d.files == nil {
		return nil, status.Error(codes.Unimplemented, "disks have no snapshots")
	}
	for _, err := range []error{
		server.Required("source_volume_id", req.GetSourceVolumeId()),
		checkName(req.GetName()),
		checkParameters(req.GetParameters()),
	} {
		if err != nil {
			return nil, err
		}
	}
	return server.Single(ctx, &d.byName, "snapshot "+req.GetName(), func(ctx context.Context) (*csi.CreateSnapshotResponse, error) {
		e, err := d.snapshot(ctx, req)
		if err != nil {
			return nil, refusal(err)
		}
		return &csi.CreateSnapshotResponse{Snapshot: describeSnapshot(e)}, nil
	})
}

func (d *Driver) snapshot(ctx context.Context, req *csi.CreateSnapshotRequest) (snapshotEntry, error) {
	found, err := d.snapshots.Named(req.GetName())
	if err != nil {
		return snapshotEntry{}, err
	}
	e := snapshotEntry{Key: server.Key{Volume: newID(), Name: req.GetName()}}
	if len(found) > 0 {
		e = found[0]
		switch {
		case e.Value.Volume != req.GetSourceVolumeId():
			return e, status.Error(codes.AlreadyExists, "source_volume_id: the snapshot of this name is of another volume; use another name")
		case e.Value.Phase == deleting:
			return e, status.Error(codes.Aborted, "the snapshot of this name is being deleted; repeat after DeleteSnapshot was OK")
		case e.Value.Phase == ready:
			return e, nil
		}
	}
	return server.Single(ctx, &d.byVolume, req.GetSourceVolumeId(), func(ctx context.Context) (snapshotEntry, error) {
		return d.makeSnapshot(ctx, e, req.GetSourceVolumeId())
	})
}

// makeSnapshot is to a snapshot what makeFile is to a volume. One that a crash
// cut off before it had its name is taken anew, as of now.
func (d *Driver) makeSnapshot(ctx context.Context, e snapshotEntry, volumeID string) (snapshotEntry, error) {
	v, err := d.usable(volumeID)
	if err != nil {
		return e, status.Error(status.Code(err), "source_volume_id: "+status.Convert(err).Message())
	}
	if e.Value.Inode != 0 {
		switch f, err := d.files.open(snapshotFiles, e.Key.Volume, e.Value.Inode, unix.O_RDONLY); {
		case err == nil:
			_ = f.Close()
			e.Value.Phase = ready
			return e, d.snapshots.Put(e.Key, e.Value)
		case !errors.Is(err, unix.ENOENT):
			return e, err
		}
	}
	f, inode, err := d.files.temporary(snapshotFiles)
	if err != nil {
		return e, err
	}
	defer f.Close()
	e.Value = snapshot{Phase: creating, Volume: volumeID, Size: v.Value.Capacity, Created: time.Now().UTC(), Inode: inode}
	if e.Value.Format, err = d.copyVolume(ctx, f, volumeID); err != nil {
		return e, err
	}
	if err := f.Sync(); err != nil {
		return e, err
	}
	// On record before it has a name, and gone with this process until then.
	if err := d.snapshots.Put(e.Key, e.Value); err != nil {
		return e, also(err, d.snapshots.Delete(e.Key))
	}
	if err := d.files.name(snapshotFiles, f, e.Key.Volume); err != nil {
		return e, also(err, d.snapshots.Delete(e.Key))
	}
	e.Value.Phase = ready
	return e, d.snapshots.Put(e.Key, e.Value)
}

func describeSnapshot(e snapshotEntry) *csi.Snapshot {
	return &csi.Snapshot{
		SnapshotId:     e.Key.Volume,
		SourceVolumeId: e.Value.Volume,
		SizeBytes:      e.Value.Size,
		CreationTime:   timestamppb.New(e.Value.Created),
		ReadyToUse:     true,
	}
}

// DeleteSnapshot implements csi.ControllerServer. Volumes made from it do not
// need it.
func (d *Driver) DeleteSnapshot(ctx context.Context, req *csi.DeleteSnapshotRequest) (*csi.DeleteSnapshotResponse, error) {
	if d.files == nil {
		return nil, status.Error(codes.Unimplemented, "disks have no snapshots")
	}
	if err := server.Required("snapshot_id", req.GetSnapshotId()); err != nil {
		return nil, err
	}
	return server.Single(ctx, &d.byVolume, req.GetSnapshotId(), func(context.Context) (*csi.DeleteSnapshotResponse, error) {
		if err := d.removeSnapshot(req.GetSnapshotId()); err != nil {
			return nil, refusal(err)
		}
		return &csi.DeleteSnapshotResponse{}, nil
	})
}

func (d *Driver) removeSnapshot(id string) error {
	e, err := d.findSnapshot(id)
	if err != nil || e.Key.Volume == "" {
		return err
	}
	e.Value.Phase = deleting
	if err := d.snapshots.Put(e.Key, e.Value); err != nil {
		return err
	}
	if err := d.files.remove(snapshotFiles, id, e.Value.Inode); err != nil {
		return fmt.Errorf("snapshot: %w", err)
	}
	return d.snapshots.Delete(e.Key)
}

// ListSnapshots implements csi.ControllerServer.
func (d *Driver) ListSnapshots(_ context.Context, req *csi.ListSnapshotsRequest) (*csi.ListSnapshotsResponse, error) {
	if d.files == nil {
		return nil, status.Error(codes.Unimplemented, "disks have no snapshots")
	}
	records, err := d.snapshots.All()
	if err != nil {
		return nil, server.Status(err)
	}
	var all []*csi.ListSnapshotsResponse_Entry
	positions := map[string]string{}
	for _, e := range records {
		switch {
		case e.Value.Phase != ready,
			req.GetSnapshotId() != "" && req.GetSnapshotId() != e.Key.Volume,
			req.GetSourceVolumeId() != "" && req.GetSourceVolumeId() != e.Value.Volume:
			continue
		}
		all = append(all, &csi.ListSnapshotsResponse_Entry{Snapshot: describeSnapshot(e)})
		positions[e.Key.Volume] = e.Key.Position()
	}
	position := func(e *csi.ListSnapshotsResponse_Entry) string { return positions[e.GetSnapshot().GetSnapshotId()] }
	entries, next, err := server.Page(d.pages, all, position, req.GetMaxEntries(), req.GetStartingToken())
	if err != nil {
		return nil, err
	}
	return &csi.ListSnapshotsResponse{Entries: entries, NextToken: next}, nil
}
