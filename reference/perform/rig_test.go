package perform

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
	"github.com/csi-prepare/csi-prepare/reference/mountns"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
)

// rig is a place to perform in: a tmpfs in a mount namespace that the test
// has for itself, with a granted directory and a consumer.
type rig struct {
	*testing.T
	ctx context.Context
	ns  *mountns.Namespace
	dir string // the tmpfs

	keeping *Executor // that keeps what it can, for the way "keeping"
}

// inside runs test in a private namespace, on a thread that is in it.
func inside(t *testing.T, test func(r *rig)) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root: a mount namespace of its own")
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	ns, err := mountns.New(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	r := &rig{T: t, ctx: ctx, ns: ns, dir: t.TempDir()}
	err = ns.Do(ctx, func() error {
		r.mount("tmpfs", r.dir, "tmpfs", 0, "mode=755")
		defer func() { _ = unix.Unmount(r.dir, unix.MNT_DETACH) }()
		r.mkdir("grant/data/sub")
		r.write("grant/data/file", "data")
		r.mkdir("consumer/place")
		r.write("consumer/file", "")
		defer func() {
			if r.keeping != nil {
				must(r, r.keeping.Close())
			}
		}()
		test(r)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func (r *rig) path(name string) string { return filepath.Join(r.dir, name) }

func (r *rig) mkdir(name string) string {
	r.Helper()
	if err := os.MkdirAll(r.path(name), 0o755); err != nil {
		r.Fatal(err)
	}
	return r.path(name)
}

func (r *rig) write(name, text string) {
	r.Helper()
	if err := os.WriteFile(r.path(name), []byte(text), 0o644); err != nil {
		r.Fatal(err)
	}
}

func (r *rig) mount(source, target, fstype string, flags uintptr, data string) {
	r.Helper()
	if err := unix.Mount(source, target, fstype, flags, data); err != nil {
		r.Fatalf("mount %s on %s: %v", source, target, err)
	}
}

func (r *rig) unmount(name string) {
	r.Helper()
	if err := unix.Unmount(r.path(name), unix.UMOUNT_NOFOLLOW); err != nil {
		r.Fatalf("umount %s: %v", name, err)
	}
}

// table reads the namespace's mounts.
func (r *rig) table() *mountns.Table {
	r.Helper()
	t, err := r.ns.Table(r.ctx)
	if err != nil {
		r.Fatal(err)
	}
	return t
}

// same fails the test if the mounts of the namespace are not as before.
func (r *rig) same(before *mountns.Table) {
	r.Helper()
	if c := mountns.Diff(before, r.table()); !c.Empty() {
		r.Errorf("the mount table has changed:\n%s", c)
	}
}

func (r *rig) target(name string) Target { return Target{Path: r.path(name)} }

// options grant the rig's directory under the name "data".
func (r *rig) options(change ...func(*Options)) Options {
	o := Options{
		Request: mountspec.Request{Performer: mountspec.Performer{
			Kinds:   mountspec.PerformedKinds(),
			FSTypes: []string{"tmpfs", "ext4", "xfs", "btrfs"},
			Grants:  []string{"data"},
			IDMap:   true,
		}},
		Grants: map[string]string{"data": r.path("grant")},
	}
	for _, c := range change {
		c(&o)
	}
	return o
}

// bind is a spec for a granted directory.
func bind(target, relative string, change ...func(*mountspec.Spec)) mountspec.Spec {
	s := mountspec.Spec{Target: target, IDMapSupported: true, Kind: &mountspec.Bind{
		Source: mountspec.PathRef{Base: mountspec.BaseGranted, Grant: "data", Relative: relative},
	}}
	for _, c := range change {
		c(&s)
	}
	return s
}

func tmpfs(target string, change ...func(*mountspec.Spec)) mountspec.Spec {
	s := mountspec.Spec{Target: target, IDMapSupported: true, Kind: &mountspec.Filesystem{
		Type: "tmpfs", Source: "csi", Parameters: []mountspec.Parameter{{Key: "size", Text: "1m"}, {Key: "mode", Text: "755"}},
	}}
	for _, c := range change {
		c(&s)
	}
	return s
}

func readonly(s *mountspec.Spec) { s.Attributes.Readonly = true }

// perform performs or fails the test.
func (r *rig) perform(e *Executor, t Target, specs []mountspec.Spec, o Options) *Performed {
	r.Helper()
	p, err := e.Perform(r.ctx, t, specs, o)
	if err != nil {
		r.Fatalf("Perform: %v", err)
	}
	return p
}

func (r *rig) undo(e *Executor, receipts []Receipt) {
	r.Helper()
	if err := e.Undo(r.ctx, nil, receipts); err != nil {
		r.Fatalf("Undo: %v", err)
	}
}

// without is an executor for a kernel that lacks some features.
func without(lack func(*kernel.Features)) *Executor {
	return &Executor{features: func() kernel.Features {
		f := kernel.Probe()
		lack(&f)
		return f
	}}
}

// way is a way to perform.
type way struct {
	name string
	e    *Executor // nil for one that keeps what it can
	old  bool      // mount(2) only
}

// executors are the ways to perform: as this kernel can, and as older ones.
var executors = []way{
	{name: "as probed", e: &Executor{}},
	{name: "keeping"},
	{name: "no detached trees", e: without(func(f *kernel.Features) { f.DetachedTree, f.DetachedClone = false, false })},
	{name: "no unique ids", e: without(func(f *kernel.Features) {
		f.UniqueID, f.Statmount, f.Listmount = false, false, false
	})},
	{name: "no openat2", e: without(func(f *kernel.Features) { f.Openat2 = false })},
	{name: "mount(2) only", old: true, e: without(func(f *kernel.Features) { *f = kernel.Features{} })},
}

// on returns the executor for the rig.
func (w way) on(r *rig) *Executor {
	if w.e != nil {
		return w.e
	}
	if r.keeping == nil {
		var err error
		r.keeping, err = NewExecutor(Keep{Sources: true, Trash: r.mkdir("trash")})
		must(r, err)
	}
	return r.keeping
}

// failing returns the executor with a hook before each step.
func (w way) failing(r *rig, before func(step string) error) *Executor {
	e := *w.on(r)
	e.before = before
	return &e
}

// openFiles counts the descriptors of this process, without those that the
// executor keeps on purpose.
func (w way) openFiles(r *rig) int {
	r.Helper()
	e := w.on(r) // made here, if it is not yet
	n := openFiles(r.T)
	if e.cache != nil {
		n -= len(e.cache.kept)
	}
	if e.watches != nil && e.watches.free != nil {
		n--
	}
	return n
}

func (w way) probe() mountspec.Features {
	if w.e == nil {
		return plain.probe()
	}
	return w.e.probe()
}
