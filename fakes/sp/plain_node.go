package sp

import (
	"context"
	"errors"
	"os"
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// mount binds a directory, with more flags in a second step: the kernel heeds
// none in the first.
func (p *Plain) mount(to, from string, flags uintptr) error {
	if err := unix.Mount(from, to, "", unix.MS_BIND, ""); err != nil {
		return err
	}
	if flags == 0 {
		return nil
	}
	if err := unix.Mount("", to, "", unix.MS_BIND|unix.MS_REMOUNT|flags, ""); err != nil {
		return errors.Join(err, unix.Unmount(to, unix.UMOUNT_NOFOLLOW))
	}
	return nil
}

func (p *Plain) unmount(at string) error {
	err := unix.Unmount(at, unix.UMOUNT_NOFOLLOW)
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
		return nil // it is no mount, or gone
	}
	return err
}

// NodeStageVolume implements csi.NodeServer.
func (p *Plain) NodeStageVolume(_ context.Context, r *csi.NodeStageVolumeRequest) (*csi.NodeStageVolumeResponse, error) {
	switch {
	case !p.config.Staging:
		return nil, status.Error(codes.Unimplemented, "STAGE_UNSTAGE_VOLUME is not a capability of this plugin")
	case r.GetVolumeId() == "":
		return nil, invalid("volume_id", "is required")
	case r.GetStagingTargetPath() == "":
		return nil, invalid("staging_target_path", "is required")
	case r.GetVolumeCapability() == nil:
		return nil, invalid("volume_capability", "is required")
	}
	defer p.rules.lock(p)()
	if p.state.Volumes[r.GetVolumeId()] == nil {
		return nil, noVolume(r.GetVolumeId())
	}
	if why := plainUnsupported(r.GetVolumeCapability()); why != "" {
		return nil, status.Error(codes.FailedPrecondition, "volume_capability: "+why)
	}
	switch p.state.Staged[r.GetVolumeId()] {
	case r.GetStagingTargetPath():
		return &csi.NodeStageVolumeResponse{}, nil
	case "":
	default:
		return nil, status.Error(codes.AlreadyExists, "staging_target_path: the volume is staged at another")
	}
	if err := p.rules.mount(p, r.GetStagingTargetPath(), p.place(r.GetVolumeId()), 0); err != nil {
		return nil, status.Errorf(codes.Internal, "staging the volume: %v", err)
	}
	p.state.Staged[r.GetVolumeId()] = r.GetStagingTargetPath()
	return &csi.NodeStageVolumeResponse{}, p.save()
}

// NodeUnstageVolume implements csi.NodeServer.
func (p *Plain) NodeUnstageVolume(_ context.Context, r *csi.NodeUnstageVolumeRequest) (*csi.NodeUnstageVolumeResponse, error) {
	switch {
	case r.GetVolumeId() == "":
		return nil, invalid("volume_id", "is required")
	case r.GetStagingTargetPath() == "":
		return nil, invalid("staging_target_path", "is required")
	}
	defer p.rules.lock(p)()
	if p.state.Staged[r.GetVolumeId()] != r.GetStagingTargetPath() {
		return &csi.NodeUnstageVolumeResponse{}, nil
	}
	if p.published(r.GetVolumeId()) {
		return nil, status.Error(codes.FailedPrecondition, "volume_id: the volume is published")
	}
	if err := p.rules.unmount(p, r.GetStagingTargetPath()); err != nil {
		return nil, status.Errorf(codes.Internal, "unstaging the volume: %v", err)
	}
	delete(p.state.Staged, r.GetVolumeId())
	return &csi.NodeUnstageVolumeResponse{}, p.save()
}

func (p *Plain) published(volume string) bool {
	for _, is := range p.state.Published {
		if is.Volume == volume {
			return true
		}
	}
	return false
}

// plainFlags are the mount flags that a bind can have.
var plainFlags = map[string]uintptr{
	"ro": unix.MS_RDONLY, "nosuid": unix.MS_NOSUID, "nodev": unix.MS_NODEV, "noexec": unix.MS_NOEXEC, "noatime": unix.MS_NOATIME,
}

// NodePublishVolume implements csi.NodeServer.
func (p *Plain) NodePublishVolume(_ context.Context, r *csi.NodePublishVolumeRequest) (*csi.NodePublishVolumeResponse, error) {
	switch {
	case r.GetVolumeId() == "":
		return nil, invalid("volume_id", "is required")
	case r.GetTargetPath() == "":
		return nil, invalid("target_path", "is required")
	case r.GetVolumeCapability() == nil:
		return nil, invalid("volume_capability", "is required")
	}
	flags := uintptr(0)
	for _, word := range r.GetVolumeCapability().GetMount().GetMountFlags() {
		if plainFlags[word] == 0 {
			return nil, invalid("volume_capability.mount.mount_flags", "holds one that a bind cannot have")
		}
		flags |= plainFlags[word]
	}
	mode := r.GetVolumeCapability().GetAccessMode().GetMode()
	is := &publication{
		Volume: r.GetVolumeId(), Readonly: r.GetReadonly() || readerOnly(r.GetVolumeCapability()),
		Exclusive: mode == csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER,
	}
	if is.Readonly {
		flags |= unix.MS_RDONLY
	}
	defer p.rules.lock(p)()
	return &csi.NodePublishVolumeResponse{}, p.publish(r, is, flags)
}

func (p *Plain) publish(r *csi.NodePublishVolumeRequest, is *publication, flags uintptr) error {
	if p.state.Volumes[r.GetVolumeId()] == nil {
		return noVolume(r.GetVolumeId())
	}
	if why := plainUnsupported(r.GetVolumeCapability()); why != "" {
		return status.Error(codes.FailedPrecondition, "volume_capability: "+why)
	}
	from := p.place(r.GetVolumeId())
	if p.config.Staging {
		if from = p.state.Staged[r.GetVolumeId()]; from == "" || from != r.GetStagingTargetPath() {
			return status.Error(codes.FailedPrecondition, "staging_target_path: the volume is not staged there")
		}
	}
	if was := p.state.Published[r.GetTargetPath()]; was != nil {
		if *was != *is {
			return status.Error(codes.AlreadyExists, "target_path: is taken by a publication with other arguments")
		}
		return nil
	}
	for _, other := range p.state.Published {
		if other.Volume == is.Volume && (is.Exclusive || other.Exclusive) {
			return status.Error(codes.FailedPrecondition, "volume_capability.access_mode: the volume is published already")
		}
	}
	if err := os.Mkdir(r.GetTargetPath(), 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		return status.Errorf(codes.Internal, "making the target: %v", err)
	}
	if err := p.rules.mount(p, r.GetTargetPath(), from, flags); err != nil {
		return status.Errorf(codes.Internal, "publishing the volume: %v", errors.Join(err, os.Remove(r.GetTargetPath())))
	}
	p.state.Published[r.GetTargetPath()] = is
	return p.save()
}

// NodeUnpublishVolume implements csi.NodeServer.
func (p *Plain) NodeUnpublishVolume(_ context.Context, r *csi.NodeUnpublishVolumeRequest) (*csi.NodeUnpublishVolumeResponse, error) {
	switch {
	case r.GetVolumeId() == "":
		return nil, invalid("volume_id", "is required")
	case r.GetTargetPath() == "":
		return nil, invalid("target_path", "is required")
	}
	defer p.rules.lock(p)()
	is := p.state.Published[r.GetTargetPath()]
	if is == nil || is.Volume != r.GetVolumeId() {
		return &csi.NodeUnpublishVolumeResponse{}, nil
	}
	if err := p.rules.unmount(p, r.GetTargetPath()); err != nil {
		return nil, status.Errorf(codes.Internal, "unpublishing the volume: %v", err)
	}
	if err := os.Remove(r.GetTargetPath()); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, status.Errorf(codes.Internal, "removing the target: %v", err)
	}
	delete(p.state.Published, r.GetTargetPath())
	return &csi.NodeUnpublishVolumeResponse{}, p.save()
}

// used returns whether a volume is staged or published at a path.
func (p *Plain) used(volume, path string) bool {
	is := p.state.Published[filepath.Clean(path)]
	return is != nil && is.Volume == volume || path != "" && p.state.Staged[volume] == path
}

// NodeGetVolumeStats implements csi.NodeServer.
func (p *Plain) NodeGetVolumeStats(_ context.Context, r *csi.NodeGetVolumeStatsRequest) (*csi.NodeGetVolumeStatsResponse, error) {
	switch {
	case r.GetVolumeId() == "":
		return nil, invalid("volume_id", "is required")
	case r.GetVolumePath() == "":
		return nil, invalid("volume_path", "is required")
	}
	defer p.rules.lock(p)()
	v := p.state.Volumes[r.GetVolumeId()]
	if v == nil {
		return nil, noVolume(r.GetVolumeId())
	}
	if !p.used(r.GetVolumeId(), r.GetVolumePath()) {
		return nil, status.Error(codes.NotFound, "volume_path: the volume is not there")
	}
	return &csi.NodeGetVolumeStatsResponse{Usage: []*csi.VolumeUsage{{Unit: csi.VolumeUsage_BYTES, Total: v.Capacity, Available: v.Capacity}}}, nil
}

// NodeExpandVolume implements csi.NodeServer.
func (p *Plain) NodeExpandVolume(_ context.Context, r *csi.NodeExpandVolumeRequest) (*csi.NodeExpandVolumeResponse, error) {
	switch {
	case r.GetVolumeId() == "":
		return nil, invalid("volume_id", "is required")
	case r.GetVolumePath() == "":
		return nil, invalid("volume_path", "is required")
	}
	defer p.rules.lock(p)()
	v := p.state.Volumes[r.GetVolumeId()]
	if v == nil {
		return nil, noVolume(r.GetVolumeId())
	}
	if !p.used(r.GetVolumeId(), r.GetVolumePath()) {
		return nil, status.Error(codes.NotFound, "volume_path: the volume is not there")
	}
	return &csi.NodeExpandVolumeResponse{CapacityBytes: v.Capacity}, nil
}
