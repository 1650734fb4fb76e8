package perform

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
)

func TestChildMakesAFilesystem(t *testing.T) {
	fds := openFiles(t)
	task := childTask{FSType: "tmpfs", Attr: unix.MOUNT_ATTR_NOSUID, Parameters: []childParameter{
		{Key: "source", Text: "made"}, {Key: "size", Text: "1m"},
	}}
	fd, _, err := inChild(t.Context(), &task, -1, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := kernel.UniqueID(fd, ""); err != nil {
		t.Error(err)
	}
	_ = unix.Close(fd)

	task.Parameters = append(task.Parameters, childParameter{Key: "bogus", Text: "hunter2", Secret: true})
	_, _, err = inChild(t.Context(), &task, -1, 0)
	var failed *kernel.FSError
	if !errors.As(err, &failed) || failed.Key != "bogus" || !errors.Is(err, unix.EINVAL) || !strings.Contains(err.Error(), "Unknown parameter") {
		t.Errorf("got %v, want the kernel's words", err)
	}
	if err != nil && strings.Contains(err.Error(), "hunter2") {
		t.Errorf("%q shows a secret", err)
	}
	if got := openFiles(t); got != fds {
		t.Errorf("%d files are open, %d were before", got, fds)
	}
	checkChildrenEnd(t)
}

// checkChildrenEnd waits for the children to be gone.
func checkChildrenEnd(t *testing.T) {
	t.Helper()
	deadline := time.Now().Add(10 * time.Second)
	for {
		left := children()
		if len(left) == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Errorf("children %v are left", left)
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// children lists the children of this process that perform has started.
func children() (pids []string) {
	tasks, _ := filepath.Glob("/proc/self/task/*/children")
	for _, task := range tasks {
		text, _ := os.ReadFile(task)
		for _, pid := range strings.Fields(string(text)) {
			line, _ := os.ReadFile("/proc/" + pid + "/cmdline")
			if strings.HasPrefix(string(line), childName) {
				pids = append(pids, pid)
			}
		}
	}
	return pids
}

// hang mounts a FUSE filesystem that nobody serves, and returns what frees who
// waits for it.
func (r *rig) hang(at string) (free func()) {
	r.Helper()
	device, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	must(r, err)
	r.mount("hung", at, "fuse", 0, "fd="+strconv.Itoa(device)+",rootmode=40000,user_id=0,group_id=0")
	freed := false
	free = func() {
		if !freed {
			_ = unix.Close(device)
			freed = true
		}
	}
	r.Cleanup(free)
	return free
}

// TestSourceOnAHungServer: the lookup waits for the server for ever; Perform
// does not, and leaves nobody waiting.
func TestSourceOnAHungServer(t *testing.T) {
	inside(t, func(r *rig) {
		free := r.hang(r.path("grant/data"))
		before, fds := r.table(), openFiles(t)
		start := time.Now()
		o := r.options(func(o *Options) { o.Timeout = 300 * time.Millisecond })
		_, err := Perform(r.ctx, r.target("consumer/place"), []mountspec.Spec{bind("", "data/inner")}, o)
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v, want the deadline", err)
		}
		if took := time.Since(start); took > 10*time.Second {
			t.Errorf("it took %s", took)
		}
		ctx, cancel := context.WithTimeout(r.ctx, 300*time.Millisecond)
		defer cancel()
		if _, err := Perform(ctx, r.target("consumer/place"), []mountspec.Spec{bind("", "data/inner")}, r.options()); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v, want the deadline of the context", err)
		}
		r.same(before)
		free()
		checkChildrenEnd(t)
		if got := openFiles(t); got != fds-1 { // the device is closed
			t.Errorf("%d files are open, %d were before", got, fds)
		}
	})
}

// TestHungMountIsBoundAndUndone: nothing of that asks the server.
func TestHungMountIsBoundAndUndone(t *testing.T) {
	for _, x := range executors {
		if x.old {
			continue // where types are looked at with stat(2)
		}
		t.Run(x.name, func(t *testing.T) {
			inside(t, func(r *rig) {
				e := x.on(r)
				free := r.hang(r.path("grant/data"))
				defer free()
				before := r.table()
				spec := bind("", "data", func(s *mountspec.Spec) { s.Kind.(*mountspec.Bind).MountFSType = "fuse" })
				ctx, cancel := context.WithTimeout(r.ctx, 20*time.Second)
				defer cancel()
				done := make(chan error, 1)
				go func() {
					done <- r.ns.Do(ctx, func() error {
						p, err := e.Perform(ctx, r.target("consumer/place"), []mountspec.Spec{spec}, r.options())
						if err != nil {
							return err
						}
						return e.Undo(ctx, nil, p.Receipts)
					})
				}()
				select {
				case err := <-done:
					must(r, err)
				case <-ctx.Done():
					free()
					t.Fatalf("it waits for the server: %v", <-done)
				}
				r.same(before)
			})
		})
	}
}

// TestServedFilesystemIsMadeInAChild, and refused where that cannot be.
func TestServedFilesystemIsMadeInAChild(t *testing.T) {
	inside(t, func(r *rig) {
		before := r.table()
		specs := []mountspec.Spec{tmpfs("", func(s *mountspec.Spec) { s.Kind.(*mountspec.Filesystem).Served = true })}
		p := r.perform(&plain, r.target("consumer/place"), specs, r.options())
		if m, _ := r.mountOf(p.Receipts[0]); !strings.Contains(m.SBOptions, "size=1024k") || m.Source != "csi" {
			t.Errorf("got %+v", m)
		}
		r.undo(&plain, p.Receipts)
		r.same(before)

		childAvailable.Store(false)
		defer childAvailable.Store(true)
		_, err := Perform(r.ctx, r.target("consumer/place"), specs, r.options())
		if err == nil || !strings.Contains(err.Error(), "MainIfChild") {
			t.Errorf("got %v, want it refused", err)
		}
		r.same(before)
	})
}

func TestRemoteTypesNeedAChild(t *testing.T) {
	childAvailable.Store(false)
	defer childAvailable.Store(true)
	for _, fstype := range []string{"nfs", "nfs4", "cifs", "smb3", "ceph"} {
		if _, err := makesInChild(&mountspec.Filesystem{Type: fstype}); err == nil {
			t.Errorf("%s would be made in the calling thread", fstype)
		}
	}
	for _, fstype := range []string{"tmpfs", "ext4"} {
		if child, err := makesInChild(&mountspec.Filesystem{Type: fstype}); child || err != nil {
			t.Errorf("%s: %t, %v", fstype, child, err)
		}
	}
}
