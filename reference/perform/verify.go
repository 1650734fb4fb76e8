package perform

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
	"github.com/csi-prepare/csi-prepare/reference/mountns"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
)

// view reads single mounts of the namespace that the thread is in.
type view struct {
	f mountspec.Features
	// ns is the namespace if the caller named one: then the thread is in it
	// by Namespace.Do and has file system state of its own.
	ns *mountns.Namespace
	// own is opened on a kernel without unique ids, for its whole table.
	own *mountns.Namespace
	// patient says that a lookup may hang here.
	patient bool
	// seen is a mount that was read a moment ago, for its first use.
	seen kernel.MountStat
}

func (x *performance) view() *view { return &view{f: x.f, ns: x.there, patient: true} }

func (v *view) close() {
	if v.own != nil {
		_ = v.own.Close()
	}
}

// lookup reads what mask names of one mount; ENOENT if it is not attached in
// this namespace.
func (v *view) lookup(ctx context.Context, id, mask uint64) (kernel.MountStat, error) {
	if v.f.UniqueIDs {
		return kernel.StatMount(0, id, mask)
	}
	t, err := v.table(ctx)
	if err != nil {
		return kernel.MountStat{}, err
	}
	for i := range t.Mounts {
		if m := &t.Mounts[i]; uint64(m.SmallID) == id {
			return statOf(t, m), nil
		}
	}
	return kernel.MountStat{}, unix.ENOENT
}

// What is read of a mount: that it is there, where it is, what it is on, and
// what it is. Each part costs.
const (
	statThere = kernel.StatBasic
	statWhere = statThere | kernel.StatPoint | kernel.StatNamespace
	statType  = statThere | kernel.StatFSType | kernel.StatSubtype
	statPlace = statThere | kernel.StatFSType | kernel.StatNamespace
	statWhole = statWhere | kernel.StatSuperblock | kernel.StatFSType
)

func (v *view) table(ctx context.Context) (*mountns.Table, error) {
	ns := v.ns
	if ns == nil {
		if v.own == nil {
			own, err := mountns.Own()
			if err != nil {
				return nil, err
			}
			v.own = own
		}
		ns = v.own
	}
	return ns.Table(ctx)
}

// statOf is a line of a table as statmount(2) would give it, in small ids.
func statOf(t *mountns.Table, m *mountns.Mount) kernel.MountStat {
	s := kernel.MountStat{
		ID: uint64(m.SmallID), ParentID: m.ParentID, OldID: m.SmallID,
		DevMajor: m.Major, DevMinor: m.Minor, Attr: m.Attr, Propagation: uint64(m.Propagation),
		Point: m.Point, FSType: m.FSType, Subtype: m.Subtype, NS: t.Namespace,
	}
	if parent, ok := t.ByID(m.ParentID); ok {
		s.ParentID = uint64(parent.SmallID)
	}
	return s
}

// children returns the ids of the mounts attached to a mount or below those.
func (v *view) children(ctx context.Context, id uint64) ([]uint64, error) {
	if v.f.UniqueIDs {
		return kernel.ListMounts(nil, 0, id, 0)
	}
	t, err := v.table(ctx)
	if err != nil {
		return nil, err
	}
	var found []uint64
	within := map[uint64]bool{}
	for grown := true; grown; {
		grown = false
		for i := range t.Mounts {
			s := statOf(t, &t.Mounts[i])
			if !within[s.ID] && s.ID != id && (s.ParentID == id || within[s.ParentID]) {
				within[s.ID], grown = true, true
				found = append(found, s.ID)
			}
		}
	}
	return found, nil
}

// verify reads the mount back by its id and holds it against the spec.
func (x *performance) verify(u *unit, s *mountspec.Step) error {
	v := x.view()
	defer v.close()
	m, err := v.lookup(x.ctx, u.id, statWhole)
	if err != nil {
		return err
	}
	if err := verifyMount(&m, u.parentID, s, &x.specs[s.Spec]); err != nil {
		return err
	}
	x.fill(s.Spec, &m)
	if u.treeEnd == 0 {
		return nil
	}
	below, err := v.children(x.ctx, u.id)
	if err != nil {
		return err
	}
	if x.f.UniqueIDs {
		below = slices.DeleteFunc(below, func(id uint64) bool { return !u.owns(id) })
	} else {
		// What the performance itself has attached below has units.
		below = slices.DeleteFunc(below, func(id uint64) bool {
			return slices.ContainsFunc(x.units, func(u unit) bool { return u.id == id })
		})
		x.done.Receipts[s.Spec].Below = below
	}
	for _, id := range below {
		m, err := v.lookup(x.ctx, id, statThere)
		if err != nil {
			return err
		}
		if err := verifyAttributes(&m, s.Set, s.Clear); err != nil {
			return err
		}
	}
	return nil
}

// owns says that a unique id is of the tree that came with a recursive bind.
func (u *unit) owns(id uint64) bool { return id > u.id && id < u.treeEnd }

func verifyMount(m *kernel.MountStat, parent uint64, s *mountspec.Step, spec *mountspec.Spec) error {
	if m.ParentID != parent {
		return fmt.Errorf("%w: it is attached to mount %d, want %d", ErrChanged, m.ParentID, parent)
	}
	if k, ok := spec.Kind.(*mountspec.Filesystem); ok {
		// A type may show as its variant: nfs as nfs4.
		if !strings.HasPrefix(m.FSType, k.Type) {
			return fmt.Errorf("%w: its type is %q, want %q", ErrChanged, m.FSType, k.Type)
		}
		// Some filesystems, such as btrfs, have a device number of their own.
		if d := k.Device; d != nil && m.DevMajor != 0 && (m.DevMajor != d.Major || m.DevMinor != d.Minor) {
			return fmt.Errorf("%w: its device is %d:%d, want %d:%d", ErrChanged, m.DevMajor, m.DevMinor, d.Major, d.Minor)
		}
	}
	return verifyAttributes(m, s.Set, s.Clear)
}

func verifyAttributes(m *kernel.MountStat, set, clear mountspec.Attr) error {
	got := mountspec.Attr(m.Attr)
	if got&set != set || got&clear != set&clear {
		return fmt.Errorf("%w: mount %d has attributes %s, want %s", ErrChanged, m.ID, got, set)
	}
	if m.Propagation != unix.MS_PRIVATE {
		return fmt.Errorf("%w: mount %d is not private", ErrChanged, m.ID)
	}
	return nil
}

// fill completes the receipt of a spec with what the kernel says of its mount.
func (x *performance) fill(i int, m *kernel.MountStat) {
	r := &x.done.Receipts[i]
	r.MntnsID, r.MountID, r.ParentID, r.Target = m.NS, m.ID, m.ParentID, m.Point
	x.units[i].remote = remoteTypes[m.FSType]
	r.Remote = remoteTypes[x.parent.FSType] || networkTypes[m.FSType]
	if i > 0 {
		r.Remote = networkTypes[m.FSType] ||
			slices.ContainsFunc(x.units, func(u unit) bool { return u.remote && u.id == m.ParentID })
	}
	if !x.f.UniqueIDs {
		r.Device = deviceText(m)
	}
	x.fillKind(i)
	if i == 0 {
		x.fillCreated(m.Point)
	}
}

func (x *performance) fillKind(i int) {
	r, u := &x.done.Receipts[i], &x.units[i]
	r.Tree, r.TreeEnd = u.treeEnd != 0, u.treeEnd
	if d, ok := x.specs[i].Kind.(*mountspec.BlockDevice); ok {
		r.Node = &Node{Major: d.Major, Minor: d.Minor, Path: r.Target}
	}
}
