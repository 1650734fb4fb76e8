package mountns

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
)

// childKey names what this test binary does when it is its own child.
const childKey = "MOUNTNS_TEST_CHILD"

func TestMain(m *testing.M) {
	switch os.Getenv(childKey) {
	case "":
		os.Exit(m.Run())
	case "chroot":
		os.Exit(chrootedChild())
	}
	os.Exit(2)
}

// chrootedChild changes its root to its argument and prints what it reads of
// its own namespace.
func chrootedChild() int {
	err := unix.Chroot(os.Args[1])
	if err == nil {
		err = unix.Chdir("/")
	}
	var seen struct {
		Table *Table
		IDs   []uint64
		New   []Mount
	}
	if err == nil {
		ctx := context.Background()
		var n *Namespace
		if n, err = Own(); err == nil {
			seen.Table, _ = n.Table(ctx)
			seen.IDs, _ = n.IDs(ctx, nil)
			w, _ := n.Mark(ctx)
			w.ID = 0
			inc, _ := n.Since(ctx, w)
			seen.New = inc.New
			err = json.NewEncoder(os.Stdout).Encode(seen)
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// needRoot skips where nothing here can be tested.
func needRoot(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("mounting needs root")
	}
}

// need skips where the kernel lacks something and names it.
func need(t testing.TB, what string, have bool) {
	t.Helper()
	if !have {
		t.Skipf("the kernel lacks %s", what)
	}
}

// older is a kernel without unique ids, namespace walk and events.
func older() kernel.Features {
	f := kernel.Probe()
	f.UniqueID, f.Listmount, f.ListmountByNS, f.ListmountReverse, f.Statmount = false, false, false, false, false
	f.NSWalk, f.PidfdNS, f.MountEvents, f.DetachedClone, f.DetachedTree = false, false, false, false, false
	return f
}

// eachKernel runs a test on what this kernel can do and on what it could before.
func eachKernel(t *testing.T, test func(t *testing.T, f kernel.Features)) {
	noEvents := kernel.Probe()
	noEvents.MountEvents, noEvents.ListmountReverse, noEvents.NSWalk = false, false, false
	for _, k := range []struct {
		name     string
		features kernel.Features
	}{{"this", kernel.Probe()}, {"no walk and no events", noEvents}, {"no unique ids", older()}} {
		t.Run(k.name, func(t *testing.T) { test(t, k.features) })
	}
}

// namespace is a private copy for one test, closed at its end.
func namespace(t testing.TB, options ...NewOption) *Namespace {
	t.Helper()
	needRoot(t)
	n, err := New(t.Context(), options...)
	must(t, err)
	t.Cleanup(func() { _ = n.Close() })
	return n
}

// namespaces are several, in order of id, which is not that of their making. The
// kernel binds a namespace only inside one with a smaller id, lest two hold each
// other.
func namespaces(t testing.TB, count int) []*Namespace {
	t.Helper()
	made := make([]*Namespace, count)
	for i := range made {
		made[i] = namespace(t)
	}
	slices.SortFunc(made, func(a, b *Namespace) int { return compareIDs(a.id, b.id) })
	return made
}

// limited is the same namespace on a kernel with other features.
func limited(n *Namespace, f kernel.Features) *Namespace {
	return &Namespace{file: n.file, fd: n.fd, id: n.id, inode: n.inode, features: f}
}

// inside runs fn in n and fails the test on an error.
func inside(t testing.TB, n *Namespace, fn func() error) {
	t.Helper()
	must(t, n.Do(t.Context(), fn))
}

func tableOf(t testing.TB, n *Namespace) *Table {
	t.Helper()
	table, err := n.Table(t.Context())
	must(t, err)
	return table
}

func mountTmpfs(point, data string) error {
	if err := os.MkdirAll(point, 0o700); err != nil {
		return err
	}
	return unix.Mount("tmpfs", point, "tmpfs", 0, data)
}

// fill mounts a tmpfs on dir and binds one of its directories n times below.
func fill(t testing.TB, ns *Namespace, dir string, n int) {
	t.Helper()
	inside(t, ns, func() error {
		if err := mountTmpfs(dir, ""); err != nil {
			return err
		}
		source := dir + "/source"
		if err := os.Mkdir(source, 0o700); err != nil {
			return err
		}
		// Fillers are children of another mount than their source, so that
		// the kernel need not look through them for each new one.
		if err := mountTmpfs(dir+"/pods", ""); err != nil {
			return err
		}
		for i := range n {
			point := fmt.Sprintf("%s/pods/%08x-pod/volumes/kubernetes.io~csi/pvc-%08x-4f2a-11ee-be56-0242ac120002/mount", dir, i/10, i)
			if err := os.MkdirAll(point, 0o700); err != nil {
				return err
			}
			if err := unix.Mount(source, point, "", unix.MS_BIND, ""); err != nil {
				return err
			}
		}
		return nil
	})
}

// child is this test binary again, doing something else.
func child(t testing.TB, what string, args ...string) *exec.Cmd {
	t.Helper()
	c := exec.CommandContext(t.Context(), "/proc/self/exe")
	c.Args = append(c.Args[:1], args...)
	c.Env = append(os.Environ(), childKey+"="+what)
	return c
}

// bounded ends in half a minute: what looks into every process of the machine
// waits for one that hangs, and is then to say which.
func bounded(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// must stops the test at an error of a step it does not test.
func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
