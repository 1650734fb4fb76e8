package main

import (
	"context"
	"errors"
	"path/filepath"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
	"github.com/csi-prepare/csi-prepare/reference/mountns"
)

// callsAlone names the variants that make the system calls of the product, one
// after another with every argument known beforehand, and nothing else: what
// resolving in root, verifying and exact undo cost in this kernel, whoever
// asks for them. Where these miss a goal, no code above them can reach it.
const callsAlone = "its system calls alone"

// calls makes system calls until one fails.
type calls struct{ err error }

func (c *calls) do(err error) {
	if c.err == nil {
		c.err = err
	}
}

func (c *calls) open(dir int, path string, flags, resolve uint64) int {
	fd, err := kernel.Openat2(dir, path, unix.OpenHow{
		Flags: flags | unix.O_PATH | unix.O_NOFOLLOW, Resolve: resolve | unix.RESOLVE_NO_MAGICLINKS,
	})
	c.do(err)
	return fd
}

func (c *calls) facts(fd int, name string) uint64 {
	f, err := kernel.FactsOf(fd, name, true)
	c.do(err)
	return f.MountID
}

func (c *calls) stat(id, mask uint64) {
	_, err := kernel.StatMount(0, id, mask)
	c.do(err)
}

// gone looks for a mount that must not be there any more.
func (c *calls) gone(id uint64) {
	if _, err := kernel.StatMount(0, id, statWhere); !errors.Is(err, unix.ENOENT) {
		c.do(err)
	}
}

const (
	statPlace = kernel.StatBasic | kernel.StatFSType | kernel.StatNamespace
	statWhere = kernel.StatBasic | kernel.StatPoint | kernel.StatNamespace
	statWhole = statWhere | kernel.StatSuperblock | kernel.StatFSType
)

// clone makes a narrowed detached bind of name below base.
func (c *calls) clone(base int, name string) (source, mount int, id uint64) {
	source = c.open(base, name, 0, unix.RESOLVE_BENEATH|unix.RESOLVE_NO_SYMLINKS)
	mount, err := kernel.OpenTree(source, "", unix.OPEN_TREE_CLONE)
	c.do(err)
	c.do(kernel.MountSetattr(mount, &unix.MountAttr{
		Attr_set:    unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV,
		Propagation: unix.MS_PRIVATE,
	}, false))
	return source, mount, c.facts(mount, "")
}

// attach moves a detached mount onto what at leads to in dir.
func (c *calls) attach(mount, dir int, at string, resolve uint64) (target int) {
	target = c.open(dir, at, 0, resolve)
	c.stat(c.facts(target, ""), statPlace)
	c.do(kernel.MoveMount(mount, target, 0))
	return target
}

// take unmounts the mount with the id, known to be at name in dir.
func (c *calls) take(id uint64, dir, name string) {
	c.stat(id, statWhere)
	fd := c.open(unix.AT_FDCWD, dir, unix.O_DIRECTORY, unix.RESOLVE_NO_SYMLINKS)
	c.poll()
	c.facts(fd, name)
	place := "/proc/self/fd/" + strconv.Itoa(fd) + "/" + name
	c.expire(place)
	c.poll()
	c.do(unix.Unmount(place, unix.MNT_EXPIRE|unix.UMOUNT_NOFOLLOW))
	c.do(unix.Close(fd))
	c.gone(id)
}

// poll is the look at whether the mount table has changed.
func (c *calls) poll() {
	_, err := unix.Ppoll(nil, &unix.Timespec{}, nil)
	c.do(err)
}

// expire marks an idle mount.
func (c *calls) expire(place string) {
	if err := unix.Unmount(place, unix.MNT_EXPIRE|unix.UMOUNT_NOFOLLOW); err != unix.EAGAIN {
		c.do(err)
	}
}

// close closes each row of neighbours by one call.
func (c *calls) close(fds []int) {
	slices.Sort(fds)
	for first := 0; first < len(fds); {
		last := first
		for last+1 < len(fds) && fds[last+1] == fds[last]+1 {
			last++
		}
		c.do(unix.CloseRange(uint(fds[first]), uint(fds[last]), 0))
		first = last + 1
	}
}

// bindCalls are those of one bind of "data" in grant at a path in root, a
// descriptor or AT_FDCWD for the path as it is; below is the directory of the
// target, for the undo.
func bindCalls(grant string, root int, at, below string) Variant {
	var id uint64
	resolve := uint64(unix.RESOLVE_NO_SYMLINKS)
	if root != unix.AT_FDCWD {
		resolve |= unix.RESOLVE_IN_ROOT
	}
	return Variant{
		Name: callsAlone,
		Perform: func() error {
			var c calls
			base := c.open(unix.AT_FDCWD, grant, unix.O_DIRECTORY, 0)
			source, mount, made := c.clone(base, "data")
			target := c.attach(mount, root, at, resolve)
			c.stat(made, statWhole)
			c.close([]int{base, source, mount, target})
			id = made
			return c.err
		},
		Undo: func() error {
			var c calls
			c.take(id, below, filepath.Base(at))
			return c.err
		},
	}
}

// elsewhereCalls are those of one bind of "data" in grant at a path in another
// namespace, with the two visits of it that performing and undoing need.
func elsewhereCalls(ns *mountns.Namespace, grant, at string) Variant {
	ctx := context.Background()
	var id uint64
	return Variant{
		Name: callsAlone,
		Perform: func() error {
			var c calls
			base := c.open(unix.AT_FDCWD, grant, unix.O_DIRECTORY, 0)
			source, mount, made := c.clone(base, "data")
			target := -1
			c.do(ns.Do(ctx, func() error {
				target = c.attach(mount, unix.AT_FDCWD, at, unix.RESOLVE_NO_SYMLINKS)
				c.stat(made, statWhole)
				return nil
			}))
			c.close([]int{base, source, mount, target})
			id = made
			return c.err
		},
		Undo: func() error {
			var c calls
			c.do(ns.Do(ctx, func() error {
				c.takeHere(id, filepath.Dir(at), filepath.Base(at))
				return nil
			}))
			return c.err
		},
	}
}

// takeHere is take on a thread with a working directory of its own, where the
// mounts below are listed in the place of the poll.
func (c *calls) takeHere(id uint64, dir, name string) {
	c.stat(id, statWhere)
	fd := c.open(unix.AT_FDCWD, dir, unix.O_DIRECTORY, unix.RESOLVE_NO_SYMLINKS)
	c.facts(fd, name)
	c.do(unix.Fchdir(fd))
	c.expire(name)
	_, err := kernel.ListMounts(nil, 0, id, 0)
	c.do(err)
	c.stat(id, statWhere)
	c.do(unix.Unmount(name, unix.MNT_EXPIRE|unix.UMOUNT_NOFOLLOW))
	c.do(unix.Chdir("/"))
	c.do(unix.Close(fd))
	c.gone(id)
}

// listCalls are those of binds of "data" in grant and of directories in it,
// the first at root and the others below that, taken away by way of trash.
func listCalls(grant, root, trash string, targets ...string) Variant {
	ids := make([]uint64, len(targets))
	template, err := tmpfsWith(len(targets))
	if err != nil {
		return Variant{Name: callsAlone, Missing: err.Error()}
	}
	const beneath = unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS
	fds := make([]int, 0, 3*len(targets)+2)
	return Variant{
		Name: callsAlone,
		Perform: func() error {
			var c calls
			base := c.open(unix.AT_FDCWD, grant, unix.O_DIRECTORY, 0)
			fds = append(fds[:0], base)
			for i, t := range targets {
				source, mount, id := c.clone(base, filepath.Join("data", t))
				ids[i], fds = id, append(fds, source, mount)
			}
			first := fds[2]
			for i, t := range targets[1:] {
				target := c.open(first, t, 0, beneath)
				c.facts(target, "")
				c.do(kernel.MoveMount(fds[2*(i+1)+2], target, 0))
				fds = append(fds, target)
			}
			fds = append(fds, c.attach(first, unix.AT_FDCWD, root, unix.RESOLVE_NO_SYMLINKS))
			for _, id := range ids {
				c.stat(id, statWhole)
			}
			c.close(fds)
			return c.err
		},
		Undo: func() error {
			var c calls
			c.stat(ids[len(ids)-1], statWhere)
			tmpfs, err := kernel.OpenTree(template, "", unix.OPEN_TREE_CLONE)
			c.do(err)
			c.facts(tmpfs, "")
			c.do(kernel.MoveMountAt(tmpfs, "", unix.AT_FDCWD, trash, 0))
			c.do(kernel.MountSetattr(tmpfs, &unix.MountAttr{Propagation: unix.MS_PRIVATE}, false))
			for i, t := range targets {
				dir, path, place := unix.AT_FDCWD, root, strconv.Itoa(i)
				if i > 0 {
					dir, path = tmpfs, "0/"+t
				}
				fd, err := unix.Openat(dir, path, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
				c.do(err)
				c.facts(fd, "")
				c.do(kernel.MoveMountAt(fd, "", tmpfs, place, 0))
				c.facts(tmpfs, place)
				c.do(unix.Close(fd))
			}
			at := "/proc/self/fd/" + strconv.Itoa(tmpfs) + "/"
			for i := range targets {
				c.expire(at + strconv.Itoa(i))
			}
			c.facts(unix.AT_FDCWD, trash)
			c.do(unix.Close(tmpfs))
			c.do(kernel.Unmount(trash, unix.MNT_DETACH))
			for _, id := range ids {
				c.gone(id)
			}
			return c.err
		},
	}
}

// tmpfsWith makes a detached tmpfs with n directories named by number.
func tmpfsWith(n int) (int, error) {
	fs, err := kernel.OpenFS("tmpfs")
	if err != nil {
		return -1, err
	}
	defer fs.Close()
	if err := fs.Create(); err != nil {
		return -1, err
	}
	fd, err := fs.Mount(0)
	for i := 0; i < n && err == nil; i++ {
		err = unix.Mkdirat(fd, strconv.Itoa(i), 0o700)
	}
	return fd, err
}

// tmpfsCalls are those of one tmpfs.
func tmpfsCalls(at string) Variant {
	var id uint64
	return Variant{
		Name: callsAlone,
		Perform: func() error {
			var c calls
			fs, err := kernel.OpenFS("tmpfs")
			if err != nil {
				return err
			}
			c.do(fs.SetString("size", "1m"))
			c.do(fs.Create())
			mount, err := fs.Mount(unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV)
			c.do(err)
			c.do(kernel.MountSetattr(mount, &unix.MountAttr{Propagation: unix.MS_PRIVATE}, false))
			id = c.facts(mount, "")
			target := c.attach(mount, unix.AT_FDCWD, at, unix.RESOLVE_NO_SYMLINKS)
			c.stat(id, statWhole)
			c.do(fs.Close())
			c.do(unix.Close(mount))
			c.do(unix.Close(target))
			return c.err
		},
		Undo: func() error {
			var c calls
			c.take(id, filepath.Dir(at), filepath.Base(at))
			return c.err
		},
	}
}

// incrementCalls are those of one look at what is new in a namespace since a
// mount id, with one mount to tell about.
func incrementCalls(ns, since uint64, fd int) Variant {
	ids := make([]uint64, 0, 64)
	return Variant{
		Name: callsAlone,
		Perform: func() (err error) {
			if ids, err = kernel.ListMounts(ids[:0], ns, kernel.Root, since); err != nil {
				return err
			}
			if _, err := kernel.NSStat(fd); err != nil {
				return err
			}
			_, err = kernel.StatMount(ns, ids[0], kernel.StatAll)
			return err
		},
	}
}
