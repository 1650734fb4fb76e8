package perform

import (
	"context"
	"fmt"
	"os"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
	"github.com/csi-prepare/csi-prepare/reference/mountns"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
)

// rawCycle is the fewest system calls with the effect of a read-only bind.
func rawCycle(source, target string) {
	const flags = unix.MS_BIND | unix.MS_REMOUNT | unix.MS_RDONLY | unix.MS_NOSUID | unix.MS_NODEV
	if unix.Mount(source, target, "", unix.MS_BIND, "") != nil ||
		unix.Mount("", target, "", flags, "") != nil ||
		unix.Unmount(target, unix.UMOUNT_NOFOLLOW) != nil {
		panic("raw cycle failed")
	}
}

// pair runs rounds of both and reports the median of the ratios of one round.
func pair(b *testing.B, raw, ours func()) {
	b.Helper()
	const cycles = 40
	slice := func(f func()) time.Duration {
		start := time.Now()
		for range cycles {
			f()
		}
		return time.Since(start) / cycles
	}
	slice(raw)
	slice(ours)
	var ratios []float64
	var sumRaw, sumOurs time.Duration
	for b.Loop() {
		r, o := slice(raw), slice(ours)
		sumRaw += r
		sumOurs += o
		ratios = append(ratios, float64(o)/float64(r))
	}
	slices.Sort(ratios)
	n := len(ratios)
	b.ReportMetric(ratios[n/2], "x-raw")
	b.ReportMetric(float64(sumRaw.Nanoseconds())/float64(n), "raw-ns")
	b.ReportMetric(float64(sumOurs.Nanoseconds())/float64(n), "ours-ns")
	b.ReportMetric(0, "ns/op")
}

// ground is the namespace a benchmark runs in, with n other mounts.
func ground(b *testing.B, n int, run func(dir string, ns *mountns.Namespace)) {
	b.Helper()
	ns, err := mountns.New(context.Background())
	if err != nil {
		b.Fatal(err)
	}
	defer ns.Close()
	dir := b.TempDir()
	err = ns.Do(context.Background(), func() error {
		if err := unix.Mount("tmpfs", dir, "tmpfs", 0, ""); err != nil {
			return err
		}
		defer func() { _ = unix.Unmount(dir, unix.MNT_DETACH) }()
		for _, d := range []string{"grant/data", "consumer/place", "fill", "filled"} {
			if err := os.MkdirAll(dir+"/"+d, 0o755); err != nil {
				return err
			}
		}
		if err := unix.Mount("tmpfs", dir+"/fill", "tmpfs", 0, ""); err != nil {
			return err
		}
		for i := range n {
			p := fmt.Sprintf("%s/fill/%d", dir, i)
			if err := os.Mkdir(p, 0o755); err != nil {
				return err
			}
			if err := unix.Mount(dir+"/filled", p, "", unix.MS_BIND, ""); err != nil {
				return err
			}
		}
		run(dir, ns)
		return nil
	})
	if err != nil {
		b.Fatal(err)
	}
}

func benchOptions(dir string) Options {
	return Options{
		Request: mountspec.Request{Performer: mountspec.Performer{
			Kinds: mountspec.PerformedKinds(), FSTypes: []string{"tmpfs"}, Grants: []string{"data"},
		}},
		Grants: map[string]string{"data": dir + "/grant"},
	}
}

func BenchmarkBind(b *testing.B) {
	for _, n := range []int{0, 1000, 10000} {
		b.Run(fmt.Sprintf("mounts=%d", n), func(b *testing.B) {
			ground(b, n, func(dir string, _ *mountns.Namespace) {
				ctx := context.Background()
				t, o := Target{Path: dir + "/consumer/place"}, benchOptions(dir)
				specs := []mountspec.Spec{bind("", "data", readonly)}
				e := keeping(b, Keep{})
				pair(b, func() { rawCycle(dir+"/grant/data", dir+"/consumer/place") }, func() { cycle(e, ctx, t, specs, o) })
			})
		})
	}
}

func BenchmarkNested(b *testing.B) {
	for _, k := range []int{3, 10} {
		b.Run(fmt.Sprintf("specs=%d", k), func(b *testing.B) {
			ground(b, 0, func(dir string, _ *mountns.Namespace) {
				ctx := context.Background()
				t, o := Target{Path: dir + "/consumer/place"}, benchOptions(dir)
				specs := []mountspec.Spec{bind("", "data", readonly)}
				for i := 1; i < k; i++ {
					name := fmt.Sprint("n", i)
					if err := os.Mkdir(dir+"/grant/data/"+name, 0o755); err != nil {
						b.Fatal(err)
					}
					specs = append(specs, bind(name, "data/"+name, readonly))
				}
				if err := os.Mkdir(dir+"/trash", 0o700); err != nil {
					b.Fatal(err)
				}
				e := keeping(b, Keep{Trash: dir + "/trash"})
				pair(b, func() {
					for range k {
						rawCycle(dir+"/grant/data", dir+"/consumer/place")
					}
				}, func() { cycle(e, ctx, t, specs, o) })
			})
		})
	}
}

func BenchmarkElsewhere(b *testing.B) {
	ground(b, 0, func(dir string, _ *mountns.Namespace) {
		ctx := context.Background()
		other, err := mountns.New(ctx)
		if err != nil {
			b.Fatal(err)
		}
		defer other.Close()
		t, o := Target{Namespace: other, Path: dir + "/consumer/place"}, benchOptions(dir)
		specs := []mountspec.Spec{bind("", "data", readonly)}
		e := keeping(b, Keep{})
		pair(b, func() { rawCycle(dir+"/grant/data", dir+"/consumer/place") }, func() { cycle(e, ctx, t, specs, o) })
	})
}

// BenchmarkBusySource binds from a mount that has n others attached.
func BenchmarkBusySource(b *testing.B) {
	for _, n := range []int{0, 1000, 10000} {
		b.Run(fmt.Sprintf("children=%d", n), func(b *testing.B) {
			ground(b, n, func(dir string, _ *mountns.Namespace) {
				ctx := context.Background()
				t, o := Target{Path: dir + "/consumer/place"}, benchOptions(dir)
				o.Grants["data"] = dir + "/fill"
				if err := os.Mkdir(dir+"/fill/data", 0o755); err != nil {
					b.Fatal(err)
				}
				specs := []mountspec.Spec{bind("", "data", readonly)}
				e := keeping(b, Keep{Sources: true})
				pair(b, func() { rawCycle(dir+"/fill/data", dir+"/consumer/place") }, func() { cycle(e, ctx, t, specs, o) })
			})
		})
	}
}

// BenchmarkFloor is the floor: what the new mount API and an unmounting by
// path come to without exactness, receipts, or a namespace's table.
func BenchmarkFloor(b *testing.B) {
	ground(b, 0, func(dir string, _ *mountns.Namespace) {
		pair(b, func() { rawCycle(dir+"/grant/data", dir+"/consumer/place") }, func() {
			if err := floorCycle(dir, "consumer/place"); err != nil {
				panic(err)
			}
		})
	})
}

// floorCycle makes the fewest calls that resolve source and target by
// descriptor, bind read-only and private without a writable moment, and know
// the mount's id.
func floorCycle(dir, place string) error {
	base, err := open(unix.AT_FDCWD, dir+"/grant", unix.O_PATH)
	if err != nil {
		return err
	}
	source, err := kernel.OpenBeneath(base, "data", unix.O_PATH)
	if err != nil {
		return err
	}
	fd, err := kernel.OpenTree(source, "", unix.OPEN_TREE_CLONE)
	if err != nil {
		return err
	}
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV, Propagation: unix.MS_PRIVATE}
	if err := kernel.MountSetattr(fd, &attr, false); err != nil {
		return err
	}
	to, err := kernel.Openat2(unix.AT_FDCWD, dir+"/"+place, unix.OpenHow{Flags: unix.O_PATH, Resolve: unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS})
	if err != nil {
		return err
	}
	if err := kernel.MoveMount(fd, to, 0); err != nil {
		return err
	}
	if _, err := kernel.UniqueID(fd, ""); err != nil {
		return err
	}
	closeAll([]int{base, source, fd, to})
	return kernel.Unmount(dir+"/"+place, 0)
}

func keeping(b *testing.B, k Keep) *Executor {
	b.Helper()
	e, err := NewExecutor(k)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = e.Close() })
	return e
}

// cycle performs and undoes.
func cycle(e *Executor, ctx context.Context, t Target, specs []mountspec.Spec, o Options) {
	p, err := e.Perform(ctx, t, specs, o)
	if err != nil {
		panic(err)
	}
	if err := e.Undo(ctx, t.Namespace, p.Receipts); err != nil {
		panic(err)
	}
}

// TestAllocations bounds what one bind costs the collector.
func TestAllocations(t *testing.T) {
	inside(t, func(r *rig) {
		specs, o := []mountspec.Spec{bind("", "data", readonly)}, r.options()
		got := testing.AllocsPerRun(200, func() { cycle(&plain, r.ctx, r.target("consumer/place"), specs, o) })
		if got > 40 {
			t.Errorf("a bind performed and undone allocates %.0f times, want at most 40", got)
		}
		t.Logf("%.0f allocations", got)
	})
}
