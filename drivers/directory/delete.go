package directory

import (
	"context"
	"errors"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/drivers/server"
	"github.com/csi-prepare/csi-prepare/drivers/tree"
)

// DeleteVolume implements csi.ControllerServer. Snapshots of the volume stay.
func (d *Controller[T]) DeleteVolume(ctx context.Context, req *csi.DeleteVolumeRequest) (*csi.DeleteVolumeResponse, error) {
	if err := server.Required("volume_id", req.GetVolumeId()); err != nil {
		return nil, err
	}
	return server.Single(ctx, d.config.Flights, req.GetVolumeId(), func(ctx context.Context) (*csi.DeleteVolumeResponse, error) {
		if err := d.remove(ctx, req.GetVolumeId()); err != nil {
			return nil, refusal(err)
		}
		return &csi.DeleteVolumeResponse{}, nil
	})
}

func (d *Controller[T]) remove(ctx context.Context, id string) error {
	// A record that is damaged, here or of a preparation, stops the removal.
	prepared, err := d.preparations.Prepared(id)
	if err != nil {
		return err
	}
	if prepared {
		return status.Error(codes.FailedPrecondition, "volume_id: the volume is prepared; call NodeUnprepareVolume first, NodeListPreparedVolumes shows where")
	}
	e, _, err := d.Find(id)
	if err != nil || e.Key.Volume == "" {
		return err
	}
	if err := d.checkRemovable(e.Value.Home, VolumesDir, id); err != nil {
		return err
	}
	e.Value.Phase = Deleting
	if err := d.volumes.Put(e.Key, e.Value); err != nil {
		return err
	}
	if err := d.removeFrom(ctx, e.Value.Home, VolumesDir, id); err != nil {
		return err
	}
	if err := d.volumes.Delete(e.Key); err != nil {
		return err
	}
	d.config.Driver.Free(id, e.Value)
	return nil
}

// checkRemovable refuses a directory with a mount at or below it, before
// anything is removed.
func (d *Controller[T]) checkRemovable(home, sub, id string) error {
	all, err := d.openAll(home, sub, true)
	if err != nil {
		return err
	}
	defer unix.Close(all)
	fd, err := tree.Open(all, id, unix.O_RDONLY)
	switch {
	case errors.Is(err, unix.ENOENT):
		return nil
	case err != nil:
		return openFailed(err)
	}
	defer unix.Close(fd)
	return tree.CheckNoMount(fd)
}

// removeFrom removes the directory of an id.
func (d *Controller[T]) removeFrom(ctx context.Context, home, sub, id string) error {
	all, err := d.openAll(home, sub, true)
	if err != nil {
		return err
	}
	defer unix.Close(all)
	return tree.Remove(ctx, all, id)
}

// refusal is the status of a call that failed: a mount in the way is for the
// CO to take away.
func refusal(err error) error {
	var mounted *tree.MountError
	if errors.As(err, &mounted) {
		return status.Error(codes.FailedPrecondition, "volume_id: "+err.Error())
	}
	return server.Status(err)
}
