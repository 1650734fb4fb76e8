package prepare

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/drivers/server"
	pb "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// targetName is what the plugin is asked to publish at, in prepare_path.
const targetName = "target"

// service is NodePrepare over a plugin that publishes.
type service struct {
	*server.NodePrepare

	plugin     csi.NodeClient
	controller csi.ControllerClient
	socket     string // of the plugin
	claims     claims
	flights    server.Flights
}

// pathKey is where a call to Unprepare keeps its prepare_path.
type pathKey struct{}

// NodeUnprepareVolume implements preparev1alpha1.NodePrepareServer.
func (s *service) NodeUnprepareVolume(ctx context.Context, req *pb.NodeUnprepareVolumeRequest) (*pb.NodeUnprepareVolumeResponse, error) {
	return s.NodePrepare.NodeUnprepareVolume(context.WithValue(ctx, pathKey{}, req.GetPreparePath()), req)
}

// Check implements server.Driver.
func (s *service) Check(_ context.Context, req *pb.NodePrepareVolumeRequest) error {
	if s.claims.stages && req.GetStagingTargetPath() == "" {
		return status.Error(codes.FailedPrecondition, "staging_target_path: is required, the plugin stages; call NodeStageVolume first and name its path")
	}
	p := req.GetPerformer()
	if p.GetKernel() != pb.Performer_NODE {
		return status.Error(codes.FailedPrecondition, "performer.kernel: a plugin that mounts does so in the node's kernel; offer NODE")
	}
	kinds := []pb.MountKind{pb.MountKind_MOUNT_KIND_BLOCK_DEVICE}
	if req.GetVolumeCapability().GetBlock() == nil {
		kinds = []pb.MountKind{pb.MountKind_MOUNT_KIND_HANDLE, pb.MountKind_MOUNT_KIND_BIND}
	}
	if !slices.ContainsFunc(kinds, func(k pb.MountKind) bool { return slices.Contains(p.GetKinds(), k) }) {
		return status.Errorf(codes.FailedPrecondition, "performer.kinds: has none of %v, with one of which this volume is answered", kinds)
	}
	if req.GetVolumeCapability().GetMount().GetVolumeMountGroup() != "" && !s.claims.mountGroup {
		return server.Invalid("volume_capability.mount.volume_mount_group", "cannot be honoured, the plugin does not have VOLUME_MOUNT_GROUP",
			"leave it empty and let the CO change the owner")
	}
	_, err := attributesOf(req)
	return err
}

// Specs implements server.Driver: it forwards the call as a publication.
func (s *service) Specs(ctx context.Context, req *pb.NodePrepareVolumeRequest) ([]*pb.MountSpec, error) {
	target := filepath.Join(req.GetPreparePath(), targetName)
	_, err := s.plugin.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{
		VolumeId: req.GetVolumeId(), PublishContext: req.GetPublishContext(), StagingTargetPath: req.GetStagingTargetPath(),
		TargetPath: target, VolumeCapability: req.GetVolumeCapability(), Readonly: req.GetReadonly(),
		Secrets: req.GetSecrets(), VolumeContext: req.GetVolumeContext(),
	})
	var spec *pb.MountSpec
	if err == nil {
		spec, err = s.answer(ctx, req, target)
	}
	if err == nil {
		return []*pb.MountSpec{spec}, nil
	}
	switch status.Code(server.Status(err)) {
	case codes.Canceled, codes.DeadlineExceeded, codes.Aborted, codes.Unavailable:
		return nil, err
	}
	// What was prepared before stays so: its end is not for this call to bring.
	prepared, known := s.Settled(req.GetVolumeId(), req.GetPrepareId())
	if known != nil || prepared {
		return nil, errors.Join(err, known)
	}
	if back := s.unpublish(context.WithoutCancel(ctx), req.GetVolumeId(), target); back != nil {
		// Not final, so that the preparation stays recorded and its end is
		// asked for.
		return nil, status.Errorf(codes.Aborted, "%s; and taking back what the plugin published failed: %s", status.Convert(err).Message(), status.Convert(back).Message())
	}
	return nil, err
}

// release is the other half of Specs, for a preparation that is not known too.
func (s *service) release(ctx context.Context, volumeID, _ string) error {
	path, _ := ctx.Value(pathKey{}).(string)
	return s.unpublish(ctx, volumeID, filepath.Join(path, targetName))
}

// unpublish has the plugin unpublish, and sees that nothing is left at target.
func (s *service) unpublish(ctx context.Context, volumeID, target string) error {
	_, err := s.plugin.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: volumeID, TargetPath: target})
	if err != nil && status.Code(err) != codes.NotFound {
		return err
	}
	m, err := mountAt(ctx, target)
	switch {
	case errors.Is(err, unix.ENOENT):
		return nil
	case err != nil:
		return err
	case m != nil:
		return status.Errorf(codes.FailedPrecondition, "prepare_path: the plugin unpublished and a %s is still mounted on %s; it is in use, or its unmounting does not reach this mount namespace", m.Type(), targetName)
	}
	// A plugin that leaves what it mounted on is a common one. The directory
	// is empty or stays; a file was made to mount a device on, or is a node.
	info, err := os.Lstat(target)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err == nil && info.IsDir() {
		err = unix.Rmdir(target)
	} else if err == nil && (info.Size() == 0 || info.Mode()&os.ModeSymlink != 0) {
		err = unix.Unlink(target)
	}
	if err != nil {
		return fmt.Errorf("prepare_path: what the plugin left of %s: %w", targetName, err)
	}
	return nil
}
