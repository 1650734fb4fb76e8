package attach

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/fusemount"
	"github.com/csi-prepare/csi-prepare/reference/handoff"
)

// A successor is another process, as it always is.
const successorVariable = "ATTACH_TEST_SUCCESSOR"

func TestMain(m *testing.M) {
	if os.Getenv(successorVariable) == "" {
		os.Exit(m.Run())
	}
	init, err := io.ReadAll(os.Stdin)
	if err == nil {
		var s *Server
		if s, err = Resume(os.NewFile(3, "device"), empty{fuse.NewDefaultRawFileSystem()}, options, init); err == nil {
			if err = s.Serve(); err == nil {
				return
			}
		}
	}
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

var options = fuse.MountOptions{Logger: log.New(io.Discard, "", 0)}

// empty is a filesystem with a root and nothing in it.
type empty struct{ fuse.RawFileSystem }

func (empty) GetAttr(_ <-chan struct{}, _ *fuse.GetAttrIn, out *fuse.AttrOut) fuse.Status {
	out.Mode = unix.S_IFDIR | 0o755
	return fuse.OK
}

func mount(t *testing.T) (device, mount *os.File) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("making FUSE mounts needs root")
	}
	if _, err := os.Stat("/dev/fuse"); err != nil {
		t.Skipf("this machine has no FUSE: %v", err)
	}
	device, mount, err := fusemount.Policy{}.Mount(t.Context(), handoff.Key{}, handoff.FUSERequest{RootMode: unix.S_IFDIR | 0o755})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { device.Close(); mount.Close() })
	return device, mount
}

func TestAServerStartsOnAHandedDevice(t *testing.T) {
	device, m := mount(t)
	s, init, err := Start(t.Context(), device, empty{fuse.NewDefaultRawFileSystem()}, options)
	if err != nil {
		t.Fatal(err)
	}
	if err := checkInit(init); err != nil {
		t.Error(err)
	}
	device.Close()
	ended := make(chan error)
	go func() { ended <- s.Serve() }()
	if err := fusemount.Prove(t.Context(), m); err != nil {
		t.Error(err)
	}
	m.Close()
	if err := <-ended; err != nil { // with the last mount
		t.Error(err)
	}
}

func TestASuccessorTakesOverWhatWasRead(t *testing.T) {
	device, m := mount(t)
	// This first server answers INIT, reads one request more, and dies.
	_, init, err := Start(t.Context(), device, empty{fuse.NewDefaultRawFileSystem()}, options)
	if err != nil {
		t.Fatal(err)
	}
	proven := make(chan error, 1)
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		proven <- fusemount.Prove(ctx, m)
	}()
	if _, err := device.Read(make([]byte, 1<<20)); err != nil {
		t.Fatal(err)
	}

	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), successorVariable+"=1")
	cmd.ExtraFiles = []*os.File{device}
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := in.Write(init); err != nil {
		t.Fatal(err)
	}
	in.Close()
	if err := <-proven; err != nil {
		t.Errorf("what the first server had read is not answered: %v", err)
	}
	m.Close()
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
}

func TestThereIsNothingToStart(t *testing.T) {
	device, m := mount(t)
	m.Close()
	if _, _, err := Start(t.Context(), device, empty{fuse.NewDefaultRawFileSystem()}, options); !errors.Is(err, unix.ENODEV) {
		t.Errorf("on a device whose mount is gone: %v", err)
	}
	device, _ = mount(t)
	if _, err := device.Read(make([]byte, 1<<20)); err != nil { // INIT is taken
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if _, _, err := Start(ctx, device, empty{fuse.NewDefaultRawFileSystem()}, options); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("without INIT: %v", err)
	}
	if _, err := Resume(device, empty{fuse.NewDefaultRawFileSystem()}, options, []byte("garbage")); err == nil {
		t.Error("resumed with what is no INIT")
	}
}
