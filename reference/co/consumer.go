package co

import (
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/mountns"
	"github.com/csi-prepare/csi-prepare/reference/perform"
)

// Consumer is a process that is to have a volume: where its paths lead.
type Consumer struct {
	// UserNamespace says that the process has another user namespace than the
	// caller, for Use.UserNamespace.
	UserNamespace bool

	namespace *mountns.Namespace
	root      *os.File
}

// ConsumerOf opens the mount namespace and the root directory of a process,
// both of the same process, although a number alone may come to mean another.
// One that has ended is ESRCH. Close the Consumer once Up has returned: what is
// performed stays.
func ConsumerOf(pid int) (_ *Consumer, err error) {
	fail := func(err error) error { return fmt.Errorf("consumer %d: %w", pid, err) }
	pidfd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return nil, fail(os.NewSyscallError("pidfd_open", err))
	}
	defer unix.Close(pidfd)
	c := &Consumer{}
	defer func() {
		if err != nil {
			_ = c.Close()
		}
	}()
	if c.namespace, err = mountns.OfProcess(pidfd); err != nil {
		return nil, fail(err)
	}
	proc := "/proc/" + strconv.Itoa(pid)
	root, err := unix.Open(proc+"/root", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fail(&os.PathError{Op: "open", Path: proc + "/root", Err: err})
	}
	c.root = os.NewFile(uintptr(root), "root of the consumer")
	own, err := os.Readlink("/proc/self/ns/user")
	if err != nil {
		return nil, fail(err)
	}
	its, err := os.Readlink(proc + "/ns/user")
	if err != nil {
		return nil, fail(err)
	}
	c.UserNamespace = own != its
	// Only if the process is alive now was the number its own until here.
	if err := unix.PidfdSendSignal(pidfd, 0, nil, 0); err != nil {
		return nil, fail(os.NewSyscallError("pidfd_send_signal", err))
	}
	return c, nil
}

// Target is a path as the process sees it.
func (c *Consumer) Target(path string) perform.Target {
	return perform.Target{Namespace: c.namespace, Root: c.root, Path: path}
}

// Close gives up what ConsumerOf opened.
func (c *Consumer) Close() error {
	if c.namespace != nil {
		_ = c.namespace.Close()
	}
	if c.root != nil {
		return c.root.Close()
	}
	return nil
}
