package perform

import (
	"errors"
	"net"
	"os"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/mountspec"
)

// TestTargetRefused checks that nothing changes where a target is no place to
// attach to.
func TestTargetRefused(t *testing.T) {
	file := func(s *mountspec.Spec) {
		k := s.Kind.(*mountspec.Bind)
		k.IsFile, k.Source.Relative = true, "data/file"
	}
	for _, test := range []struct {
		name    string
		prepare func(*rig)
		path    string // below the rig's directory
		abs     string
		specs   []mountspec.Spec
		policy  mountspec.Policy
		want    error
	}{
		{name: "empty", abs: "-", want: ErrTarget},
		{name: "relative", abs: "consumer/place", want: ErrTarget},
		{name: "the root", abs: "/", want: ErrTarget},
		{name: "the root by dots", abs: "/./.", want: ErrTarget},
		{name: "a way up", path: "consumer/../consumer/place", abs: "raw", want: ErrTarget},
		{name: "a NUL", path: "consumer/place\x00", abs: "raw", want: ErrTarget},
		{name: "missing", path: "consumer/none", want: unix.ENOENT},
		{name: "missing, and parents too", path: "consumer/none/two", want: unix.ENOENT},
		{name: "a file for a directory", path: "consumer/file", want: ErrTarget},
		{name: "a directory for a file", path: "consumer/place", specs: []mountspec.Spec{bind("", "", file)}, want: ErrTarget},
		{
			name: "a FIFO", path: "consumer/fifo", want: ErrTarget, specs: []mountspec.Spec{bind("", "", file)},
			prepare: func(r *rig) { must(r, unix.Mkfifo(r.path("consumer/fifo"), 0o600)) },
		},
		{
			name: "a device", path: "consumer/null", want: ErrTarget, specs: []mountspec.Spec{bind("", "", file)},
			prepare: func(r *rig) {
				must(r, unix.Mknod(r.path("consumer/null"), unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))))
			},
		},
		{
			name: "a socket", path: "consumer/sock", want: ErrTarget, specs: []mountspec.Spec{bind("", "", file)},
			prepare: func(r *rig) {
				l, err := net.Listen("unix", r.path("consumer/sock"))
				must(r, err)
				r.Cleanup(func() { _ = l.Close() })
			},
		},
		{
			name: "a link at the end", path: "consumer/link", want: ErrTarget,
			prepare: func(r *rig) { must(r, os.Symlink("place", r.path("consumer/link"))) },
		},
		{
			name: "a link at the end, though links are followed", path: "consumer/link", want: ErrTarget,
			policy:  mountspec.Policy{FollowLinks: true},
			prepare: func(r *rig) { must(r, os.Symlink("place", r.path("consumer/link"))) },
		},
		{
			name: "a link on the way", path: "consumer/link/place", want: unix.ELOOP,
			prepare: func(r *rig) { must(r, os.Symlink("../consumer", r.path("consumer/link"))) },
		},
		{
			name: "a link on the way, creating", path: "consumer/link/none", want: unix.ELOOP,
			policy:  mountspec.Policy{CreateTarget: true},
			prepare: func(r *rig) { must(r, os.Symlink("../consumer", r.path("consumer/link"))) },
		},
		{
			name: "a dangling link, creating", path: "consumer/link/none", want: unix.ENOTDIR,
			policy:  mountspec.Policy{CreateTarget: true, FollowLinks: true},
			prepare: func(r *rig) { must(r, os.Symlink("nowhere", r.path("consumer/link"))) },
		},
		{name: "a magic link", abs: "/proc/self/cwd", want: ErrTarget, policy: mountspec.Policy{FollowLinks: true}},
		{name: "through a magic link", abs: "/proc/self/root/tmp", want: unix.ELOOP, policy: mountspec.Policy{FollowLinks: true}},
		{name: "procfs", abs: "/proc/sys", want: ErrTarget},
		{name: "procfs, creating", abs: "/proc/none", want: ErrTarget, policy: mountspec.Policy{CreateTarget: true}},
		{name: "sysfs", abs: "/sys/kernel", want: ErrTarget},
		{name: "devpts", abs: "/dev/pts", want: ErrTarget},
		{
			name: "a cgroup hierarchy", path: "consumer/place", want: ErrTarget,
			prepare: func(r *rig) { r.mount("cgroup2", r.path("consumer/place"), "cgroup2", 0, "") },
		},
		{
			name: "a link in a spec's own target", path: "consumer/place", want: ErrTarget,
			policy: mountspec.Policy{FollowLinks: true},
			specs:  []mountspec.Spec{bind("", "data"), tmpfs("link")},
			prepare: func(r *rig) {
				must(r, os.Symlink("sub", r.path("grant/data/link")))
			},
		},
		{
			name: "a missing target of a later spec, though targets are created", path: "consumer/place", want: unix.ENOENT,
			policy: mountspec.Policy{CreateTarget: true},
			specs:  []mountspec.Spec{bind("", "data"), tmpfs("none")},
		},
		{
			name: "a file as a later spec's directory", path: "consumer/place", want: ErrTarget,
			specs: []mountspec.Spec{bind("", "data"), tmpfs("file")},
		},
	} {
		for _, x := range executors {
			if test.policy.FollowLinks && !x.probe().Openat2 {
				continue // then no link is followed at all
			}
			t.Run(test.name+"/"+x.name, func(t *testing.T) {
				inside(t, func(r *rig) {
					if test.prepare != nil {
						test.prepare(r)
					}
					fds, before, files := x.openFiles(r), r.table(), r.tree("consumer")
					path := r.path(test.path)
					switch test.abs {
					case "":
					case "-":
						path = ""
					case "raw":
						path = r.dir + "/" + test.path
					default:
						path = test.abs
					}
					specs := test.specs
					if specs == nil {
						specs = []mountspec.Spec{bind("", "data")}
					}
					o := r.options(func(o *Options) { o.Policy = test.policy })
					_, err := x.on(r).Perform(r.ctx, Target{Path: path}, specs, o)
					var failed *Error
					if strings.Contains(test.name, "link") && !x.probe().Openat2 && errors.Is(err, unix.ELOOP) {
						err = &Error{Err: test.want} // a walk stops at the link itself
					}
					if !errors.Is(err, test.want) || !errors.As(err, &failed) {
						t.Errorf("got %v, want an *Error with %v", err, test.want)
					}
					r.same(before)
					if got := r.tree("consumer"); got != files {
						t.Errorf("the consumer has changed:\n%s\nwas:\n%s", got, files)
					}
					if got := x.openFiles(r); got != fds {
						t.Errorf("%d files open, %d before", got, fds)
					}
				})
			})
		}
	}
}

func must(r *rig, err error) {
	r.Helper()
	if err != nil {
		r.Fatal(err)
	}
}

// tree lists the names below a directory of the rig.
func (r *rig) tree(name string) string {
	r.Helper()
	var b strings.Builder
	var list func(dir string)
	list = func(dir string) {
		entries, err := os.ReadDir(dir)
		if err != nil {
			return
		}
		for _, e := range entries {
			b.WriteString(dir + "/" + e.Name() + " " + e.Type().String() + "\n")
			if e.IsDir() {
				list(dir + "/" + e.Name())
			}
		}
	}
	list(r.path(name))
	return b.String()
}

func TestLinksOfTheConsumerStayInItsRoot(t *testing.T) {
	inside(t, func(r *rig) {
		r.mkdir("root/real/place")
		r.mkdir("real/place")
		must(r, os.Symlink("/real", r.path("root/absolute")))
		must(r, os.Symlink("../../../../real", r.path("root/up")))
		root, err := os.OpenFile(r.path("root"), unix.O_PATH|unix.O_DIRECTORY, 0)
		must(r, err)
		defer root.Close()
		for _, path := range []string{"/real/place", "/absolute/place", "/up/place"} {
			o := r.options(func(o *Options) { o.Policy.FollowLinks = true })
			p := r.perform(&plain, Target{Root: root, Path: path}, []mountspec.Spec{bind("", "data")}, o)
			if want := r.path("root/real/place"); p.Receipts[0].Target != want {
				t.Errorf("%s led to %s, want %s", path, p.Receipts[0].Target, want)
			}
			r.undo(&plain, p.Receipts)
		}
	})
}

func TestCreateTarget(t *testing.T) {
	for _, x := range executors {
		t.Run(x.name, func(t *testing.T) {
			inside(t, func(r *rig) {
				create := func(o *Options) { o.Policy.CreateTarget = true }
				before, files := r.table(), r.tree("consumer")

				p := r.perform(x.on(r), r.target("consumer/place/a/b"), []mountspec.Spec{bind("", "data")}, r.options(create))
				want := []string{r.path("consumer/place/a"), r.path("consumer/place/a/b")}
				checkCreated(r, p.Receipts[0].Created, false, want...)
				r.undo(x.on(r), p.Receipts)
				r.same(before)
				if got := r.tree("consumer"); got != files {
					t.Errorf("undo left\n%s\nwas\n%s", got, files)
				}

				file := bind("", "data/file", func(s *mountspec.Spec) { s.Kind.(*mountspec.Bind).IsFile = true })
				p = r.perform(x.on(r), r.target("consumer/new"), []mountspec.Spec{file}, r.options(create))
				checkCreated(r, p.Receipts[0].Created, true, r.path("consumer/new"))
				r.undo(x.on(r), p.Receipts)
				if got := r.tree("consumer"); got != files {
					t.Errorf("undo left\n%s\nwas\n%s", got, files)
				}

				// Nothing is created for what is there.
				p = r.perform(x.on(r), r.target("consumer/place"), []mountspec.Spec{bind("", "data")}, r.options(create))
				checkCreated(r, p.Receipts[0].Created, false)
				r.undo(x.on(r), p.Receipts)
				r.same(before)
			})
		})
	}
}

func checkCreated(r *rig, got []Created, file bool, want ...string) {
	r.Helper()
	if len(got) != len(want) {
		r.Fatalf("created %+v, want %v", got, want)
	}
	for i, c := range got {
		var st unix.Stat_t
		if c.Path != want[i] || c.File != file || c.Inode == 0 {
			r.Errorf("created %+v, want %s", c, want[i])
		}
		if i < len(got)-1 { // the last is covered
			if err := unix.Lstat(c.Path, &st); err != nil || st.Ino != c.Inode {
				r.Errorf("%s has inode %d, %v, want %d", c.Path, st.Ino, err, c.Inode)
			}
		}
	}
}

func TestUndoRemovesOnlyWhatItCreated(t *testing.T) {
	inside(t, func(r *rig) {
		create := func(o *Options) { o.Policy.CreateTarget = true }
		for _, test := range []struct {
			name   string
			change func()
			left   string
		}{
			{"something was put beside it", func() { r.write("consumer/new/other", "x") }, "consumer/new/other"},
			{"it was replaced", func() {
				must(r, os.Rename(r.path("consumer/new"), r.path("consumer/moved")))
				r.mkdir("consumer/new")
			}, "consumer/new"},
		} {
			p := r.perform(&plain, r.target("consumer/new/place"), []mountspec.Spec{bind("", "data")}, r.options(create))
			test.change()
			r.undo(&plain, p.Receipts)
			if _, err := os.Lstat(r.path(test.left)); err != nil {
				t.Errorf("%s: %v", test.name, err)
			}
			must(r, os.RemoveAll(r.path("consumer/new")))
		}
	})
}

// TestFlippedTarget lets an attacker exchange a directory on the way to the
// target with a link out of the consumer, as fast as it can, while the
// executor performs there.
func TestFlippedTarget(t *testing.T) {
	attempts := 20_000
	if testing.Short() {
		attempts = 2_000
	}
	inside(t, func(r *rig) {
		r.mkdir("root/dir/place")
		r.mkdir("outside/place")
		must(r, os.Symlink(r.path("outside"), r.path("root/link")))
		root, err := os.OpenFile(r.path("root"), unix.O_PATH|unix.O_DIRECTORY, 0)
		must(r, err)
		defer root.Close()
		before := r.table()
		r.ctx = t.Context() // it may take longer than a minute
		// The attacker's thread has to see the rig.
		var stop, pause atomic.Bool
		flips, done := 0, make(chan error, 1)
		go func() {
			done <- r.ns.Do(r.ctx, func() error {
				for ; !stop.Load(); flips++ {
					for pause.Load() && !stop.Load() {
						runtime.Gosched()
					}
					if err := unix.Renameat2(unix.AT_FDCWD, r.path("root/dir"), unix.AT_FDCWD, r.path("root/link"), unix.RENAME_EXCHANGE); err != nil {
						return err
					}
				}
				return nil
			})
		}()
		var performed, refused, escaped int
		inside := "/root/"
		for n := range attempts {
			o := r.options(func(o *Options) { o.Policy.FollowLinks = n%2 == 0 })
			p, err := Perform(r.ctx, Target{Root: root, Path: "/dir/place"}, []mountspec.Spec{bind("", "data")}, o)
			switch {
			case err == nil:
				performed++
				if !strings.HasPrefix(p.Receipts[0].Target, r.dir+inside) {
					escaped++
				}
				pause.Store(n%50 != 0) // now and then undo among exchanges too
				for err := Undo(r.ctx, nil, p.Receipts); err != nil; err = Undo(r.ctx, nil, p.Receipts) {
					var busy *BusyError
					if !errors.As(err, &busy) {
						t.Fatal(err)
					}
				}
				pause.Store(false)
			case errors.Is(err, unix.ELOOP), errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.EAGAIN):
				refused++
			default:
				t.Fatal(err)
			}
		}
		stop.Store(true)
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		t.Logf("%d attempts against %d exchanges: %d performed, %d refused, %d escaped", attempts, flips, performed, refused, escaped)
		if escaped > 0 || performed == 0 {
			t.Errorf("%d escaped, %d performed", escaped, performed)
		}
		r.same(before)
	})
}
