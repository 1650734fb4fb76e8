package mountns

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
)

// MachineWatermark is a [Watermark] for every namespace of the machine at once.
type MachineWatermark struct {
	// ID is such that every mount made later, in whatever namespace, has a
	// greater one.
	ID uint64

	counts map[uint64]int
	whole  *Snapshot // where the kernel cannot do better
}

// MachineIncrement is what has come into the namespaces of the machine since a
// watermark.
type MachineIncrement struct {
	// Namespaces are those with something to tell, in order of ID.
	Namespaces []NamespaceIncrement
	// Vanished are namespaces that are gone.
	Vanished []uint64
	// Next is the watermark for going on from here.
	Next MachineWatermark
}

// NamespaceIncrement is what has come into one namespace.
type NamespaceIncrement struct {
	ID uint64
	// Appeared says that the namespace is new itself; all its mounts are then
	// in New.
	Appeared bool
	// New are ids; [Describe] tells more.
	New []uint64
	// Unexplained is that of [Increment].
	Unexplained int
}

// MarkMachine takes a watermark of the whole machine: the id of a mount that is
// made and thrown away, since ids are counted over all namespaces, and how many
// mounts each has. [All] says what it needs; where the kernel cannot do it, it
// is a [Snapshot].
func MarkMachine(ctx context.Context) (MachineWatermark, error) {
	return markMachine(ctx, kernel.Probe())
}

func machineIncremental(f kernel.Features) bool {
	return f.NSWalk && f.Listmount && f.ListmountByNS && f.UniqueID && f.NewMountAPI
}

func markMachine(ctx context.Context, f kernel.Features) (w MachineWatermark, err error) {
	if !machineIncremental(f) {
		w.whole, err = takeSnapshot(ctx, f)
		return w, err
	}
	if w.ID, err = throwAwayID(); err != nil {
		return w, fmt.Errorf("mountns: mark the machine: %w", err)
	}
	w.counts = map[uint64]int{}
	err = walk(ctx, func(_ int, info kernel.NSInfo) error {
		w.counts[info.ID] = int(info.Mounts)
		return nil
	})
	if err != nil {
		return w, fmt.Errorf("mountns: mark the machine: %w", err)
	}
	return w, nil
}

// throwAwayID is the id of a detached clone, which is in no namespace and gone
// when this returns.
func throwAwayID() (uint64, error) {
	fd, err := kernel.OpenTree(unix.AT_FDCWD, "/", unix.OPEN_TREE_CLONE)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	return kernel.UniqueID(fd, "")
}

// Since returns what was mounted on the machine after the watermark, with the
// blind spots of [Namespace.Since]. A mount made while it runs may be told of
// again by the next, never left out by both.
func (w MachineWatermark) Since(ctx context.Context) (MachineIncrement, error) {
	return w.since(ctx, kernel.Probe())
}

func (w MachineWatermark) since(ctx context.Context, f kernel.Features) (MachineIncrement, error) {
	if w.whole != nil {
		return w.sinceWhole(ctx, f)
	}
	if w.counts == nil {
		return MachineIncrement{}, errors.New("mountns: the zero MachineWatermark; take one with MarkMachine")
	}
	// The next watermark is older than the first namespace looked at: a mount
	// made there afterwards can have a smaller id than one seen later elsewhere.
	next, err := throwAwayID()
	if err != nil {
		return MachineIncrement{}, fmt.Errorf("mountns: mark the machine: %w", err)
	}
	inc := MachineIncrement{Next: MachineWatermark{ID: next, counts: make(map[uint64]int, len(w.counts))}}
	var ids []uint64
	err = walk(ctx, func(fd int, info kernel.NSInfo) error {
		before, known := w.counts[info.ID]
		after := w.ID
		if !known {
			after = 0 // a new namespace may hold mounts made before it
		}
		count, err := steady(fd, info.Mounts, func() (err error) {
			ids, err = listNamespace(ctx, ids[:0], fd, info.ID, after)
			return err
		})
		if err != nil {
			return err
		}
		at, _ := slices.BinarySearch(ids, next+1)
		inc.Next.counts[info.ID] = count - (len(ids) - at)
		n := NamespaceIncrement{ID: info.ID, Appeared: !known}
		if known {
			n.Unexplained = count - before - len(ids)
		}
		if len(ids) > 0 || n.Unexplained != 0 || !known {
			n.New = slices.Clone(ids)
			inc.Namespaces = append(inc.Namespaces, n)
		}
		return nil
	})
	if err != nil {
		return MachineIncrement{}, fmt.Errorf("mountns: mounts of the machine since %d: %w", w.ID, err)
	}
	for id := range w.counts {
		if _, there := inc.Next.counts[id]; !there {
			inc.Vanished = append(inc.Vanished, id)
		}
	}
	slices.Sort(inc.Vanished)
	slices.SortFunc(inc.Namespaces, func(a, b NamespaceIncrement) int { return compareIDs(a.ID, b.ID) })
	return inc, nil
}

func (w MachineWatermark) sinceWhole(ctx context.Context, f kernel.Features) (MachineIncrement, error) {
	now, err := takeSnapshot(ctx, f)
	if err != nil {
		return MachineIncrement{}, err
	}
	changes := w.whole.Diff(now)
	inc := MachineIncrement{Vanished: changes.Vanished, Next: MachineWatermark{whole: now}}
	for _, c := range changes.Changed {
		if slices.Contains(changes.Vanished, c.ID) {
			continue
		}
		inc.Namespaces = append(inc.Namespaces, NamespaceIncrement{
			ID: c.ID, Appeared: slices.Contains(changes.Appeared, c.ID), New: c.Added, Unexplained: -len(c.Removed),
		})
	}
	return inc, nil
}

// Describe reads the mounts with the ids in the namespace with the id, without
// those that are gone. It needs no open namespace, and a kernel with unique ids
// (6.11); elsewhere it is [errors.ErrUnsupported], and [Namespace.Lookup] on a
// namespace from [All] does the same.
func Describe(ctx context.Context, namespace uint64, ids ...uint64) ([]Mount, error) {
	if f := kernel.Probe(); !f.ListmountByNS || !f.Statmount {
		return nil, fmt.Errorf("mountns: describe mounts by id: %w", errors.ErrUnsupported)
	}
	return statAll(ctx, namespace, ids, make([]Mount, 0, len(ids)))
}
