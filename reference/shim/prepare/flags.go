package prepare

import (
	"fmt"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/drivers/server"
	"github.com/csi-prepare/csi-prepare/reference/mountns"
	pb "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

const flagsField = "volume_capability.mount.mount_flags"

// readonlyModes are the access modes that imply readonly.
var readonlyModes = []csi.VolumeCapability_AccessMode_Mode{
	csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY, csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY,
}

// attributeWords are the mount flags that become attributes of the mount spec.
var attributeWords = map[string]func(*pb.MountAttributes){
	"ro":          func(a *pb.MountAttributes) { a.Readonly = true },
	"nosuid":      func(a *pb.MountAttributes) { a.Nosuid = true },
	"nodev":       func(a *pb.MountAttributes) { a.Nodev = true },
	"noexec":      func(a *pb.MountAttributes) { a.Noexec = true },
	"nosymfollow": func(a *pb.MountAttributes) { a.Nosymfollow = true },
	"nodiratime":  func(a *pb.MountAttributes) { a.Nodiratime = true },
	"relatime":    func(a *pb.MountAttributes) { a.Atime = pb.MountAttributes_RELATIME },
	"noatime":     func(a *pb.MountAttributes) { a.Atime = pb.MountAttributes_NOATIME },
	"strictatime": func(a *pb.MountAttributes) { a.Atime = pb.MountAttributes_STRICTATIME },
}

// attributesOf are what readonly and the mount flags come to.
func attributesOf(req *pb.NodePrepareVolumeRequest) (*pb.MountAttributes, error) {
	c := req.GetVolumeCapability()
	a := &pb.MountAttributes{Readonly: req.GetReadonly() || slices.Contains(readonlyModes, c.GetAccessMode().GetMode())}
	for _, flag := range c.GetMount().GetMountFlags() {
		set, known := attributeWords[flag]
		if !known {
			continue
		}
		atime := a.GetAtime()
		set(a)
		if atime != pb.MountAttributes_ATIME_UNSPECIFIED && a.GetAtime() != atime {
			return nil, server.Invalid(flagsField, fmt.Sprintf("%q contradicts another access time flag", flag), "keep one of them")
		}
	}
	if a.GetReadonly() && slices.Contains(c.GetMount().GetMountFlags(), "rw") {
		return nil, server.Invalid(flagsField, `"rw" contradicts a read-only mount`, "leave it out")
	}
	return a, nil
}

// superblockWords are the flags of a superblock that it does not show among its
// options.
var superblockWords = map[string]uint32{"sync": unix.MS_SYNCHRONOUS, "dirsync": unix.MS_DIRSYNC, "lazytime": unix.MS_LAZYTIME}

// unheeded finds a mount flag that the plugin cannot have heeded. What it
// published is a part of a filesystem that was mounted before, so no parameter
// of that is of its choosing but the ones it already has. Of a whole filesystem
// the plugin is believed: the kernel shows parameters by other names, and
// defaults not at all.
func unheeded(m *mountns.Mount, flags []string) (flag string, found bool) {
	if m.Root == "/" {
		return "", false
	}
	shown := strings.Split(m.SBOptions, ",")
	for _, flag := range flags {
		_, isAttribute := attributeWords[flag]
		if isAttribute || flag == "rw" || slices.Contains(shown, flag) || m.SBFlags&superblockWords[flag] != 0 {
			continue
		}
		return flag, true
	}
	return "", false
}
