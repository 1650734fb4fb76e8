package kernel

import "strings"

// Features says which parts of the mount interface work here. The zero value
// is a kernel with mount(2), umount2(2) and /proc alone.
//
// Code that has a fallback takes a Features value instead of asking [Probe]
// where it needs to know, so that tests can run the fallback on a kernel that
// would not need it, by clearing fields.
type Features struct {
	// NewMountAPI: fsopen, fsconfig, fsmount, open_tree, move_mount (5.2).
	NewMountAPI bool `json:"newMountAPI"`
	// MountSetattr: mount_setattr(2), recursive attributes (5.12).
	MountSetattr bool `json:"mountSetattr"`
	// Openat2: openat2(2) with its RESOLVE_ flags (5.6).
	Openat2 bool `json:"openat2"`
	// UniqueID: statx(2) tells the 64-bit mount id that is never reused (6.8).
	UniqueID bool `json:"uniqueID"`
	// Listmount: listmount(2) on the caller's namespace (6.8).
	Listmount bool `json:"listmount"`
	// Statmount: statmount(2) with every field package mountns needs,
	// options, subtype and source included (6.13).
	Statmount bool `json:"statmount"`
	// ListmountByNS: listmount(2) and statmount(2) take the id of another
	// mount namespace (6.11).
	ListmountByNS bool `json:"listmountByNS"`
	// ListmountReverse: listmount(2) can start at the newest id (6.12).
	ListmountReverse bool `json:"listmountReverse"`
	// NSWalk: the nsfs ioctls that give a mount namespace's id, its number of
	// mounts and its neighbours (6.12).
	NSWalk bool `json:"nsWalk"`
	// DetachedClone: a detached tree can be cloned again (6.15).
	DetachedClone bool `json:"detachedClone"`
	// DetachedTree: a mount can be attached inside a detached tree (6.15).
	DetachedTree bool `json:"detachedTree"`
	// MountEvents: fanotify reports mounts attached and detached (6.15).
	MountEvents bool `json:"mountEvents"`
	// CreateExclusive: FSCONFIG_CMD_CREATE_EXCL refuses a superblock that
	// exists already (6.6).
	CreateExclusive bool `json:"createExclusive"`
	// MoveBeneath: MOVE_MOUNT_BENEATH (6.5).
	MoveBeneath bool `json:"moveBeneath"`
	// PidfdNS: a pidfd gives its process's mount namespace without /proc
	// (6.11).
	PidfdNS bool `json:"pidfdNS"`
}

// Each calls f for every feature in the order of the struct, with the name
// users see.
func (f Features) Each(do func(name string, have bool)) {
	do("new-mount-api", f.NewMountAPI)
	do("mount-setattr", f.MountSetattr)
	do("openat2", f.Openat2)
	do("unique-id", f.UniqueID)
	do("listmount", f.Listmount)
	do("statmount", f.Statmount)
	do("listmount-by-ns", f.ListmountByNS)
	do("listmount-reverse", f.ListmountReverse)
	do("ns-walk", f.NSWalk)
	do("detached-clone", f.DetachedClone)
	do("detached-tree", f.DetachedTree)
	do("mount-events", f.MountEvents)
	do("create-exclusive", f.CreateExclusive)
	do("move-beneath", f.MoveBeneath)
	do("pidfd-ns", f.PidfdNS)
}

// String lists the features in order, those lacking with a leading "no-".
func (f Features) String() string {
	var b strings.Builder
	f.Each(func(name string, have bool) {
		if b.Len() > 0 {
			b.WriteByte(' ')
		}
		if !have {
			b.WriteString("no-")
		}
		b.WriteString(name)
	})
	return b.String()
}
