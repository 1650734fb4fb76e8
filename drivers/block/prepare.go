package block

import (
	"context"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/drivers/block/device"
	"github.com/csi-prepare/csi-prepare/drivers/block/filesystem"
	"github.com/csi-prepare/csi-prepare/drivers/server"
	prepare "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// use is the record of what one preparation uses, for one boot; its key is
// (volume_id, prepare_id).
type use struct {
	// OtherKernel is true if not the node's kernel performs.
	OtherKernel bool `json:"other_kernel,omitempty"`
	// Parameters of the superblock, sorted.
	Parameters []string `json:"parameters,omitempty"`
	// Loop is the device of a read-only preparation of a block volume.
	Loop *device.Loop `json:"loop,omitempty"`
}

// stagedAt returns the stage of a volume at a path.
func (d *Driver) stagedAt(volumeID, path string) (stage, error) {
	const field = "staging_target_path"
	if path == "" {
		return stage{}, status.Errorf(codes.FailedPrecondition, "%s: is required, this plugin has STAGE_UNSTAGE_VOLUME; call NodeStageVolume, and give its path", field)
	}
	s, known, err := d.stages.Get(stageKey(volumeID))
	switch {
	case err != nil:
		return s, err
	case !known, !s.Done:
		return s, status.Errorf(codes.FailedPrecondition, "%s: the volume is not staged; call NodeStageVolume first", field)
	case s.Path != path:
		return s, status.Errorf(codes.FailedPrecondition, "%s: the volume is staged at another path; use that", field)
	}
	return s, nil
}

// Check implements server.Driver.
func (d *Driver) Check(_ context.Context, req *prepare.NodePrepareVolumeRequest) error {
	const field = "volume_capability"
	if _, err := d.usable(req.GetVolumeId()); err != nil {
		return err
	}
	c := req.GetVolumeCapability()
	if reason := d.supported(c); reason != "" {
		return status.Errorf(codes.FailedPrecondition, "%s.%s", field, reason)
	}
	s, err := d.stagedAt(req.GetVolumeId(), req.GetStagingTargetPath())
	if err != nil {
		return err
	}
	asked := filesystem.Type(c.GetMount().GetFsType())
	switch {
	case (c.GetBlock() != nil) != (s.Type == ""):
		return status.Errorf(codes.FailedPrecondition, "%s.access_type: the volume is staged for the other one; call NodeUnstageVolume and stage it for this", field)
	case asked != "" && asked != s.Type:
		return status.Errorf(codes.FailedPrecondition, "%s.mount.fs_type: the volume has %s; ask for that, or for none", field, s.Type)
	}
	o, err := readOptions(field, c, s.Type, req.GetReadonly())
	if err != nil {
		return err
	}
	if err := checkPerformer(req, s.Type); err != nil {
		return err
	}
	return d.compatible(req, s, o)
}

func checkPerformer(req *prepare.NodePrepareVolumeRequest, t filesystem.Type) error {
	p := req.GetPerformer()
	offers := func(k prepare.MountKind) bool { return slices.Contains(p.GetKinds(), k) }
	switch {
	case t == "" && offers(prepare.MountKind_MOUNT_KIND_BLOCK_DEVICE), t != "" && mountsItself(p, t), t != "" && takesHandle(req):
		return nil
	case t == "":
		return status.Errorf(codes.FailedPrecondition, "performer.kinds: this plugin returns %s alone for this access type; offer it", prepare.MountKind_MOUNT_KIND_BLOCK_DEVICE)
	case offers(prepare.MountKind_MOUNT_KIND_FILESYSTEM):
		return status.Errorf(codes.FailedPrecondition, "performer.fs_types: the volume has %s; offer it", t)
	case offers(prepare.MountKind_MOUNT_KIND_HANDLE):
		return status.Errorf(codes.FailedPrecondition, "handle_socket: is needed for a handle, and the kernel NODE; offer %s instead, or set both", prepare.MountKind_MOUNT_KIND_FILESYSTEM)
	}
	return status.Errorf(codes.FailedPrecondition, "performer.kinds: this plugin returns %s or %s for this access type; offer one of them",
		prepare.MountKind_MOUNT_KIND_FILESYSTEM, prepare.MountKind_MOUNT_KIND_HANDLE)
}

// mountsItself tells whether the CO mounts a filesystem of type t.
func mountsItself(p *prepare.Performer, t filesystem.Type) bool {
	return slices.Contains(p.GetKinds(), prepare.MountKind_MOUNT_KIND_FILESYSTEM) && slices.Contains(p.GetFsTypes(), string(t))
}

// compatible refuses what cannot be together with the other preparations of
// the volume, or with what mounts it.
func (d *Driver) compatible(req *prepare.NodePrepareVolumeRequest, s stage, o options) error {
	other := req.GetPerformer().GetKernel() == prepare.Performer_OTHER
	uses, err := d.uses.OfVolume(req.GetVolumeId())
	if err != nil {
		return err
	}
	for _, u := range uses {
		if u.Key.Name == req.GetPrepareId() {
			continue
		}
		if u.Value.OtherKernel != other {
			return status.Error(codes.FailedPrecondition, "performer.kernel: the volume is prepared for the other kernel, and two kernels would corrupt it; call NodeUnprepareVolume for that first")
		}
		if s.Type != "" && !slices.Equal(u.Value.Parameters, o.rendered()) {
			return status.Errorf(codes.FailedPrecondition, "volume_capability.mount.mount_flags: the volume is prepared with other parameters (%s), and one device has one superblock, whose first mount decides; use the same, or call NodeUnprepareVolume for that first", strings.Join(u.Value.Parameters, ","))
		}
	}
	if !other || s.Type == "" {
		return nil
	}
	number, err := d.numberOf(req.GetVolumeId(), s)
	if err != nil {
		return err
	}
	mounted, err := filesystem.Mounted(number, s.Type)
	if err != nil {
		return err
	}
	if mounted {
		return status.Error(codes.FailedPrecondition, "performer.kernel: the node itself has the volume mounted, and two kernels would corrupt it; unmount it first")
	}
	return nil
}

// numberOf the device of a staged volume.
func (d *Driver) numberOf(volumeID string, s stage) (device.Number, error) {
	if s.Loop != nil {
		return s.Loop.Number, nil
	}
	e, err := d.usable(volumeID)
	if err != nil {
		return device.Number{}, err
	}
	id, err := d.locate(*e.Value.Disk)
	return id.Number, err
}

// Specs implements server.Driver: one spec, for a block volume the device, for
// a mount volume the filesystem on it, or where the CO does not mount that type
// a mount of it.
func (d *Driver) Specs(ctx context.Context, req *prepare.NodePrepareVolumeRequest) ([]*prepare.MountSpec, error) {
	e, err := d.usable(req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	s, err := d.stagedAt(req.GetVolumeId(), req.GetStagingTargetPath())
	if err != nil {
		return nil, err
	}
	o, err := readOptions("volume_capability", req.GetVolumeCapability(), s.Type, req.GetReadonly())
	if err != nil {
		return nil, err
	}
	key := server.Key{Volume: req.GetVolumeId(), Name: req.GetPrepareId()}
	u, known, err := d.uses.Get(key)
	if err != nil {
		return nil, err
	}
	u.OtherKernel = req.GetPerformer().GetKernel() == prepare.Performer_OTHER
	u.Parameters = o.rendered()
	dev, err := d.useDevice(ctx, e, &s, key, &u, o.attributes.GetReadonly())
	if err != nil {
		if !known {
			err = also(err, d.release(context.WithoutCancel(ctx), key.Volume, key.Name))
		}
		return nil, refusal(err)
	}
	blockDevice := &prepare.BlockDevice{Major: dev.Number.Major, Minor: dev.Number.Minor, Diskseq: dev.Diskseq}
	if s.Type == "" {
		return []*prepare.MountSpec{{
			Kind:       &prepare.MountSpec_BlockDevice{BlockDevice: blockDevice},
			Attributes: &prepare.MountAttributes{Readonly: o.attributes.GetReadonly()},
		}}, nil
	}
	for _, flag := range s.viewParameters() {
		if !slices.ContainsFunc(o.parameters, func(p *prepare.FsParameter) bool { return p.GetKey() == flag }) {
			o.parameters = append(o.parameters, &prepare.FsParameter{Key: flag})
		}
	}
	if !mountsItself(req.GetPerformer(), s.Type) {
		if err := d.handOver(ctx, req, s, o); err != nil {
			if !known {
				err = also(err, d.release(context.WithoutCancel(ctx), key.Volume, key.Name))
			}
			return nil, refusal(server.HandoffStatus(err))
		}
		return []*prepare.MountSpec{{
			Kind:           &prepare.MountSpec_Handle{Handle: &prepare.MountHandle{HandleId: handleID, FsType: string(s.Type)}},
			Attributes:     o.attributes,
			IdmapSupported: true,
		}}, nil
	}
	return []*prepare.MountSpec{{
		Kind: &prepare.MountSpec_Filesystem{Filesystem: &prepare.FilesystemMount{
			FsType:     string(s.Type),
			Source:     &prepare.FilesystemMount_Device{Device: blockDevice},
			Parameters: o.parameters,
		}},
		Attributes:     o.attributes,
		IdmapSupported: true,
	}}, nil
}

// useDevice returns the device for a preparation, and has the preparation on
// record before.
func (d *Driver) useDevice(ctx context.Context, e volumeEntry, s *stage, key server.Key, u *use, readonly bool) (device.Loop, error) {
	if err := d.uses.Put(key, *u); err != nil {
		return device.Loop{}, err
	}
	dev, err := d.deviceOf(ctx, e, s)
	if err != nil || s.Type != "" || !readonly {
		return dev, err
	}
	backing, err := d.readable(e, dev)
	if err != nil {
		return dev, err
	}
	defer backing.Close()
	record := func(l *device.Loop) error {
		u.Loop = l
		return d.uses.Put(key, *u)
	}
	return d.attached(ctx, backing, u.Loop, true, record)
}

// readable opens what a read-only device of the volume is attached to.
func (d *Driver) readable(e volumeEntry, dev device.Loop) (*os.File, error) {
	if e.Value.Disk != nil {
		return d.nodes.Open(dev.Number, unix.O_RDONLY)
	}
	return d.files.open(volumeFiles, e.Key.Volume, e.Value.Inode, unix.O_RDONLY)
}

// release ends what a preparation uses of its own.
func (d *Driver) release(ctx context.Context, volumeID, prepareID string) error {
	key := server.Key{Volume: volumeID, Name: prepareID}
	u, known, err := d.uses.Get(key)
	if err != nil || !known {
		return err
	}
	if u.Loop != nil {
		before("detach")
		if err := d.nodes.Detach(ctx, *u.Loop); err != nil {
			return refusal(err)
		}
	}
	return d.uses.Delete(key)
}
