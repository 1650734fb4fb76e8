package kernel

import (
	"sync"

	"golang.org/x/sys/unix"
)

// Probe finds out, once per process, what this process may do with this kernel.
// Every feature is tried on objects that nobody else sees and that are gone
// afterwards: detached mounts, and a private mount namespace on a thread that
// is ended. A feature that exists but is forbidden here, by lack of privilege
// or by a system call filter, counts as lacking.
func Probe() Features { return probed() }

var probed = sync.OnceValue(func() Features {
	result := make(chan Features)
	StartThread(func() {
		var f Features
		// A Goexit or panic must not leave the caller waiting.
		defer func() { result <- f }()
		f.probe()
	})
	return <-result
})

func (f *Features) probe() {
	f.Openat2 = ok(Openat2(unix.AT_FDCWD, "/", unix.OpenHow{
		Flags: unix.O_PATH | unix.O_DIRECTORY, Resolve: unix.RESOLVE_IN_ROOT | resolveStrict,
	}))
	if _, err := UniqueID(unix.AT_FDCWD, "/"); err == nil {
		f.UniqueID = true
	}
	f.probeDetached()
	f.probeNamespace()
}

// ok closes the descriptor of a call that gave one.
func ok(fd int, err error) bool {
	if err != nil {
		return false
	}
	_ = unix.Close(fd)
	return true
}

// probeTmpfs makes a detached tmpfs that is named so that it can be told apart
// should somebody look.
func probeTmpfs(create func(*FSContext) error) (int, error) {
	fs, err := OpenFS("tmpfs")
	if err != nil {
		return -1, err
	}
	defer func() { _ = fs.Close() }()
	if err := fs.SetString("source", "probe"); err != nil {
		return -1, err
	}
	if err := create(fs); err != nil {
		return -1, err
	}
	return fs.Mount(0)
}

func (f *Features) probeDetached() {
	f.CreateExclusive = ok(probeTmpfs((*FSContext).CreateExclusive))
	fd, err := probeTmpfs((*FSContext).Create)
	if err != nil {
		return
	}
	defer unix.Close(fd)
	if root, err := OpenTree(unix.AT_FDCWD, "/", 0); err == nil {
		f.NewMountAPI = true
		_ = unix.Close(root)
	}
	f.MountSetattr = MountSetattr(fd, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_NOSUID}, true) == nil

	clone, err := OpenTree(fd, "", unix.OPEN_TREE_CLONE)
	if err != nil {
		return
	}
	defer unix.Close(clone)
	f.DetachedClone = ok(OpenTree(clone, "", unix.OPEN_TREE_CLONE))
	if unix.Mkdirat(fd, "d", 0o700) == nil {
		f.DetachedTree = MoveMountAt(clone, "", fd, "d", 0) == nil
	}
}

func (f *Features) probeNamespace() {
	own, err := unix.Open("/proc/thread-self/ns/mnt", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err == nil {
		defer unix.Close(own)
		f.probeNSFS(own)
	}
	f.probePidfd()
	if unix.Unshare(unix.CLONE_NEWNS) != nil {
		f.probeListing(own)
		return
	}
	if unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "") != nil {
		return
	}
	f.probeMoves()
	f.probeListing(own)
}

func (f *Features) probeNSFS(own int) {
	if _, err := NSStat(own); err == nil {
		fd, _, err := NextNS(own)
		if err == nil {
			_ = unix.Close(fd)
		}
		f.NSWalk = err == nil || errnoIs(err, unix.ENOENT)
	}
	group, err := unix.FanotifyInit(unix.FAN_CLOEXEC|unix.FAN_NONBLOCK|unix.FAN_REPORT_MNT, unix.O_RDONLY|unix.O_CLOEXEC)
	if err != nil {
		return
	}
	defer unix.Close(group)
	f.MountEvents = unix.FanotifyMark(group, unix.FAN_MARK_ADD|unix.FAN_MARK_MNTNS,
		unix.FAN_MNT_ATTACH|unix.FAN_MNT_DETACH, own, "") == nil
}

func (f *Features) probePidfd() {
	pidfd, err := unix.PidfdOpen(unix.Getpid(), 0)
	if err != nil {
		return
	}
	defer unix.Close(pidfd)
	f.PidfdNS = ok(PidfdMountNS(pidfd))
}

// probeListing runs in the private namespace, where a tmpfs with a source is
// attached if the new mount API is there; own is the namespace left behind.
func (f *Features) probeListing(own int) {
	ids, err := ListMounts(nil, 0, Root, 0)
	f.Listmount = err == nil
	if _, err := NewestMount(0); err == nil {
		f.ListmountReverse = true
	}
	const wanted = StatSuperblock | StatBasic | StatRoot | StatPoint | StatFSType | StatNamespace | StatSource
	for _, id := range ids {
		if s, err := StatMount(0, id, StatAll); err == nil && s.Mask&wanted == wanted {
			f.Statmount = true
			break
		}
	}
	if ns, err := NSID(own); err == nil {
		_, err := ListMounts(nil, ns, Root, 0)
		f.ListmountByNS = err == nil
	}
}

func (f *Features) probeMoves() {
	if !f.NewMountAPI {
		return
	}
	var mounts [3]int
	for i := range mounts {
		fd, err := probeTmpfs((*FSContext).Create)
		if err != nil {
			return
		}
		defer unix.Close(fd)
		mounts[i] = fd
	}
	root, err := OpenTree(unix.AT_FDCWD, "/", 0)
	if err != nil {
		return
	}
	defer unix.Close(root)
	if MoveMount(mounts[0], root, 0) != nil || unix.Mkdirat(mounts[0], "d", 0o700) != nil ||
		MoveMountAt(mounts[1], "", mounts[0], "d", 0) != nil {
		return
	}
	// Named through the covered directory, "d" is the mount on top of it.
	f.MoveBeneath = MoveMountAt(mounts[2], "", mounts[0], "d", MoveMountBeneath) == nil
}
