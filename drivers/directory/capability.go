package directory

import (
	"fmt"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/drivers/server"
	prepare "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// Supported tells why no volume supports a capability, "" if all do. Mount
// flags are not looked at.
func Supported(c *csi.VolumeCapability) (reason string) {
	switch mode := c.GetAccessMode().GetMode(); mode {
	case csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER,
		csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY,
		csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER,
		csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER:
	default:
		return fmt.Sprintf("access_mode: %s is not supported, a volume is on the disk of one node; use a SINGLE_NODE mode", mode)
	}
	if c.GetBlock() != nil {
		return "access_type: block is not supported, a volume is a directory; use mount"
	}
	if c.GetMount().GetFsType() != "" {
		return "fs_type: cannot be chosen for a directory; leave it empty"
	}
	return ""
}

func checkCapability(field string, c *csi.VolumeCapability, readonly bool) (reason string, err error) {
	if reason := Supported(c); reason != "" {
		return reason, nil
	}
	_, err = Attributes(field, c, readonly)
	return "", err
}

// checkCapabilities is for CreateVolume, where all that cannot be honoured is
// INVALID_ARGUMENT.
func (d *Controller[T]) checkCapabilities(caps []*csi.VolumeCapability) error {
	const field = "volume_capabilities"
	if len(caps) == 0 {
		return server.Invalid(field, "is required", "set at least one")
	}
	for i, c := range caps {
		name := fmt.Sprintf("%s[%d]", field, i)
		if err := server.CheckCapability(name, c); err != nil {
			return err
		}
		reason, err := d.config.Capability(name, c, false)
		if reason != "" {
			return status.Errorf(codes.InvalidArgument, "%s.%s", name, reason)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// Check refuses, for server.Driver, a volume that does not exist and a
// capability it does not support.
func (d *Controller[T]) Check(req *prepare.NodePrepareVolumeRequest) (Entry[T], error) {
	const field = "volume_capability"
	e, err := d.Usable(req.GetVolumeId())
	if err != nil {
		return e, err
	}
	reason, err := d.config.Capability(field, req.GetVolumeCapability(), req.GetReadonly())
	if reason != "" {
		return e, status.Errorf(codes.FailedPrecondition, "%s.%s", field, reason)
	}
	return e, err
}

// Attributes are what the mount flags of a capability come to. A word that
// restricts nothing is refused, because the CO may add restrictions, so that
// "dev" or "suid" could not be promised; one that would be a parameter of a
// superblock is, because there is none of the driver's.
func Attributes(field string, c *csi.VolumeCapability, readonly bool) (*prepare.MountAttributes, error) {
	a := &prepare.MountAttributes{Readonly: readonly}
	switch c.GetAccessMode().GetMode() {
	case csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY, csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY:
		a.Readonly = true
	}
	mount := field + ".mount"
	field = mount + ".mount_flags"
	writable := false
	for _, flag := range c.GetMount().GetMountFlags() {
		atime := prepare.MountAttributes_ATIME_UNSPECIFIED
		switch flag {
		case "ro":
			a.Readonly = true
		case "rw":
			writable = true
		case "nosuid":
			a.Nosuid = true
		case "nodev":
			a.Nodev = true
		case "noexec":
			a.Noexec = true
		case "nosymfollow":
			a.Nosymfollow = true
		case "nodiratime":
			a.Nodiratime = true
		case "relatime":
			atime = prepare.MountAttributes_RELATIME
		case "noatime":
			atime = prepare.MountAttributes_NOATIME
		case "strictatime":
			atime = prepare.MountAttributes_STRICTATIME
		default:
			return nil, server.Invalid(field, fmt.Sprintf("%q cannot be honoured for a directory", server.FlagName(flag)),
				"use ro, nosuid, nodev, noexec, nosymfollow, nodiratime and one of relatime, noatime, strictatime")
		}
		if atime != prepare.MountAttributes_ATIME_UNSPECIFIED {
			if a.Atime != prepare.MountAttributes_ATIME_UNSPECIFIED && a.Atime != atime {
				return nil, server.Invalid(field, fmt.Sprintf("%q contradicts another access time flag", flag), "keep one of them")
			}
			a.Atime = atime
		}
	}
	if writable && a.Readonly {
		return nil, server.Invalid(field, `"rw" contradicts a read-only mount`, "leave it out")
	}
	if c.GetMount().GetVolumeMountGroup() != "" {
		return nil, server.Invalid(mount+".volume_mount_group", "cannot be honoured, the files of a directory keep the owner they have",
			"leave it empty and let the CO change the owner, or ask for one with the parameters of CreateVolume where the plugin has such")
	}
	return a, nil
}
