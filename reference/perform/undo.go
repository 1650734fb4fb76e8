package perform

import (
	"context"
	"errors"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/mountns"
)

// Undo takes away what receipts record and nothing else: the mounts, known by
// their ids wherever they are attached by now, in reverse order, and then the
// directories and files that were created for them. ns is the namespace they
// are in, nil for that of the calling thread; receipts of another one are
// ErrForeign. Receipts of another boot are void: nothing of them can be left.
//
// A mount that is in use stays, with everything on it, and so do those that
// come before it in receipts: the error is a *BusyError. A mount is in use if
// a process has a file or a directory of it open, or is in it, or if somebody
// else has mounted something on it. Nothing is ever detached lazily, and
// nothing below a target is looked at.
//
// Undo may be repeated, and may be called for receipts that only the journal
// has seen. Before it reports success it has looked the ids up again.
//
// Whoever audits namespaces for leaks does so before Undo where a receipt has
// Created: to remove a directory silently detaches what other namespaces have
// mounted on it.
func (e *Executor) Undo(ctx context.Context, ns *mountns.Namespace, receipts []Receipt) error {
	boot, err := bootID()
	if err != nil {
		return &Error{-1, "read the boot id", err}
	}
	for i := range receipts {
		if err := receipts[i].check(); err != nil {
			return &Error{i, "read receipt", err}
		}
	}
	if slices.ContainsFunc(receipts, func(r Receipt) bool { return r.BootID != boot }) {
		receipts = slices.DeleteFunc(slices.Clone(receipts), func(r Receipt) bool { return r.BootID != boot })
	}
	if len(receipts) == 0 {
		return nil
	}
	v := &view{f: e.probe(), ns: ns, patient: e.patient || !childAvailable.Load()}
	defer v.close()
	switch {
	case !v.patient && slices.ContainsFunc(receipts, func(r Receipt) bool { return r.Remote }):
		err = errMayHang
	case ns == nil:
		err = e.undoHere(ctx, v, receipts)
	default:
		err = ns.Do(ctx, func() error { return e.undoHere(ctx, v, receipts) })
	}
	if errors.Is(err, errMayHang) {
		err = e.undoInChild(ctx, ns, receipts, Exact)
	}
	var busy *BusyError
	if errors.As(err, &busy) && len(busy.Mounts) == 0 && !busy.Covered && v.f.UniqueIDs {
		busy.Holders = findHolders(ctx, busy.MountID)
	}
	return err
}

// holderTime bounds the search for who keeps a mount busy.
const holderTime = 500 * time.Millisecond

// searching holds the one search that may be under way: to look at a process
// that hangs in execve(2) hangs too, and no number of searches would help.
var searching = make(chan struct{}, 1)

// findHolders is called where the caller is, in whose /proc the processes are.
func findHolders(ctx context.Context, mount uint64) []mountns.Holder {
	select {
	case searching <- struct{}{}:
	default:
		return nil
	}
	found := make(chan []mountns.Holder, 1)
	ctx, cancel := context.WithTimeout(ctx, holderTime)
	go func() {
		defer cancel()
		h, _ := mountns.Holders(ctx, mount) // as many as could be found
		<-searching
		found <- h
	}()
	select {
	case h := <-found:
		return h
	case <-time.After(holderTime + holderTime/4):
		return nil
	}
}

func (e *Executor) undoHere(ctx context.Context, v *view, receipts []Receipt) error {
	if err := v.checkNamespace(ctx, receipts); err != nil {
		return err
	}
	if err := e.undoMounts(ctx, v, receipts); err != nil {
		return err
	}
	for i := len(receipts) - 1; i >= 0; i-- {
		created := receipts[i].Created
		for j := len(created) - 1; j >= 0; j-- {
			err := e.step("remove created")
			if err == nil {
				err = v.removeCreated(ctx, &created[j])
			}
			if err != nil {
				return &Error{i, "remove what was created", err}
			}
		}
	}
	return nil
}

// checkNamespace sees that the receipts are of the namespace the thread is in.
// A unique id that is found here proves it; else the namespace is asked.
func (v *view) checkNamespace(ctx context.Context, receipts []Receipt) error {
	last := len(receipts) - 1
	here := uint64(0)
	if v.ns != nil {
		here = v.ns.ID()
	} else if v.f.UniqueIDs {
		if m, err := v.lookup(ctx, receipts[last].MountID, statWhere); err == nil {
			here, v.seen = m.NS, m
		}
	}
	if here == 0 {
		var err error
		if here, err = nsID(nil); err != nil {
			return &Error{-1, "find the namespace", err}
		}
	}
	for i := range receipts {
		if receipts[i].MntnsID != here {
			return &Error{i, "find the namespace", ErrForeign}
		}
	}
	return nil
}

// undoMounts takes the mounts of the receipts away, the last first, and looks
// for each of them again at the end.
func (e *Executor) undoMounts(ctx context.Context, v *view, receipts []Receipt) error {
	err := errNoTrash
	if e.trash.batchable(v, receipts) {
		err = e.trash.take(ctx, e, receipts)
	}
	if errors.Is(err, errNoTrash) {
		err = e.undoSequence(ctx, v, receipts)
	}
	if err != nil {
		return err
	}
	for i := range receipts {
		r := &receipts[i]
		if r.MountID == 0 {
			continue
		}
		m, err := v.lookup(ctx, r.MountID, statWhere)
		if err == nil && (v.f.UniqueIDs || r.is(&m)) {
			err = &BusyError{Index: i, MountID: r.MountID, Target: m.Point}
		}
		if err != nil && !errors.Is(err, unix.ENOENT) {
			return &Error{i, "look again", err}
		}
	}
	return nil
}

func (e *Executor) undoSequence(ctx context.Context, v *view, receipts []Receipt) error {
	for i := len(receipts) - 1; i >= 0; i-- {
		if err := e.undoOne(ctx, v, i, &receipts[i]); err != nil {
			return err
		}
	}
	return nil
}

// undoOne takes one receipt's mount away, and first those that came with it.
func (e *Executor) undoOne(ctx context.Context, v *view, i int, r *Receipt) error {
	t := taking{e: e, ctx: ctx, v: v, index: i}
	if r.Tree {
		below, err := t.below(r)
		if err != nil {
			return t.fail("list the mounts below", err)
		}
		for _, id := range slices.Backward(below) {
			if err := t.take(id, nil); err != nil {
				return err
			}
		}
	}
	return t.take(r.MountID, r)
}

// below returns the mounts that came with a recursive bind and are still
// below it, outermost first. Anybody else's there makes it busy.
func (t *taking) below(r *Receipt) ([]uint64, error) {
	m, err := t.find(r.MountID, r)
	if err != nil || m.ID == 0 {
		return nil, err
	}
	below, err := t.v.children(t.ctx, r.MountID)
	if err != nil {
		return nil, err
	}
	// A tree is copied from its root down.
	if t.v.f.UniqueIDs {
		slices.Sort(below)
	}
	for _, id := range below {
		own := id > r.MountID && id < r.TreeEnd
		if !t.v.f.UniqueIDs {
			own = slices.Contains(r.Below, id)
		}
		if !own {
			return nil, t.busyWith(&m, []uint64{id})
		}
	}
	return below, nil
}
