package co

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
)

// errBusy is what unmount reports of a mount that is in use.
var errBusy = errors.New("is in use")

// Undo implements [Executor].
func (p *Plain) Undo(ctx context.Context, t Target, texts []string) error {
	receipts, err := living(texts)
	if err != nil || len(receipts) == 0 {
		return err
	}
	ns, err := open(t.Namespace)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // it ended, and its mounts with it
	}
	if err != nil {
		return &StateError{"target.namespace", err}
	}
	defer ns.Close()
	if ns.ID() != receipts[0].NSID {
		return &StateError{"target.namespace", fmt.Errorf("is %d, and the receipts are of %d", ns.ID(), receipts[0].NSID)}
	}
	return ns.Do(ctx, func() error { return p.undo(t, receipts) })
}

// undo is Undo inside the namespace.
func (p *Plain) undo(t Target, receipts []receipt) error {
	for _, i := range p.order(len(receipts)) {
		if err := p.undoOne(t, receipts[i]); err != nil {
			return err
		}
	}
	return nil
}

// undoOne undoes one mount, and what was created for it.
func (p *Plain) undoOne(t Target, r receipt) error {
	if _, err := kernel.StatMount(0, r.MountID, kernel.StatBasic); err != nil {
		if !errors.Is(err, unix.ENOENT) {
			return err
		}
		if len(r.Created) == 0 {
			return nil
		}
	}
	at, err := p.find(Target{Root: t.Root, Path: r.Target})
	if err != nil {
		return &StateError{r.Target, err}
	}
	defer at.close()
	if err := p.unmount(at, r); err != nil {
		return err
	}
	return p.remove(at, r)
}

// unmount takes the mount with the id of the receipt away, and no other. It
// asks nothing of the filesystem that is mounted. Between its look at the id
// and the call somebody may still cover the mount: only moving it away first
// would rule that out.
func unmount(at *place, r receipt) error {
	switch gone, err := isGone(r.MountID); {
	case err != nil || gone:
		return err
	}
	switch top, err := kernel.UniqueID(at.parent, at.name); {
	case err != nil:
		return err
	case top != r.MountID:
		return &StateError{r.Target, fmt.Errorf("%w: mount %d lies over mount %d, or that was moved away", errBusy, top, r.MountID)}
	}
	if err := unmountTree(r); err != nil {
		return err
	}
	if err := at.umount(0); err != nil {
		return busy(r.Target, err)
	}
	gone, err := isGone(r.MountID)
	if err == nil && !gone {
		err = &StateError{r.Target, fmt.Errorf("mount %d is still there", r.MountID)}
	}
	return err
}

// unmountTree takes away what came along with a recursive bind, the last
// first. What others have mounted there since has a later id, and stays.
func unmountTree(r receipt) error {
	below, err := kernel.ListMounts(nil, 0, r.MountID, r.MountID)
	if err != nil {
		return err
	}
	for _, id := range slices.Backward(below) {
		if id >= r.TreeEnd {
			continue
		}
		stat, err := kernel.StatMount(0, id, kernel.StatPoint)
		if err != nil {
			return err
		}
		if err := unmountAt(stat.Point, id); err != nil {
			return err
		}
	}
	return nil
}

func unmountAt(point string, id uint64) error {
	at, err := find(Target{Path: point})
	if err != nil {
		return err
	}
	defer at.close()
	if top, err := kernel.UniqueID(at.parent, at.name); err != nil || top != id {
		return errors.Join(err, &StateError{point, errBusy})
	}
	return busy(point, at.umount(0))
}

// busy puts the error of an unmount into words.
func busy(point string, err error) error {
	if errors.Is(err, unix.EBUSY) {
		return &StateError{point, fmt.Errorf("%w: %w", errBusy, err)}
	}
	return err
}

// umount unmounts what is on top at the place, which is named relative to
// its directory: a path could be led elsewhere in the meantime.
func (at *place) umount(flags int) error {
	if err := unix.Fchdir(at.parent); err != nil {
		return os.NewSyscallError("fchdir", err)
	}
	err := kernel.Unmount(at.name, flags)
	return errors.Join(err, unix.Chdir("/"))
}

func isGone(id uint64) (bool, error) {
	_, err := kernel.StatMount(0, id, kernel.StatBasic)
	if errors.Is(err, unix.ENOENT) {
		return true, nil
	}
	return false, err
}

// remove takes away, without recursion, what was created for the target.
func remove(at *place, r receipt) error {
	for _, created := range r.Created {
		if created != at.path {
			return fmt.Errorf("receipt: created %q is not the target %q", created, at.path)
		}
		var st unix.Stat_t
		err := unix.Fstatat(at.parent, path.Base(created), &st, unix.AT_SYMLINK_NOFOLLOW)
		if errors.Is(err, unix.ENOENT) {
			return nil
		}
		if err != nil {
			return err
		}
		if kind := st.Mode & unix.S_IFMT; kind != unix.S_IFDIR && (kind != unix.S_IFREG || st.Size > 0) {
			return nil // somebody else's: what was made is empty
		}
		if err := at.rmdir(path.Base(created), st.Mode&unix.S_IFMT != unix.S_IFDIR); err != nil {
			return &StateError{created, err}
		}
	}
	return nil
}

func reverse(n int) []int {
	var order []int
	for i := n - 1; i >= 0; i-- {
		order = append(order, i)
	}
	return order
}

// Whole implements [Executor].
func (p *Plain) Whole(ctx context.Context, t Target, texts []string) (bool, error) {
	receipts, err := living(texts)
	if err != nil || len(receipts) < len(texts) {
		return false, err
	}
	ns, err := open(t.Namespace)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer ns.Close()
	whole := true
	err = ns.Do(ctx, func() error {
		for _, r := range receipts {
			gone, err := isGone(r.MountID)
			if err != nil {
				return err
			}
			whole = whole && !gone
		}
		return nil
	})
	return whole, err
}

// living returns the receipts of this boot: with another, the mounts ended.
func living(texts []string) ([]receipt, error) {
	receipts, err := decode(texts)
	if err != nil {
		return nil, err
	}
	boot, err := bootID()
	return slices.DeleteFunc(receipts, func(r receipt) bool { return r.BootID != boot }), err
}

func decode(texts []string) ([]receipt, error) {
	var receipts []receipt
	for i, text := range texts {
		var r receipt
		if err := json.Unmarshal([]byte(text), &r); err != nil {
			return nil, &StateError{fmt.Sprintf("receipts[%d]", i), err}
		}
		receipts = append(receipts, r)
	}
	return receipts, nil
}
