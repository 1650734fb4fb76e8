package perform

import (
	"context"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
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
		deadline := time.Now().Add(10 * time.Second)
		for openFiles(t) != fds-1 { // the device is closed
			if time.Now().After(deadline) {
				t.Fatalf("%d files are open, %d were before", openFiles(t), fds)
			}
			time.Sleep(5 * time.Millisecond)
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

// TestUndoBelowAHungServer: a mount attached in a directory of a server that
// does not answer any more can neither be looked up nor unmounted by path. The
// undo ends with its deadline, and succeeds when the server is gone.
func TestUndoBelowAHungServer(t *testing.T) {
	inside(t, func(r *rig) {
		served := r.serve(r.path("consumer/place"))
		before := r.table()
		p := r.perform(&plain, r.target("consumer/place/inner"), []mountspec.Spec{bind("", "data")}, r.options())
		if !p.Receipts[0].Remote {
			t.Errorf("the receipt %+v does not say that its place is on a server", p.Receipts[0])
		}
		r.undo(&plain, p.Receipts) // in a child, while the server answers
		r.same(before)

		p = r.perform(&plain, r.target("consumer/place/inner"), []mountspec.Spec{bind("", "data")}, r.options())
		served.silence()
		ctx, cancel := context.WithTimeout(r.ctx, 500*time.Millisecond)
		defer cancel()
		if err := Undo(ctx, nil, p.Receipts); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v, want the deadline", err)
		}
		if _, ok := r.mountOf(p.Receipts[0]); !ok {
			t.Error("the mount is gone")
		}
		if _, err := Perform(ctx, r.target("consumer/place/other"), []mountspec.Spec{bind("", "data")}, r.options()); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("performing there: %v, want the deadline", err)
		}
		served.end()
		checkChildrenEnd(t)
	})
}

// server is a FUSE filesystem of directories that all look the same.
type server struct {
	device int
	silent atomic.Bool
	done   chan struct{}
}

// serve mounts a FUSE filesystem and answers what a lookup and statx need.
func (r *rig) serve(at string) *server {
	r.Helper()
	device, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	must(r, err)
	s := &server{device: device, done: make(chan struct{})}
	r.mount("served", at, "fuse", 0, "fd="+strconv.Itoa(device)+",rootmode=40000,user_id=0,group_id=0")
	go s.answer()
	r.Cleanup(s.end)
	return s
}

func (s *server) silence() { s.silent.Store(true) }

func (s *server) end() {
	select {
	case <-s.done:
		return
	default:
	}
	close(s.done)
	_ = unix.Close(s.device)
}

func (s *server) answer() {
	buf := make([]byte, 1<<17)
	for {
		select {
		case <-s.done:
			return
		default:
		}
		if s.silent.Load() {
			time.Sleep(time.Millisecond)
			continue
		}
		n, err := unix.Read(s.device, buf)
		if err == unix.EAGAIN {
			time.Sleep(100 * time.Microsecond)
			continue
		}
		if err != nil || n < 40 {
			if err == unix.EINTR || err == unix.ENOENT {
				continue
			}
			return
		}
		if reply := fuseReply(buf[:n]); reply != nil {
			_, _ = unix.Write(s.device, reply)
		}
	}
}

// fuseReply answers one request of linux/fuse.h: directories without end, that
// have to be asked for each time.
func fuseReply(request []byte) []byte {
	const lookup, forget, getattr, initialize, batchForget = 1, 2, 3, 26, 42
	le := binary.NativeEndian
	opcode, node := le.Uint32(request[4:]), le.Uint64(request[16:])
	attr := func(b []byte, inode uint64) []byte {
		a := make([]byte, 88)
		le.PutUint64(a, inode)
		le.PutUint32(a[60:], unix.S_IFDIR|0o755)
		le.PutUint32(a[64:], 2)
		return append(b, a...)
	}
	var body []byte
	errno := int32(0)
	switch opcode {
	case initialize:
		body = make([]byte, 64)
		le.PutUint32(body, 7)
		le.PutUint32(body[4:], 31)
		le.PutUint32(body[20:], 1<<16)
	case lookup:
		body = make([]byte, 40)
		le.PutUint64(body, node+1)
		body = attr(body, node+1)
	case getattr:
		body = attr(make([]byte, 16), node)
	case forget, batchForget:
		return nil
	default:
		errno = -int32(unix.ENOSYS)
	}
	header := make([]byte, 16)
	le.PutUint32(header, uint32(16+len(body)))
	le.PutUint32(header[4:], uint32(errno))
	copy(header[8:], request[8:16])
	return append(header, body...)
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
