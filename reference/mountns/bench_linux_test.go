package mountns

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
)

// Each benchmark prints, beside its time, how many times faster it is than what
// it replaces, measured in the same run: the least of several, since other
// programs only ever add.

func least(rounds int, fn func()) time.Duration {
	best := time.Duration(1<<63 - 1)
	for range rounds {
		start := time.Now()
		fn()
		best = min(best, time.Since(start))
	}
	return best
}

// compare reports how much faster fn is than peer.
func compare(b *testing.B, name string, rounds int, fn, peer func()) {
	fn()
	ours, theirs := time.Duration(1<<63-1), time.Duration(1<<63-1)
	for range rounds {
		ours = min(ours, least(5, fn))
		theirs = min(theirs, least(1, peer))
	}
	b.ReportMetric(float64(theirs)/float64(ours), "x-"+name)
}

// sizes are how many other mounts there are.
var sizes = []int{100, 1_000, 10_000, 30_000}

func BenchmarkAudit(b *testing.B) {
	for _, size := range sizes {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			n := namespace(b)
			dir := b.TempDir()
			fill(b, n, dir, size)
			inside(b, n, func() error { return os.Mkdir(dir+"/leak", 0o700) })
			ctx := context.Background()
			w := markOf(b, n)
			before := idsOf(b, n)
			inside(b, n, func() error { return mountTmpfs(dir+"/leak", "") })
			getMounts := func() {
				must(b, n.Do(ctx, func() error {
					_, err := mountinfo.GetMounts(nil)
					return err
				}))
			}
			since := func() {
				if inc, err := n.Since(ctx, w); err != nil || len(inc.New) != 1 {
					b.Fatalf("%+v, %v", inc, err)
				}
			}
			var buf []uint64
			ids := func() {
				var err error
				if buf, err = n.IDs(ctx, buf[:0]); err != nil {
					b.Fatal(err)
				}
				if added, removed := DiffIDs(before, buf); len(added) != 1 || removed != nil {
					b.Fatalf("added %v removed %v", added, removed)
				}
			}
			table := func() { tableOf(b, n) }
			for _, c := range []struct {
				name string
				fn   func()
			}{{"since", since}, {"ids", ids}, {"table", table}} {
				b.Run(c.name, func(b *testing.B) {
					b.ReportAllocs()
					for b.Loop() {
						c.fn()
					}
					compare(b, "GetMounts", 10, c.fn, getMounts)
				})
			}
		})
	}
}

func BenchmarkMachine(b *testing.B) {
	const count = 55
	var made []*Namespace
	first := namespace(b)
	fill(b, first, b.TempDir(), 100)
	for range count {
		n, err := first.Copy(b.Context())
		must(b, err)
		b.Cleanup(func() { _ = n.Close() })
		made = append(made, n)
	}
	ctx := context.Background()
	w, err := MarkMachine(ctx)
	must(b, err)
	before, err := TakeSnapshot(ctx)
	must(b, err)
	dir := b.TempDir()
	inside(b, made[count/2], func() error { return mountTmpfs(dir, "") })

	// Every thread's table, as a program without better means would read it.
	// Namespaces without a thread are not seen, so this does less.
	procWalk := func() {
		seen := map[string]bool{}
		tables, _ := filepath.Glob("/proc/[0-9]*/task/[0-9]*/mountinfo")
		for _, path := range tables {
			if f, err := os.Open(path); err == nil {
				_, _ = mountinfo.GetMountsFromReader(f, nil)
				_ = f.Close()
				seen[path] = true
			}
		}
	}
	hold := holdInside(b, made)
	defer hold()
	b.Run("since", func(b *testing.B) {
		fn := func() {
			inc, err := w.Since(ctx)
			if err != nil || len(inc.Namespaces) == 0 {
				b.Fatal(inc, err)
			}
		}
		for b.Loop() {
			fn()
		}
		compare(b, "procwalk", 5, fn, procWalk)
	})
	b.Run("snapshot", func(b *testing.B) {
		fn := func() {
			s, err := TakeSnapshot(ctx)
			must(b, err)
			if c := before.Diff(s); c.Empty() {
				b.Fatal("no change")
			}
		}
		for b.Loop() {
			fn()
		}
		compare(b, "procwalk", 5, fn, procWalk)
	})
}

// holdInside keeps one thread in each namespace, as processes would.
func holdInside(b *testing.B, namespaces []*Namespace) (release func()) {
	stop := make(chan struct{})
	for _, n := range namespaces {
		entered := make(chan struct{})
		go func() { _ = n.Do(context.Background(), func() error { close(entered); <-stop; return nil }) }()
		<-entered
	}
	return func() { close(stop) }
}

func BenchmarkEnter(b *testing.B) {
	n := namespace(b)
	dir := b.TempDir()
	cycle := func() error {
		if err := unix.Mount("/proc", dir, "", unix.MS_BIND, ""); err != nil {
			return err
		}
		return unix.Unmount(dir, 0)
	}
	ctx := context.Background()
	b.Run("nothing", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			must(b, n.Do(ctx, func() error { return nil }))
		}
	})
	b.Run("cycle", func(b *testing.B) {
		for b.Loop() {
			must(b, n.Do(ctx, cycle))
		}
	})
	b.Run("cycle in a visit", func(b *testing.B) {
		v, err := n.Enter(ctx)
		must(b, err)
		defer v.Leave()
		for b.Loop() {
			must(b, v.Do(cycle))
		}
	})
	b.Run("raw cycle", func(b *testing.B) {
		inside(b, n, func() error {
			for b.Loop() {
				if err := cycle(); err != nil {
					return err
				}
			}
			return nil
		})
	})
}

func BenchmarkMonitor(b *testing.B) {
	need(b, "mount events", kernel.Probe().MountEvents)
	n := namespace(b)
	dir := b.TempDir()
	cycle := func() {
		if err := unix.Mount("/proc", dir, "", unix.MS_BIND, ""); err != nil {
			b.Error(err)
		}
		if err := unix.Unmount(dir, 0); err != nil {
			b.Error(err)
		}
	}
	cycles := func(b *testing.B) {
		inside(b, n, func() error {
			for b.Loop() {
				cycle()
			}
			return nil
		})
	}
	b.Run("cycle unwatched", cycles)
	m, err := NewMonitor()
	must(b, err)
	defer m.Close()
	must(b, m.Add(b.Context(), n))
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	seen := make(chan time.Time, 1<<16)
	go func() {
		for {
			events, err := m.Next(ctx)
			if err != nil {
				close(seen)
				return
			}
			now := time.Now()
			for range events {
				select {
				case seen <- now:
				default:
				}
			}
		}
	}()
	b.Run("cycle watched", cycles)
	b.Run("attach to event", func(b *testing.B) {
		for len(seen) > 0 {
			<-seen
		}
		total, best, count := time.Duration(0), time.Duration(1<<63-1), 0
		inside(b, n, func() error {
			for b.Loop() {
				if err := unix.Mount("/proc", dir, "", unix.MS_BIND, ""); err != nil {
					return err
				}
				called := time.Now()
				took := (<-seen).Sub(called)
				total, best, count = total+took, min(best, took), count+1
				if err := unix.Unmount(dir, 0); err != nil {
					return err
				}
				<-seen
			}
			return nil
		})
		b.ReportMetric(float64(total.Nanoseconds())/float64(count), "ns-after-call/op")
		b.ReportMetric(float64(best.Nanoseconds()), "least-ns-after-call")
	})
}

func BenchmarkCopy(b *testing.B) {
	for _, size := range []int{0, 1_000} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			n := namespace(b)
			fill(b, n, b.TempDir(), size)
			for b.Loop() {
				c, err := n.Copy(b.Context())
				must(b, err)
				must(b, c.Close())
			}
		})
	}
}
