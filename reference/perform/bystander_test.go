package perform

import (
	"errors"
	"runtime"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
)

// TestWatchNoticesEveryChange: the proof that a marked mount is the one that was
// compared rests on this.
func TestWatchNoticesEveryChange(t *testing.T) {
	inside(t, func(r *rig) {
		detached := func() int {
			fs, err := kernel.OpenFS("tmpfs")
			must(r, err)
			defer fs.Close()
			must(r, fs.Create())
			fd, err := fs.Mount(0)
			must(r, err)
			r.Cleanup(func() { _ = unix.Close(fd) })
			return fd
		}
		a, b := r.mkdir("a"), r.mkdir("b")
		made := detached()
		for _, change := range []struct {
			name string
			do   func()
		}{
			{"mount", func() { r.mount("tmpfs", a, "tmpfs", 0, "") }},
			{"move", func() { r.mount(a, b, "", unix.MS_MOVE, "") }},
			{"move_mount of a mount made before", func() {
				must(r, kernel.MoveMountAt(made, "", unix.AT_FDCWD, a, 0))
			}},
			{"move_mount beneath", func() {
				must(r, kernel.MoveMountAt(detached(), "", unix.AT_FDCWD, b, kernel.MoveMountBeneath))
			}},
			{"umount", func() { r.unmount("b") }},
			{"detach", func() { must(r, unix.Unmount(b, unix.MNT_DETACH)) }},
		} {
			v := view{f: plain.probe()}
			w, err := v.watch(nil, 0)
			must(r, err)
			if !w.quiet() {
				t.Errorf("before %s: not quiet", change.name)
			}
			change.do()
			if w.quiet() {
				t.Errorf("%s was not noticed", change.name)
			}
			w.close()
		}
	})
}

// TestBystanderStacksWhileUndoing lets somebody stack a mount of his own on the
// target, in three ways and as fast as he can, while the executor takes its
// mount away: he finds every mount of his where he left it.
func TestBystanderStacksWhileUndoing(t *testing.T) {
	rounds := 1500
	if testing.Short() {
		rounds = 600
	}
	for _, x := range executors {
		if x.old {
			continue // takes mounts away as the others do
		}
		t.Run(x.name, func(t *testing.T) {
			inside(t, func(r *rig) {
				r.mkdir("waiting")
				before := r.table()
				var stop, allowed, acting atomic.Bool
				stacked := 0
				done := make(chan error, 1)
				go func() {
					done <- r.ns.Do(r.ctx, func() error {
						for n := 0; !stop.Load(); n++ {
							acting.Store(true)
							if !allowed.Load() {
								acting.Store(false)
								runtime.Gosched()
								continue
							}
							took, err := stackOnce(r.path("consumer/place"), r.path("waiting"), n%3)
							acting.Store(false)
							if err != nil {
								return err
							}
							if took {
								stacked++
							}
						}
						return nil
					})
				}()
				var refused, gone int
				for range rounds {
					p := r.perform(x.on(r), r.target("consumer/place"), []mountspec.Spec{bind("", "data")}, r.options())
					allowed.Store(true)
					for {
						err := x.on(r).Undo(r.ctx, nil, p.Receipts)
						if err == nil {
							gone++
							break
						}
						var busy *BusyError
						if !errors.As(err, &busy) {
							t.Fatal(err)
						}
						refused++
					}
					allowed.Store(false)
					for acting.Load() {
						runtime.Gosched()
					}
					select {
					case err := <-done:
						t.Fatalf("the bystander: %v", err)
					default:
					}
				}
				stop.Store(true)
				if err := <-done; err != nil {
					t.Errorf("the bystander: %v", err)
				}
				t.Logf("%d undone against %d mounts stacked, %d times refused as busy", gone, stacked, refused)
				r.same(before)
			})
		})
	}
}

// stackOnce puts a mount on top of place, looks at it there and takes it away
// again; it fails if the mount is not there any more. It leaves no mark of use.
func stackOnce(place, waiting string, way int) (bool, error) {
	fs, err := kernel.OpenFS("tmpfs")
	if err != nil {
		return false, err
	}
	defer fs.Close()
	if err := fs.Create(); err != nil {
		return false, err
	}
	fd, err := fs.Mount(0)
	if err != nil {
		return false, err
	}
	id, err := kernel.UniqueID(fd, "")
	if err != nil {
		return false, err
	}
	if way == 1 { // attached elsewhere first, and moved on top
		if err := kernel.MoveMountAt(fd, "", unix.AT_FDCWD, waiting, 0); err != nil {
			return false, err
		}
	}
	err = kernel.MoveMountAt(fd, "", unix.AT_FDCWD, place, 0)
	_ = unix.Close(fd) // idle from here on
	if err != nil {
		return false, err
	}
	if way == 2 {
		runtime.Gosched()
	}
	if _, err := kernel.StatMount(0, id, kernel.StatBasic); err != nil {
		return false, errors.New("his mount is gone")
	}
	// Unmounted by path: he is the only other one to stack here. While his
	// mount is being looked at it is in use for a moment.
	for {
		if err := kernel.Unmount(place, 0); !errors.Is(err, unix.EBUSY) {
			return true, err
		}
	}
}
