package perform

import (
	"context"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
	"github.com/csi-prepare/csi-prepare/reference/mountns"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
)

// statDetached reads a mount that is in no namespace, which statmount(2)
// cannot: a clone of it is attached in a copy of the own namespace, read there,
// and goes with the copy.
func statDetached(ctx context.Context, mount int, f mountspec.Features) (kernel.MountStat, error) {
	clone, err := kernel.OpenTree(mount, "", unix.OPEN_TREE_CLONE)
	if err != nil {
		return kernel.MountStat{}, fmt.Errorf("clone to read it: %w", err)
	}
	defer unix.Close(clone)
	facts, err := kernel.FactsOf(clone, "", f.UniqueIDs)
	if err != nil {
		return kernel.MountStat{}, err
	}
	ns, err := mountns.New(ctx)
	if err != nil {
		return kernel.MountStat{}, err
	}
	defer func() { _ = ns.Close() }()
	var stat kernel.MountStat
	err = ns.Do(ctx, func() error {
		// On top of the root of the copy, which nobody else is in.
		root, err := open(unix.AT_FDCWD, "/", unix.O_PATH|unix.O_DIRECTORY)
		if err != nil {
			return err
		}
		defer unix.Close(root)
		if err := kernel.MoveMount(clone, root, 0); err != nil {
			return err
		}
		if f.UniqueIDs {
			stat, err = kernel.StatMount(0, facts.MountID, kernel.StatSuperblock|kernel.StatOptions)
			return err
		}
		t, err := ns.Table(ctx)
		if err != nil {
			return err
		}
		for _, m := range t.Mounts {
			if uint64(m.SmallID) == facts.MountID {
				stat.Options = m.SBOptions
				if m.SBReadonly {
					stat.SBFlags = unix.MS_RDONLY
				}
				return nil
			}
		}
		return unix.ENOENT
	})
	return stat, err
}
