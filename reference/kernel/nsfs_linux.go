package kernel

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// ioctls of nsfs and pidfds that x/sys does not name.
const (
	nsMntGetInfo      = 0x8010b70a
	nsMntGetNext      = 0x8010b70b
	nsMntGetPrev      = 0x8010b70c
	pidfdMntNamespace = 0xff03
)

// NSInfo is struct mnt_ns_info: what the kernel tells of a mount namespace.
type NSInfo struct {
	size uint32
	// Mounts is the number of mounts attached in it, those included that no
	// path leads to.
	Mounts uint32
	// ID never repeats until the next boot. Ids do not tell which namespace
	// was made first: processors take them in batches.
	ID uint64
}

// NSID returns the id of the mount namespace open at fd (NS_GET_MNTNS_ID).
func NSID(fd int) (uint64, error) {
	var id uint64
	_, errno := nsIoctl(fd, unix.NS_GET_MNTNS_ID, unsafe.Pointer(&id))
	return id, callError("ioctl NS_GET_MNTNS_ID", errno)
}

// NSStat returns id and number of mounts of the mount namespace open at fd
// (NS_MNT_GET_INFO; Linux 6.12). It costs less than half a microsecond.
func NSStat(fd int) (NSInfo, error) {
	info := NSInfo{size: unix.MNT_NS_INFO_SIZE_VER0}
	_, errno := nsIoctl(fd, nsMntGetInfo, unsafe.Pointer(&info))
	return info, callError("ioctl NS_MNT_GET_INFO", errno)
}

// NextNS opens the mount namespace with the next greater id, NextNS's mirror
// [PrevNS] the one with the next smaller. Together they reach every mount
// namespace of the machine that is alive, whatever holds it. At the end the
// error is ENOENT; without CAP_SYS_ADMIN over the machine it is EPERM.
// NS_MNT_GET_NEXT; Linux 6.12.
func NextNS(fd int) (int, NSInfo, error) { return neighbour(fd, nsMntGetNext, "ioctl NS_MNT_GET_NEXT") }

// PrevNS is [NextNS] downwards.
func PrevNS(fd int) (int, NSInfo, error) { return neighbour(fd, nsMntGetPrev, "ioctl NS_MNT_GET_PREV") }

func neighbour(fd int, request uintptr, call string) (int, NSInfo, error) {
	info := NSInfo{size: unix.MNT_NS_INFO_SIZE_VER0}
	next, errno := nsIoctl(fd, request, unsafe.Pointer(&info))
	if errno != 0 {
		return -1, NSInfo{}, callError(call, errno)
	}
	return next, info, nil
}

// PidfdMountNS opens the mount namespace of the process or thread behind a
// pidfd, without /proc (PIDFD_GET_MNT_NAMESPACE; Linux 6.11). A process that
// has ended is ESRCH.
func PidfdMountNS(pidfd int) (int, error) {
	fd, errno := nsIoctl(pidfd, pidfdMntNamespace, nil)
	if errno != 0 {
		return -1, callError("ioctl PIDFD_GET_MNT_NAMESPACE", errno)
	}
	return fd, nil
}

func nsIoctl(fd int, request uintptr, arg unsafe.Pointer) (int, unix.Errno) {
	for {
		r, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), request, uintptr(arg))
		if errno != unix.EINTR {
			return int(r), errno
		}
	}
}
