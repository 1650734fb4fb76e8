package co

import (
	"errors"
	"os"
	"os/exec"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/mountns"
)

// TestConsumerOfAProcess performs into the root of a process that has a mount
// namespace, a root directory and a user namespace of its own.
func TestConsumerOfAProcess(t *testing.T) {
	r := newRig(t)
	r.mkdir("consumer/image/data")
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), roleVariable+"="+roleWait)
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWUSER, Pdeathsig: syscall.SIGKILL,
		UidMappings: []syscall.SysProcIDMap{{HostID: 100000, Size: 1000}},
	}
	in, err := cmd.StdinPipe()
	r.must(err)
	r.must(cmd.Start())
	consumer, err := ConsumerOf(cmd.Process.Pid)
	r.must(err)
	if !consumer.UserNamespace {
		t.Error("its user namespace was taken for the caller's")
	}
	u := r.use(r.volume("v"))
	u.Target, u.UserNamespace = consumer.Target(u.Target.Path), consumer.UserNamespace
	record := r.up(u)
	ns, err := mountns.OfPID(cmd.Process.Pid)
	r.must(err)
	table, err := ns.Table(r.ctx)
	r.must(err)
	if got := table.At(record.Target); len(got) != 1 {
		t.Errorf("%d mounts in the process's namespace, want 1", len(got))
	}
	r.mountsAt(u.Target.Path, 0)
	r.down(record.Key())
	r.must(consumer.Close())
	r.must(ns.Close())
	in.Close()
	r.must(cmd.Wait())
	if _, err := ConsumerOf(cmd.Process.Pid); !errors.Is(err, unix.ESRCH) {
		t.Errorf("of a process that has ended: %v, want ESRCH", err)
	}
	r.must(os.RemoveAll(r.path("consumer/image")))
	r.nothingLeft()
}
