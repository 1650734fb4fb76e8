package kernel

import (
	"golang.org/x/sys/unix"
)

// Facts is what one statx(2) tells of an open file without asking a server.
type Facts struct {
	// MountID is the unique id of the mount the file is on, or the small one
	// of mountinfo where the kernel has no unique ids.
	MountID uint64
	// MountRoot says that the file is the root of that mount.
	MountRoot bool
	// Mode holds the file type and the permission bits.
	Mode uint32
	// Inode and the device name the file within the boot.
	Inode              uint64
	DevMajor, DevMinor uint32
	// RdevMajor and RdevMinor are the device a device node stands for.
	RdevMajor, RdevMinor uint32
	// Size is in bytes; Links counts the names of the file.
	Size  uint64
	Links uint32
}

// FactsOf reads the Facts of path relative to dirfd; an empty path is dirfd
// itself, also if it is a mount that is attached nowhere. The last component
// is not followed if it is a link. What a network or FUSE filesystem answers
// is what the node already knows of the file. unique says which mount id is
// wanted. statx(2); Linux 5.8 for the small id, 6.8 for the unique one.
func FactsOf(dirfd int, path string, unique bool) (Facts, error) {
	const wanted = unix.STATX_TYPE | unix.STATX_MODE | unix.STATX_INO | unix.STATX_SIZE | unix.STATX_NLINK
	id := unix.STATX_MNT_ID
	if unique {
		id = unix.STATX_MNT_ID_UNIQUE
	}
	var st unix.Statx_t
	if errno := statx(dirfd, path, wanted|id, &st); errno != 0 {
		return Facts{}, pathError("statx", path, errno)
	}
	if st.Mask&uint32(id) == 0 {
		return Facts{}, pathError("statx", path, unix.ENOTSUP)
	}
	return Facts{
		MountID:   st.Mnt_id,
		MountRoot: st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0,
		Mode:      uint32(st.Mode),
		Inode:     st.Ino,
		DevMajor:  st.Dev_major, DevMinor: st.Dev_minor,
		RdevMajor: st.Rdev_major, RdevMinor: st.Rdev_minor,
		Size: st.Size, Links: st.Nlink,
	}, nil
}
