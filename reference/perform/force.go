package perform

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
	"github.com/csi-prepare/csi-prepare/reference/mountns"
)

// Force is how far an undo goes for a mount whose server does not answer, each
// step including those before.
type Force int

const (
	// Exact is what Undo does: nothing that is in use is touched.
	Exact Force = iota
	// Abort has the kernel end what waits for the server, with an error
	// (MNT_FORCE): whoever waits loses what he has not written yet.
	Abort
	// Lazy takes the mount out of the namespace although it is in use
	// (MNT_DETACH): the table looks clean, and files that are open stay so.
	Lazy
)

// String returns the name of the step.
func (f Force) String() string {
	return [...]string{"exact", "abort", "lazy"}[f]
}

// Forced reports a step that was more than Undo does.
type Forced struct {
	// Index is that of the receipt.
	Index int
	// MountID is the mount, by unique id.
	MountID uint64
	// Target is where it was attached.
	Target string
	// Step is what was done.
	Step Force
	// Busy is why: what Undo found before.
	Busy *BusyError
}

// ForceUndo is Undo for filesystems on a network whose server is gone. What is
// in use is tried again with one step more, up to most, and each step is
// reported, in order, also beside an error. It is for an operator, or a policy
// of his, to ask for. The program has to call MainIfChild: forcing may hang.
//
// Only a mount that is itself of a network's filesystem is forced, and only
// while nobody else has mounted anything on it; in all else it is as Undo.
// What somebody stacks on the mount in the very moment in which it is forced
// cannot be told from it.
func (e *Executor) ForceUndo(ctx context.Context, ns *mountns.Namespace, receipts []Receipt, most Force) ([]Forced, error) {
	if most > Exact && !childAvailable.Load() {
		return nil, &Error{-1, "undo by force", errors.New("this program does not call perform.MainIfChild")}
	}
	var steps []Forced
	reached := make([]Force, len(receipts))
	for {
		err := e.Undo(ctx, ns, receipts)
		var busy *BusyError
		if !errors.As(err, &busy) || len(busy.Mounts) > 0 || busy.Covered {
			return steps, err
		}
		r := &receipts[busy.Index]
		if busy.MountID != r.MountID || reached[busy.Index] == most {
			return steps, err
		}
		reached[busy.Index]++
		forced := e.undoInChild(ctx, ns, []Receipt{*r}, reached[busy.Index])
		if errors.Is(forced, errNotForced) {
			return steps, err
		}
		var at *Error
		if errors.As(forced, &at) {
			return steps, &Error{busy.Index, at.Step, at.Err} // the child had one receipt
		}
		steps = append(steps, Forced{busy.Index, r.MountID, busy.Target, reached[busy.Index], busy})
	}
}

// errNotForced says that a mount is none to be forced. It crosses the child as
// an errno that nothing else here gives.
var errNotForced error = unix.ENOTSUP

// forceHere makes one step, in a child: it may hang.
func (e *Executor) forceHere(ctx context.Context, ns *mountns.Namespace, r *Receipt, step Force) error {
	return ns.Do(ctx, func() error {
		v := &view{f: e.probe(), ns: ns, patient: true}
		defer v.close()
		t := taking{e: e, ctx: ctx, v: v}
		m, err := t.find(r.MountID, r)
		if err != nil || m.ID == 0 {
			return t.fail("find", err)
		}
		kind, err := v.lookup(ctx, m.ID, statType)
		if err != nil {
			return t.fail("find", err)
		}
		if !networkTypes[kind.FSType] {
			return t.fail("find", errNotForced)
		}
		return t.fail(step.String(), t.force(&m, step))
	})
}

func (t *taking) force(m *kernel.MountStat, step Force) error {
	dir, name := splitPath(m.Point)
	fd, err := t.v.openDir(t.ctx, dir)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	top, err := kernel.FactsOf(fd, name, t.v.f.UniqueIDs)
	if err != nil {
		return err
	}
	if top.MountID != m.ID {
		return t.covered(m, top.MountID)
	}
	if err := unix.Fchdir(fd); err != nil {
		return err
	}
	flags := unix.MNT_FORCE | unix.UMOUNT_NOFOLLOW
	if step == Lazy {
		flags = unix.MNT_DETACH | unix.UMOUNT_NOFOLLOW
	}
	if err := unix.Unmount(name, flags); err != nil && (step == Lazy || !errors.Is(err, unix.EBUSY)) {
		return fmt.Errorf("umount2 %q: %w", m.Point, err)
	}
	return nil
}

// ForceUndo forces with an Executor of the zero value.
func ForceUndo(ctx context.Context, ns *mountns.Namespace, receipts []Receipt, most Force) ([]Forced, error) {
	return plain.ForceUndo(ctx, ns, receipts, most)
}
