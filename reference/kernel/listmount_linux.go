package kernel

import (
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Root stands for the root of a namespace where a mount id is wanted
// (LSMT_ROOT): listing it lists every mount the caller may see there.
const Root = ^uint64(0)

const listmountReverse = 1

// mountIDRequest is struct mnt_id_req, version 1.
type mountIDRequest struct {
	size  uint32
	nsFD  uint32
	mount uint64
	param uint64
	ns    uint64
}

// ListMounts appends to dst the unique ids of the mounts below mount, ascending,
// that are greater than after; start with 0. [Root] lists a whole namespace;
// listing below any other mount makes the kernel look at every mount of the
// namespace. ns is a mount namespace id, 0 for the calling thread's own.
//
// The list is exact if nothing is attached or detached meanwhile: ids come in
// several calls when they are more than dst has room for, and a caller that
// needs to know compares a second list. In its own namespace a caller that has
// changed its root sees only what is mounted below that root.
//
// listmount(2); Linux 6.8, other namespaces 6.11.
func ListMounts(dst []uint64, ns, mount, after uint64) ([]uint64, error) {
	req := mountIDRequest{size: unix.MNT_ID_REQ_SIZE_VER1, mount: mount, param: after, ns: ns}
	for {
		if cap(dst)-len(dst) < 1 {
			dst = slices.Grow(dst, max(64, len(dst)))
		}
		room := dst[len(dst):cap(dst)]
		n, errno := listmount(&req, room, 0)
		if errno != 0 {
			return dst, callError("listmount", errno)
		}
		dst = dst[:len(dst)+n]
		if n < len(room) {
			return dst, nil
		}
		req.param = dst[len(dst)-1]
	}
}

// NewestMount returns the greatest unique id in the namespace with id ns, 0 for
// the calling thread's own: that of the mount made last among those attached
// there. Linux 6.12.
func NewestMount(ns uint64) (uint64, error) {
	req := mountIDRequest{size: unix.MNT_ID_REQ_SIZE_VER1, mount: Root, ns: ns}
	var id [1]uint64
	n, errno := listmount(&req, id[:], listmountReverse)
	if errno == 0 && n == 0 {
		errno = unix.ENOENT
	}
	return id[0], callError("listmount", errno)
}

// maxListing is the most ids one listmount(2) may be asked for.
const maxListing = 1_000_000

func listmount(req *mountIDRequest, ids []uint64, flags uintptr) (int, unix.Errno) {
	for {
		n, _, errno := unix.Syscall6(unix.SYS_LISTMOUNT, uintptr(unsafe.Pointer(req)),
			uintptr(unsafe.Pointer(unsafe.SliceData(ids))), uintptr(min(len(ids), maxListing)), flags, 0, 0)
		if errno != unix.EINTR {
			return int(n), errno
		}
	}
}
