package kernel

import (
	"golang.org/x/sys/unix"
)

const quietStatx = unix.AT_STATX_DONT_SYNC | unix.AT_NO_AUTOMOUNT | unix.AT_SYMLINK_NOFOLLOW

// UniqueID returns the unique id of the mount that holds path, relative to the
// directory dirfd; an empty path is dirfd itself, whatever it is open on, also
// a mount that is attached nowhere. The last component is not followed if it
// is a link, and no server is asked, so a dead or hung mount has an id too.
//
// Unique ids are counted over the whole machine from boot, are never used
// again, and stay with a mount from its making through attaching and moving.
// A kernel without them answers ENOTSUP. statx(2), STATX_MNT_ID_UNIQUE; Linux 6.8.
func UniqueID(dirfd int, path string) (uint64, error) {
	id, _, err := uniqueID(dirfd, path)
	return id, err
}

// MountRootID is [UniqueID] that also says whether path is the root of that
// mount, rather than something inside it.
func MountRootID(dirfd int, path string) (id uint64, root bool, err error) {
	return uniqueID(dirfd, path)
}

func uniqueID(dirfd int, path string) (uint64, bool, error) {
	var st unix.Statx_t
	if errno := statx(dirfd, path, unix.STATX_MNT_ID_UNIQUE, &st); errno != 0 {
		return 0, false, pathError("statx", path, errno)
	}
	if st.Mask&unix.STATX_MNT_ID_UNIQUE == 0 {
		return 0, false, pathError("statx", path, unix.ENOTSUP)
	}
	return st.Mnt_id, st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0, nil
}

func statx(dirfd int, path string, mask int, st *unix.Statx_t) unix.Errno {
	flags := quietStatx
	if path == "" {
		flags |= unix.AT_EMPTY_PATH
	}
	for {
		err := unix.Statx(dirfd, path, flags, mask, st)
		if err != unix.EINTR {
			return errnoOf(err)
		}
	}
}

// LinkedMount returns the unique id of the mount that a link of /proc leads to
// (fd/3, cwd), 0 if it leads nowhere or the kernel has no unique ids. Unlike
// [UniqueID] it follows the link.
func LinkedMount(dirfd int, link string) uint64 {
	var st unix.Statx_t
	for {
		err := unix.Statx(dirfd, link, unix.AT_STATX_DONT_SYNC|unix.AT_NO_AUTOMOUNT, unix.STATX_MNT_ID_UNIQUE, &st)
		switch {
		case err == unix.EINTR:
		case err != nil || st.Mask&unix.STATX_MNT_ID_UNIQUE == 0:
			return 0
		default:
			return st.Mnt_id
		}
	}
}
