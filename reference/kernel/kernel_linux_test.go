package kernel

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// private runs a test function in a mount namespace of its own, on a thread
// that ends with it. The function reports with t.Error, not t.Fatal.
func private(t *testing.T, fn func() error) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("mounting needs root")
	}
	result := make(chan error, 1)
	StartThread(func() {
		err := errors.New("the test function did not return")
		defer func() { result <- err }()
		if err = unix.Unshare(unix.CLONE_NEWNS); err != nil {
			return
		}
		if err = unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
			return
		}
		err = fn()
	})
	if err := <-result; err != nil {
		t.Fatal(err)
	}
}

func need(t *testing.T, what string, have bool) {
	t.Helper()
	if !have {
		t.Skipf("the kernel lacks %s", what)
	}
}

// tmpfs is a detached one with the parameters.
func tmpfs(parameters ...string) (int, error) {
	fs, err := OpenFS("tmpfs")
	if err != nil {
		return -1, err
	}
	defer fs.Close()
	for i := 0; i < len(parameters); i += 2 {
		if err := fs.SetString(parameters[i], parameters[i+1]); err != nil {
			return -1, err
		}
	}
	if err := fs.Create(); err != nil {
		return -1, err
	}
	return fs.Mount(unix.MOUNT_ATTR_NODEV)
}

func TestErrorsCarryTheKernelsWords(t *testing.T) {
	need(t, "the new mount API", Probe().NewMountAPI)
	open := func() *FSContext {
		fs, err := OpenFS("tmpfs")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = fs.Close() })
		return fs
	}
	for _, c := range []struct {
		name string
		step func(*FSContext) error
		want string
	}{
		{
			"unknown parameter",
			func(fs *FSContext) error { return fs.SetString("bogus", "1") },
			`fsconfig tmpfs "bogus": invalid argument (kernel: tmpfs: Unknown parameter 'bogus')`,
		},
		{
			"unknown flag",
			func(fs *FSContext) error { return fs.SetFlag("nosuid") },
			`fsconfig tmpfs "nosuid": invalid argument (kernel: tmpfs: Unknown parameter 'nosuid')`,
		},
		{
			"bad value",
			func(fs *FSContext) error { return fs.SetString("size", "a lot") },
			`fsconfig tmpfs "size": invalid argument (kernel: tmpfs: Bad value for 'size')`,
		},
		{
			"secret named by the kernel",
			func(fs *FSContext) error { return fs.SetSecret("bogus", "bogus") },
			`fsconfig tmpfs "bogus": invalid argument (kernel: tmpfs: Unknown parameter '***')`,
		},
		{
			"value too long",
			func(fs *FSContext) error { return fs.SetString("source", strings.Repeat("x", 256)) },
			`fsconfig tmpfs "source": invalid argument`,
		},
		{
			"mounting before creating",
			func(fs *FSContext) error { _, err := fs.Mount(0); return err },
			`fsmount tmpfs: invalid argument`,
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			err := c.step(open())
			var fsErr *FSError
			if !errors.As(err, &fsErr) || !errors.Is(err, unix.EINVAL) || err.Error() != c.want {
				t.Errorf("have %v\nwant %s", err, c.want)
			}
		})
	}
	if _, err := OpenFS("no-such-fs"); !errors.Is(err, unix.ENODEV) || err.Error() != "fsopen no-such-fs: no such device" {
		t.Errorf("unknown type: %v", err)
	}
	fs := open()
	if err := fs.Create(); err != nil {
		t.Fatal(err)
	}
	if err := fs.Create(); !errors.Is(err, unix.EBUSY) {
		t.Errorf("creating twice: %v, want EBUSY", err)
	}
	if err := errors.Join(fs.Close(), fs.Close()); err != nil {
		t.Errorf("closing twice: %v", err)
	}
}

func TestUniqueIDStaysWithAMount(t *testing.T) {
	need(t, "unique ids", Probe().UniqueID && Probe().NewMountAPI)
	dir := t.TempDir()
	private(t, func() error {
		fd, err := tmpfs()
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		id, err := UniqueID(fd, "")
		if err != nil {
			return err
		}
		if _, err := StatMount(0, id, StatBasic); !errors.Is(err, unix.ENOENT) {
			t.Errorf("statmount of a detached mount: %v, want ENOENT", err)
		}
		if err := errors.Join(unix.Mkdirat(fd, "in", 0o700), unix.Symlinkat("in", fd, "link"), os.Mkdir(dir+"/a", 0o700), os.Mkdir(dir+"/b", 0o700)); err != nil {
			return err
		}
		outside, err := UniqueID(unix.AT_FDCWD, dir)
		if err != nil {
			return err
		}
		for _, point := range []string{dir + "/a", dir + "/b"} { // attach, then move
			if err := MoveMountAt(fd, "", unix.AT_FDCWD, point, 0); err != nil {
				return err
			}
			got, root, err := MountRootID(unix.AT_FDCWD, point)
			if err != nil || got != id || !root {
				t.Errorf("at %s: %d root %v %v, want %d", point, got, root, err, id)
			}
			for _, name := range []string{"/in", "/link"} {
				got, root, err := MountRootID(unix.AT_FDCWD, point+name)
				if err != nil || got != id || root {
					t.Errorf("at %s: %d root %v %v, want %d, not its root", point+name, got, root, err, id)
				}
			}
		}
		// A link is looked at, not followed: it is in the outer mount.
		if err := os.Symlink("b", dir+"/to-b"); err != nil {
			return err
		}
		if got, err := UniqueID(unix.AT_FDCWD, dir+"/to-b"); err != nil || got != outside {
			t.Errorf("through a link: %d %v, want %d", got, err, outside)
		}
		if got := LinkedMount(unix.AT_FDCWD, fmt.Sprintf("/proc/self/fd/%d", fd)); got != id {
			t.Errorf("LinkedMount: %d, want %d", got, id)
		}
		_, err = UniqueID(unix.AT_FDCWD, dir+"/absent")
		if !errors.Is(err, os.ErrNotExist) {
			t.Errorf("absent: %v", err)
		}
		return nil
	})
}

func TestListing(t *testing.T) {
	need(t, "listmount", Probe().Listmount && Probe().ListmountReverse)
	dir := t.TempDir()
	private(t, func() error {
		if err := unix.Mount("tmpfs", dir, "tmpfs", 0, ""); err != nil {
			return err
		}
		mark, err := NewestMount(0)
		if err != nil {
			return err
		}
		top, err := UniqueID(unix.AT_FDCWD, dir)
		if err != nil || mark != top {
			return fmt.Errorf("the newest is %d, want %d, %w", mark, top, err)
		}
		var want []uint64
		for i := range 300 {
			point := fmt.Sprintf("%s/%d", dir, i)
			if err := errors.Join(os.Mkdir(point, 0o700), unix.Mount("tmpfs", point, "tmpfs", 0, "")); err != nil {
				return err
			}
			id, err := UniqueID(unix.AT_FDCWD, point)
			if err != nil {
				return err
			}
			want = append(want, id)
		}
		// However little room there is, all come, once, in order.
		for _, room := range []int{0, 1, 7, 299, 300, 301, 4096} {
			got, err := ListMounts(make([]uint64, 1, 1+room), 0, Root, mark)
			if err != nil || !slices.Equal(got[1:], want) {
				t.Errorf("room for %d: %d ids, %v; want %d", room, len(got)-1, err, len(want))
			}
		}
		if got, err := ListMounts(nil, 0, top, 0); err != nil || !slices.Equal(got, want) {
			t.Errorf("below one mount: %d ids, %v; want %d", len(got), err, len(want))
		}
		if got, err := ListMounts(nil, 0, Root, want[len(want)-1]); err != nil || len(got) != 0 {
			t.Errorf("above the newest: %v, %v", got, err)
		}
		return nil
	})
	if _, err := ListMounts(nil, 1<<60, Root, 0); err == nil {
		t.Error("a namespace that does not exist was listed")
	}
}

func TestStatMountTakesTextsOfAnyLength(t *testing.T) {
	need(t, "statmount", Probe().Statmount)
	dir := t.TempDir()
	private(t, func() error {
		if err := errors.Join(unix.Mount("tmpfs", dir, "tmpfs", 0, ""), unix.Chdir(dir)); err != nil {
			return err
		}
		point, name := dir, strings.Repeat("d", 250)
		for range 80 { // 20 kB of path, far more than a path argument may have
			if err := errors.Join(unix.Mkdir(name, 0o700), unix.Chdir(name)); err != nil {
				return err
			}
			point += "/" + name
		}
		if err := unix.Mount("the source", ".", "tmpfs", unix.MS_NOSUID, "size=4m"); err != nil {
			return err
		}
		id, err := NewestMount(0)
		if err != nil {
			return err
		}
		s, err := StatMount(0, id, StatAll|StatSupported)
		if err != nil {
			return err
		}
		if s.ID != id || s.Point != point || s.Source != "the source" || s.FSType != "tmpfs" || s.Root != "/" || s.Attr != unix.MOUNT_ATTR_NOSUID {
			t.Errorf("%d bytes of point, want %d; %+v", len(s.Point), len(point), s)
		}
		only, err := StatMount(0, id, StatBasic)
		if err != nil || only.Point != "" || only.ID != id || only.Mask != StatBasic {
			t.Errorf("only the basics: %+v, %v", only, err)
		}
		return nil
	})
}

func TestProbeBusy(t *testing.T) {
	need(t, "unique ids", Probe().UniqueID)
	dir := t.TempDir()
	private(t, func() error {
		if busy, err := ProbeBusy(dir, 0); !errors.Is(err, unix.ESTALE) {
			t.Errorf("no mount: busy %v, %v; want ESTALE", busy, err)
		}
		if err := unix.Mount("tmpfs", dir, "tmpfs", 0, ""); err != nil {
			return err
		}
		id, err := UniqueID(unix.AT_FDCWD, dir)
		if err != nil {
			return err
		}
		for range 3 { // a probe does not unmount, however often
			if busy, err := ProbeBusy(dir, id); busy || err != nil {
				t.Errorf("idle: busy %v, %v", busy, err)
			}
		}
		if _, err := ProbeBusy(dir, id+1); !errors.Is(err, unix.ESTALE) {
			t.Errorf("another id: %v, want ESTALE", err)
		}
		file, err := os.Create(dir + "/file")
		if err != nil {
			return err
		}
		if busy, err := ProbeBusy(dir, id); !busy || err != nil {
			t.Errorf("a file is open: busy %v, %v", busy, err)
		}
		_ = file.Close()
		if err := errors.Join(os.Mkdir(dir+"/child", 0o700), unix.Mount("tmpfs", dir+"/child", "tmpfs", 0, "")); err != nil {
			return err
		}
		if busy, err := ProbeBusy(dir, id); !busy || err != nil {
			t.Errorf("something is mounted on it: busy %v, %v", busy, err)
		}
		if err := errors.Join(Unmount(dir+"/child", 0), os.Symlink(dir, dir+"/link")); err != nil {
			return err
		}
		if err := Unmount(dir+"/link", 0); !errors.Is(err, unix.EINVAL) {
			t.Errorf("unmounting a link: %v, want EINVAL", err)
		}
		if got, err := UniqueID(unix.AT_FDCWD, dir); err != nil || got != id {
			t.Errorf("the mount is gone: %d %v, want %d", got, err, id)
		}
		return nil
	})
}

func TestResolution(t *testing.T) {
	need(t, "openat2", Probe().Openat2)
	dir := t.TempDir()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(os.MkdirAll(dir+"/root/sub/deep", 0o700))
	must(os.Symlink("sub", dir+"/root/link"))
	must(os.Symlink("/", dir+"/root/absolute"))
	must(os.Symlink("/proc/self/root", dir+"/root/magic"))
	root, err := unix.Open(dir+"/root", unix.O_PATH|unix.O_CLOEXEC, 0)
	must(err)
	defer unix.Close(root)
	const path = unix.O_PATH
	for _, c := range []struct {
		path            string
		beneath, inRoot error
	}{
		{path: "sub/deep"},
		{path: "."},
		{path: "sub/../sub"},
		{path: "..", beneath: unix.EXDEV},
		{path: "/sub", beneath: unix.EXDEV},
		{path: "../../../../sub", beneath: unix.EXDEV},
		{path: "link", beneath: unix.ELOOP, inRoot: unix.ELOOP},
		{path: "link/deep", beneath: unix.ELOOP, inRoot: unix.ELOOP},
		{path: "absolute", beneath: unix.ELOOP, inRoot: unix.ELOOP},
		{path: "magic/etc", beneath: unix.ELOOP, inRoot: unix.ELOOP},
		{path: "absent", beneath: unix.ENOENT, inRoot: unix.ENOENT},
		{path: "a\x00b", beneath: unix.EINVAL, inRoot: unix.EINVAL},
	} {
		fd, err := OpenBeneath(root, c.path, path)
		if !errors.Is(err, c.beneath) {
			t.Errorf("beneath %q: %v, want %v", c.path, err, c.beneath)
		}
		_ = unix.Close(fd)
		fd, err = OpenInRoot(root, c.path, path)
		if !errors.Is(err, c.inRoot) {
			t.Errorf("in root %q: %v, want %v", c.path, err, c.inRoot)
		}
		_ = unix.Close(fd)
	}
}

func TestAttributesAndOrder(t *testing.T) {
	f := Probe()
	need(t, "what this needs", f.NewMountAPI && f.MountSetattr && f.MoveBeneath && f.Statmount)
	dir := t.TempDir()
	private(t, func() error {
		first, err := tmpfs("source", "first")
		if err != nil {
			return err
		}
		second, err := tmpfs("source", "second")
		if err != nil {
			return err
		}
		attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOATIME, Attr_clr: unix.MOUNT_ATTR__ATIME}
		if err := MountSetattr(first, &attr, false); err != nil {
			return err
		}
		if err := MoveMountAt(first, "", unix.AT_FDCWD, dir, 0); err != nil {
			return err
		}
		if err := MoveMountAt(second, "", unix.AT_FDCWD, dir, MoveMountBeneath); err != nil {
			return err
		}
		ids := [2]uint64{}
		for i, fd := range []int{first, second} {
			if ids[i], err = UniqueID(fd, ""); err != nil {
				return err
			}
			_ = unix.Close(fd)
		}
		if top, err := UniqueID(unix.AT_FDCWD, dir); err != nil || top != ids[0] {
			t.Errorf("on top is %d %v, want the first, %d", top, err, ids[0])
		}
		s, err := StatMount(0, ids[0], StatAll)
		want := uint64(unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOATIME | unix.MOUNT_ATTR_NODEV)
		if err != nil || s.Attr != want || s.ParentID != ids[1] {
			t.Errorf("%+v %v, want attributes %#x and parent %d", s, err, want, ids[1])
		}
		return nil
	})
}

func TestThreadsAreNeverTheLeaderAndEnd(t *testing.T) {
	var wg sync.WaitGroup
	tids := make([]int, 100)
	for i := range tids {
		wg.Add(1)
		StartThread(func() {
			defer wg.Done()
			if tids[i] = unix.Gettid(); tids[i] == unix.Getpid() {
				t.Error("on the leader")
			}
		})
	}
	wg.Wait()
	for _, tid := range tids {
		for try := 0; ; try++ { // it ends just after fn
			if _, err := os.Stat(filepath.Join("/proc/self/task", fmt.Sprint(tid))); err != nil {
				break
			}
			if try == 100_000 {
				t.Fatalf("thread %d is still there", tid)
			}
			unix.Nanosleep(&unix.Timespec{Nsec: 1e5}, nil)
		}
	}
}
