package perform

import (
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
	"github.com/csi-prepare/csi-prepare/reference/mountns"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
)

// TestUndoBusy checks that a mount in use is reported and stays, with all that
// is on it, and goes once it is free.
func TestUndoBusy(t *testing.T) {
	for _, test := range []struct {
		name  string
		specs []mountspec.Spec
		use   func(r *rig) (free func())
		check func(r *rig, busy *BusyError)
		index int
	}{{
		name: "an open file, with its holder",
		use: func(r *rig) func() {
			f, err := os.Open(r.path("consumer/place/file"))
			must(r, err)
			return func() { _ = f.Close() }
		},
		check: func(r *rig, busy *BusyError) {
			if !holdersCanBeFound(r) {
				return
			}
			if len(busy.Holders) == 0 || busy.Holders[0].PID != os.Getpid() || busy.Holders[0].By != "fd" {
				r.Errorf("holders are %v, want this process", busy.Holders)
			}
			if !strings.Contains(busy.Error(), "fd") {
				r.Errorf("%q does not name the holder", busy)
			}
		},
	}, {
		name: "a working directory",
		use: func(r *rig) func() {
			c := exec.Command("sleep", "60")
			c.Dir = r.path("consumer/place")
			must(r, c.Start())
			return func() { _ = c.Process.Kill(); _ = c.Wait() }
		},
		check: func(r *rig, busy *BusyError) {
			if holdersCanBeFound(r) && (len(busy.Holders) != 1 || busy.Holders[0].By != "cwd") {
				r.Errorf("holders are %v, want the working directory of one", busy.Holders)
			}
		},
	}, {
		name: "a mapped file",
		use: func(r *rig) func() {
			f, err := os.Open(r.path("consumer/place/file"))
			must(r, err)
			m, err := unix.Mmap(int(f.Fd()), 0, 4, unix.PROT_READ, unix.MAP_PRIVATE)
			must(r, err)
			must(r, f.Close())
			return func() { _ = unix.Munmap(m) }
		},
	}, {
		name: "somebody else's mount below it",
		use: func(r *rig) func() {
			r.mount("tmpfs", r.path("consumer/place/sub"), "tmpfs", 0, "")
			return func() { r.unmount("consumer/place/sub") }
		},
		check: func(r *rig, busy *BusyError) {
			if len(busy.Mounts) != 1 || len(busy.Holders) != 0 {
				r.Errorf("got %+v, want the other mount", busy)
			}
		},
	}, {
		name: "somebody else's mount stacked on it",
		use: func(r *rig) func() {
			r.mount("tmpfs", r.path("consumer/place"), "tmpfs", 0, "")
			return func() { r.unmount("consumer/place") }
		},
		check: func(r *rig, busy *BusyError) {
			if top, _ := r.table().Top(r.path("consumer/place")); len(busy.Mounts) != 1 || busy.Mounts[0] != top.ID {
				r.Errorf("got %+v, want mount %d", busy, top.ID)
			}
		},
	}, {
		name: "a mount over a directory above it",
		use: func(r *rig) func() {
			r.mount("tmpfs", r.path("consumer"), "tmpfs", 0, "")
			return func() { r.unmount("consumer") }
		},
		check: func(r *rig, busy *BusyError) {
			if !busy.Covered {
				r.Errorf("got %+v, want it covered", busy)
			}
		},
	}, {
		name: "another mount where its path leads now",
		use: func(r *rig) func() {
			r.mount("tmpfs", r.path("consumer"), "tmpfs", 0, "")
			r.mkdir("consumer/place")
			r.mount("tmpfs", r.path("consumer/place"), "tmpfs", 0, "")
			return func() { r.unmount("consumer/place"); r.unmount("consumer") }
		},
	}, {
		name:  "the outer of two",
		specs: []mountspec.Spec{bind("", "data"), tmpfs("sub")},
		use: func(r *rig) func() {
			f, err := os.Open(r.path("consumer/place/file"))
			must(r, err)
			return func() { _ = f.Close() }
		},
	}, {
		name:  "the inner of two",
		specs: []mountspec.Spec{bind("", "data"), tmpfs("sub")},
		index: 1,
		use: func(r *rig) func() {
			f, err := os.Open(r.path("consumer/place/sub"))
			must(r, err)
			return func() { _ = f.Close() }
		},
	}, {
		name: "a mount below a recursive bind",
		specs: []mountspec.Spec{bind("", "tree", func(s *mountspec.Spec) {
			s.Kind.(*mountspec.Bind).Recursive = true
		})},
		use: func(r *rig) func() {
			f, err := os.Open(r.path("consumer/place/sub"))
			must(r, err)
			return func() { _ = f.Close() }
		},
	}, {
		name: "somebody else's mount below a recursive bind",
		specs: []mountspec.Spec{bind("", "tree", func(s *mountspec.Spec) {
			s.Kind.(*mountspec.Bind).Recursive = true
		})},
		use: func(r *rig) func() {
			must(r, os.Mkdir(r.path("consumer/place/sub/x"), 0o755))
			r.mount("tmpfs", r.path("consumer/place/sub/x"), "tmpfs", 0, "")
			return func() { r.unmount("consumer/place/sub/x") }
		},
	}} {
		for _, x := range executors {
			recursive := len(test.specs) == 1
			if x.old && recursive {
				continue
			}
			t.Run(test.name+"/"+x.name, func(t *testing.T) {
				inside(t, func(r *rig) {
					r.mkdir("grant/tree/sub")
					r.mount("tmpfs", r.path("grant/tree/sub"), "tmpfs", 0, "")
					before := r.table()
					specs := test.specs
					if specs == nil {
						specs = []mountspec.Spec{bind("", "data")}
					}
					p := r.perform(x.on(r), r.target("consumer/place"), specs, r.options())
					free := test.use(r)
					used := r.table()
					err := x.on(r).Undo(r.ctx, nil, p.Receipts)
					var busy *BusyError
					if !errors.As(err, &busy) || !errors.Is(err, unix.EBUSY) {
						t.Fatalf("got %v, want a *BusyError", err)
					}
					if busy.Index != test.index {
						t.Errorf("receipt %d is said to be busy, want %d: %v", busy.Index, test.index, err)
					}
					for n := 0; n < 5 && x.probe().UniqueIDs && len(busy.Holders)+len(busy.Mounts) == 0 && !busy.Covered; n++ {
						// A machine under load does not get through all processes.
						_ = errors.As(x.on(r).Undo(r.ctx, nil, p.Receipts), &busy)
					}
					if test.check != nil && x.probe().UniqueIDs {
						test.check(r, busy)
					}
					changes := mountns.Diff(used, r.table())
					if len(changes.Added) > 0 || len(changes.Changed) > 0 {
						t.Errorf("undo has changed\n%s", changes)
					}
					for _, m := range changes.Removed {
						if !own(p, m) {
							t.Errorf("undo took %s", m)
						}
					}
					if _, ok := r.mountOf(p.Receipts[busy.Index]); !ok && !recursive {
						t.Error("the busy mount is gone")
					}
					free()
					r.undo(x.on(r), p.Receipts)
					r.same(before)
				})
			})
		}
	}
}

// holdersCanBeFound is false while some process of the machine hangs in
// execve(2), which hangs whoever looks at it.
func holdersCanBeFound(r *rig) bool {
	if len(searching) == 0 {
		return true
	}
	r.Log("a process of this machine cannot be looked at: holders are not checked")
	return false
}

// own tells whether a mount is the performance's own.
func own(p *Performed, m mountns.Mount) bool {
	for _, rc := range p.Receipts {
		if rc.MountID == m.ID || rc.MountID == uint64(m.SmallID) {
			return true
		}
	}
	return false
}

func TestUndoLeavesBystanders(t *testing.T) {
	for _, x := range executors {
		t.Run(x.name, func(t *testing.T) {
			inside(t, func(r *rig) {
				// One below at the same target, one beside, one that is older
				// and comes to lie on the parent later.
				r.mount("below", r.path("consumer/place"), "tmpfs", 0, "")
				r.mkdir("consumer/other")
				r.mount("beside", r.path("consumer/other"), "tmpfs", 0, "")
				before := r.table()
				p := r.perform(x.on(r), r.target("consumer/place"), []mountspec.Spec{bind("", "data"), tmpfs("sub")}, r.options())
				r.undo(x.on(r), p.Receipts)
				r.same(before)
			})
		})
	}
}

func TestUndoFollowsAMountThatWasMoved(t *testing.T) {
	inside(t, func(r *rig) {
		before := r.table()
		p := r.perform(&plain, r.target("consumer/place"), []mountspec.Spec{bind("", "data"), tmpfs("sub")}, r.options())
		r.mkdir("elsewhere")
		r.mount(r.path("consumer/place"), r.path("elsewhere"), "", unix.MS_MOVE, "")
		r.undo(&plain, p.Receipts)
		r.same(before)
	})
}

func TestUndoOfWhatIsGone(t *testing.T) {
	inside(t, func(r *rig) {
		before := r.table()
		p := r.perform(&plain, r.target("consumer/place"), []mountspec.Spec{bind("", "data"), tmpfs("sub")}, r.options())
		r.unmount("consumer/place/sub")
		r.undo(&plain, p.Receipts)
		r.same(before)
		// Another mount at the same target is none of the receipt's business.
		r.mount("other", r.path("consumer/place"), "tmpfs", 0, "")
		before = r.table()
		r.undo(&plain, p.Receipts)
		r.same(before)
	})
}

// TestUndoOfReusedIDs: the small ids of mountinfo are given again at once.
func TestUndoOfReusedIDs(t *testing.T) {
	e := without(func(f *kernel.Features) { f.UniqueID = false })
	inside(t, func(r *rig) {
		p := r.perform(e, r.target("consumer/place"), []mountspec.Spec{bind("", "data")}, r.options())
		r.unmount("consumer/place")
		r.mkdir("consumer/other")
		r.mount("other", r.path("consumer/other"), "tmpfs", 0, "")
		if m, _ := r.table().Top(r.path("consumer/other")); uint64(m.SmallID) != p.Receipts[0].MountID {
			t.Skipf("the kernel gave id %d, not %d again", m.SmallID, p.Receipts[0].MountID)
		}
		before := r.table()
		r.undo(e, p.Receipts)
		r.same(before)
	})
}

func TestUndoRefusesForeignReceipts(t *testing.T) {
	inside(t, func(r *rig) {
		other, err := mountns.New(r.ctx)
		must(r, err)
		defer other.Close()
		p := r.perform(&plain, r.target("consumer/place"), []mountspec.Spec{bind("", "data")}, r.options())
		before := r.table()
		if err := Undo(r.ctx, other, p.Receipts); !errors.Is(err, ErrForeign) {
			t.Errorf("got %v, want ErrForeign", err)
		}
		// Gone or not makes no difference.
		moved := p.Receipts[0]
		moved.MountID, moved.MntnsID = moved.MountID+1_000_000, other.ID()
		if err := Undo(r.ctx, nil, []Receipt{moved}); !errors.Is(err, ErrForeign) {
			t.Errorf("got %v, want ErrForeign", err)
		}
		r.same(before)
		r.undo(&plain, p.Receipts)
	})
}

func TestUndoOfAnotherBoot(t *testing.T) {
	inside(t, func(r *rig) {
		p := r.perform(&plain, r.target("consumer/place"), []mountspec.Spec{bind("", "data")}, r.options())
		before := r.table()
		void := p.Receipts[0]
		void.BootID = "6bd0c7a0-0000-0000-0000-000000000000"
		void.MntnsID = 1
		r.undo(&plain, []Receipt{void})
		r.same(before)
		r.undo(&plain, []Receipt{void, p.Receipts[0]})
		if _, ok := r.mountOf(p.Receipts[0]); ok {
			t.Error("the receipt of this boot was not undone")
		}
	})
}

func TestUndoRefusesWhatIsNoReceipt(t *testing.T) {
	good := Receipt{Version: 1, BootID: "b", Target: "/t"}
	for _, change := range []func(*Receipt){
		func(r *Receipt) { r.Version = 2 },
		func(r *Receipt) { r.Version = 0 },
		func(r *Receipt) { r.BootID = "" },
		func(r *Receipt) { r.Target = "" },
		func(r *Receipt) { r.Target = "/" },
		func(r *Receipt) { r.Target = "t" },
		func(r *Receipt) { r.Created = []Created{{Path: "/"}} },
		func(r *Receipt) { r.Created = []Created{{Path: "x"}} },
	} {
		bad := good
		change(&bad)
		if err := Undo(t.Context(), nil, []Receipt{bad}); !errors.Is(err, ErrReceipt) {
			t.Errorf("%+v: %v, want ErrReceipt", bad, err)
		}
	}
}

// TestUndoFromDisk: receipts are all that another process needs.
func TestUndoFromDisk(t *testing.T) {
	inside(t, func(r *rig) {
		before, files := r.table(), r.tree("consumer")
		o := r.options(func(o *Options) { o.Policy.CreateTarget = true })
		p := r.perform(&plain, r.target("consumer/new/place"), []mountspec.Spec{bind("", "data"), tmpfs("sub")}, o)
		text, err := json.Marshal(p.Receipts)
		must(r, err)
		var receipts []Receipt
		must(r, json.Unmarshal(text, &receipts))
		r.undo(&Executor{}, receipts)
		r.same(before)
		if got := r.tree("consumer"); got != files {
			t.Errorf("undo left\n%s\nwas\n%s", got, files)
		}
	})
}

// TestUndoUnderASharedParent: a peer's copies go as well, and busy is busy
// there too.
func TestUndoUnderASharedParent(t *testing.T) {
	inside(t, func(r *rig) {
		r.mount("", r.dir, "", unix.MS_SHARED, "")
		peer := r.peer()
		before, theirs := r.table(), tableOf(r, peer)
		p := r.perform(&plain, r.target("consumer/place"), []mountspec.Spec{bind("", "data"), tmpfs("sub")}, r.options())
		if d := mountns.Diff(theirs, tableOf(r, peer)); len(d.Added) == 0 {
			t.Fatal("the rig has no peer")
		}
		var f *os.File
		must(r, peer.Do(r.ctx, func() (err error) {
			f, err = os.Open(r.path("consumer/place/file"))
			return err
		}))
		err := Undo(r.ctx, nil, p.Receipts)
		if !errors.Is(err, unix.EBUSY) {
			t.Errorf("got %v, want EBUSY while the copy is in use", err)
		}
		must(r, f.Close())
		r.undo(&plain, p.Receipts)
		r.same(before)
		if d := mountns.Diff(theirs, tableOf(r, peer)); !d.Empty() {
			t.Errorf("the peer has\n%s", d)
		}
	})
}

// peer makes a namespace that shares mounts with the rig's.
func (r *rig) peer() *mountns.Namespace {
	r.Helper()
	c := exec.Command("sleep", "60")
	c.SysProcAttr = &unix.SysProcAttr{Cloneflags: unix.CLONE_NEWNS, Pdeathsig: unix.SIGKILL}
	must(r, c.Start())
	ns, err := mountns.OfPID(c.Process.Pid)
	must(r, c.Process.Kill())
	_ = c.Wait()
	must(r, err)
	r.Cleanup(func() { _ = ns.Close() })
	return ns
}

func tableOf(r *rig, ns *mountns.Namespace) *mountns.Table {
	r.Helper()
	t, err := ns.Table(r.ctx)
	must(r, err)
	return t
}

// TestUndoDoesNotTouchCopies: a copy in another namespace is not ours to take.
func TestUndoDoesNotTouchCopies(t *testing.T) {
	inside(t, func(r *rig) {
		before := r.table()
		p := r.perform(&plain, r.target("consumer/place"), []mountspec.Spec{bind("", "data"), tmpfs("sub")}, r.options())
		copied, err := mountns.New(r.ctx)
		must(r, err)
		defer copied.Close()
		theirs := tableOf(r, copied)
		r.undo(&plain, p.Receipts)
		r.same(before)
		if d := mountns.Diff(theirs, tableOf(r, copied)); !d.Empty() {
			t.Errorf("the copy has\n%s", d)
		}
	})
}
