package master

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
	"github.com/csi-prepare/csi-prepare/reference/mountns"
)

func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("mounting needs root")
	}
}

// tmpfs is a detached mount with a file in it.
func tmpfs(t *testing.T) *os.File {
	t.Helper()
	fs, err := kernel.OpenFS("tmpfs")
	if err != nil {
		t.Fatal(err)
	}
	defer fs.Close()
	if err := fs.Create(); err != nil {
		t.Fatal(err)
	}
	fd, err := fs.Mount(0)
	if err != nil {
		t.Fatal(err)
	}
	f, err := unix.Openat(fd, "f", unix.O_CREAT|unix.O_WRONLY|unix.O_CLOEXEC, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	unix.Close(f)
	return file(t, fd)
}

func file(t *testing.T, fd int) *os.File {
	f := os.NewFile(uintptr(fd), "mount")
	t.Cleanup(func() { f.Close() })
	return f
}

// in runs fn in a mount namespace of the test's own, and returns what it
// opened there.
func in(t *testing.T, fn func(ns *mountns.Namespace) (int, error)) *os.File {
	t.Helper()
	ns, err := mountns.New(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ns.Close() })
	fd := -1
	if err := ns.Do(t.Context(), func() error { fd, err = fn(ns); return err }); err != nil {
		t.Fatal(err)
	}
	return file(t, fd)
}

func TestAReceivedMountIsClonedForConsumers(t *testing.T) {
	needRoot(t)
	base := t.TempDir()
	for name, mount := range map[string]*os.File{
		"made by fsmount": tmpfs(t),
		"a clone made in another namespace": in(t, func(*mountns.Namespace) (int, error) {
			m := tmpfs(t)
			if err := kernel.MoveMountAt(int(m.Fd()), "", unix.AT_FDCWD, base, 0); err != nil {
				return -1, err
			}
			return kernel.OpenTree(unix.AT_FDCWD, base, unix.OPEN_TREE_CLONE)
		}),
	} {
		t.Run(name, func(t *testing.T) {
			m, err := Receive(t.Context(), mount, Expected{FSType: "tmpfs"})
			if err != nil {
				t.Fatal(err)
			}
			mount.Close()
			for range 2 {
				fd, err := m.Clone(t.Context(), false)
				if err != nil {
					t.Fatal(err)
				}
				// It is attached where the consumer is, and usable there.
				in(t, func(*mountns.Namespace) (int, error) {
					if err := kernel.MoveMountAt(fd, "", unix.AT_FDCWD, base, 0); err != nil {
						return -1, err
					}
					unix.Close(fd)
					return unix.Open(filepath.Join(base, "f"), unix.O_PATH|unix.O_CLOEXEC, 0)
				})
			}
			if table, err := m.ns.Table(t.Context()); err != nil || len(table.Mounts) != 2 {
				t.Errorf("the private namespace has more than the root and the mount: %v, %v", table.Mounts, err)
			}
			fd, err := m.Clone(t.Context(), false)
			if err != nil {
				t.Fatal(err)
			}
			clone := file(t, fd)
			if err := m.Close(); err != nil {
				t.Error(err)
			}
			if _, err := kernel.FactsOf(int(clone.Fd()), "f", true); err != nil {
				t.Errorf("a clone died with its master: %v", err)
			}
		})
	}
}

func TestAMadeMountIsClonedFromAnywhere(t *testing.T) {
	needRoot(t)
	m := Made(tmpfs(t))
	in(t, func(*mountns.Namespace) (int, error) { return m.Clone(t.Context(), false) })
	if err := m.Close(); err != nil {
		t.Error(err)
	}
	if _, err := m.Clone(t.Context(), true); err != nil {
		t.Errorf("closing a master that was made closed the mount: %v", err)
	}
}

func TestWhatIsNoUsableMountIsRefused(t *testing.T) {
	needRoot(t)
	base := t.TempDir()
	attach := func(*mountns.Namespace) (int, error) {
		m := tmpfs(t)
		return int(m.Fd()), kernel.MoveMountAt(int(m.Fd()), "", unix.AT_FDCWD, base, 0)
	}
	directory, err := os.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer directory.Close()
	plain := func() *os.File { return tmpfs(t) }
	for name, c := range map[string]struct {
		mount func() *os.File
		want  Expected
		says  string
	}{
		"a directory":              {func() *os.File { return directory }, Expected{FSType: "tmpfs"}, "no root of a mount"},
		"another type":             {plain, Expected{FSType: "ext4"}, "type is tmpfs"},
		"no type":                  {plain, Expected{}, "type is tmpfs"},
		"a type that is forbidden": {plain, Expected{FSType: "tmpfs", Allowed: func(string) error { return errors.New("not here") }}, "not here"},
		"attached elsewhere": {func() *os.File {
			return in(t, func(ns *mountns.Namespace) (int, error) {
				if _, err := attach(ns); err != nil {
					return -1, err
				}
				return unix.Open(base, unix.O_PATH|unix.O_CLOEXEC, 0)
			})
		}, Expected{FSType: "tmpfs"}, "attached in a mount namespace"},
		"attached in the CO's namespace": {func() *os.File {
			fd, err := unix.Open("/proc", unix.O_PATH|unix.O_CLOEXEC, 0)
			if err != nil {
				t.Fatal(err)
			}
			return file(t, fd)
		}, Expected{FSType: "proc"}, "CO's own"},
		"the root of the node": {func() *os.File {
			fd, err := kernel.OpenTree(unix.AT_FDCWD, "/", unix.OPEN_TREE_CLONE)
			if err != nil {
				t.Fatal(err)
			}
			return file(t, fd)
		}, Expected{FSType: rootType(t)}, "CO's root"},
		"a file": {func() *os.File {
			return in(t, func(ns *mountns.Namespace) (int, error) {
				if _, err := attach(ns); err != nil {
					return -1, err
				}
				return kernel.OpenTree(unix.AT_FDCWD, base+"/f", unix.OPEN_TREE_CLONE)
			})
		}, Expected{FSType: "tmpfs"}, "not of a directory"},
		"a tree": {func() *os.File {
			return in(t, func(ns *mountns.Namespace) (int, error) {
				if _, err := attach(ns); err != nil {
					return -1, err
				}
				if err := os.Mkdir(base+"/d", 0o700); err != nil {
					return -1, err
				}
				if err := unix.Mount("none", base+"/d", "tmpfs", 0, ""); err != nil {
					return -1, err
				}
				return kernel.OpenTree(unix.AT_FDCWD, base, unix.OPEN_TREE_CLONE|unix.AT_RECURSIVE)
			})
		}, Expected{FSType: "tmpfs"}, "1 mounts are below"},
	} {
		t.Run(name, func(t *testing.T) {
			m, err := Receive(t.Context(), c.mount(), c.want)
			var refused *RefusedError
			if !errors.As(err, &refused) || !strings.Contains(err.Error(), c.says) {
				t.Errorf("got %v, %v", m, err)
			}
		})
	}
}

func rootType(t *testing.T) string {
	t.Helper()
	id, err := kernel.UniqueID(unix.AT_FDCWD, "/")
	if err != nil {
		t.Fatal(err)
	}
	st, err := kernel.StatMount(0, id, kernel.StatFSType)
	if err != nil {
		t.Fatal(err)
	}
	return st.FSType
}

// TestAMountThatHangsIsReceived has a FUSE mount that nobody serves.
func TestAMountThatHangsIsReceived(t *testing.T) {
	needRoot(t)
	device, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	if err != nil {
		t.Skipf("this machine has no FUSE: %v", err)
	}
	defer device.Close()
	fs, err := kernel.OpenFS("fuse")
	if err != nil {
		t.Fatal(err)
	}
	defer fs.Close()
	err = withFD(device, func(fd int) error {
		for _, p := range [][2]string{{"fd", strconv.Itoa(fd)}, {"rootmode", "40755"}, {"user_id", "0"}, {"group_id", "0"}, {"subtype", "x"}} {
			if err := fs.SetString(p[0], p[1]); err != nil {
				return err
			}
		}
		return fs.Create()
	})
	if err != nil {
		t.Fatal(err)
	}
	fd, err := fs.Mount(0)
	if err != nil {
		t.Fatal(err)
	}
	m, err := Receive(t.Context(), file(t, fd), Expected{FSType: "fuse.x"})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	clone, err := m.Clone(t.Context(), false)
	if err != nil {
		t.Fatal(err)
	}
	unix.Close(clone)
}
