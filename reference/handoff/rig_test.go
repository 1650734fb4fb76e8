package handoff

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	pb "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// rig is a CO that listens, with a Mount that makes no FUSE mount: what
// crosses the channel is a real device and a real detached mount.
type rig struct {
	*Listener
	t *testing.T

	mu      sync.Mutex
	mounts  int
	aborts  int
	notices chan Notice
}

func newRig(t *testing.T, change func(*Config)) *rig {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("making detached mounts needs root")
	}
	r := &rig{t: t, notices: make(chan Notice, 64)}
	c := Config{
		Directory: filepath.Join(shortDir(t), "handoff"),
		Mount: func(context.Context, Key, FUSERequest) (*os.File, *os.File, error) {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.mounts++
			return openFUSE(t), detachedTmpfs(t), nil
		},
		Adopt: func(context.Context, Key, string, *os.File) (*os.File, error) { return detachedTmpfs(t), nil },
		Abort: func(context.Context, *os.File) error {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.aborts++
			return nil
		},
		Gone: func(n Notice) { r.notices <- n },
	}
	if change != nil {
		change(&c)
	}
	l, err := Listen(c)
	if err != nil {
		t.Fatal(err)
	}
	r.Listener = l
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	return r
}

func openFUSE(t *testing.T) *os.File {
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) {
		t.Skip("this machine has no /dev/fuse")
	}
	if err != nil {
		t.Error(err)
		return nil
	}
	return os.NewFile(uintptr(fd), "fuse")
}

// mounted is a FUSE mount and its device, that nobody serves.
func mounted(t *testing.T) (device, mount *os.File) {
	t.Helper()
	device = openFUSE(t)
	fs, err := unix.Fsopen("fuse", unix.FSOPEN_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fs)
	for key, value := range map[string]string{"fd": fmt.Sprint(device.Fd()), "rootmode": "40000", "user_id": "0", "group_id": "0"} {
		if err := unix.FsconfigSetString(fs, key, value); err != nil {
			t.Fatal(err)
		}
	}
	if err := unix.FsconfigCreate(fs); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	mount = os.NewFile(uintptr(fd), "fuse")
	t.Cleanup(func() { mount.Close(); device.Close() })
	return device, mount
}

func detachedTmpfs(t *testing.T) *os.File {
	fs, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		t.Error(err)
		return nil
	}
	defer unix.Close(fs)
	if err := unix.FsconfigCreate(fs); err != nil {
		t.Error(err)
		return nil
	}
	fd, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, 0)
	if err != nil {
		t.Error(err)
		return nil
	}
	return os.NewFile(uintptr(fd), "tmpfs")
}

var preparation = Key{VolumeID: "v1", PrepareID: "p1"}

func (r *rig) begin(key Key) *Call {
	r.t.Helper()
	c, err := r.Begin(r.t.Context(), key)
	if err != nil {
		r.t.Fatal(err)
	}
	return c
}

func (r *rig) dial(c *Call) *Conn {
	r.t.Helper()
	conn, err := Dial(r.t.Context(), r.Path(), c.key, c.Token())
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { conn.Close() })
	return conn
}

// raw is a peer that keeps no rule.
func (r *rig) raw() *net.UnixConn {
	r.t.Helper()
	c, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Net: "unixpacket", Name: r.Path()})
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { c.Close() })
	return c
}

// answer reads one packet of the CO; nil if the connection was closed.
func (r *rig) answer(c *net.UnixConn) *pb.HandoffReply {
	r.t.Helper()
	_ = c.SetReadDeadline(time.Now().Add(20 * time.Second))
	m, files, err := receive(c)
	closeAll(files)
	if errors.Is(err, io.EOF) || errors.Is(err, unix.ECONNRESET) {
		return nil
	}
	if err != nil {
		r.t.Fatal(err)
	}
	return m.GetReply()
}

var request = FUSERequest{Subtype: "x", RootMode: unix.S_IFDIR | 0o755}

func resumable() FUSERequest {
	r := request
	r.Resumable = true
	return r
}

// serve brings a FUSE handle to serving within a call.
func (r *rig) serve(c *Call, id string, q FUSERequest) *Conn {
	r.t.Helper()
	conn := r.dial(c)
	device, err := conn.RequestFUSE(r.t.Context(), id, q)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { device.Close() })
	if err := conn.Serving(r.t.Context(), id, session); err != nil {
		r.t.Fatal(err)
	}
	return conn
}

var session = Session{Init: []byte("init"), State: []byte("state")}

func (r *rig) notice() Notice {
	r.t.Helper()
	select {
	case n := <-r.notices:
		return n
	case <-time.After(20 * time.Second):
		r.t.Fatal("no notice")
		return Notice{}
	}
}

// settle waits until the CO holds so many descriptors.
func (r *rig) settle(want int) {
	r.t.Helper()
	for range 2000 {
		if r.Descriptors() == want {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	r.t.Fatalf("the CO holds %d descriptors, want %d", r.Descriptors(), want)
}

func openDescriptors(t *testing.T) int {
	t.Helper()
	names, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(names)
}

// shortDir is a temporary directory without the test's name in its path: that
// of a socket has room for 107 bytes.
func shortDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "h")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}
