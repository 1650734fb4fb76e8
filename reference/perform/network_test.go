package perform

import (
	"errors"
	"os"
	"os/exec"
	"strconv"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/mountspec"
)

// A child makes a filesystem in the network namespace it is told. Sysfs shows
// which one that was.
func TestChildMakesInANetworkNamespace(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root: a network namespace of its own")
	}
	other := exec.Command("sleep", "1000")
	other.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET, Pdeathsig: unix.SIGKILL}
	if err := other.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = other.Process.Kill(); _ = other.Wait() }()
	network, err := os.Open("/proc/" + strconv.Itoa(other.Process.Pid) + "/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	defer network.Close()
	here := networkOf(t, -1, false)
	there := networkOf(t, int(network.Fd()), true)
	var of [2]unix.Stat_t
	if err := errors.Join(unix.Fstat(int(network.Fd()), &of[0]), unix.Stat("/proc/self/ns/net", &of[1])); err != nil {
		t.Fatal(err)
	}
	if of[0].Ino == of[1].Ino {
		t.Fatal("there is no other network namespace")
	}
	if here == there {
		t.Error("a filesystem made in another network namespace is the superblock of this one")
	}
}

// networkOf returns the device of a sysfs that a child makes: each network
// namespace has its own.
func networkOf(t *testing.T, network int, enter bool) uint64 {
	t.Helper()
	fd, _, err := inChild(t.Context(), &childTask{FSType: "sysfs", Network: enter}, network, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		t.Fatal(err)
	}
	return st.Dev
}

// What is busy and on no network is never forced.
func TestForceUndoForcesNetworksAlone(t *testing.T) {
	inside(t, func(r *rig) {
		done, err := Perform(r.ctx, r.target("consumer/place"), []mountspec.Spec{bind("", "data")}, r.options())
		must(r, err)
		held, err := os.Open(r.path("consumer/place/file"))
		must(r, err)
		before := r.table()
		steps, err := ForceUndo(r.ctx, r.ns, done.Receipts, Lazy)
		if !errors.Is(err, unix.EBUSY) || len(steps) > 0 {
			t.Errorf("got %v, %v; want EBUSY and no step", steps, err)
		}
		r.same(before)
		must(r, held.Close())
		if steps, err := ForceUndo(r.ctx, r.ns, done.Receipts, Lazy); err != nil || len(steps) > 0 {
			t.Errorf("of what is idle: %v, %v; want nothing but an undo", steps, err)
		}
	})
}
