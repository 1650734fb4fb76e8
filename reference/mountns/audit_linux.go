package mountns

import (
	"context"
	"errors"
	"fmt"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
)

// Watermark is a moment in the life of a namespace that later states can be
// compared with at a price that does not grow with the number of mounts.
type Watermark struct {
	// ID is such that every mount made later has a greater one.
	ID uint64
	// Mounts is how many mounts the namespace had.
	Mounts int

	// table is the whole state, where the kernel has no unique ids.
	table *Table
}

// Increment is what has come into a namespace since a watermark.
type Increment struct {
	// New are the mounts made after the watermark and attached now.
	New []Mount
	// Unexplained is by how many mounts the namespace has more (positive) or
	// fewer (negative) than the watermark and New account for. Negative: at
	// least so many mounts are gone. Positive: at least so many were attached
	// that are older than the watermark, or that no path leads to. Zero means
	// that the account is even, not that nothing of both happened: only the
	// difference of full lists tells.
	Unexplained int
	// Next is the watermark for going on from here.
	Next Watermark
}

// Mark takes a watermark. On a kernel without unique ids, or without a count of
// a namespace's mounts, it remembers the whole table instead, and [Namespace.Since]
// compares whole tables: right, but not cheap.
func (n *Namespace) Mark(ctx context.Context) (Watermark, error) {
	if !n.incremental() {
		t, err := n.Table(ctx)
		if err != nil {
			return Watermark{}, err
		}
		return watermarkOf(t), nil
	}
	var w Watermark
	err := n.reading(ctx, func(ns uint64) error {
		count, err := n.steady(func() (err error) {
			w.ID, err = kernel.NewestMount(ns)
			return err
		})
		w.Mounts = count
		return err
	})
	if err != nil {
		return Watermark{}, fmt.Errorf("mountns: mark %s: %w", n, err)
	}
	return w, nil
}

func watermarkOf(t *Table) Watermark {
	w := Watermark{Mounts: t.Len(), table: t}
	if w.Mounts > 0 {
		w.ID = t.Mounts[w.Mounts-1].ID
	}
	return w
}

func (n *Namespace) incremental() bool {
	return n.byID() && n.features.Statmount && n.features.ListmountReverse && n.features.NSWalk
}

// steadyAttempts bounds how often a reading is repeated because the number of
// mounts was another one afterwards.
const steadyAttempts = 8

// steady reads while the number of mounts of the namespace open at fd stays the
// same, as far as that can be had, and returns the number. before is the number
// just before.
func steady(fd int, before uint32, read func() error) (int, error) {
	for range steadyAttempts {
		if err := read(); err != nil {
			return 0, err
		}
		after, err := kernel.NSStat(fd)
		if err != nil {
			return 0, err
		}
		if after.Mounts == before {
			break
		}
		before = after.Mounts
	}
	return int(before), nil
}

// steady is the same for the namespace.
func (n *Namespace) steady(read func() error) (int, error) {
	before, err := kernel.NSStat(n.fd)
	if err != nil {
		return 0, err
	}
	return steady(n.fd, before.Mounts, read)
}

// Since returns what was mounted after the watermark, which must be one of this
// namespace. It does not see a mount made before the watermark and attached
// after it (see [Increment.Unexplained]), a mount that came and went, nor a
// change of a mount that stays.
func (n *Namespace) Since(ctx context.Context, w Watermark) (Increment, error) {
	if w.table != nil || !n.incremental() {
		return n.sinceTable(ctx, w)
	}
	inc := Increment{Next: w}
	err := n.reading(ctx, func(ns uint64) error {
		pooled := idBuffers.Get().(*[]uint64)
		defer idBuffers.Put(pooled)
		list := func() (err error) {
			*pooled, err = kernel.ListMounts((*pooled)[:0], ns, kernel.Root, w.ID)
			return err
		}
		if err := list(); err != nil {
			return err
		}
		info, err := kernel.NSStat(n.fd)
		if err != nil {
			return err
		}
		count := int(info.Mounts)
		if count != w.Mounts+len(*pooled) {
			// Uneven for good, or because of a change between the two.
			if count, err = n.steady(list); err != nil {
				return err
			}
		}
		ids := *pooled
		inc.Unexplained = count - w.Mounts - len(ids)
		inc.Next.Mounts = count
		if len(ids) == 0 {
			return nil
		}
		inc.Next.ID = ids[len(ids)-1]
		inc.New, err = statAll(ctx, ns, ids, make([]Mount, 0, len(ids)))
		return err
	})
	if err != nil {
		return Increment{}, fmt.Errorf("mountns: mounts of %s since %d: %w", n, w.ID, err)
	}
	return inc, nil
}

var errForeignWatermark = errors.New("the watermark was taken in another way than this namespace can be read")

func (n *Namespace) sinceTable(ctx context.Context, w Watermark) (Increment, error) {
	if w.table == nil {
		return Increment{}, fmt.Errorf("mountns: mounts of %s: %w", n, errForeignWatermark)
	}
	now, err := n.Table(ctx)
	if err != nil {
		return Increment{}, err
	}
	changes := Diff(w.table, now)
	return Increment{New: changes.Added, Unexplained: -len(changes.Removed), Next: watermarkOf(now)}, nil
}

// DiffIDs compares two lists from [Namespace.IDs], both ascending.
func DiffIDs(before, after []uint64) (added, removed []uint64) {
	for len(before) > 0 && len(after) > 0 {
		b, a := before[0], after[0]
		switch {
		case b == a:
			before, after = before[1:], after[1:]
		case b < a:
			removed, before = append(removed, b), before[1:]
		default:
			added, after = append(added, a), after[1:]
		}
	}
	return append(added, after...), append(removed, before...)
}
