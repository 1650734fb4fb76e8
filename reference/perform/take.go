package perform

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
)

// taking is the exact unmounting of single mounts.
//
// umount2(2) names a mount by a path and takes whatever is on top there at
// that moment, so an id that was compared before proves nothing. MNT_EXPIRE
// closes the gap. The first such call on a mount that is idle and has nothing
// on it only marks it (EAGAIN); any use of the mount wipes the mark; the
// second call unmounts a mount that still has its mark, and only marks one
// that has none. So:
//
//  1. the id on top is compared;
//  2. the first call marks what is on top now;
//  3. if nothing was attached or detached in the namespace since before 1,
//     the marked mount is the one that was compared;
//  4. the second call takes that mount, or nothing.
//
// Whatever somebody stacks on the mount in between is never taken, since it
// has no mark. A busy mount is told from the first call (EBUSY), with the
// kernel's own count of its users, and has not been touched.
//
// The mount is named by the descriptor of the directory it is in and the last
// component of its path, so that what happens to the directories above makes
// no difference.
type taking struct {
	e     *Executor
	ctx   context.Context
	v     *view
	index int
}

// attempts bounds how often a mount that others walk through all the time is
// tried before it is reported as in use.
const attempts = 16

// take unmounts the mount with the id. One that is not attached in this
// namespace is done. r is the receipt the mount must agree with where ids are
// reused, nil for any.
func (t *taking) take(id uint64, r *Receipt) error {
	busy := &BusyError{Index: t.index, MountID: id}
	for n := range attempts {
		m, err := t.find(id, r)
		if err != nil || m.ID == 0 {
			return t.fail("find", err)
		}
		busy.Target = m.Point
		err = t.try(&m)
		busy.Covered = errors.Is(err, errCovered)
		if !busy.Covered && !errors.Is(err, unix.EAGAIN) {
			return t.fail("unmount", err)
		}
		if err := t.ctx.Err(); err != nil {
			return t.fail("unmount", err)
		}
		if n > 2 {
			time.Sleep(time.Duration(n) * 100 * time.Microsecond)
		}
	}
	return t.fail("unmount", busy)
}

// errCovered says that the path of a mount leads elsewhere, for now.
var errCovered = errors.New("covered")

func (t *taking) fail(step string, err error) error {
	if err == nil {
		return nil
	}
	return &Error{t.index, step, err}
}

// find reads the mount, the zero value if it is gone.
func (t *taking) find(id uint64, r *Receipt) (kernel.MountStat, error) {
	if id == 0 {
		return kernel.MountStat{}, t.findUnnamed(r)
	}
	if m := t.v.seen; m.ID == id {
		t.v.seen = kernel.MountStat{}
		return m, nil
	}
	m, err := t.v.lookup(t.ctx, id, statWhere)
	if errors.Is(err, unix.ENOENT) {
		return kernel.MountStat{}, nil
	}
	if err == nil && !t.v.f.UniqueIDs && r != nil && !r.is(&m) {
		return kernel.MountStat{}, nil // the id is another mount's by now
	}
	return m, err
}

// findUnnamed is for a receipt that was written before mount(2) made the
// mount, by a process that did not live to learn its id. Whether a mount that
// is there now is the one cannot be told on such a kernel.
func (t *taking) findUnnamed(r *Receipt) error {
	table, err := t.v.table(t.ctx)
	if err != nil {
		return err
	}
	for _, m := range table.At(r.Target) {
		if s := statOf(table, &m); r.is(&s) {
			return fmt.Errorf("%w: it has no mount id, and mount %d may or may not be its own", ErrReceipt, s.ID)
		}
	}
	return nil
}

// is tells whether a mount found by a reusable id is where the receipt says.
func (r *Receipt) is(m *kernel.MountStat) bool {
	return m.Point == r.Target && (r.ParentID == 0 || m.ParentID == r.ParentID) &&
		(r.Device == "" || r.Device == deviceText(m))
}

func deviceText(m *kernel.MountStat) string {
	return strconv.FormatUint(uint64(m.DevMajor), 10) + ":" + strconv.FormatUint(uint64(m.DevMinor), 10)
}

// try makes one attempt; EAGAIN means that it was disturbed.
func (t *taking) try(m *kernel.MountStat) error {
	dir, name := splitPath(m.Point)
	if name == "" {
		return fmt.Errorf("%w: it is the root of the namespace", ErrReceipt)
	}
	fd, err := t.v.openDir(t.ctx, dir)
	if errors.Is(err, errMayHang) {
		return err
	}
	if err != nil {
		return errCovered
	}
	defer unix.Close(fd)
	w, err := t.v.watch(t.e.watches, m.NS)
	if err != nil {
		return err
	}
	defer w.close()
	top, err := kernel.FactsOf(fd, name, t.v.f.UniqueIDs)
	if err != nil {
		return errCovered
	}
	if top.MountID != m.ID {
		return t.covered(m, top.MountID)
	}
	if err := t.e.step("mark"); err != nil {
		return err
	}
	place := t.v.name(fd, name)
	if t.v.ns != nil {
		// The thread is the only one with this working directory.
		if err := unix.Fchdir(fd); err != nil {
			return err
		}
		defer func() { _ = unix.Chdir("/") }()
	}
	switch errno := expire(place); errno {
	case unix.EAGAIN:
	case unix.EBUSY:
		return t.busy(m)
	case 0:
		// Its owner had marked it for expiry himself, whichever it was.
		return unix.EAGAIN
	default:
		return t.unmountError(m, errno)
	}
	if err := t.undisturbed(m, w); err != nil {
		return err
	}
	if err := t.e.step("unmount"); err != nil {
		return err
	}
	switch errno := expire(place); errno {
	case 0:
		return nil
	case unix.EAGAIN:
		return errno
	case unix.EBUSY:
		return t.busy(m)
	default:
		return t.unmountError(m, errno)
	}
}

// undisturbed proves that what was marked is m. If nothing has changed in the
// namespace that is plain; if something has, it may have been elsewhere.
func (t *taking) undisturbed(m *kernel.MountStat, w *watch) error {
	if w.quiet() {
		return nil
	}
	on, err := t.v.children(t.ctx, m.ID)
	if errors.Is(err, unix.ENOENT) {
		return unix.EAGAIN
	}
	if err != nil {
		return err
	}
	if len(on) > 0 {
		return t.busyWith(m, on)
	}
	now, err := t.v.lookup(t.ctx, m.ID, statWhere)
	if err != nil || now.ParentID != m.ParentID || now.Point != m.Point {
		return unix.EAGAIN
	}
	return nil
}

// expire is one umount2(2) with MNT_EXPIRE; 0 means that it took the mount.
func expire(place string) unix.Errno {
	for {
		err := unix.Unmount(place, unix.MNT_EXPIRE|unix.UMOUNT_NOFOLLOW)
		if err == nil {
			return 0
		}
		errno := unix.EINVAL
		_ = errors.As(err, &errno)
		if errno != unix.EINTR {
			return errno
		}
	}
}

func (t *taking) unmountError(m *kernel.MountStat, err error) error {
	if now, gone := t.v.lookup(t.ctx, m.ID, statWhere); errors.Is(gone, unix.ENOENT) || now.Point != m.Point {
		return unix.EAGAIN
	}
	return fmt.Errorf("umount2 %q: %w", m.Point, err)
}

// covered tells a mount that somebody has stacked something on from one whose
// path leads elsewhere.
func (t *taking) covered(m *kernel.MountStat, top uint64) error {
	if on, err := t.v.lookup(t.ctx, top, statWhere); err == nil && on.ParentID == m.ID {
		return t.busyWith(m, []uint64{top})
	}
	return errCovered
}

func (t *taking) busy(m *kernel.MountStat) error {
	on, err := t.v.children(t.ctx, m.ID)
	if err != nil {
		on = nil
	}
	return t.busyWith(m, on)
}

func (t *taking) busyWith(m *kernel.MountStat, on []uint64) error {
	return &BusyError{Index: t.index, MountID: m.ID, Target: m.Point, Mounts: on}
}

// name names a file in a directory for a system call that takes a path only.
func (v *view) name(dir int, name string) string {
	if v.ns != nil {
		return name // the working directory is dir
	}
	return "/proc/self/fd/" + strconv.Itoa(dir) + "/" + name
}
