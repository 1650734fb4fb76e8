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

	"github.com/csi-prepare/csi-prepare/drivers/directory"
	"github.com/csi-prepare/csi-prepare/drivers/server"
	prepare "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// NodeGetVolumeStats implements csi.NodeServer. volume_path is the
// prepare_path of a preparation. The figures are those of the filesystem the
// volume lies on, as df shows them in a consumer: only for a volume of a sized
// grant are they its own.
func (d *Driver) NodeGetVolumeStats(ctx context.Context, req *csi.NodeGetVolumeStatsRequest) (*csi.NodeGetVolumeStatsResponse, error) {
	e, err := d.Measured(req)
	if err != nil {
		return nil, err
	}
	return shared(ctx, &d.measuring, "stats of "+e.Key.Volume, func() (*csi.NodeGetVolumeStatsResponse, error) {
		return d.stats(e)
	})
}

func (d *Driver) stats(e entry) (*csi.NodeGetVolumeStatsResponse, error) {
	fd, err := d.OpenVolume(e, unix.O_PATH)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	var st unix.Statfs_t
	if err := unix.Fstatfs(fd, &st); err != nil {
		return nil, fmt.Errorf("statfs: %w", err)
	}
	return directory.Usage(&st), nil
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
	e, err := d.Controller.Check(req)
	if err != nil {
		return err
	}
	performer := req.GetPerformer()
	switch {
	case performer.GetKernel() != prepare.Performer_NODE:
		return status.Error(codes.FailedPrecondition, "performer.kernel: a directory of the node cannot be bound by another kernel; prepare for NODE")
	case !slices.Contains(performer.GetKinds(), prepare.MountKind_MOUNT_KIND_BIND):
		return status.Error(codes.FailedPrecondition, "performer.kinds: this plugin returns MOUNT_KIND_BIND alone; offer it")
	case !slices.Contains(performer.GetGrants(), e.Value.Home):
		return status.Errorf(codes.FailedPrecondition, "performer.grants: the volume lies in grant %s; have the operator give that directory to the CO too, and offer it", e.Value.Home)
	}
	return nil
}

// Specs implements server.Driver: one bind of the volume's directory.
func (d *Driver) Specs(_ context.Context, req *prepare.NodePrepareVolumeRequest) ([]*prepare.MountSpec, error) {
	e, err := d.Usable(req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	g, err := d.grantOf(e.Value.Home)
	if err != nil {
		return nil, status.Error(codes.FailedPrecondition, err.Error())
	}
	// Where the filesystem of a grant is not mounted, the directory is
	// missing: say so here, not in the consumer.
	fd, err := d.OpenVolume(e, unix.O_PATH)
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP), errors.Is(err, unix.EXDEV):
		return nil, status.Errorf(codes.FailedPrecondition, "volume_id: the directory of the volume cannot be reached: %v; is the filesystem of the grant mounted?", err)
	case err != nil:
		return nil, err
	}
	_ = unix.Close(fd)
	a, err := directory.Attributes("volume_capability", req.GetVolumeCapability(), req.GetReadonly())
	if err != nil {
		return nil, err
	}
	return []*prepare.MountSpec{{
		Kind: &prepare.MountSpec_Bind{Bind: &prepare.BindMount{Source: &prepare.PathRef{
			Base:     prepare.PathRef_GRANTED,
			Grant:    g.Name,
			Relative: directory.VolumesDir + "/" + e.Key.Volume,
		}}},
		Attributes:     a,
		IdmapSupported: true,
	}}, nil
}
