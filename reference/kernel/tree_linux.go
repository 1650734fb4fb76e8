package kernel

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// OpenTree returns an O_PATH descriptor of the mount or directory at path.
// With unix.OPEN_TREE_CLONE in flags it is a new detached mount, with
// unix.AT_RECURSIVE of the whole tree; closing its last descriptor destroys
// it. An empty path is dirfd itself. Links at the end are followed unless
// flags has unix.AT_SYMLINK_NOFOLLOW.
//
// A clone has the attributes and the peer group of its source: narrow it with
// [MountSetattr] before [MoveMount]. open_tree(2); Linux 5.2, cloning detached
// mounts 6.15.
func OpenTree(dirfd int, path string, flags uint) (int, error) {
	p, err := pathPtr(path)
	if err != nil {
		return -1, pathError("open_tree", path, errnoOf(err))
	}
	flags |= unix.O_CLOEXEC
	if path == "" {
		flags |= unix.AT_EMPTY_PATH
	}
	for {
		fd, _, errno := unix.Syscall(unix.SYS_OPEN_TREE, uintptr(dirfd), uintptr(unsafe.Pointer(p)), uintptr(flags))
		if errno == 0 {
			return int(fd), nil
		}
		if errno != unix.EINTR {
			return -1, pathError("open_tree", path, errno)
		}
	}
}

// MoveMountBeneath slides the mount below the one that is on top of the target
// (MOVE_MOUNT_BENEATH); Linux 6.5.
const MoveMountBeneath = 0x200

// MoveMount attaches the mount open at from onto the directory or file open at
// to, both named by descriptor alone, in the mount namespace of the calling
// thread. flags may hold [MoveMountBeneath]. A mount that is attached already
// is moved, with all that is mounted or stacked on it. move_mount(2); Linux 5.2.
func MoveMount(from, to int, flags int) error {
	return MoveMountAt(from, "", to, "", flags)
}

// MoveMountAt is [MoveMount] onto a path relative to a directory descriptor,
// from a path likewise; an empty path is the descriptor itself. Links at the
// end are not followed.
func MoveMountAt(from int, fromPath string, to int, toPath string, flags int) error {
	fp, err := pathPtr(fromPath)
	if err != nil {
		return pathError("move_mount", fromPath, errnoOf(err))
	}
	tp, err := pathPtr(toPath)
	if err != nil {
		return pathError("move_mount", toPath, errnoOf(err))
	}
	if fromPath == "" {
		flags |= unix.MOVE_MOUNT_F_EMPTY_PATH
	}
	if toPath == "" {
		flags |= unix.MOVE_MOUNT_T_EMPTY_PATH
	}
	for {
		_, _, errno := unix.Syscall6(unix.SYS_MOVE_MOUNT, uintptr(from), uintptr(unsafe.Pointer(fp)),
			uintptr(to), uintptr(unsafe.Pointer(tp)), uintptr(flags), 0)
		if errno != unix.EINTR {
			return pathError("move_mount", toPath, errno)
		}
	}
}

// MountSetattr sets and clears attributes (MOUNT_ATTR_ bits), the propagation
// and the id mapping of the mount open at fd; with recursive, of every mount
// below it as well, all or none. Bits that are not named stay as they are; to
// change the access time mode, clear unix.MOUNT_ATTR__ATIME too. Making a
// mount read-only that has a file open for writing is EBUSY. mount_setattr(2);
// Linux 5.12.
func MountSetattr(fd int, attr *unix.MountAttr, recursive bool) error {
	flags := uintptr(unix.AT_EMPTY_PATH)
	if recursive {
		flags |= unix.AT_RECURSIVE
	}
	for {
		_, _, errno := unix.Syscall6(unix.SYS_MOUNT_SETATTR, uintptr(fd), uintptr(unsafe.Pointer(&empty[0])),
			flags, uintptr(unsafe.Pointer(attr)), unix.MOUNT_ATTR_SIZE_VER0, 0)
		if errno != unix.EINTR {
			return callError("mount_setattr", errno)
		}
	}
}

// Unmount is umount2(2) that never follows a link at the end of path. flags 0
// refuses a mount that is in use or has mounts on it (EBUSY), and so does any
// descriptor open on it, an O_PATH one included. What is unmounted is the
// topmost mount at path, whoever made it: look at its unique id first.
func Unmount(path string, flags int) error {
	for {
		err := unix.Unmount(path, flags|unix.UMOUNT_NOFOLLOW)
		if err != unix.EINTR {
			return pathError("umount2", path, errnoOf(err))
		}
	}
}

// ProbeBusy says whether the mount on top at path, which must be the one with
// the unique id want, could be unmounted now: it is busy if something is open
// on it or mounted on it, the caller's own descriptors included. want 0 skips
// that check, where the kernel has no unique ids. Another mount on top, or none,
// is ESTALE.
//
// The probe is umount2(2) with MNT_EXPIRE, which only marks an idle mount; a
// second such call would unmount it unless something has walked through the
// mount in between. The look at the id is that walk, so probing again is safe.
// Another process that probes the same mount in the very same moment can still
// make this call unmount it, which is ENOENT: the mount was idle, and is gone.
func ProbeBusy(path string, want uint64) (busy bool, err error) {
	var st unix.Statx_t
	if errno := statx(unix.AT_FDCWD, path, unix.STATX_MNT_ID_UNIQUE, &st); errno != 0 {
		return false, pathError("statx", path, errno)
	}
	isRoot := st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0 || st.Attributes_mask&unix.STATX_ATTR_MOUNT_ROOT == 0
	if !isRoot || want != 0 && (st.Mask&unix.STATX_MNT_ID_UNIQUE == 0 || st.Mnt_id != want) {
		return false, pathError("umount2", path, unix.ESTALE)
	}
	for {
		switch err := unix.Unmount(path, unix.MNT_EXPIRE|unix.UMOUNT_NOFOLLOW); err {
		case unix.EAGAIN:
			return false, nil
		case unix.EBUSY:
			return true, nil
		case unix.EINTR:
		case nil:
			return false, pathError("umount2", path, unix.ENOENT)
		default:
			return false, pathError("umount2", path, errnoOf(err))
		}
	}
}
