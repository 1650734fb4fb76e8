package co

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/reference/fusemount"
	"github.com/csi-prepare/csi-prepare/reference/mountns"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
	"github.com/csi-prepare/csi-prepare/reference/perform"
	"github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// Down takes a volume away from a consumer: it undoes, unprepares, unstages if
// no other consumer on the node has the volume, and forgets. A preparation
// that the ledger does not have is down already. What is in use stays, with
// everything it needs: after some attempts, or when ctx ends, the error says
// who uses it, and Down may be called again.
//
// Errors are as those of Up, a *LeftoverError for a directory that is not
// empty after all, or have a *perform.BusyError in their chain.
func (c *CO) Down(ctx context.Context, k Key) error {
	leave, err := c.volumes.enter(ctx, k.volume())
	if err != nil {
		return err
	}
	defer leave()
	if err := c.down(ctx, k); err != nil {
		return fmt.Errorf("volume %s: %w", k.VolumeID, err)
	}
	return nil
}

func (c *CO) down(ctx context.Context, k Key) error {
	r, err := c.ledger.get(k)
	if r == nil || err != nil {
		return err
	}
	lock, err := c.hold(ctx, k)
	if err != nil {
		return err
	}
	defer lock.Close()
	a := &act{CO: c, lock: lock, r: r, s: c.policy.For(k.Driver)}
	return a.takeBack(ctx)
}

// takeBack goes on from the phase of the record, whatever of its act has
// happened, until nothing is left. Each act may be repeated.
func (a *act) takeBack(ctx context.Context) error {
	err := a.back(ctx)
	if err == nil {
		a.log.Info("taken back", "preparation", a.r.Key().String())
		return nil
	}
	a.r.Error = err.Error()
	a.log.Warn("not taken back yet", "preparation", a.r.Key().String(), "phase", string(a.r.Phase), "error", err)
	return errors.Join(err, a.ledger.put(a.r))
}

func (a *act) back(ctx context.Context) error {
	if a.r.BootID != a.boot {
		return a.void(ctx)
	}
	if len(a.r.Receipts) > 0 {
		if err := a.set(Undoing, true); err != nil {
			return err
		}
		if err := a.undo(ctx); err != nil {
			return err
		}
		a.r.Receipts = nil
	}
	defer a.closeControls()
	a.release(a.r.Key())
	if len(a.r.Devices) > 0 {
		if err := a.free(ctx); err != nil {
			return err
		}
		a.r.Devices = nil
	}
	if a.r.Phase != Staging && a.r.Phase != Unstaging && a.r.Phase != Removing {
		if err := a.set(Unpreparing, true); err != nil {
			return err
		}
		p, err := a.pluginOf(ctx, a.r, &a.s)
		if err == nil {
			err = a.unprepare(ctx, p)
		}
		if status.Code(err) == codes.FailedPrecondition && len(a.controls) > 0 {
			// A copy of a mount in somebody's namespace keeps its
			// connection. It is this CO's to end, now that its consumer
			// has left.
			a.log.Warn("a FUSE connection outlives its performance and is aborted", "preparation", a.r.Key().String())
			err = errors.Join(a.abort(), a.unprepare(ctx, p))
		}
		if err != nil {
			return err
		}
	}
	if a.r.staged() && a.r.Phase != Removing {
		if err := a.unstage(ctx); err != nil {
			return err
		}
	}
	if err := a.set(Removing, false); err != nil {
		return err
	}
	if err := removeDir(ctx, a.r.PreparePath); err != nil {
		return err
	}
	return a.forget(ctx)
}

// forget removes the staging path if it is of no more use, and the record.
func (a *act) forget(ctx context.Context) error {
	if a.r.staged() {
		used, err := a.ledger.usedByOthers(a.r.Key(), a.boot)
		if err == nil && !used {
			err = removeDir(ctx, a.r.StagingPath)
		}
		if err != nil {
			// The volume can be staged here again all the same.
			a.log.Warn("staging path", "preparation", a.r.Key().String(), "error", err)
		}
	}
	a.before("drop")
	if err := a.ledger.drop(a.r.Key()); err != nil {
		return err
	}
	a.before("dropped")
	return nil
}

// void ends a preparation of another boot. Its mounts went with that boot, and
// the plugin has forgotten it; a directory may be left.
func (a *act) void(ctx context.Context) error {
	a.r.Receipts, a.r.Devices = nil, nil
	if err := a.set(Removing, false); err != nil {
		return err
	}
	err := removeDir(ctx, a.r.PreparePath)
	if errors.Is(err, unix.ENOTEMPTY) {
		p, found := a.pluginOf(ctx, a.r, &a.s)
		if found == nil {
			found = a.unprepare(ctx, p)
		}
		if found != nil {
			return errors.Join(err, found)
		}
		err = removeDir(ctx, a.r.PreparePath)
	}
	if err != nil {
		return err
	}
	return a.forget(ctx)
}

// undo takes away what the receipts are of, in a child.
func (a *act) undo(ctx context.Context) error {
	ns, err := namespaceOf(ctx, a.r.Receipts[0].MntnsID)
	if errors.Is(err, errGone) {
		return nil
	}
	if err != nil {
		return err
	}
	var file *os.File
	if ns != nil {
		defer ns.Close()
		file = ns.File()
	}
	step := func(receipts []perform.Receipt) error {
		return a.s.repeat(ctx, isBusy, func(ctx context.Context) error {
			_, err := a.step(ctx, a.r.Key(), a.lock, task{job: job{Act: actUndo, Receipts: receipts, Settings: a.s}, namespace: file})
			return err
		})
	}
	a.openControls(ctx, ns)
	// What was created for the target goes last, and not before the mounts
	// below it have been counted.
	mounts, created := withoutCreated(a.r.Receipts)
	if len(created) > 0 {
		own, err := lookup(ctx, ns, mountIDs(a.r.Receipts)...)
		if err == nil {
			err = step(mounts)
		}
		if err == nil {
			err = a.countBelow(ctx, created[0], own) // the outermost
		}
		if err != nil {
			return err
		}
	}
	err = step(a.r.Receipts)
	a.before("undone")
	return err
}

// lookup reads mounts of a namespace, nil for the own.
func lookup(ctx context.Context, ns *mountns.Namespace, ids ...uint64) ([]mountns.Mount, error) {
	if ns == nil {
		own, err := mountns.Own()
		if err != nil {
			return nil, err
		}
		defer own.Close()
		ns = own
	}
	return ns.Lookup(ctx, ids...)
}

// openControls gets hold of the FUSE connections that are about to be left,
// while their mounts show which they are.
func (a *act) openControls(ctx context.Context, ns *mountns.Namespace) {
	for _, r := range a.r.Receipts {
		if r.Kind != mountspec.KindFUSE {
			continue
		}
		before, err := lookup(ctx, ns, r.MountID)
		if err != nil || len(before) != 1 || before[0].Major != 0 {
			continue
		}
		control, err := fusemount.OpenControl(before[0].Minor)
		if err != nil {
			a.log.Warn("no control of a FUSE connection", "preparation", a.r.Key().String(), "error", err)
			continue
		}
		// Attached before and after, so the number was its own meanwhile.
		if after, err := lookup(ctx, ns, r.MountID); err != nil || len(after) != 1 || after[0].Minor != before[0].Minor {
			_ = control.Close()
			continue
		}
		a.controls = append(a.controls, control)
	}
}

func (a *act) abort() error {
	var errs []error
	for _, c := range a.controls {
		errs = append(errs, c.Abort())
	}
	return errors.Join(errs...)
}

func (a *act) closeControls() {
	for _, c := range a.controls {
		_ = c.Close()
	}
	a.controls = nil
}

// free sees that nobody has the devices in use that this CO was the first to
// use, once no consumer on the node has the volume: a table without a mount of
// it does not prove that, and whoever takes the device away then destroys data.
func (a *act) free(ctx context.Context) error {
	used, err := a.ledger.usedByOthers(a.r.Key(), a.boot)
	if used || err != nil {
		return err
	}
	err = a.s.repeat(ctx, isBusy, func(ctx context.Context) error {
		_, err := a.step(ctx, a.r.Key(), a.lock, task{job: job{Act: actFree, Devices: a.r.Devices, Settings: a.s}})
		return err
	})
	var busy *DeviceBusyError
	if errors.As(err, &busy) {
		where, found := mountsOfDevice(ctx, busy.Device)
		return errors.Join(&DeviceBusyError{busy.Device, where}, found)
	}
	return err
}

func mountsOfDevice(ctx context.Context, d Device) ([]FoundMount, error) {
	return mountsWhere(ctx, func(t *mountns.Table) (found []mountns.Mount) {
		for _, m := range t.Mounts {
			if m.Major == d.Major && m.Minor == d.Minor {
				found = append(found, m)
			}
		}
		return found
	})
}

// countBelow looks for mounts below what was created for a target. Copies of
// the performance, which a namespace got when it was cloned meanwhile, are
// reported and go with the directory: they would keep the volume in use, and
// nobody could undo them. Whatever else is there keeps it.
func (a *act) countBelow(ctx context.Context, dir string, own []mountns.Mount) error {
	left, err := mountsBelow(ctx, dir)
	if err != nil {
		return err
	}
	var others []FoundMount
	for _, m := range left {
		if !slices.ContainsFunc(own, func(o mountns.Mount) bool {
			return o.Major == m.Mount.Major && o.Minor == m.Mount.Minor && o.Root == m.Mount.Root && o.Point == m.Mount.Point
		}) {
			others = append(others, m)
			continue
		}
		a.log.Warn("another mount namespace has a copy of the performance", "preparation", a.r.Key().String(),
			"mount", m.Mount.String(), "mntns_id", m.Namespace)
	}
	if len(others) > 0 {
		return &LeftoverError{Dir: dir, Mounts: others, Err: unix.EBUSY}
	}
	return nil
}

func isBusy(err error) bool {
	var mount *perform.BusyError
	var device *DeviceBusyError
	return errors.As(err, &mount) || errors.As(err, &device)
}

func withoutCreated(receipts []perform.Receipt) (mounts []perform.Receipt, created []string) {
	for _, r := range receipts {
		for _, c := range r.Created {
			created = append(created, c.Path)
		}
		r.Created = nil
		mounts = append(mounts, r)
	}
	return mounts, created
}

func (a *act) unprepare(ctx context.Context, p *plugin) error {
	err := a.s.callBack(ctx, "NodeUnprepareVolume", func(ctx context.Context) error {
		_, err := p.prepare.NodeUnprepareVolume(ctx, &preparev1alpha1.NodeUnprepareVolumeRequest{
			VolumeId: a.r.VolumeID, PrepareId: a.r.PrepareID,
			PreparePath: a.r.PreparePath, StagingTargetPath: a.r.StagingPath,
		})
		return err
	})
	a.before("called NodeUnprepareVolume")
	return err
}

// unstage calls NodeUnstageVolume for the last preparation of the volume.
func (a *act) unstage(ctx context.Context) error {
	if err := a.set(Unstaging, true); err != nil {
		return err
	}
	used, err := a.ledger.usedByOthers(a.r.Key(), a.boot)
	if used || err != nil {
		return err
	}
	p, err := a.pluginOf(ctx, a.r, &a.s)
	if err != nil {
		return err
	}
	err = a.s.callBack(ctx, "NodeUnstageVolume", func(ctx context.Context) error {
		_, err := p.node.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{
			VolumeId: a.r.VolumeID, StagingTargetPath: a.r.StagingPath,
		})
		return err
	})
	a.before("called NodeUnstageVolume")
	return err
}
