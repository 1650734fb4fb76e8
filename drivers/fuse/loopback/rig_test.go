package loopback

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	gofuse "github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/drivers/fuse/attach"
	"github.com/csi-prepare/csi-prepare/reference/fusemount"
	"github.com/csi-prepare/csi-prepare/reference/handoff"
	"github.com/csi-prepare/csi-prepare/reference/kernel"
	"github.com/csi-prepare/csi-prepare/reference/mountns"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
)

// The test binary is also the serving process, whose death is what is tested,
// and the process that starts one after another.
//
// That one cannot be the test itself, which has files of the mount open: a
// child that a process starts closes its copies of such files on the way to
// being another program, and closing one asks the server. With the server
// dead, the start of its successor would wait for itself.
const roleVariable = "LOOPBACK_TEST_ROLE"

func TestMain(m *testing.M) {
	role, arguments, _ := strings.Cut(os.Getenv(roleVariable), " ")
	var err error
	switch role {
	case "serve":
		err = serve(strings.Split(arguments, " "))
	case "classic":
		err = classic(strings.Split(arguments, " "))
	case "spawn":
		err = spawn(arguments)
	default:
		os.Exit(m.Run())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, role, err)
		os.Exit(1)
	}
}

// serve serves the device at descriptor 3. Descriptor 4 has the recorded INIT,
// and gets it in generation 0; a byte at 5 says that it serves.
func serve(arguments []string) error {
	unix.Umask(0)
	generation, err := strconv.ParseUint(arguments[2], 10, 16)
	if err != nil {
		return err
	}
	fs, err := New(arguments[0], arguments[1], Options{Generation: uint16(generation)})
	if err != nil {
		return err
	}
	device, recorded, ready := os.NewFile(3, "device"), os.NewFile(4, "init"), os.NewFile(5, "ready")
	o := gofuse.MountOptions{IDMappedMount: true, Logger: log.New(io.Discard, "", 0)}
	var server *attach.Server
	if generation == 0 {
		var init []byte
		if server, init, err = attach.Start(context.Background(), device, fs, o); err != nil {
			return err
		}
		if _, err := recorded.WriteAt(init, 0); err != nil {
			return err
		}
	} else {
		init, err := io.ReadAll(io.NewSectionReader(recorded, 0, 1<<20))
		if err != nil {
			return err
		}
		if server, err = attach.Resume(device, fs, o, init); err != nil {
			return err
		}
	}
	device.Close()
	if _, err := ready.Write([]byte{1}); err != nil {
		return err
	}
	return server.Serve()
}

// spawn starts the next serving process for each byte it reads, after it has
// killed the last one, and answers with a byte when that one serves. It ends
// the connection when it is not asked any more, or after so long that the test
// must be hanging, so that nobody is left waiting.
func spawn(directories string) error {
	device, recorded, mount := os.NewFile(3, "device"), os.NewFile(4, "init"), os.NewFile(5, "mount")
	end := func() { _ = fusemount.Abort(context.Background(), mount) }
	time.AfterFunc(5*time.Minute, func() { end(); os.Exit(1) })
	defer end()
	var server *exec.Cmd
	kill := func() {
		if server != nil {
			_ = server.Process.Kill()
			_ = server.Wait()
		}
	}
	defer kill()
	for generation := 0; ; generation++ {
		if _, err := os.Stdin.Read(make([]byte, 1)); err != nil {
			return nil
		}
		kill()
		r, w, err := os.Pipe()
		if err != nil {
			return err
		}
		server = exec.Command("/proc/self/exe")
		server.Env = append(os.Environ(), fmt.Sprintf("%s=serve %s %d", roleVariable, directories, generation))
		server.ExtraFiles = []*os.File{device, recorded, w}
		server.Stderr = os.Stderr
		if err := server.Start(); err != nil {
			return err
		}
		w.Close()
		_, err = io.ReadFull(r, make([]byte, 1))
		r.Close()
		if err != nil {
			return fmt.Errorf("generation %d does not serve: %w", generation, err)
		}
		if _, err := os.Stdout.Write([]byte{1}); err != nil {
			return err
		}
	}
}

// volume is a directory mounted in a namespace of its own and served by a
// process that can be killed.
type volume struct {
	t             *testing.T
	base, point   string
	data, orphans string
	ns            *mountns.Namespace
	ask           io.WriteCloser
	answer        io.Reader
}

func newVolume(t *testing.T) *volume {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("making FUSE mounts needs root")
	}
	if _, err := os.Stat("/dev/fuse"); err != nil {
		t.Skipf("this machine has no FUSE: %v", err)
	}
	v := &volume{t: t, base: t.TempDir()}
	v.data, v.orphans, v.point = filepath.Join(v.base, "data"), filepath.Join(v.base, "orphans"), filepath.Join(v.base, "point")
	for _, d := range []string{v.data, v.orphans, v.point} {
		v.must(os.Mkdir(d, 0o755))
	}
	device, mount, err := fusemount.Policy{}.Mount(t.Context(), handoff.Key{}, handoff.FUSERequest{
		RootMode: unix.S_IFDIR | 0o755, Resumable: true,
		Parameters: []mountspec.Parameter{{Key: "default_permissions"}},
	})
	v.must(err)
	defer mount.Close()
	defer device.Close()
	recorded, err := os.CreateTemp(v.base, "init")
	v.must(err)
	defer recorded.Close()

	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), fmt.Sprintf("%s=spawn %s %s", roleVariable, v.data, v.orphans))
	cmd.ExtraFiles = []*os.File{device, recorded, mount}
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	v.ask, err = cmd.StdinPipe()
	v.must(err)
	v.answer, err = cmd.StdoutPipe()
	v.must(err)
	v.must(cmd.Start())
	t.Cleanup(func() {
		v.ask.Close()
		if err := cmd.Wait(); err != nil {
			t.Errorf("%v: %s", err, stderr.String())
		}
		if v.ns != nil {
			v.ns.Close()
		}
		if t.Failed() {
			t.Logf("servers: %s", stderr.String())
		}
	})
	v.failover()

	v.ns, err = mountns.New(t.Context())
	v.must(err)
	v.in(func() error {
		clone, err := kernel.OpenTree(int(mount.Fd()), "", unix.OPEN_TREE_CLONE)
		if err != nil {
			return err
		}
		defer unix.Close(clone)
		return kernel.MoveMountAt(clone, "", unix.AT_FDCWD, v.point, 0)
	})
	return v
}

func (v *volume) must(err error) {
	v.t.Helper()
	if err != nil {
		v.t.Fatal(err)
	}
}

// failover kills the serving process and starts a successor.
func (v *volume) failover() {
	v.t.Helper()
	if _, err := v.ask.Write([]byte{1}); err != nil {
		v.t.Fatal(err)
	}
	if _, err := io.ReadFull(v.answer, make([]byte, 1)); err != nil {
		v.t.Fatalf("no successor: %v", err)
	}
}

// in runs fn where the volume is mounted at v.point.
func (v *volume) in(fn func() error) {
	v.t.Helper()
	v.must(v.ns.Do(v.t.Context(), fn))
}

func (v *volume) path(name string) string { return filepath.Join(v.point, name) }
