package perform

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
)

// batch is one use of the trash.
type batch struct {
	e        *Executor
	t        *trash
	ctx      context.Context
	receipts []Receipt
	fd       int    // the attached tmpfs
	id       uint64 // and its mount
	path     string // a path to it that no mount can cover
	moved    []movedMount
}

// movedMount is a mount that is in the trash for now.
type movedMount struct {
	receipt int
	id      uint64
	parent  uint64
	place   string // in the trash
}

// batchable says whether the receipts can go through the trash: several single
// mounts, in the trash's own namespace.
func (t *trash) batchable(v *view, receipts []Receipt) bool {
	if t == nil || v.ns != nil || len(receipts) < 2 || len(receipts) > trashPlaces {
		return false
	}
	for i := range receipts {
		if r := &receipts[i]; r.Tree || r.MntnsID != t.ns || r.MountID == 0 {
			return false
		}
	}
	return true
}

// take takes the mounts of all receipts away, or none of them. errNoTrash means
// that nothing was done, and that one has to be taken after another.
func (t *trash) take(ctx context.Context, e *Executor, receipts []Receipt) (err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.clean && t.sweep(e) != nil {
		return errNoTrash // until what is left of another use has been undone
	}
	b := &batch{e: e, t: t, ctx: ctx, receipts: receipts, fd: -1}
	defer func() { closeFD(&b.fd) }()
	if err := e.step("attach the trash"); err != nil {
		return err
	}
	if err := b.attach(); err != nil {
		return errNoTrash
	}
	if err := b.fill(); err != nil {
		return b.restore(err)
	}
	if err := e.step("detach the trash"); err != nil {
		return b.restore(err)
	}
	return b.detach()
}

// attach puts an empty, private tmpfs on the trash's directory.
func (b *batch) attach() (err error) {
	if b.fd, err = kernel.OpenTree(b.t.template, "", unix.OPEN_TREE_CLONE); err != nil {
		return err
	}
	if b.id, err = kernel.UniqueID(b.fd, ""); err != nil {
		return err
	}
	b.t.clean = false
	if err := kernel.MoveMountAt(b.fd, "", b.t.lock, trashName, 0); err != nil {
		return err
	}
	b.path = "/proc/self/fd/" + strconv.Itoa(b.fd) + "/"
	// A shared parent has made it shared, and would get what is moved in.
	return kernel.MountSetattr(b.fd, &unix.MountAttr{Propagation: unix.MS_PRIVATE}, false)
}

// fill moves every mount into the trash, those that hold others first, so that
// nobody sees a part of it gone, and sees that each is idle.
func (b *batch) fill() error {
	b.moved = make([]movedMount, 0, len(b.receipts))
	for i := range b.receipts {
		if err := b.move(i); err != nil {
			return err
		}
	}
	for i := range b.moved {
		if err := b.probe(&b.moved[i]); err != nil {
			return err
		}
	}
	return nil
}

// move moves the mount of one receipt. One that is gone is done.
func (b *batch) move(i int) error {
	r := &b.receipts[i]
	if err := b.ctx.Err(); err != nil {
		return &Error{i, "unmount", err}
	}
	fd, id, err := openMount(b.where(r))
	if err != nil || id != r.MountID {
		if fd >= 0 {
			_ = unix.Close(fd)
		}
		if _, err := kernel.StatMount(0, r.MountID, kernel.StatBasic); errors.Is(err, unix.ENOENT) {
			return nil
		}
		return errNoTrash // moved, or covered: the careful way finds out
	}
	defer unix.Close(fd)
	if err := b.e.step("move to the trash"); err != nil {
		return &Error{i, "unmount", err}
	}
	m := movedMount{receipt: i, id: id, parent: r.ParentID}
	for _, file := range [...]bool{false, true} {
		m.place = trashPlace(len(b.moved), file)
		err = kernel.MoveMountAt(fd, "", b.fd, m.place, 0)
		if !errors.Is(err, unix.EINVAL) {
			break
		}
	}
	if err != nil {
		return errNoTrash // a shared parent lets nothing go
	}
	// From here on nobody can stack anything on it. What was stacked just
	// before has come along, and goes back with it.
	if top, err := kernel.UniqueID(b.fd, m.place); err != nil || top != id {
		if err := b.moveBack(fd, &m); err != nil {
			return b.stuck(&m, err)
		}
		return errNoTrash
	}
	b.moved = append(b.moved, m)
	return nil
}

// where is the path of a receipt's mount, and the directory it starts from,
// now that what held it may be in the trash.
func (b *batch) where(r *Receipt) (dir int, path string) {
	for i := range b.moved {
		m := &b.moved[i]
		if m.id != r.ParentID {
			continue
		}
		if rest, ok := strings.CutPrefix(r.Target, b.receipts[m.receipt].Target+"/"); ok {
			return b.fd, m.place + "/" + rest
		}
	}
	return unix.AT_FDCWD, r.Target
}

// openMount opens the mount that path leads to, and tells its id.
func openMount(dir int, path string) (int, uint64, error) {
	fd, err := open(dir, path, unix.O_PATH|unix.O_NOFOLLOW)
	if err != nil {
		return -1, 0, err
	}
	id, err := kernel.UniqueID(fd, "")
	return fd, id, err
}

// probe sees that a mount in the trash is idle and has nothing on it.
func (b *batch) probe(m *movedMount) error {
	errno := expire(b.path + m.place)
	var err error = errno
	switch errno {
	case 0, unix.EAGAIN:
		return nil
	case unix.EBUSY:
		busy := &BusyError{Index: m.receipt, MountID: m.id, Target: b.receipts[m.receipt].Target}
		busy.Mounts, _ = kernel.ListMounts(nil, 0, m.id, 0)
		err = busy
	}
	return &Error{m.receipt, "unmount", err}
}

// restore moves everything back, what holds others first, and takes the empty
// tmpfs away. It returns cause, unless something cannot be moved back.
func (b *batch) restore(cause error) error {
	for i := range b.moved {
		m := &b.moved[i]
		fd, err := open(b.fd, m.place, unix.O_PATH|unix.O_NOFOLLOW)
		if err == nil {
			err = b.moveBack(fd, m)
			_ = unix.Close(fd)
		}
		if err != nil {
			return errors.Join(cause, b.stuck(m, err))
		}
	}
	closeFD(&b.fd)
	if err := b.t.sweep(b.e); err != nil {
		return errors.Join(cause, err)
	}
	return cause
}

// stuck is the error for a mount that remains in the trash: another undo finds
// it there.
func (b *batch) stuck(m *movedMount, err error) error {
	return &Error{m.receipt, "move back from " + b.t.path + "/" + m.place, &LeftError{b.receipts, err}}
}

// moveBack attaches the mount open at fd where it was, with what is on it.
func (b *batch) moveBack(fd int, m *movedMount) error {
	to, id, err := openMount(unix.AT_FDCWD, b.receipts[m.receipt].Target)
	if err != nil {
		return err
	}
	defer unix.Close(to)
	if id != m.parent {
		return fmt.Errorf("%w: mount %d is there", ErrChanged, id)
	}
	return kernel.MoveMount(fd, to, 0)
}

// detach detaches the trash with all that is in it, and is idle.
func (b *batch) detach() error {
	if top, err := kernel.UniqueID(b.t.lock, trashName); err != nil || top != b.id {
		return b.restore(errors.Join(err, errNoTrash))
	}
	closeFD(&b.fd)
	err := kernel.Unmount(b.t.path, unix.MNT_DETACH)
	b.t.clean = err == nil
	return err
}
