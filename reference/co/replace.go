package co

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
	"github.com/csi-prepare/csi-prepare/reference/perform"
)

// follow brings the FUSE mounts of a consumer up to date after a repeat: one
// that is served over the connection it always had is left alone, and one whose
// connection has ended is replaced by a clone of the mount that is served now.
func (a *act) follow(ctx context.Context, x *accepted) error {
	var served []string
	for i := range x.handles {
		g := &x.handles[i]
		served = append(served, g.handle.ID)
		same, err := a.isAttached(ctx, g)
		if err == nil && !same {
			err = a.replace(ctx, g)
		}
		if err == nil {
			err = a.prove(ctx, g)
		}
		if err != nil {
			return err
		}
	}
	if ch := a.channelOf(); ch != nil {
		ch.Keep(a.r.Key().handoff(), served...)
	}
	return nil
}

func (c *CO) channelOfDriver(driver string) *channel {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.channels[driver]
}

func (a *act) channelOf() *channel { return a.channelOfDriver(a.r.Driver) }

// isAttached says whether what is attached for a handle is of its connection.
// No server is asked: both mounts are there, so their device tells.
func (a *act) isAttached(ctx context.Context, g *given) (bool, error) {
	if g.index >= len(a.r.Receipts) {
		return false, fmt.Errorf("mount_specs[%d]: no receipt of it", g.index)
	}
	receipt := &a.r.Receipts[g.index]
	if receipt.Kind != mountspec.KindFUSE {
		return false, ErrNotEquivalent
	}
	ns, err := namespaceOf(ctx, receipt.MntnsID)
	if err != nil {
		return false, err
	}
	attached, err := lookup(ctx, ns, receipt.MountID)
	if ns != nil {
		_ = ns.Close()
	}
	if err != nil {
		return false, err
	}
	if len(attached) != 1 {
		return false, fmt.Errorf("mount %d on %s is gone", receipt.MountID, receipt.Target)
	}
	raw, err := g.handle.Mount.SyscallConn()
	if err != nil {
		return false, err
	}
	var held kernel.Facts
	if cerr := raw.Control(func(fd uintptr) { held, err = kernel.FactsOf(int(fd), "", false) }); cerr != nil {
		return false, cerr
	}
	return held.DevMajor == attached[0].Major && held.DevMinor == attached[0].Minor, err
}

// replace attaches a clone of a mount that is served in the place of one whose
// connection has ended. Both are in the ledger before either is touched.
func (a *act) replace(ctx context.Context, g *given) error {
	old := a.r.Receipts[g.index]
	for i := range a.r.Receipts {
		if a.r.Receipts[i].ParentID == old.MountID {
			return fmt.Errorf("mount_specs[%d] has no server any more, and mount_specs[%d] is attached in it: take the volume down, and up again", g.index, i)
		}
	}
	ns, err := namespaceOf(ctx, old.MntnsID)
	if err != nil {
		return err
	}
	t := task{job: job{Act: actReplace, Receipts: []perform.Receipt{old}, Settings: a.s}, handles: []given{*g}}
	if ns != nil {
		defer ns.Close()
		t.namespace = ns.File()
	}
	whole := a.r.Receipts
	t.journal = func(m message) error {
		// The dead one is on top, so it is the later of the two.
		a.r.Receipts = slices.Replace(slices.Clone(whole), g.index, g.index+1, m.Receipts...)
		return a.set(Performing, true)
	}
	done, err := a.step(ctx, a.r.Key(), a.lock, t)
	if err == nil {
		a.r.Receipts = slices.Replace(slices.Clone(whole), g.index, g.index+1, done.Receipts...)
		a.log.Info("replaced a mount without a server", "preparation", a.r.Key().String(), "target", old.Target)
		return nil
	}
	if len(a.r.Receipts) > len(whole) && !isPending(err) {
		// Nobody acts any more: what was attached is what the table says.
		a.settle(ctx, whole, g.index)
	}
	if errors.Is(err, unix.EBUSY) {
		err = errors.Join(ErrNotEquivalent, err)
	}
	return err
}

// settle keeps that receipt of a failed replacement whose mount is attached.
func (a *act) settle(ctx context.Context, whole []perform.Receipt, index int) {
	both := a.r.Receipts[index : index+2]
	ns, err := namespaceOf(ctx, both[0].MntnsID)
	if err != nil {
		return
	}
	if ns != nil {
		defer ns.Close()
	}
	there, err := lookup(ctx, ns, both[0].MountID, both[1].MountID)
	if err != nil || len(there) != 1 {
		return
	}
	now := both[0]
	if there[0].ID == both[1].MountID {
		now = whole[index]
	}
	a.r.Receipts = slices.Replace(slices.Clone(whole), index, index+1, now)
}

func isPending(err error) bool {
	var pending *PendingError
	return errors.As(err, &pending)
}

// prove has a child ask the server of a mount for an answer.
func (a *act) prove(ctx context.Context, g *given) error {
	_, err := a.step(ctx, a.r.Key(), a.lock, task{job: job{Act: actProve, Settings: a.s}, handles: []given{*g}})
	return err
}
