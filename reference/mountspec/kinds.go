package mountspec

import (
	"slices"

	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// The widths of a device number in the kernel (include/linux/kdev_t.h): what
// is larger wraps to the number of another device.
const (
	maxMajor = 1<<12 - 1
	maxMinor = 1<<20 - 1
)

// device judges a block device that stands at field.
func (c *check) device(field string, d *BlockDevice) {
	switch {
	case d.Major == 0:
		c.add(requirement.BlockNumbers, field+".major",
			"0, which no block device has: send major and minor as in /sys/class/block/*/dev")
	case d.Major > maxMajor:
		c.add(requirement.BlockNumbers, field+".major",
			"%d is over the kernel's limit of %d: send it as in /sys/class/block/*/dev", d.Major, maxMajor)
	}
	if d.Minor > maxMinor {
		c.add(requirement.BlockNumbers, field+".minor",
			"%d is over the kernel's limit of %d: send it as in /sys/class/block/*/dev", d.Minor, maxMinor)
	}
	if fault := textFault(d.DevicePath); fault != "" {
		c.add(requirement.SpecText, field+".device_path", "%s: send text", fault)
	}
	if len(d.DevicePath) > maxPath {
		c.add(requirement.SpecFieldLength, field+".device_path",
			"%d bytes: at most %d", len(d.DevicePath), maxPath)
	}
}

func (c *check) handle(k *Handle) {
	c.handleID(requirement.HandleID, "handle.handle_id", k.ID)

	const field = "handle.fs_type"
	c.text(field, k.FSType)
	c.length(field, k.FSType, maxText)
	if k.FSType == "" {
		c.add(requirement.HandleFSType, field, "empty: name the filesystem type of the mount that was sent")
	}
	if why, no := forbiddenTypes[k.FSType]; no && !why.asHandle {
		c.add(requirement.HandleFSType, field, "%s is %s: send a mount of the volume", k.FSType, why.reason)
	}
}

func (c *check) fuse(k *FUSE) {
	c.handleID(requirement.FUSEID, "fuse.handle_id", k.ID)
}

// handleID judges the id of a handle or FUSE mount; the two share one space
// of ids within a call.
func (c *check) handleID(id requirement.ID, field, s string) {
	c.text(field, s)
	if fault := idFault(s); fault != "" {
		c.add(id, field, "%s %s: send the id of the handoff, 1 to %d bytes of [A-Za-z0-9._-]",
			show(s), fault, maxHandleID)
		return
	}
	for i := range c.index {
		if handleIDOf(c.specs[i].Kind) == s {
			c.add(id, field, "%s is the id of mount_specs[%d] too: hand each mount over by itself", show(s), i)
		}
	}
}

func handleIDOf(k Kind) string {
	if !kindSet(k) {
		return ""
	}
	switch k := k.(type) {
	case *Handle:
		return k.ID
	case *FUSE:
		return k.ID
	default:
		return ""
	}
}

func (c *check) extension(k *Extension) {
	const field = "extension.type_url"
	c.text(field, k.TypeURL)
	c.length(field, k.TypeURL, maxText)
	if !slices.Contains(c.req.Performer.Extensions, k.TypeURL) {
		c.add(requirement.ExtensionOffered, field,
			"%s is not in performer.extensions: return a kind that is offered, or FAILED_PRECONDITION",
			show(k.TypeURL))
	}
}
