package perform

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
)

// made is one directory or file made for a target to exist.
type made struct {
	at    int // which of the missing components it is
	dir   int // descriptor of the directory it is in
	name  string
	inode uint64
	file  bool
}

// createTarget makes what openTarget found missing, each part from the
// descriptor of the one before, so that nobody can lead it elsewhere. What
// somebody else has made meanwhile is used, and is not taken for created.
func (x *performance) createTarget() error {
	if x.missing == nil {
		return nil
	}
	if err := x.checkTarget(); err != nil {
		return err
	}
	x.creating = true
	u := &x.units[0]
	for i, name := range x.missing {
		file := i == len(x.missing)-1 && isFile(&x.specs[0])
		next, err := x.createIn(u.target, i, file)
		if n := len(x.made); n > 0 && x.made[n-1].at == i {
			u.target = -1 // kept to remove what was made in it
		}
		closeFD(&u.target)
		if err != nil {
			return fmt.Errorf("%q: %w", name, err)
		}
		u.target = next
	}
	facts, err := kernel.FactsOf(u.target, "", x.f.UniqueIDs)
	if err != nil {
		return err
	}
	return checkTargetType(&x.specs[0], facts.Mode)
}

// createIn makes the missing component i in dir, and opens it.
func (x *performance) createIn(dir, i int, file bool) (int, error) {
	name := x.missing[i]
	var next int
	var created bool
	var err error
	if remoteTypes[x.parent.FSType] && childAvailable.Load() {
		next, created, err = x.createInChild(dir, name, file)
	} else {
		next, created, err = create(dir, name, file)
	}
	if created {
		x.made = append(x.made, made{at: i, dir: dir, name: name, file: file})
	}
	if err != nil {
		return -1, err
	}
	if err := x.e.step("open created"); err != nil {
		_ = unix.Close(next)
		return -1, err
	}
	facts, err := kernel.FactsOf(next, "", x.f.UniqueIDs)
	if err == nil && facts.MountID != x.units[0].parentID {
		err = fmt.Errorf("%w: something was mounted on it meanwhile", ErrTarget)
	}
	if err != nil {
		_ = unix.Close(next)
		return -1, err
	}
	if created {
		x.made[len(x.made)-1].inode = facts.Inode
	}
	return next, nil
}

// create makes a directory or an empty file, unless it is there, and opens it.
func create(dir int, name string, file bool) (fd int, created bool, err error) {
	flags := unix.O_PATH | unix.O_NOFOLLOW
	if file {
		err = unix.Mknodat(dir, name, unix.S_IFREG|0o644, 0)
	} else {
		flags |= unix.O_DIRECTORY
		err = unix.Mkdirat(dir, name, 0o755)
	}
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return -1, false, err
	}
	created = err == nil
	fd, err = open(dir, name, flags)
	return fd, created, err
}

func (x *performance) createInChild(dir int, name string, file bool) (int, bool, error) {
	fd, answer, err := inChild(x.ctx, &childTask{Create: name, File: file}, dir, x.o.Timeout)
	return fd, answer.Created, err
}

// removeCreated removes what a receipt says was created, if it still is that.
func (v *view) removeCreated(ctx context.Context, c *Created) error {
	dir, name := splitPath(c.Path)
	fd, err := v.openDir(ctx, dir)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
		return nil // nothing is at that path any more
	}
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return removeIn(fd, name, c.Inode, c.File)
}

// removeIn removes a directory or file that was created, and leaves it where
// it is another by now, where somebody has put something into it, or where it
// has a mount on it.
func removeIn(dir int, name string, inode uint64, file bool) error {
	facts, err := kernel.FactsOf(dir, name, false)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return err
	}
	kind, flags := uint32(unix.S_IFDIR), unix.AT_REMOVEDIR
	if file {
		kind, flags = unix.S_IFREG, 0
	}
	switch {
	case facts.MountRoot, facts.Mode&unix.S_IFMT != kind, inode != 0 && facts.Inode != inode,
		file && (facts.Size > 0 || facts.Links > 1):
		return nil
	}
	err = unix.Unlinkat(dir, name, flags)
	for _, left := range [...]error{unix.ENOENT, unix.ENOTEMPTY, unix.EEXIST, unix.EBUSY, unix.ENOTDIR} {
		if errors.Is(err, left) {
			return nil
		}
	}
	return err
}

// splitPath splits an absolute path into a directory and a name in it.
func splitPath(path string) (dir, name string) {
	cut := strings.LastIndexByte(path, '/')
	if cut == 0 {
		return "/", path[1:]
	}
	return path[:cut], path[cut+1:]
}
