package perform

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/mountspec"
)

func (d *device) block(readonly bool) []mountspec.Spec {
	at := d.BlockDevice
	return []mountspec.Spec{{Kind: &at, Attributes: mountspec.Attributes{Readonly: readonly}}}
}

func forBlock(o *Options) {
	o.Request.Block = true
	o.Policy.CreateTarget = true
}

// TestReadonlyBlockDevice: the device has to refuse writes itself.
func TestReadonlyBlockDevice(t *testing.T) {
	inside(t, func(r *rig) {
		d := r.loop("")
		before := r.table()
		o := r.options(forBlock)
		_, err := Perform(r.ctx, r.target("consumer/dev"), d.block(true), o)
		if !errors.Is(err, ErrWritable) {
			t.Errorf("a writable device, to be read-only: got %v, want ErrWritable", err)
		}
		r.same(before)
		must(r, unix.IoctlSetPointerInt(int(d.file.Fd()), unix.BLKROSET, 1))
		// It would outlive the device and hold for the next one of the number.
		defer func() { must(r, unix.IoctlSetPointerInt(int(d.file.Fd()), unix.BLKROSET, 0)) }()
		p := r.perform(&plain, r.target("consumer/dev"), d.block(true), o)
		w, err := os.OpenFile(r.path("consumer/dev"), os.O_RDWR|unix.O_DIRECT, 0)
		if err == nil {
			_, err = w.WriteAt(make([]byte, 4096), 0)
			_ = w.Close()
		}
		if !errors.Is(err, unix.EPERM) && !errors.Is(err, unix.EACCES) && !errors.Is(err, unix.EROFS) {
			t.Errorf("writing to it: got %v", err)
		}
		r.undo(&plain, p.Receipts)
		r.same(before)
		d.free(r)
	})
}

// rootless is the environment variable that makes this program an executor in
// a user namespace: "dir,rest" with the specs and options that rest stands for.
const rootless = "PERFORM_TEST_ROOTLESS"

// nodeTask is what an executor in a user namespace is to do.
type nodeTask struct {
	Dir    string
	Device mountspec.BlockDevice
	Mode   os.FileMode
}

// performRootless performs a block device, writes through its node, and undoes.
func performRootless(text string) error {
	var task nodeTask
	if err := json.Unmarshal([]byte(text), &task); err != nil {
		return err
	}
	// What is mounted before the namespace was made cannot be written to by
	// others, so the consumer lives on a mount of its own.
	if err := unix.Mount("consumer", task.Dir, "tmpfs", 0, "mode=755"); err != nil {
		return err
	}
	r := &rig{dir: task.Dir}
	o := r.options(forBlock)
	o.NodeMode = task.Mode
	d := device{BlockDevice: task.Device}
	p, err := Perform(context.Background(), r.target("dev"), d.block(false), o)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(r.path("dev"), os.O_RDWR|unix.O_SYNC, 0)
	if err != nil {
		return err
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return err
	}
	if st.Rdev != unix.Mkdev(task.Device.Major, task.Device.Minor) {
		return fmt.Errorf("the node is of device %#x", st.Rdev)
	}
	_, err = f.WriteAt([]byte("written without root"), 0)
	if err := errors.Join(err, f.Close(), Undo(context.Background(), nil, p.Receipts)); err != nil {
		return err
	}
	left, err := os.ReadDir(task.Dir)
	if err != nil || len(left) > 0 {
		return fmt.Errorf("left: %v, %w", left, err)
	}
	return nil
}

// TestHostNodeInAUserNamespace: an executor that may make no node binds the
// one the host has, once it has seen that it is that of the device.
func TestHostNodeInAUserNamespace(t *testing.T) {
	inside(t, func(r *rig) {
		d := r.loop("")
		dir := r.mkdir("rootless")
		run := func(task nodeTask) string {
			text, err := json.Marshal(task)
			must(r, err)
			c := exec.Command("/proc/self/exe")
			c.Env = append(os.Environ(), rootless+"="+string(text))
			// Root is root, without its power over devices.
			same := []syscall.SysProcIDMap{{ContainerID: 0, HostID: 0, Size: 65536}}
			c.SysProcAttr = &syscall.SysProcAttr{
				Cloneflags:  syscall.CLONE_NEWNS | syscall.CLONE_NEWUSER,
				UidMappings: same, GidMappings: same, Pdeathsig: syscall.SIGKILL,
			}
			out, err := c.CombinedOutput()
			if err != nil {
				return strings.TrimSpace(string(out)) + ", " + err.Error()
			}
			return ""
		}
		task := nodeTask{Dir: dir, Device: d.BlockDevice}
		if failed := run(task); failed != "" {
			t.Errorf("%s", failed)
		}
		got := make([]byte, 20)
		_, err := d.file.ReadAt(got, 0)
		must(r, err)
		if string(got) != "written without root" {
			t.Errorf("the device holds %q", got)
		}
		// Owner and mode that the host's node has not cannot be had.
		task.Mode = 0o604
		if failed := run(task); !strings.Contains(failed, "the host's is mode") {
			t.Errorf("another mode: got %q", failed)
		}
		task.Mode = 0
		task.Device.Diskseq++
		if failed := run(task); !strings.Contains(failed, ErrDevice.Error()) {
			t.Errorf("another diskseq: got %q", failed)
		}
	})
}
