package mountns

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
)

func TestOwnIsTheCallingThreads(t *testing.T) {
	n := namespace(t)
	here, err := Own()
	must(t, err)
	defer here.Close()
	if here.ID() == n.ID() {
		t.Fatalf("a new namespace has the id %d of its origin", n.ID())
	}
	inside(t, n, func() error {
		there, err := Own()
		if err != nil {
			return err
		}
		defer there.Close()
		if there.ID() != n.ID() || there.Inode() != n.Inode() {
			t.Errorf("inside %s: Own is %s", n, there)
		}
		if id, err := OwnID(); err != nil || id != n.ID() {
			t.Errorf("inside %s: OwnID is %d, %v", n, id, err)
		}
		return nil
	})
}

func TestOfProcessNeedsALivingProcess(t *testing.T) {
	eachKernel(t, func(t *testing.T, f kernel.Features) {
		n := namespace(t)
		sleeper := exec.CommandContext(t.Context(), "sleep", "600")
		pidfd := -1
		sleeper.SysProcAttr = &unix.SysProcAttr{PidFD: &pidfd}
		inside(t, n, sleeper.Start)
		defer unix.Close(pidfd)
		found, err := ofProcess(pidfd, f)
		if err == nil {
			defer found.Close()
			if found.Inode() != n.Inode() {
				t.Errorf("found %s, want %s", found, n)
			}
		} else {
			t.Error(err)
		}
		must(t, sleeper.Process.Kill())
		_ = sleeper.Wait()
		if found, err := ofProcess(pidfd, f); !errors.Is(err, unix.ESRCH) {
			t.Errorf("after the process has ended: %v, %v; want ESRCH", found, err)
		}
	})
}

func TestOnlyMountNamespacesAreOpened(t *testing.T) {
	dir := t.TempDir()
	fifo, file := filepath.Join(dir, "fifo"), filepath.Join(dir, "file")
	must(t, unix.Mkfifo(fifo, 0o600))
	must(t, os.WriteFile(file, nil, 0o600))
	for _, path := range []string{fifo, file, dir, "/proc/self/ns/net", "/dev/null"} {
		if _, err := OpenPath(path); !errors.Is(err, ErrNotNamespace) {
			t.Errorf("%s: %v, want ErrNotNamespace", path, err)
		}
	}
	if _, err := OpenPath(filepath.Join(dir, "absent")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("absent: %v", err)
	}
	f, err := os.Open(file)
	must(t, err)
	if _, err := FromFile(f); !errors.Is(err, ErrNotNamespace) {
		t.Errorf("FromFile: %v, want ErrNotNamespace", err)
	}
	if err := f.Close(); !errors.Is(err, os.ErrClosed) {
		t.Errorf("FromFile left the file open: %v", err)
	}
}

func TestFromFileAndBoundFileAreTheSameNamespace(t *testing.T) {
	made := namespaces(t, 2)
	holder, n := made[0], made[1]
	f, err := os.Open("/proc/self/fd/" + strconv.Itoa(n.FD()))
	must(t, err)
	again, err := FromFile(f)
	must(t, err)
	defer again.Close()
	if again.ID() != n.ID() {
		t.Errorf("FromFile: %d, want %d", again.ID(), n.ID())
	}

	// Bound to a file in another namespace, as container runtimes do.
	file := filepath.Join(t.TempDir(), "pinned")
	must(t, os.WriteFile(file, nil, 0o600))
	inside(t, holder, func() error {
		if err := unix.Mount("/proc/self/fd/"+strconv.Itoa(n.FD()), file, "", unix.MS_BIND, ""); err != nil {
			return err
		}
		bound, err := OpenPath(file)
		if err != nil {
			return err
		}
		defer bound.Close()
		if bound.ID() != n.ID() {
			t.Errorf("OpenPath: %d, want %d", bound.ID(), n.ID())
		}
		return nil
	})
}

func TestCopyIsPrivateOrSlave(t *testing.T) {
	ctx := t.Context()
	origin := namespace(t)
	dir := t.TempDir()
	inside(t, origin, func() error {
		if err := mountTmpfs(dir, ""); err != nil {
			return err
		}
		if err := os.Mkdir(dir+"/later", 0o700); err != nil {
			return err
		}
		return unix.Mount("", dir, "", unix.MS_SHARED, "")
	})
	private, err := origin.Copy(ctx)
	must(t, err)
	defer private.Close()
	slave, err := origin.Copy(ctx, Slave())
	must(t, err)
	defer slave.Close()
	inside(t, origin, func() error { return mountTmpfs(dir+"/later", "") })
	for _, c := range []struct {
		name string
		n    *Namespace
		want int
		mode Propagation
	}{{"origin", origin, 1, Shared}, {"private", private, 0, Private}, {"slave", slave, 1, SlaveOf}} {
		table := tableOf(t, c.n)
		if got := len(table.At(dir + "/later")); got != c.want {
			t.Errorf("%s: %d mounts at the later point, want %d", c.name, got, c.want)
		}
		if m, _ := table.Top(dir); m.Propagation != c.mode {
			t.Errorf("%s: propagation %s, want %s", c.name, m.Propagation, c.mode)
		}
	}
	inside(t, slave, func() error { return unix.Unmount(dir+"/later", 0) })
	if got := len(tableOf(t, origin).At(dir + "/later")); got != 1 {
		t.Error("unmounting in the slave reached the origin")
	}
}

// A namespace lives through its descriptor alone and goes when that is closed.
func TestCloseLetsTheNamespaceGo(t *testing.T) {
	need(t, "the namespace walk", kernel.Probe().NSWalk)
	n := namespace(t)
	id := n.ID()
	listed := func() bool {
		all, err := All(t.Context())
		must(t, err)
		defer CloseAll(all)
		for _, a := range all {
			if a.ID() == id {
				return true
			}
		}
		return false
	}
	if !listed() {
		t.Fatal("a namespace held only by a descriptor is not listed")
	}
	must(t, n.Close())
	for listed() { // the kernel takes it apart in its own time
		select {
		case <-t.Context().Done():
			t.Fatal("still there")
		case <-time.After(time.Millisecond):
		}
	}
}

func TestNewHonoursItsContext(t *testing.T) {
	needRoot(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if n, err := New(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("New with a cancelled context: %v, %v", n, err)
	}
}

func TestAllocations(t *testing.T) {
	n := namespace(t)
	for _, c := range []struct {
		name string
		max  float64
		call func() error
	}{
		{"Own and Close", 12, func() error {
			own, err := Own()
			if err == nil {
				err = own.Close()
			}
			return err
		}},
		{"OwnID", 1, func() error { _, err := OwnID(); return err }},
		{"Do", 2, func() error { return n.Do(t.Context(), func() error { return nil }) }},
		{"Mark", 4, func() error { _, err := n.Mark(t.Context()); return err }},
	} {
		if c.name == "Mark" && !kernel.Probe().Listmount {
			continue // the whole table is read for it
		}
		var failed error
		got := testing.AllocsPerRun(100, func() {
			if err := c.call(); err != nil {
				failed = err
			}
		})
		if failed != nil || got > c.max {
			t.Errorf("%s: %v allocations, at most %v; %v", c.name, got, c.max, failed)
		}
	}
}
