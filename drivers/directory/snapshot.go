package directory

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/csi-prepare/csi-prepare/drivers/server"
	"github.com/csi-prepare/csi-prepare/drivers/tree"
)

var errNoCopies = status.Error(codes.Unimplemented, "this plugin has no snapshots")

// origin returns the home and the least size of what a volume is made of.
func (d *Controller[T]) origin(s Source) (home string, size int64, err error) {
	switch {
	case s.Snapshot != "":
		e, err := d.usableSnapshot(s.Snapshot)
		return e.Value.Home, e.Value.Size, err
	case s.Volume != "":
		e, err := d.Usable(s.Volume)
		return e.Value.Home, d.config.Driver.Capacity(e.Value), err
	}
	return "", 0, nil
}

func (d *Controller[T]) usableSnapshot(id string) (snapshotEntry, error) {
	e, ok, err := d.findSnapshot(id)
	if err == nil && !ok {
		err = errNoSnapshot
	}
	return e, err
}

// withSource keeps the source of a copy from being changed or deleted.
func (d *Controller[T]) withSource(ctx context.Context, s Source, act func(context.Context) (Entry[T], error)) (Entry[T], error) {
	if s == (Source{}) {
		return act(ctx)
	}
	return server.Single(ctx, d.config.Flights, s.Snapshot+s.Volume, act)
}

// copySource makes the directory of a volume a copy of its source.
func (d *Controller[T]) copySource(ctx context.Context, volumes int, e Entry[T]) error {
	from, err := d.openSource(e.Value.Source)
	if err != nil {
		return err
	}
	defer unix.Close(from)
	if err := tree.Remove(ctx, volumes, e.Key.Volume); err != nil {
		return err
	}
	data, err := d.layOut(volumes, e.Key.Volume)
	if err != nil {
		return err
	}
	defer unix.Close(data)
	if err := tree.Copy(ctx, data, from); err != nil {
		return fmt.Errorf("volume_content_source: %w", err)
	}
	return d.syncAll(volumes, e.Key.Volume)
}

// openSource opens the data of a snapshot or a volume.
func (d *Controller[T]) openSource(s Source) (int, error) {
	if s.Volume != "" {
		return d.openQuiet(s.Volume)
	}
	e, err := d.usableSnapshot(s.Snapshot)
	if err != nil {
		return -1, err
	}
	all, err := d.openAll(e.Value.Home, SnapshotsDir, false)
	if err != nil {
		return -1, err
	}
	defer unix.Close(all)
	fd, err := tree.Open(all, s.Snapshot, unix.O_RDONLY)
	if err != nil {
		return -1, openFailed(err)
	}
	return fd, nil
}

// openQuiet opens the data of a volume that nobody can write to: a tree is not
// copied in one moment, so that a copy of what changes meanwhile would be of
// no moment at all. The caller has the flight of the volume.
func (d *Controller[T]) openQuiet(id string) (int, error) {
	e, err := d.Usable(id)
	if err != nil {
		return -1, err
	}
	writers, err := d.preparations.Writable(id)
	if err != nil {
		return -1, err
	}
	if writers {
		return -1, status.Error(codes.FailedPrecondition, "volume_id: the volume is prepared for writing, and a directory cannot be copied in one moment; copy it when no consumer has it, or only read-only")
	}
	fd, err := d.OpenVolume(e, unix.O_RDONLY)
	if err != nil {
		return -1, err
	}
	if d.config.Layout.Data == "" {
		return fd, nil
	}
	defer unix.Close(fd)
	data, err := tree.Open(fd, d.config.Layout.Data, unix.O_RDONLY)
	if err != nil {
		return -1, openFailed(err)
	}
	return data, nil
}

// CreateSnapshot implements csi.ControllerServer. While the volume is prepared
// for writing it is FAILED_PRECONDITION.
func (d *Controller[T]) CreateSnapshot(ctx context.Context, req *csi.CreateSnapshotRequest) (*csi.CreateSnapshotResponse, error) {
	if !d.config.Copies {
		return nil, errNoCopies
	}
	for _, err := range []error{
		server.Required("source_volume_id", req.GetSourceVolumeId()),
		checkName(req.GetName()),
	} {
		if err != nil {
			return nil, err
		}
	}
	for key := range req.GetParameters() {
		return nil, server.Invalid(fmt.Sprintf("parameters[%q]", key), "is unknown, snapshots have no parameters", "leave it out")
	}
	return server.Single(ctx, &d.byName, "snapshot "+req.GetName(), func(ctx context.Context) (*csi.CreateSnapshotResponse, error) {
		e, err := d.snapshot(ctx, req)
		if err != nil {
			return nil, refusal(err)
		}
		return &csi.CreateSnapshotResponse{Snapshot: describeSnapshot(e)}, nil
	})
}

func (d *Controller[T]) snapshot(ctx context.Context, req *csi.CreateSnapshotRequest) (snapshotEntry, error) {
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
		case e.Value.Phase == Deleting:
			return e, status.Error(codes.Aborted, "the snapshot of this name is being deleted; repeat after DeleteSnapshot was OK")
		case e.Value.Phase == Ready:
			return e, nil
		}
	}
	return server.Single(ctx, d.config.Flights, req.GetSourceVolumeId(), func(ctx context.Context) (snapshotEntry, error) {
		return d.makeSnapshot(ctx, e, req.GetSourceVolumeId())
	})
}

// makeSnapshot copies a volume. What an attempt that was cut off has copied is
// removed: a snapshot is of the moment in which the call is answered.
func (d *Controller[T]) makeSnapshot(ctx context.Context, e snapshotEntry, volumeID string) (snapshotEntry, error) {
	v, err := d.Usable(volumeID)
	if err != nil {
		return e, status.Error(status.Code(server.Status(err)), "source_"+status.Convert(err).Message())
	}
	if e.Value.Phase == "" {
		e.Value = Snapshot{Phase: Creating, Volume: volumeID, Size: d.config.Driver.Capacity(v.Value)}
		if e.Value.Home, err = d.config.Driver.SnapshotHome(v.Value); err != nil {
			return e, err
		}
	}
	from, err := d.openQuiet(volumeID)
	if err != nil {
		return e, err
	}
	defer unix.Close(from)
	if err := d.snapshots.Put(e.Key, e.Value); err != nil {
		return e, errors.Join(err, d.snapshots.Delete(e.Key))
	}
	if err := d.copyIntoSnapshot(ctx, e, from); err != nil {
		return e, d.abandonSnapshot(ctx, e, err)
	}
	e.Value.Phase, e.Value.Created = Ready, time.Now().UTC()
	if err := d.snapshots.Put(e.Key, e.Value); err != nil {
		return e, d.abandonSnapshot(ctx, e, err)
	}
	return e, nil
}

func (d *Controller[T]) copyIntoSnapshot(ctx context.Context, e snapshotEntry, from int) error {
	all, err := d.openAll(e.Value.Home, SnapshotsDir, true)
	if err != nil {
		return err
	}
	defer unix.Close(all)
	if err := tree.Remove(ctx, all, e.Key.Volume); err != nil {
		return err
	}
	if err := makeDir(all, e.Key.Volume); err != nil {
		return err
	}
	to, err := tree.Open(all, e.Key.Volume, unix.O_RDONLY)
	if err != nil {
		return openFailed(err)
	}
	defer unix.Close(to)
	if err := tree.Copy(ctx, to, from); err != nil {
		return err
	}
	return unix.Fsync(all)
}

// abandonSnapshot leaves nothing of a snapshot that failed for a reason, as
// abandon does of a volume.
func (d *Controller[T]) abandonSnapshot(ctx context.Context, e snapshotEntry, reason error) error {
	if ctx.Err() != nil {
		return reason
	}
	if err := d.removeFrom(ctx, e.Value.Home, SnapshotsDir, e.Key.Volume); err != nil {
		return fmt.Errorf("%w; and its directory stays: %w", reason, err)
	}
	if err := d.snapshots.Delete(e.Key); err != nil {
		return fmt.Errorf("%w; and its record stays: %w", reason, err)
	}
	return reason
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

// GetSnapshot implements csi.ControllerServer.
func (d *Controller[T]) GetSnapshot(_ context.Context, req *csi.GetSnapshotRequest) (*csi.GetSnapshotResponse, error) {
	if !d.config.Copies {
		return nil, errNoCopies
	}
	if err := server.Required("snapshot_id", req.GetSnapshotId()); err != nil {
		return nil, err
	}
	e, err := d.usableSnapshot(req.GetSnapshotId())
	if err != nil {
		return nil, server.Status(err)
	}
	return &csi.GetSnapshotResponse{Snapshot: describeSnapshot(e)}, nil
}

// DeleteSnapshot implements csi.ControllerServer. Volumes made from it do not
// need it.
func (d *Controller[T]) DeleteSnapshot(ctx context.Context, req *csi.DeleteSnapshotRequest) (*csi.DeleteSnapshotResponse, error) {
	if !d.config.Copies {
		return nil, errNoCopies
	}
	if err := server.Required("snapshot_id", req.GetSnapshotId()); err != nil {
		return nil, err
	}
	return server.Single(ctx, d.config.Flights, req.GetSnapshotId(), func(ctx context.Context) (*csi.DeleteSnapshotResponse, error) {
		if err := d.removeSnapshot(ctx, req.GetSnapshotId()); err != nil {
			return nil, refusal(err)
		}
		return &csi.DeleteSnapshotResponse{}, nil
	})
}

func (d *Controller[T]) removeSnapshot(ctx context.Context, id string) error {
	e, _, err := d.findSnapshot(id)
	if err != nil || e.Key.Volume == "" {
		return err
	}
	if err := d.checkRemovable(e.Value.Home, SnapshotsDir, id); err != nil {
		return err
	}
	e.Value.Phase = Deleting
	if err := d.snapshots.Put(e.Key, e.Value); err != nil {
		return err
	}
	if err := d.removeFrom(ctx, e.Value.Home, SnapshotsDir, id); err != nil {
		return err
	}
	return d.snapshots.Delete(e.Key)
}
