package perform

import (
	"errors"
	"os"
	"os/exec"
	"strconv"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
	"github.com/csi-prepare/csi-prepare/reference/mountns"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
)

// consumer is a process in namespaces of its own, stopped by the cleanup.
func (r *rig) consumer(user bool) (*mountns.Namespace, int) {
	r.Helper()
	c := exec.Command("sleep", "120")
	c.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	if user {
		c.SysProcAttr = &syscall.SysProcAttr{
			Cloneflags:  syscall.CLONE_NEWNS | syscall.CLONE_NEWUSER,
			UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: 100_000, Size: 65536}},
			GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: 100_000, Size: 65536}},
			Pdeathsig:   syscall.SIGKILL,
		}
	}
	must(r, c.Start())
	r.Cleanup(func() { _ = c.Process.Kill(); _ = c.Wait() })
	ns, err := mountns.OfPID(c.Process.Pid)
	must(r, err)
	r.Cleanup(func() { _ = ns.Close() })
	return ns, c.Process.Pid
}

// TestPerformElsewhere: sources are found here, and attached there.
func TestPerformElsewhere(t *testing.T) {
	for _, kind := range []struct {
		name string
		make func(r *rig) *mountns.Namespace
	}{
		{"pinned by a file only", func(r *rig) *mountns.Namespace {
			ns, err := mountns.New(r.ctx)
			must(r, err)
			r.Cleanup(func() { _ = ns.Close() })
			return ns
		}},
		{"of a process", func(r *rig) *mountns.Namespace { ns, _ := r.consumer(false); return ns }},
		{"of a process with a user namespace", func(r *rig) *mountns.Namespace { ns, _ := r.consumer(true); return ns }},
	} {
		for _, x := range executors {
			t.Run(kind.name+"/"+x.name, func(t *testing.T) {
				inside(t, func(r *rig) {
					there := kind.make(r)
					here, theirs, files := r.table(), tableOf(r, there), r.tree("consumer")
					for _, journal := range []func([]Receipt) error{nil, func([]Receipt) error {
						// It runs where the caller is.
						if own, err := nsID(nil); err != nil || own != r.ns.ID() {
							t.Errorf("the journal is called in namespace %d, %v", own, err)
						}
						return nil
					}} {
						o := r.options(func(o *Options) { o.Policy.CreateTarget, o.Journal = true, journal })
						to := Target{Namespace: there, Path: r.path("consumer/new/place")}
						p, err := x.on(r).Perform(r.ctx, to, nested(), o)
						if x.old {
							var unsupported *mountspec.UnsupportedError
							if !errors.As(err, &unsupported) {
								t.Fatalf("got %v, want an *UnsupportedError", err)
							}
							return
						}
						must(r, err)
						r.same(here)
						if d := mountns.Diff(theirs, tableOf(r, there)); len(d.Added) != 3 || len(d.Changed)+len(d.Removed) != 0 {
							t.Errorf("there:\n%s", d)
						}
						must(r, there.Do(r.ctx, func() error {
							_, err := os.Stat(r.path("consumer/new/place/file"))
							return err
						}))
						if err := x.on(r).Undo(r.ctx, nil, p.Receipts); !errors.Is(err, ErrForeign) {
							t.Errorf("undo here: %v, want ErrForeign", err)
						}
						for range 2 {
							must(r, x.on(r).Undo(r.ctx, there, p.Receipts))
						}
						if d := mountns.Diff(theirs, tableOf(r, there)); !d.Empty() {
							t.Errorf("left there:\n%s", d)
						}
						if got := r.tree("consumer"); got != files {
							t.Errorf("left\n%s", got)
						}
					}
				})
			})
		}
	}
}

// TestPerformInARootOfItsOwn: the consumer's root is a directory in its
// namespace, here after pivot_root(2), without any /proc that could be trusted.
func TestPerformInARootOfItsOwn(t *testing.T) {
	inside(t, func(r *rig) {
		there, err := mountns.New(r.ctx)
		must(r, err)
		defer there.Close()
		root := r.mkdir("rootfs")
		must(r, there.Do(r.ctx, func() error {
			if err := unix.Mount("rootfs", root, "tmpfs", 0, "mode=755"); err != nil {
				return err
			}
			for _, d := range []string{"/place", "/proc/self/fd", "/old"} {
				if err := os.MkdirAll(root+d, 0o755); err != nil {
					return err
				}
			}
			if err := unix.PivotRoot(root, root+"/old"); err != nil {
				return err
			}
			if err := unix.Chdir("/"); err != nil {
				return err
			}
			return unix.Unmount("/old", unix.MNT_DETACH)
		}))
		theirs := tableOf(r, there)
		for _, x := range executors {
			if x.old {
				continue
			}
			p, err := x.on(r).Perform(r.ctx, Target{Namespace: there, Path: "/place"}, nested(), r.options())
			must(r, err)
			if p.Receipts[1].Target != "/place/sub" {
				t.Errorf("%s: target %q", x.name, p.Receipts[1].Target)
			}
			var f *os.File
			must(r, there.Do(r.ctx, func() (err error) { f, err = os.Open("/place/file"); return err }))
			if err := x.on(r).Undo(r.ctx, there, p.Receipts); !errors.Is(err, unix.EBUSY) {
				t.Errorf("%s: busy: %v", x.name, err)
			}
			must(r, f.Close())
			must(r, x.on(r).Undo(r.ctx, there, p.Receipts))
			if d := mountns.Diff(theirs, tableOf(r, there)); !d.Empty() {
				t.Errorf("%s: left\n%s", x.name, d)
			}
		}
	})
}

// TestPerformBelowARootFile: the root is a descriptor that was opened in the
// consumer's namespace.
func TestPerformBelowARootFile(t *testing.T) {
	inside(t, func(r *rig) {
		there, pid := r.consumer(true)
		r.mkdir("rootfs/place")
		_ = pid
		var root *os.File
		must(r, there.Do(r.ctx, func() (err error) {
			root, err = os.OpenFile(r.path("rootfs"), unix.O_PATH|unix.O_DIRECTORY, 0)
			return err
		}))
		defer root.Close()
		for _, journal := range []func([]Receipt) error{nil, func(receipts []Receipt) error {
			if receipts[0].Target != r.path("rootfs/place") {
				t.Errorf("the journal has target %q", receipts[0].Target)
			}
			return nil
		}} {
			o := r.options(func(o *Options) { o.Journal = journal })
			p, err := Perform(r.ctx, Target{Namespace: there, Root: root, Path: "/place"}, nested(), o)
			must(r, err)
			if p.Receipts[0].Target != r.path("rootfs/place") {
				t.Errorf("target %q", p.Receipts[0].Target)
			}
			must(r, Undo(r.ctx, there, p.Receipts))
		}
	})
}

// TestThreadsStayWhereTheyWere: whatever happened inside a consumer, the
// threads of this process are in its own namespace afterwards.
func TestThreadsStayWhereTheyWere(t *testing.T) {
	own, err := os.Readlink("/proc/self/ns/mnt")
	if err != nil {
		t.Fatal(err)
	}
	there, err := mountns.New(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer there.Close()
	broken := Executor{before: func(step string) error {
		if step == "check target" {
			return errInjected
		}
		return nil
	}}
	o := Options{
		Request: mountspec.Request{Performer: mountspec.Performer{Kinds: mountspec.PerformedKinds(), FSTypes: []string{"tmpfs"}}},
	}
	for range 20 {
		_, err := broken.Perform(t.Context(), Target{Namespace: there, Path: "/tmp"}, []mountspec.Spec{tmpfs("")}, o)
		if !errors.Is(err, errInjected) {
			t.Fatal(err)
		}
	}
	tasks, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	for _, task := range tasks {
		got, err := os.Readlink("/proc/self/task/" + task.Name() + "/ns/mnt")
		if err == nil && got != own {
			t.Errorf("thread %s is in %s, not %s", task.Name(), got, own)
		}
	}
}

func TestIDMap(t *testing.T) {
	inside(t, func(r *rig) {
		_, pid := r.consumer(true)
		userns, err := os.Open("/proc/" + strconv.Itoa(pid) + "/ns/user")
		must(r, err)
		defer userns.Close()
		must(r, os.Chown(r.path("grant/data/file"), 7, 7))
		before := r.table()
		o := r.options(func(o *Options) { o.IDMap = userns })

		p := r.perform(&plain, r.target("consumer/place"), nested(), o)
		var st unix.Stat_t
		must(r, unix.Stat(r.path("consumer/place/file"), &st))
		if st.Uid != 100_007 || st.Gid != 100_007 {
			t.Errorf("the file belongs to %d:%d, want 100007:100007", st.Uid, st.Gid)
		}
		for i := range p.Receipts {
			if m, _ := r.mountOf(p.Receipts[i]); m.Attr&mountns.AttrIDMap == 0 {
				t.Errorf("%s is not mapped", m)
			}
		}
		r.undo(&plain, p.Receipts)
		r.same(before)

		// A filesystem that cannot map fails the whole, before anything shows.
		o.Request.Performer.FSTypes = []string{"tmpfs"}
		unmapped := nested()
		unmapped[1].IDMapSupported = false
		_, err = Perform(r.ctx, r.target("consumer/place"), unmapped, o)
		var unsupported *mountspec.UnsupportedError
		if !errors.As(err, &unsupported) || unsupported.Index != 1 {
			t.Errorf("got %v, want an *UnsupportedError for spec 1", err)
		}
		r.mkdir("grant/procfs")
		r.mount("proc", r.path("grant/procfs"), "proc", 0, "")
		before = r.table()
		_, err = Perform(r.ctx, r.target("consumer/place"), []mountspec.Spec{bind("", "procfs")}, o)
		if !errors.Is(err, unix.EINVAL) {
			t.Errorf("got %v, want EINVAL of a filesystem that cannot map", err)
		}
		r.same(before)
	})
}

// TestProbe documents what the forced fallbacks lack.
func TestForcedFeatures(t *testing.T) {
	all := planFeatures(kernel.Probe())
	if all != (mountspec.Features{MountAPI: true, DetachedTrees: true, ExclusiveCreate: true, UniqueIDs: true, Openat2: true}) {
		t.Skipf("this kernel offers only %+v", all)
	}
	for _, x := range executors[2:] {
		if x.probe() == all {
			t.Errorf("%s lacks nothing", x.name)
		}
	}
	if got := executors[5].probe(); got != (mountspec.Features{}) {
		t.Errorf("mount(2) only has %+v", got)
	}
}
