package fusemount

import (
	"context"
	"fmt"
	"io"
	"log"
	"os"
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/handoff"
)

var key = handoff.Key{VolumeID: "v", PrepareID: "p"}

var request = handoff.FUSERequest{Subtype: "test", RootMode: unix.S_IFDIR | 0o755}

// needFUSE skips where FUSE mounts cannot be made.
func needFUSE(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("making FUSE mounts needs root")
	}
	if _, err := os.Stat("/dev/fuse"); err != nil {
		t.Skipf("this machine has no FUSE: %v", err)
	}
}

func mount(t *testing.T, p Policy, r handoff.FUSERequest) (device, mount *os.File) {
	t.Helper()
	needFUSE(t)
	device, mount, err := p.Mount(t.Context(), key, r)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { device.Close(); mount.Close() })
	return device, mount
}

// serve answers the requests of device in this process, until its mount is
// gone, and closes the copy it works on.
func serve(t *testing.T, device *os.File) {
	t.Helper()
	fd, err := unix.FcntlInt(device.Fd(), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		t.Fatal(err)
	}
	root := &fs.Inode{}
	s, err := fuse.NewServer(fs.NewNodeFS(root, &fs.Options{}), fmt.Sprintf("/dev/fd/%d", fd),
		&fuse.MountOptions{Logger: log.New(io.Discard, "", 0)})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() { s.Serve(); close(done) }()
	t.Cleanup(func() {
		select {
		case <-done:
		case <-time.After(20 * time.Second):
			t.Error("the server did not end with its mount")
		}
	})
}

func soon(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	t.Cleanup(cancel)
	return ctx
}
