package fuse

import (
	"context"
	"errors"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/drivers/directory"
	"github.com/csi-prepare/csi-prepare/drivers/server"
	"github.com/csi-prepare/csi-prepare/drivers/tree"
	"github.com/csi-prepare/csi-prepare/reference/handoff"
	prepare "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// NodeGetVolumeStats implements csi.NodeServer. volume_path is the
// prepare_path of a preparation. The figures are those of the filesystem the
// volume lies on, as df shows them in a consumer. No serving process is asked.
func (d *Driver) NodeGetVolumeStats(_ context.Context, req *csi.NodeGetVolumeStatsRequest) (*csi.NodeGetVolumeStatsResponse, error) {
	e, err := d.Measured(req)
	if err != nil {
		return nil, err
	}
	volumes, err := d.open(e.Value.Home)
	if err != nil {
		return nil, server.Status(err)
	}
	defer volumes.Close()
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(volumes.Fd()), &st); err != nil {
		return nil, server.Status(err)
	}
	return directory.Usage(&st), nil
}

// Check implements server.Driver.
func (d *Driver) Check(_ context.Context, req *prepare.NodePrepareVolumeRequest) error {
	if _, err := d.Controller.Check(req); err != nil {
		return err
	}
	performer := req.GetPerformer()
	switch {
	case performer.GetKernel() != prepare.Performer_NODE:
		return status.Error(codes.FailedPrecondition, "performer.kernel: a FUSE mount is of the node's kernel; prepare for NODE")
	case !slices.Contains(performer.GetKinds(), prepare.MountKind_MOUNT_KIND_FUSE):
		return status.Error(codes.FailedPrecondition, "performer.kinds: this plugin returns MOUNT_KIND_FUSE alone; offer it")
	case req.GetHandleSocket() == "":
		return status.Error(codes.FailedPrecondition, "handle_socket: is not set, and MOUNT_KIND_FUSE needs it; listen and set it")
	}
	return nil
}

// Specs implements server.Driver: it sees to it that a process serves the
// preparation and that the CO has what it needs of it.
func (d *Driver) Specs(ctx context.Context, req *prepare.NodePrepareVolumeRequest) ([]*prepare.MountSpec, error) {
	e, err := d.Usable(req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	a, err := directory.Attributes("volume_capability", req.GetVolumeCapability(), req.GetReadonly())
	if err != nil {
		return nil, err
	}
	a.Nosuid, a.Nodev = true, true // the CO gives a FUSE mount both in any case
	home, err := d.home(e.Value.Home)
	if err != nil {
		return nil, status.Error(codes.FailedPrecondition, err.Error())
	}
	volumes, err := d.open(e.Value.Home)
	if err != nil {
		return nil, err
	}
	defer volumes.Close()
	orphans, err := makeOrphans(volumes, e.Key.Volume, req.GetPrepareId())
	if err != nil {
		return nil, err
	}
	handle, err := d.servers.serve(ctx, order{
		Socket: req.GetHandleSocket(), Token: req.GetHandoffToken(),
		Volume: req.GetVolumeId(), Prepare: req.GetPrepareId(),
		Data: home + "/" + e.Key.Volume + "/" + dataDir, Orphans: home + "/" + orphans,
		UID: e.Value.Traits.UID, GID: e.Value.Traits.GID,
	}, req.GetHeldHandles())
	if err != nil {
		return nil, handoffStatus(err)
	}
	return []*prepare.MountSpec{{
		Kind:           &prepare.MountSpec_Fuse{Fuse: &prepare.FuseMount{HandleId: handle, Resumable: true}},
		Attributes:     a,
		IdmapSupported: true,
	}}, nil
}

// makeOrphans makes the directory of a preparation's orphans, and names it
// from the directory of all volumes.
func makeOrphans(volumes interface{ Fd() uintptr }, id, prepareID string) (string, error) {
	fd, err := tree.Open(int(volumes.Fd()), id, unix.O_PATH)
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP), errors.Is(err, unix.EXDEV):
		return "", status.Errorf(codes.FailedPrecondition, "volume_id: the directory of the volume cannot be reached: %v; is its filesystem mounted?", err)
	case err != nil:
		return "", err
	}
	defer unix.Close(fd)
	name := orphansDir + "/" + digest(prepareID)
	if err := unix.Mkdirat(fd, name, 0o700); err != nil && !errors.Is(err, unix.EEXIST) {
		return "", err
	}
	return id + "/" + name, nil
}

// release lets go of what Specs made: it is OK once no process serves.
func (d *Driver) release(ctx context.Context, volumeID, prepareID string) error {
	if err := d.servers.end(ctx, volumeID, prepareID); err != nil {
		return err
	}
	e, _, err := d.Find(volumeID)
	if err != nil || e.Key.Volume == "" {
		return err
	}
	volumes, err := d.open(e.Value.Home)
	if err != nil {
		return err
	}
	defer volumes.Close()
	fd, err := tree.Open(int(volumes.Fd()), e.Key.Volume+"/"+orphansDir, unix.O_RDONLY)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return tree.Remove(ctx, fd, digest(prepareID))
}

// handoffStatus is the status of a call whose handoff came to err.
func handoffStatus(err error) error {
	var refused *handoff.Refusal
	if !errors.As(err, &refused) {
		return err
	}
	switch refused.Code {
	case codes.Internal, codes.Unavailable, codes.DeadlineExceeded, codes.ResourceExhausted:
		return status.Errorf(refused.Code, "handle_socket: the CO answers: %s", refused.Message)
	default:
		return status.Errorf(codes.FailedPrecondition, "handle_socket: the CO answers %s: %s", refused.Code, refused.Message)
	}
}
