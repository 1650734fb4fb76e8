package fusemount

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
)

// Replace attaches a clone of mount, with the attributes of what it replaces,
// below the mount that is on top at path, whose connection has ended, and then
// takes that one away: at no moment is the place empty. What consumers have
// open there stays ENOTCONN; what they open afterwards is served. It has to be
// called in the namespace of path, by whoever attached what is there.
//
// before, unless nil, is told the unique ids of the mount to be taken away and
// of the one to be attached; if it fails, nothing is done.
//
// A mount at path that is served is EBUSY; one whose server does not answer is
// left alone too, when ctx ends. An id-mapped one is EINVAL, since its mapping
// cannot be read. Linux 6.8.
func Replace(ctx context.Context, mount *os.File, path string, before func(dead, clone uint64) error) error {
	raw, err := mount.SyscallConn()
	if err != nil {
		return err
	}
	cerr := raw.Control(func(fd uintptr) { err = replace(ctx, int(fd), path, before) })
	if err := errors.Join(cerr, err); err != nil {
		return fmt.Errorf("fusemount: replace: %w", err)
	}
	return nil
}

func replace(ctx context.Context, mount int, path string, before func(dead, clone uint64) error) error {
	dead, err := kernel.OpenTree(unix.AT_FDCWD, path, unix.AT_SYMLINK_NOFOLLOW)
	if err != nil {
		return err
	}
	defer unix.Close(dead)
	if err := hasEnded(ctx, dead); err != nil {
		return &os.PathError{Op: "replace", Path: path, Err: err}
	}
	id, err := kernel.UniqueID(dead, "")
	if err != nil {
		return err
	}
	ms, err := kernel.StatMount(0, id, kernel.StatBasic)
	if err != nil {
		return err
	}
	if ms.Attr&unix.MOUNT_ATTR_IDMAP != 0 {
		return &os.PathError{Op: "replace", Path: path, Err: unix.EINVAL}
	}
	clone, err := kernel.OpenTree(mount, "", unix.OPEN_TREE_CLONE)
	if err != nil {
		return err
	}
	defer unix.Close(clone)
	attr := unix.MountAttr{Attr_set: ms.Attr, Attr_clr: unix.MOUNT_ATTR__ATIME, Propagation: unix.MS_PRIVATE}
	if err := kernel.MountSetattr(clone, &attr, false); err != nil {
		return err
	}
	if before != nil {
		cloneID, err := kernel.UniqueID(clone, "")
		if err != nil {
			return err
		}
		if err := before(id, cloneID); err != nil {
			return err
		}
	}
	if err := kernel.MoveMount(clone, dead, kernel.MoveMountBeneath); err != nil {
		return err
	}
	top, err := kernel.UniqueID(unix.AT_FDCWD, path)
	if err != nil {
		return err
	}
	if top != id {
		return &os.PathError{Op: "replace", Path: path, Err: unix.ESTALE}
	}
	// In use or not: every use of it has failed since its server ended.
	return kernel.Unmount(path, unix.MNT_DETACH)
}

// hasEnded returns nil if the connection behind a mount has ended. The wait
// for a server that hangs is left behind with a descriptor of its own.
func hasEnded(ctx context.Context, mount int) error {
	fd, err := unix.FcntlInt(uintptr(mount), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return err
	}
	answered := make(chan error, 1)
	go func() {
		defer unix.Close(fd)
		var st unix.Statfs_t
		answered <- unix.Fstatfs(fd, &st)
	}()
	select {
	case err := <-answered:
		if !errors.Is(err, unix.ENOTCONN) {
			return unix.EBUSY
		}
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
