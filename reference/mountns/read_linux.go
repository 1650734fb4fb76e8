package mountns

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
)

// Table reads the namespace's mount table. ctx bounds the waiting, and is
// looked at between mounts of a long table.
//
// A mount that goes while the table is being read is left out; so may be one
// that comes. Points are paths from the root of the namespace, also for a
// process that has changed its root with chroot(2).
func (n *Namespace) Table(ctx context.Context) (*Table, error) {
	if !n.byID() || !n.features.Statmount {
		return n.mountinfo(ctx)
	}
	t := &Table{Namespace: n.id, Unique: true}
	err := n.reading(ctx, func(ns uint64) (err error) {
		t.Mounts, err = readTable(ctx, ns)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("mountns: table of %s: %w", n, err)
	}
	return t, nil
}

// byID says whether ids are unique ids that the kernel can list for any
// namespace.
func (n *Namespace) byID() bool {
	return n.features.UniqueID && n.features.Listmount && n.features.ListmountByNS
}

var idBuffers = sync.Pool{New: func() any { return new([]uint64) }}

func readTable(ctx context.Context, ns uint64) ([]Mount, error) {
	pooled := idBuffers.Get().(*[]uint64)
	defer idBuffers.Put(pooled)
	ids, err := kernel.ListMounts((*pooled)[:0], ns, kernel.Root, 0)
	*pooled = ids
	if err != nil {
		return nil, err
	}
	return statAll(ctx, ns, ids, make([]Mount, 0, len(ids)))
}

// statAll appends the mounts that still exist.
func statAll(ctx context.Context, ns uint64, ids []uint64, mounts []Mount) ([]Mount, error) {
	for i, id := range ids {
		if i%256 == 255 && ctx.Err() != nil {
			return nil, ctx.Err()
		}
		s, err := kernel.StatMount(ns, id, kernel.StatAll)
		if errors.Is(err, unix.ENOENT) {
			continue // it went after it was listed
		}
		if err != nil {
			return nil, fmt.Errorf("mount %d: %w", id, err)
		}
		mounts = append(mounts, mountOf(&s))
	}
	return mounts, nil
}

func mountOf(s *kernel.MountStat) Mount {
	m := Mount{
		ID: s.ID, ParentID: s.ParentID, SmallID: s.OldID,
		Major: s.DevMajor, Minor: s.DevMinor,
		FSType: s.FSType, Subtype: s.Subtype, Source: s.Source, SBOptions: s.Options,
		SBReadonly: s.SBFlags&unix.MS_RDONLY != 0, SBFlags: s.SBFlags &^ unix.MS_RDONLY,
		Attr: s.Attr, Propagation: Propagation(s.Propagation), PeerGroup: s.PeerGroup, Master: s.Master,
	}
	m.Root, m.RootDeleted = strings.CutSuffix(s.Root, deletedSuffix)
	m.Point, m.PointDeleted = strings.CutSuffix(s.Point, deletedSuffix)
	return m
}

// deletedSuffix marks a removed directory. No path has two slashes otherwise.
const deletedSuffix = "//deleted"

// reading runs read with the id under which the namespace is to be read, on
// this thread if it sees all of it from here, else inside.
func (n *Namespace) reading(ctx context.Context, read func(ns uint64) error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if confined() == n.id {
		return n.Do(ctx, func() error { return read(0) })
	}
	return read(n.id)
}

// confined is the id of the process's namespace if it has changed its root away
// from that namespace's, else 0. Reading one's own namespace shows only what is
// below the root; any other namespace is shown whole. Asked once: a process
// that calls chroot(2) does so when it starts.
var confined = sync.OnceValue(func() uint64 {
	own, err := OpenPath("/proc/self/ns/mnt")
	if err != nil {
		return 0
	}
	defer func() { _ = own.Close() }()
	here, err := rootAt("/proc/self/root/.")
	if err != nil {
		return 0
	}
	var whole root
	err = own.Do(context.Background(), func() (err error) {
		whole, err = rootAt("/")
		return err
	})
	if err != nil || here == whole {
		return 0
	}
	return own.id
})

// root identifies a directory and the mount it is seen through.
type root struct{ mount, dev, inode uint64 }

func rootAt(path string) (r root, err error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return r, os.NewSyscallError("stat", err)
	}
	r.dev, r.inode = st.Dev, st.Ino
	r.mount, err = kernel.UniqueID(unix.AT_FDCWD, path)
	return r, err
}

// IDs appends the unique ids of the namespace's mounts to dst, ascending. It is
// by far the cheapest exact account of a namespace. A kernel before 6.8 has no
// such ids and gives those of mountinfo, sorted: see [Table.Unique].
func (n *Namespace) IDs(ctx context.Context, dst []uint64) ([]uint64, error) {
	if !n.byID() {
		t, err := n.mountinfo(ctx)
		if err != nil {
			return dst, err
		}
		for i := range t.Mounts {
			dst = append(dst, t.Mounts[i].ID)
		}
		return dst, nil
	}
	start := len(dst)
	err := n.reading(ctx, func(ns uint64) (err error) {
		dst, err = kernel.ListMounts(dst[:start], ns, kernel.Root, 0)
		return err
	})
	if err != nil {
		return dst, fmt.Errorf("mountns: ids of %s: %w", n, err)
	}
	return dst, nil
}

// Lookup reads the mounts with the ids, in that order, without those that are
// not in the namespace.
func (n *Namespace) Lookup(ctx context.Context, ids ...uint64) ([]Mount, error) {
	if !n.byID() || !n.features.Statmount {
		t, err := n.mountinfo(ctx)
		if err != nil {
			return nil, err
		}
		var mounts []Mount
		for _, id := range ids {
			if m, ok := t.ByID(id); ok {
				mounts = append(mounts, m)
			}
		}
		return mounts, nil
	}
	var mounts []Mount
	err := n.reading(ctx, func(ns uint64) (err error) {
		mounts, err = statAll(ctx, ns, ids, make([]Mount, 0, len(ids)))
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("mountns: mounts of %s: %w", n, err)
	}
	return slices.Clip(mounts), nil
}
