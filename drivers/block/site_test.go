package block

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/reference/mountspec"
	"github.com/csi-prepare/csi-prepare/reference/mountspec/wire"
	"github.com/csi-prepare/csi-prepare/reference/perform"
	prepare "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// site is what an operator sets up for a driver, and a CO with clients of it.
type site struct {
	t          *testing.T
	dir        string
	config     Config
	identity   csi.IdentityClient
	controller csi.ControllerClient
	node       csi.NodeClient
	prepares   prepare.NodePrepareClient
}

func newSite(t *testing.T) *site {
	t.Helper()
	dir, err := os.MkdirTemp("", "s")
	if err != nil {
		t.Fatal(err)
	}
	s := &site{t: t, dir: dir}
	s.config = Config{
		Endpoint: "unix://" + filepath.Join(dir, "csi.sock"),
		StateDir: filepath.Join(dir, "state"),
		NodeID:   "node1",
		Dir:      s.mkdir("store"),
	}
	conn, err := grpc.NewClient(s.config.Endpoint, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(grpc.ConnectParams{
			MinConnectTimeout: time.Second,
			Backoff:           backoff.Config{BaseDelay: 5 * time.Millisecond, Multiplier: 1, MaxDelay: 5 * time.Millisecond},
		}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	s.identity, s.controller = csi.NewIdentityClient(conn), csi.NewControllerClient(conn)
	s.node, s.prepares = csi.NewNodeClient(conn), prepare.NewNodePrepareClient(conn)
	t.Cleanup(func() {
		if left := loopsBelow(dir); left != nil {
			t.Errorf("loop devices left: %q", left)
		}
	})
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

func (s *site) args() []string {
	args := []string{roleDriver, "--endpoint", s.config.Endpoint, "--state-dir", s.config.StateDir, "--node-id", s.config.NodeID}
	if s.config.Dir != "" {
		args = append(args, "--dir", s.config.Dir)
	}
	for _, k := range s.config.Disks {
		args = append(args, "--disk", k.Name+"="+k.Path)
	}
	return args
}

// command is the driver in a process of its own, which ends with this one.
func (s *site) command(env ...string) *exec.Cmd {
	s.t.Helper()
	self, err := os.Executable()
	if err != nil {
		s.t.Fatal(err)
	}
	cmd := exec.Command(self, s.args()...)
	cmd.Env = append(os.Environ(), env...)
	log, err := os.OpenFile(filepath.Join(s.dir, "log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		s.t.Fatal(err)
	}
	cmd.Stderr = log
	s.t.Cleanup(func() { log.Close() })
	return cmd
}

func (s *site) ready() {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), 30*time.Second)
	defer cancel()
	for {
		_, err := s.identity.Probe(ctx, &csi.ProbeRequest{}, grpc.WaitForReady(true))
		if err == nil {
			return
		}
		// The connection to a driver that was killed may seem to live.
		if status.Code(err) != codes.Unavailable || ctx.Err() != nil {
			s.t.Fatalf("the driver does not answer: %v", err)
		}
	}
}

const (
	multiWriter  = csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER
	singleWriter = csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER
	oldReader    = csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY
	manyWriters  = csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER
)

func mountOf(fsType string, flags ...string) *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: multiWriter},
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: fsType, MountFlags: flags}},
	}
}

func raw() *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: multiWriter},
		AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}},
	}
}

const mib = 1 << 20

func (s *site) createRequest(name string, size int64, c *csi.VolumeCapability) *csi.CreateVolumeRequest {
	return &csi.CreateVolumeRequest{
		Name: name, VolumeCapabilities: []*csi.VolumeCapability{c},
		CapacityRange: &csi.CapacityRange{RequiredBytes: size},
	}
}

func (s *site) create(name string, size int64, c *csi.VolumeCapability) string {
	s.t.Helper()
	resp, err := s.controller.CreateVolume(s.t.Context(), s.createRequest(name, size, c))
	if err != nil {
		s.t.Fatalf("CreateVolume: %v", err)
	}
	return resp.GetVolume().GetVolumeId()
}

// copy creates a volume from a snapshot or another volume.
func (s *site) copy(name string, from source, size int64, c *csi.VolumeCapability) string {
	s.t.Helper()
	req := s.createRequest(name, size, c)
	req.VolumeContentSource = from.message()
	resp, err := s.controller.CreateVolume(s.t.Context(), req)
	if err != nil {
		s.t.Fatalf("CreateVolume from %v: %v", from, err)
	}
	return resp.GetVolume().GetVolumeId()
}

func (s *site) delete(id string) {
	s.t.Helper()
	if _, err := s.controller.DeleteVolume(s.t.Context(), &csi.DeleteVolumeRequest{VolumeId: id}); err != nil {
		s.t.Errorf("DeleteVolume: %v", err)
	}
}

// staging path of a volume, which nothing needs to be at.
func (s *site) staging(id string) string { return filepath.Join(s.dir, "staging", id) }

func (s *site) tryStage(id string, c *csi.VolumeCapability) error {
	_, err := s.node.NodeStageVolume(s.t.Context(), &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: s.staging(id), VolumeCapability: c})
	return err
}

func (s *site) stage(id string, c *csi.VolumeCapability) {
	s.t.Helper()
	if err := s.tryStage(id, c); err != nil {
		s.t.Fatalf("NodeStageVolume: %v", err)
	}
}

func (s *site) tryUnstage(id string) error {
	_, err := s.node.NodeUnstageVolume(s.t.Context(), &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: s.staging(id)})
	return err
}

func (s *site) unstage(id string) {
	s.t.Helper()
	if err := s.tryUnstage(id); err != nil {
		s.t.Errorf("NodeUnstageVolume: %v", err)
	}
}

func (s *site) request(id, prepareID string, c *csi.VolumeCapability, readonly bool) *prepare.NodePrepareVolumeRequest {
	s.t.Helper()
	return &prepare.NodePrepareVolumeRequest{
		VolumeId: id, PrepareId: prepareID, PreparePath: s.mkdir("p-" + id[:8] + "-" + prepareID),
		StagingTargetPath: s.staging(id), VolumeCapability: c, Readonly: readonly,
		Performer: &prepare.Performer{
			Kernel:  prepare.Performer_NODE,
			Kinds:   []prepare.MountKind{prepare.MountKind_MOUNT_KIND_BLOCK_DEVICE, prepare.MountKind_MOUNT_KIND_FILESYSTEM},
			FsTypes: []string{"ext4", "xfs", "btrfs"},
		},
	}
}

func (s *site) tryPrepare(req *prepare.NodePrepareVolumeRequest) (*prepare.MountSpec, error) {
	resp, err := s.prepares.NodePrepareVolume(s.t.Context(), req)
	if err != nil {
		return nil, err
	}
	return resp.GetMountSpecs()[0], nil
}

// prepare returns the one mount spec, and wants it to keep the contract.
func (s *site) prepare(req *prepare.NodePrepareVolumeRequest) *prepare.MountSpec {
	s.t.Helper()
	spec, err := s.tryPrepare(req)
	if err != nil {
		s.t.Fatalf("NodePrepareVolume: %v", err)
	}
	specs, lost := wire.FromProto([]*prepare.MountSpec{spec})
	if broken := append(lost, mountspec.Validate(specs, wire.RequestFromProto(req))...); broken != nil {
		s.t.Fatalf("the answer breaks the contract: %v", broken)
	}
	return spec
}

func (s *site) tryUnprepare(req *prepare.NodePrepareVolumeRequest) error {
	_, err := s.prepares.NodeUnprepareVolume(s.t.Context(), &prepare.NodeUnprepareVolumeRequest{
		VolumeId: req.GetVolumeId(), PrepareId: req.GetPrepareId(), PreparePath: req.GetPreparePath(),
	})
	return err
}

func (s *site) unprepare(req *prepare.NodePrepareVolumeRequest) {
	s.t.Helper()
	if err := s.tryUnprepare(req); err != nil {
		s.t.Errorf("NodeUnprepareVolume: %v", err)
	}
}

// perform does what a CO does with the answer, at a path of its own, which it
// returns with the function that undoes it.
func (s *site) perform(req *prepare.NodePrepareVolumeRequest, spec *prepare.MountSpec) (path string, undo func()) {
	s.t.Helper()
	path, undo, err := s.tryPerform(req, spec)
	if err != nil {
		s.t.Fatalf("Perform: %v", err)
	}
	return path, undo
}

func (s *site) tryPerform(req *prepare.NodePrepareVolumeRequest, spec *prepare.MountSpec) (string, func(), error) {
	specs, _ := wire.FromProto([]*prepare.MountSpec{spec})
	path := filepath.Join(s.dir, "target-"+req.GetVolumeId()[:8]+"-"+req.GetPrepareId())
	done, err := perform.Perform(s.t.Context(), perform.Target{Path: path}, specs, perform.Options{
		Request: wire.RequestFromProto(req),
		Policy:  mountspec.Policy{CreateTarget: true},
	})
	if err != nil {
		return path, nil, err
	}
	undone := false
	undo := func() {
		s.t.Helper()
		if undone {
			return
		}
		undone = true
		if err := perform.Undo(context.WithoutCancel(s.t.Context()), nil, done.Receipts); err != nil {
			s.t.Errorf("Undo: %v", err)
		}
	}
	s.t.Cleanup(undo)
	return path, undo, nil
}

// use stages, prepares and performs a volume; end goes back all the way.
func (s *site) use(id, prepareID string, c *csi.VolumeCapability) (path string, end func()) {
	s.t.Helper()
	s.stage(id, c)
	req := s.request(id, prepareID, c, false)
	path, undo := s.perform(req, s.prepare(req))
	return path, func() {
		s.t.Helper()
		undo()
		s.unprepare(req)
		s.unstage(id)
	}
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

// file of a volume.
func (s *site) file(id string) string { return filepath.Join(s.config.Dir, string(volumeFiles), id) }

// mounts of this namespace, sorted.
func mounts(t *testing.T) []string {
	t.Helper()
	text, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	slices.Sort(lines)
	return lines
}

// tool runs a program and wants it to succeed.
func tool(t *testing.T, name string, args ...string) string {
	t.Helper()
	cmd := exec.Command(name, args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s %q: %v\n%s", name, args, err, out)
	}
	return string(out)
}
