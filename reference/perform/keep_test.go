package perform

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
	"github.com/csi-prepare/csi-prepare/reference/mountns"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
)

func (r *rig) keepingExecutor(k Keep) *Executor {
	r.Helper()
	r.needsDetachedTrees()
	e, err := NewExecutor(k)
	must(r, err)
	r.Cleanup(func() { _ = e.Close() })
	return e
}

// needsDetachedTrees skips a test of what is kept, which older kernels cannot
// keep: a clone that can be cloned again (Linux 6.15).
func (r *rig) needsDetachedTrees() {
	r.Helper()
	if f := probed(); !f.DetachedTrees || !f.UniqueIDs {
		r.Skip("the kernel clones no detached mount: nothing is kept")
	}
}

// TestKeptSourceIsTheSource: a clone that is kept must never show anything else
// than a bind of the source itself would.
func TestKeptSourceIsTheSource(t *testing.T) {
	for _, test := range []struct {
		name   string
		change func(r *rig) // after the source has been kept
		source string
		check  func(r *rig)
	}{
		{name: "nothing has changed", source: "data"},
		{name: "something is mounted on the source", source: "data", change: func(r *rig) {
			r.mount("tmpfs", r.path("grant/data"), "tmpfs", 0, "")
			r.write("grant/data/file", "data")
		}},
		{name: "something is mounted above the source", source: "data/sub", change: func(r *rig) {
			r.mount("tmpfs", r.path("grant/data"), "tmpfs", 0, "")
			r.mkdir("grant/data/sub")
			r.write("grant/data/sub/file", "data")
		}},
		{name: "something is mounted on the base", source: "data", change: func(r *rig) {
			r.mount("tmpfs", r.path("grant"), "tmpfs", 0, "")
			r.mkdir("grant/data")
			r.write("grant/data/file", "data")
		}},
		{name: "the source was replaced", source: "data", change: func(r *rig) {
			must(r, os.Rename(r.path("grant/data"), r.path("grant/old")))
			r.mkdir("grant/data")
			r.write("grant/data/file", "data")
		}},
		{name: "the base was replaced", source: "data", change: func(r *rig) {
			must(r, os.Rename(r.path("grant"), r.path("old")))
			r.mkdir("grant/data")
			r.write("grant/data/file", "data")
		}},
		{name: "the source's mount was made read-only", source: "data", change: func(r *rig) {
			r.mount("", r.dir, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY|unix.MS_NOEXEC, "")
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			inside(t, func(r *rig) {
				r.write("grant/data/sub/file", "data")
				e := r.keepingExecutor(Keep{Sources: true})
				specs := []mountspec.Spec{bind("", test.source)}
				r.undo(e, r.perform(e, r.target("consumer/place"), specs, r.options()).Receipts)
				if len(e.cache.kept) != 1 {
					t.Fatalf("%d sources are kept", len(e.cache.kept))
				}
				if test.change != nil {
					test.change(r)
				}
				kept := r.perform(e, r.target("consumer/place"), specs, r.options())
				if text, err := os.ReadFile(r.path("consumer/place/file")); err != nil || string(text) != "data" {
					t.Errorf("got %q, %v", text, err)
				}
				got, _ := r.mountOf(kept.Receipts[0])
				r.undo(e, kept.Receipts)
				plainly := r.perform(&plain, r.target("consumer/place"), specs, r.options())
				want, _ := r.mountOf(plainly.Receipts[0])
				r.undo(&plain, plainly.Receipts)
				if got.Root != want.Root || got.Minor != want.Minor || got.Attributes() != want.Attributes() {
					t.Errorf("got root %s of %d:%d with %s, want %s of %d:%d with %s", got.Root, got.Major, got.Minor, got.Attributes(),
						want.Root, want.Major, want.Minor, want.Attributes())
				}
			})
		})
	}
}

func TestDropFreesTheFilesystem(t *testing.T) {
	inside(t, func(r *rig) {
		d := r.loop("ext4")
		r.mount(d.file.Name(), r.path("grant/data"), "ext4", 0, "")
		e := r.keepingExecutor(Keep{Sources: true})
		o := r.options(func(o *Options) { o.Grants = map[string]string{"data": r.path("grant/data")} })
		r.undo(e, r.perform(e, r.target("consumer/place"), []mountspec.Spec{bind("", "lost+found")}, o).Receipts)
		r.unmount("grant/data")
		if _, err := unix.Open(d.file.Name(), unix.O_RDONLY|unix.O_EXCL|unix.O_CLOEXEC, 0); err != unix.EBUSY {
			t.Errorf("the device is not kept in use: %v", err)
		}
		e.Drop()
		d.free(r)
	})
}

func TestKeptSourcesAreBounded(t *testing.T) {
	inside(t, func(r *rig) {
		fds := openFiles(t)
		e := r.keepingExecutor(Keep{Sources: true})
		for i := range maxSources + 10 {
			dir := r.mkdir(fmt.Sprint("grants/", i, "/data"))
			o := r.options(func(o *Options) { o.Grants = map[string]string{"data": dir} })
			r.undo(e, r.perform(e, r.target("consumer/place"), []mountspec.Spec{bind("", "")}, o).Receipts)
		}
		if got := len(e.cache.kept); got != maxSources {
			t.Errorf("%d sources are kept, want %d", got, maxSources)
		}
		must(r, e.Close())
		if got := openFiles(t); got != fds {
			t.Errorf("%d files are open, %d were before", got, fds)
		}
	})
}

func TestTrashIsOneExecutors(t *testing.T) {
	inside(t, func(r *rig) {
		dir := r.mkdir("trash")
		e := r.keepingExecutor(Keep{Trash: dir})
		if _, err := NewExecutor(Keep{Trash: dir}); !errors.Is(err, unix.EWOULDBLOCK) {
			t.Errorf("a second executor on one trash: %v", err)
		}
		must(r, e.Close())
		r.mount("tmpfs", dir, "tmpfs", 0, "")
		if _, err := NewExecutor(Keep{Trash: r.path("trash/none")}); !errors.Is(err, unix.ENOENT) {
			t.Errorf("a trash that is not there: %v", err)
		}
	})
}

// TestTrashOfAKilledExecutor: what a killed process had in its trash is undone
// from the receipts by anybody, and the next executor clears the trash.
func TestTrashOfAKilledExecutor(t *testing.T) {
	inside(t, func(r *rig) {
		r.needsDetachedTrees()
		dir := r.mkdir("trash")
		before, files := r.table(), r.tree("consumer")
		for n := 0; ; n++ {
			e, err := NewExecutor(Keep{Trash: dir})
			must(r, err)
			p := r.perform(e, r.target("consumer/place"), nested(), r.options())
			// A panic leaves things as SIGKILL would.
			count, killed := 0, false
			e.before = func(string) error {
				if count++; count == n+1 {
					killed = true
					panic("killed")
				}
				return nil
			}
			func() {
				defer func() { _ = recover() }()
				must(r, e.Undo(r.ctx, nil, p.Receipts))
			}()
			closeFD(&e.trash.lock)
			closeFD(&e.trash.template)
			e.watches.close()

			next, err := NewExecutor(Keep{Trash: dir})
			must(r, err)
			r.undo(next, p.Receipts)
			must(r, next.Close())
			r.same(before)
			if got := r.tree("consumer"); got != files {
				t.Errorf("it left\n%s", got)
			}
			if !killed {
				t.Logf("%d steps", n)
				break
			}
		}
	})
}

// TestTrashGivesBackWhatIsBusy: the consumer has all of it again, as it was.
func TestTrashGivesBackWhatIsBusy(t *testing.T) {
	inside(t, func(r *rig) {
		e := r.keepingExecutor(Keep{Trash: r.mkdir("trash")})
		for _, name := range []string{"place", "place/sub", "place/file"} {
			p := r.perform(e, r.target("consumer/place"), nested(), r.options())
			before := r.table()
			f, err := os.Open(r.path("consumer/" + name))
			must(r, err)
			if err := e.Undo(r.ctx, nil, p.Receipts); !errors.Is(err, unix.EBUSY) {
				t.Errorf("%s is open: %v, want EBUSY", name, err)
			}
			r.same(before)
			must(r, f.Close())
			r.undo(e, p.Receipts)
		}
	})
}

func TestExecutorIsForSeveralGoroutines(t *testing.T) {
	inside(t, func(r *rig) {
		e := r.keepingExecutor(Keep{Sources: true, Trash: r.mkdir("trash")})
		before := r.table()
		var group sync.WaitGroup
		for g := range 4 {
			r.mkdir(fmt.Sprint("consumers/", g))
			group.Go(func() {
				err := r.ns.Do(r.ctx, func() error {
					for range 50 {
						p, err := e.Perform(r.ctx, r.target(fmt.Sprint("consumers/", g)), nested(), r.options())
						if err != nil {
							return err
						}
						if err := e.Undo(r.ctx, nil, p.Receipts); err != nil {
							return err
						}
					}
					return nil
				})
				if err != nil {
					t.Error(err)
				}
			})
		}
		group.Wait()
		r.same(before)
	})
}

// TestKeptWatchIsOfItsNamespace: one executor undoes in two namespaces in turn.
func TestKeptWatchIsOfItsNamespace(t *testing.T) {
	inside(t, func(r *rig) {
		e := r.keepingExecutor(Keep{})
		other, err := mountns.New(r.ctx)
		must(r, err)
		defer other.Close()
		for range 3 {
			r.undo(e, r.perform(e, r.target("consumer/place"), nested(), r.options()).Receipts)
			must(r, other.Do(r.ctx, func() error {
				p, err := e.Perform(r.ctx, r.target("consumer/place"), nested(), r.options())
				if err != nil {
					return err
				}
				return e.Undo(r.ctx, nil, p.Receipts)
			}))
		}
	})
}

func TestOlderKernelsKeepNothing(t *testing.T) {
	inside(t, func(r *rig) {
		for _, lack := range []func(*kernel.Features){
			func(f *kernel.Features) { f.UniqueID = false },
			func(f *kernel.Features) { f.DetachedTree = false },
		} {
			e := r.keepingExecutor(Keep{Sources: true})
			e.features = without(lack).features
			before := r.table()
			r.undo(e, r.perform(e, r.target("consumer/place"), nested(), r.options()).Receipts)
			r.same(before)
			if len(e.cache.kept) != 0 {
				t.Error("a source is kept that could not be cloned")
			}
		}
	})
}
