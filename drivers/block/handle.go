package block

import (
	"context"
	"errors"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/drivers/block/filesystem"
	"github.com/csi-prepare/csi-prepare/reference/handoff"
	prepare "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// handleID is that of the one handle of a preparation.
const handleID = "filesystem"

// takesHandle tells whether the CO takes a mount from the driver.
func takesHandle(req *prepare.NodePrepareVolumeRequest) bool {
	p := req.GetPerformer()
	return p.GetKernel() == prepare.Performer_NODE && req.GetHandleSocket() != "" &&
		slices.Contains(p.GetKinds(), prepare.MountKind_MOUNT_KIND_HANDLE)
}

// handOver mounts the filesystem of a volume, attached nowhere, and sends the
// mount to the CO, unless that holds it already. The driver keeps nothing of
// it: the mount is the CO's, and ends with it.
func (d *Driver) handOver(ctx context.Context, req *prepare.NodePrepareVolumeRequest, s stage, o options) (err error) {
	if slices.Contains(req.GetHeldHandles(), handleID) {
		return nil
	}
	dev, err := d.openStaged(req.GetVolumeId(), s, unix.O_RDWR)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, dev.Close()) }()
	// The CO narrows its clones; what all of them have is set here.
	mount, err := filesystem.Detach(dev, s.Type, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV, o.rendered()...)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, mount.Close()) }()
	key := handoff.Key{VolumeID: req.GetVolumeId(), PrepareID: req.GetPrepareId()}
	conn, err := handoff.Dial(ctx, req.GetHandleSocket(), key, req.GetHandoffToken())
	if err != nil {
		return err
	}
	return errors.Join(conn.Offer(ctx, handleID, mount), conn.Close())
}
