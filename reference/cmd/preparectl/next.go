package main

import (
	"fmt"
	"slices"
)

// next is the one safe next step. What keeps a mount comes before what keeps
// only its filesystem, and what is nearest to the mount before what is not.
func (e *explanation) next() string {
	point := e.Subject.points()
	free := e.Subject.Device == nil && !slices.ContainsFunc(e.Holds, func(h hold) bool { return h.Keeps == "mount" })
	for _, kind := range []string{
		mountBelow, openFile, mappedFile, program, workingDir, rootDir, loopDevice, swapArea,
		stackedDevice, openDevice, detachedFile, heldNamespace, mountCopy,
	} {
		// Of one kind, what keeps the mount itself comes first.
		for _, keeps := range []string{"mount", "filesystem", "device"} {
			i := slices.IndexFunc(e.Holds, func(h hold) bool { return h.Kind == kind && h.Keeps == keeps })
			switch {
			case i >= 0 && free:
				return "nothing was found to keep the mount itself: umount " + point +
					". To have its filesystem free as well, " + e.Holds[i].release(point)
			case i >= 0:
				return e.Holds[i].release(point)
			}
		}
	}
	switch {
	case e.Answers == answersGone:
		return "umount " + point + ": its server is gone, and that is not what makes a mount busy"
	case e.Answers == answersNot:
		return "umount " + point + ": its server does not answer, and that is not what makes a mount busy" + e.abort()
	case e.Unseen != "":
		return "repeat as root, or when what could not be searched answers; do not unmount lazily: that hides who uses it"
	}
	return "try again what was refused. If it still is busy, look for users inside the kernel (an NFS server, a " +
		"descriptor under way in a socket); do not unmount lazily: that hides who uses it"
}

// abort says how to let go who waits for a FUSE server.
func (e *explanation) abort() string {
	for _, p := range e.Subject.Mounts {
		if p.Mount.FSType == "fuse" {
			return fmt.Sprintf(". If that waits, see to the server, or give up what it has not written: "+
				"echo 1 >/sys/fs/fuse/connections/%d/abort", p.Mount.Minor)
		}
	}
	return ""
}

// release says how one hold ends.
func (h *hold) release(point string) string {
	who := fmt.Sprintf("process %d (%s)", h.PID, h.Command)
	if h.Container != "" {
		who += " of " + h.Container
	}
	if h.record != nil {
		return fmt.Sprintf("take that volume down first: preparectl volume down %s %s", h.record.VolumeID, h.record.PrepareID)
	}
	switch h.Kind {
	case mountBelow:
		return fmt.Sprintf("find out who made the mount at %s and have it unmounted first: preparectl explain-busy %s", h.table.Point, h.table.Point)
	case loopDevice:
		return "unmount what is on " + h.What + ", and detach it: losetup --detach"
	case swapArea:
		return "swapoff " + h.What
	case stackedDevice:
		return "release what is on top first: preparectl explain-busy " + h.What
	case detachedFile:
		return who + " still uses a mount that was unmounted lazily: end it before the device is given away"
	case heldNamespace:
		if h.PID == 0 {
			return fmt.Sprintf("find what keeps mount namespace %d; its mounts go with it, and nothing else takes them away safely", h.Namespace)
		}
		return fmt.Sprintf("have %s close the mount namespace %d: its mounts go with it", who, h.Namespace)
	case mountCopy:
		if h.PID == 0 {
			return fmt.Sprintf("unmount %s as well, if nobody needs it", h.table.Point)
		}
		return fmt.Sprintf("end %s, or have it unmount %s: it has a copy in mount namespace %d", who, h.table.Point, h.Namespace)
	case openDevice:
		return "have " + who + " close the device"
	}
	return fmt.Sprintf("end %s, or have it let go of %s; then unmount %s", who, h.What, point)
}
