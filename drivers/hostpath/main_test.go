package hostpath

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/drivers/directory"
	"github.com/csi-prepare/csi-prepare/drivers/server"
	prepare "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// The test binary is also the driver: killing it, and its privileges, are
// real only in a process of its own.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "hostpath" {
		ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
		defer stop()
		cmd := NewCommand()
		cmd.SetArgs(os.Args[2:])
		err := cmd.ExecuteContext(ctx)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
		os.Exit(server.ExitCode(err))
	}
	os.Exit(m.Run())
}

const ownNamespace = "HOSTPATH_TEST_OWN_NAMESPACE"

// inOwnNamespace runs the rest of the calling test in a child process with a
// mount namespace of its own, and returns true in that child. The parent gets
// false, after the child has ended: it returns then.
func inOwnNamespace(t *testing.T) bool {
	t.Helper()
	if os.Getenv(ownNamespace) == t.Name() {
		if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
			t.Fatalf("make the namespace private: %v", err)
		}
		return true
	}
	if os.Geteuid() != 0 {
		t.Skip("needs root for a mount namespace")
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), self, "-test.run=^"+t.Name()+"$", "-test.v")
	cmd.Env = append(os.Environ(), ownNamespace+"="+t.Name())
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	runtime.LockOSThread() // Pdeathsig is sent when the thread ends
	defer runtime.UnlockOSThread()
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("in a mount namespace of its own: %v\n%s", err, out)
	}
	return false
}

// site is what an operator sets up for a driver, and clients of it.
type site struct {
	t          testing.TB
	dir        string // of all; prepare paths lie in it too
	config     Config
	identity   csi.IdentityClient
	controller csi.ControllerClient
	node       csi.NodeClient
	prepares   prepare.NodePrepareClient
}

func newSite(t testing.TB, grants ...Grant) *site {
	t.Helper()
	dir, err := os.MkdirTemp("", "hostpath") // short, for the socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	s := &site{t: t, dir: dir}
	if grants == nil {
		grants = []Grant{{Name: "data", Dir: s.mkdir("data")}}
	}
	s.config = Config{
		Endpoint: "unix://" + filepath.Join(dir, "csi.sock"),
		StateDir: filepath.Join(dir, "state"),
		NodeID:   "node1",
		Grants:   grants,
	}
	conn, err := grpc.NewClient(s.config.Endpoint, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(grpc.ConnectParams{MinConnectTimeout: time.Second}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	s.identity, s.controller = csi.NewIdentityClient(conn), csi.NewControllerClient(conn)
	s.node, s.prepares = csi.NewNodeClient(conn), prepare.NewNodePrepareClient(conn)
	return s
}

func (s *site) mkdir(name string) string {
	s.t.Helper()
	path := filepath.Join(s.dir, name)
	if err := os.MkdirAll(path, 0o700); err != nil {
		s.t.Fatal(err)
	}
	return path
}

// start serves the driver in this process; the function it returns stops it.
func (s *site) start() (stop func()) {
	s.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- Run(ctx, s.config) }()
	stopped := false
	stop = func() {
		s.t.Helper()
		if stopped {
			return
		}
		stopped = true
		cancel()
		if err := <-ended; err != nil {
			s.t.Errorf("Run: %v", err)
		}
	}
	s.t.Cleanup(stop)
	s.ready()
	return stop
}

// spawn serves the driver in a process of its own.
func (s *site) spawn(attr *syscall.SysProcAttr, log *os.File) *exec.Cmd {
	s.t.Helper()
	self, err := os.Executable()
	if err != nil {
		s.t.Fatal(err)
	}
	args := []string{"hostpath", "--verbose", "--endpoint", s.config.Endpoint, "--state-dir", s.config.StateDir, "--node-id", s.config.NodeID}
	for _, g := range s.config.Grants {
		args = append(args, "--grant", g.Name+"="+g.Dir)
	}
	// By descriptor: another user need not reach the directory it lies in.
	binary, err := os.Open(self)
	if err != nil {
		s.t.Fatal(err)
	}
	defer binary.Close()
	cmd := exec.Command("/proc/self/fd/3", args...)
	cmd.ExtraFiles = []*os.File{binary}
	cmd.Stderr = log
	if attr == nil {
		attr = &syscall.SysProcAttr{}
	}
	attr.Pdeathsig = syscall.SIGKILL
	cmd.SysProcAttr = attr
	if err := cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() {
		if cmd.ProcessState == nil {
			cmd.Process.Kill()
			cmd.Wait()
		}
	})
	s.ready()
	return cmd
}

func (s *site) ready() {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), 30*time.Second)
	defer cancel()
	if _, err := s.identity.Probe(ctx, &csi.ProbeRequest{}, grpc.WaitForReady(true)); err != nil {
		s.t.Fatalf("the driver does not answer: %v", err)
	}
}

func capability(mode csi.VolumeCapability_AccessMode_Mode, flags ...string) *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: mode},
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{MountFlags: flags}},
	}
}

func block(mode csi.VolumeCapability_AccessMode_Mode) *csi.VolumeCapability {
	c := capability(mode)
	c.AccessType = &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}
	return c
}

const (
	multiWriter  = csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER
	singleWriter = csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER
	oldReader    = csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY
	manyWriters  = csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER
)

func createRequest(name string) *csi.CreateVolumeRequest {
	return &csi.CreateVolumeRequest{Name: name, VolumeCapabilities: []*csi.VolumeCapability{capability(multiWriter)}}
}

func (s *site) create(name string) *csi.Volume {
	s.t.Helper()
	resp, err := s.controller.CreateVolume(s.t.Context(), createRequest(name))
	if err != nil {
		s.t.Fatalf("CreateVolume: %v", err)
	}
	return resp.GetVolume()
}

func (s *site) delete(id string) error {
	_, err := s.controller.DeleteVolume(s.t.Context(), &csi.DeleteVolumeRequest{VolumeId: id})
	return err
}

// path of a volume in the first grant.
func (s *site) path(id string) string {
	return filepath.Join(s.config.Grants[0].Dir, directory.VolumesDir, id)
}

func (s *site) request(volumeID, prepareID string) *prepare.NodePrepareVolumeRequest {
	s.t.Helper()
	var names []string
	for _, g := range s.config.Grants {
		names = append(names, g.Name)
	}
	return &prepare.NodePrepareVolumeRequest{
		VolumeId: volumeID, PrepareId: prepareID, PreparePath: s.mkdir("p-" + prepareID),
		VolumeCapability: capability(multiWriter),
		Performer: &prepare.Performer{
			Kernel: prepare.Performer_NODE,
			Kinds:  []prepare.MountKind{prepare.MountKind_MOUNT_KIND_BIND},
			Grants: names,
		},
	}
}

func (s *site) prepare(req *prepare.NodePrepareVolumeRequest) []*prepare.MountSpec {
	s.t.Helper()
	resp, err := s.prepares.NodePrepareVolume(s.t.Context(), req)
	if err != nil {
		s.t.Fatalf("NodePrepareVolume: %v", err)
	}
	return resp.GetMountSpecs()
}

func (s *site) unprepare(req *prepare.NodePrepareVolumeRequest) error {
	_, err := s.prepares.NodeUnprepareVolume(s.t.Context(), &prepare.NodeUnprepareVolumeRequest{
		VolumeId: req.GetVolumeId(), PrepareId: req.GetPrepareId(), PreparePath: req.GetPreparePath(),
	})
	return err
}

// code wants a status, and words in its message.
func (s *site) code(what string, err error, want codes.Code, words ...string) {
	s.t.Helper()
	if status.Code(err) != want {
		s.t.Errorf("%s: got %v, want %v", what, err, want)
	}
	for _, w := range words {
		if !strings.Contains(status.Convert(err).Message(), w) {
			s.t.Errorf("%s: message %q does not name %q", what, status.Convert(err).Message(), w)
		}
	}
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return !errors.Is(err, os.ErrNotExist)
}
