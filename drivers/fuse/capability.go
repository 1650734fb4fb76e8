package fuse

import (
	"fmt"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/drivers/server"
	prepare "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// supported tells why no volume supports a capability, "" if all do. Mount
// flags are not looked at.
func supported(c *csi.VolumeCapability) (reason string) {
	switch mode := c.GetAccessMode().GetMode(); mode {
	case csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER,
		csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY,
		csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER,
		csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER:
	default:
		return fmt.Sprintf("access_mode: %s is not supported, a volume is on one node; use a SINGLE_NODE mode", mode)
	}
	if c.GetBlock() != nil {
		return "access_type: block is not supported, FUSE serves files; use mount"
	}
	if c.GetMount().GetFsType() != "" {
		return "fs_type: cannot be chosen, it is fuse; leave it empty"
	}
	return ""
}

// checkCapabilities is for CreateVolume, where all that cannot be honoured is
// INVALID_ARGUMENT.
func checkCapabilities(caps []*csi.VolumeCapability) error {
	const field = "volume_capabilities"
	if len(caps) == 0 {
		return server.Invalid(field, "is required", "set at least one")
	}
	for i, c := range caps {
		name := fmt.Sprintf("%s[%d]", field, i)
		if err := server.CheckCapability(name, c); err != nil {
			return err
		}
		if reason := supported(c); reason != "" {
			return status.Errorf(codes.InvalidArgument, "%s.%s", name, reason)
		}
		if _, err := attributes(name, c, false); err != nil {
			return err
		}
	}
	return nil
}

// attributes are what the mount flags of a capability come to. A word that
// restricts nothing is refused, because the CO may add restrictions, as is one
// that would be a parameter of the superblock: the CO sets those.
func attributes(field string, c *csi.VolumeCapability, readonly bool) (*prepare.MountAttributes, error) {
	a := &prepare.MountAttributes{
		Readonly: readonly || c.GetAccessMode().GetMode() == csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY,
		// The CO gives a FUSE mount both in any case.
		Nosuid: true, Nodev: true,
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
		case "nosuid", "nodev":
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
			return nil, server.Invalid(field, fmt.Sprintf("%q cannot be honoured by this plugin", server.FlagName(flag)),
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
		return nil, server.Invalid(mount+".volume_mount_group", "cannot be honoured, all files of a volume have the owner it was created with",
			"leave it empty and create the volume with the parameter owner")
	}
	return a, nil
}
