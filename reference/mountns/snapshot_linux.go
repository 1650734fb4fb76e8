package mountns

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
)

// Snapshot is which mounts every namespace of the machine had.
type Snapshot struct {
	// Namespaces are in order of ID.
	Namespaces []NamespaceIDs `json:"namespaces"`
}

// NamespaceIDs is which mounts one namespace had.
type NamespaceIDs struct {
	// ID is that of [Namespace.ID].
	ID uint64 `json:"id"`
	// Mounts are the ids, ascending.
	Mounts []uint64 `json:"mounts"`

	table *Table // where ids are not unique
}

// SnapshotChanges is the difference of two snapshots.
type SnapshotChanges struct {
	// Appeared and Vanished are ids of namespaces. Their mounts are in
	// Changed too, all as added or all as removed.
	Appeared []uint64 `json:"appeared,omitempty"`
	Vanished []uint64 `json:"vanished,omitempty"`
	// Changed are the namespaces in which mounts came or went.
	Changed []NamespaceChange `json:"changed,omitempty"`
}

// NamespaceChange is which mounts came into a namespace and went from it. Where
// ids are not unique, one that was given again is in both lists.
type NamespaceChange struct {
	ID      uint64   `json:"id"`
	Added   []uint64 `json:"added,omitempty"`
	Removed []uint64 `json:"removed,omitempty"`
}

// Empty says that nothing differs.
func (c *SnapshotChanges) Empty() bool {
	return len(c.Appeared)+len(c.Vanished)+len(c.Changed) == 0
}

// TakeSnapshot lists the mounts of every namespace of the machine; what that
// needs and sees, [All] says. It holds no namespace open when it returns.
// Namespaces are listed one after another, not at one moment.
func TakeSnapshot(ctx context.Context) (*Snapshot, error) {
	return takeSnapshot(ctx, kernel.Probe())
}

func takeSnapshot(ctx context.Context, f kernel.Features) (*Snapshot, error) {
	s := &Snapshot{}
	var err error
	if f.NSWalk && f.ListmountByNS && f.Listmount {
		err = s.walk(ctx)
	} else {
		err = s.visit(ctx, f)
	}
	if err != nil {
		return nil, fmt.Errorf("mountns: snapshot of the machine: %w", err)
	}
	return s, nil
}

func (s *Snapshot) walk(ctx context.Context) error {
	// One array holds the ids of all namespaces; offsets, because it grows.
	var ids []uint64
	var starts []int
	err := walk(ctx, func(fd int, info kernel.NSInfo) (err error) {
		starts = append(starts, len(ids))
		s.Namespaces = append(s.Namespaces, NamespaceIDs{ID: info.ID})
		ids = slices.Grow(ids, int(info.Mounts)+1) // one call a namespace
		ids, err = listNamespace(ctx, ids, fd, info.ID, 0)
		return err
	})
	for i := range s.Namespaces {
		end := len(ids)
		if i+1 < len(starts) {
			end = starts[i+1]
		}
		s.Namespaces[i].Mounts = ids[starts[i]:end:end]
	}
	s.sort()
	return err
}

// listNamespace appends to dst the ids above after in the namespace open at fd,
// which has the id ns.
func listNamespace(ctx context.Context, dst []uint64, fd int, ns, after uint64) ([]uint64, error) {
	if ns == confined() {
		err := insideByFD(ctx, fd, func() (err error) {
			dst, err = kernel.ListMounts(dst, 0, kernel.Root, after)
			return err
		})
		return dst, err
	}
	dst, err := kernel.ListMounts(dst, ns, kernel.Root, after)
	if errors.Is(err, unix.ENOENT) {
		err = nil // no mount in it, as when its last process has just ended
	}
	return dst, err
}

// visit is the slow way.
func (s *Snapshot) visit(ctx context.Context, f kernel.Features) error {
	namespaces, err := all(ctx, f)
	if err != nil {
		return err
	}
	defer CloseAll(namespaces)
	for _, n := range namespaces {
		account, err := n.account(ctx)
		if err != nil {
			return err
		}
		s.Namespaces = append(s.Namespaces, account)
	}
	s.sort()
	return nil
}

// account is the namespace's ids, with all that is needed to compare them.
func (n *Namespace) account(ctx context.Context) (a NamespaceIDs, err error) {
	a.ID = n.id
	if n.byID() {
		a.Mounts, err = n.IDs(ctx, nil)
		return a, err
	}
	if a.table, err = n.mountinfo(ctx); err != nil {
		return a, err
	}
	for i := range a.table.Mounts {
		a.Mounts = append(a.Mounts, a.table.Mounts[i].ID)
	}
	return a, nil
}

func (before *NamespaceIDs) diff(after *NamespaceIDs) (added, removed []uint64) {
	if before.table == nil || after.table == nil {
		return DiffIDs(before.Mounts, after.Mounts)
	}
	changes := Diff(before.table, after.table)
	for _, m := range changes.Added {
		added = append(added, m.ID)
	}
	for _, m := range changes.Removed {
		removed = append(removed, m.ID)
	}
	return added, removed
}

// Diff compares with a later snapshot.
func (s *Snapshot) Diff(later *Snapshot) SnapshotChanges {
	var c SnapshotChanges
	before, after := s.Namespaces, later.Namespaces
	note := func(id uint64, added, removed []uint64) {
		if len(added)+len(removed) > 0 {
			c.Changed = append(c.Changed, NamespaceChange{ID: id, Added: added, Removed: removed})
		}
	}
	head := func(list []NamespaceIDs) uint64 {
		if len(list) == 0 {
			return math.MaxUint64
		}
		return list[0].ID
	}
	for len(before)+len(after) > 0 {
		switch b, a := head(before), head(after); {
		case b < a:
			c.Vanished = append(c.Vanished, b)
			note(b, nil, before[0].Mounts)
			before = before[1:]
		case a < b:
			c.Appeared = append(c.Appeared, a)
			note(a, after[0].Mounts, nil)
			after = after[1:]
		default:
			added, removed := before[0].diff(&after[0])
			note(a, added, removed)
			before, after = before[1:], after[1:]
		}
	}
	return c
}

func (s *Snapshot) sort() {
	slices.SortFunc(s.Namespaces, func(a, b NamespaceIDs) int { return compareIDs(a.ID, b.ID) })
}

// insideByFD is [Namespace.Do] for a descriptor.
func insideByFD(ctx context.Context, fd int, fn func() error) error {
	dup, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("fcntl", err)
	}
	n, err := adopt(dup, "namespace", kernel.Probe())
	if err != nil {
		return err
	}
	defer func() { _ = n.Close() }()
	return n.Do(ctx, fn)
}
