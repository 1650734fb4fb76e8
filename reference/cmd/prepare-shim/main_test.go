package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/rogpeppe/go-internal/testscript"
	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/drivers/block"
	"github.com/csi-prepare/csi-prepare/drivers/fuse"
	"github.com/csi-prepare/csi-prepare/drivers/hostpath"
	"github.com/csi-prepare/csi-prepare/reference/co"
	"github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// The test binary is the shim and the drivers too, and the tests run in a mount
// namespace of their own. A process that the tests started never runs them: the
// drivers start themselves again, by another name.
const (
	insideVariable  = "PREPARE_SHIM_TEST_INSIDE"
	commandVariable = "PREPARE_SHIM_TEST_COMMAND"
)

func TestMain(m *testing.M) {
	co.Child()
	switch os.Getenv(commandVariable) {
	case "prepare-shim":
		os.Exit(run())
	case "prepare-driver":
		runDriver()
	}
	isCommand := filepath.Base(os.Args[0]) == "prepare-shim"
	if !isCommand && os.Geteuid() == 0 && os.Getenv(insideVariable) == "" {
		cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
		cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
		cmd.Env = append(os.Environ(), insideVariable+"=1")
		cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
		if err := cmd.Run(); err != nil {
			fmt.Println("tests:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	runtime.UnlockOSThread() // of init
	testscript.Main(m, map[string]func(){"prepare-shim": func() { os.Exit(run()) }})
}

func runDriver() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	cmd := &cobra.Command{Use: "prepare-driver"}
	cmd.AddCommand(hostpath.NewCommand(), block.NewCommand(), fuse.NewCommand())
	if cmd.ExecuteContext(ctx) != nil {
		os.Exit(1)
	}
	os.Exit(0)
}

func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{Dir: "testdata"})
}

// rig is a driver and a shim before it.
type rig struct {
	t      *testing.T
	dir    string
	driver string
	blocks bool
	// unshare is CLONE_NEWNS for a plugin whose mounts reach nobody.
	unshare uintptr

	plugin, shim *exec.Cmd
	conn         *grpc.ClientConn
	node         csi.NodeClient
	controller   csi.ControllerClient
	before       string
}

func newRig(t *testing.T, driver string) *rig {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("mounting needs root")
	}
	dir, err := os.MkdirTemp("", "shim") // the path of a socket has room for 107 bytes
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{t: t, dir: dir, driver: driver}
	r.must(unix.Mount("tests", dir, "tmpfs", 0, "mode=711"))
	t.Cleanup(func() {
		// What a failed test left of mounts is below.
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
		if err := os.Remove(dir); err != nil {
			t.Error(err)
		}
	})
	for _, d := range []string{"data", "pods"} {
		r.must(os.Mkdir(r.path(d), 0o700))
	}
	r.must(os.WriteFile(r.path("policy.yaml"), []byte(`
apiVersion: csi-prepare/v1alpha1
kind: Policy
defaults:
  grants: {data: `+r.path("data")+`}
  attempts: 2
`), 0o600))
	r.startPlugin()
	r.startShim()
	r.before = r.table()
	t.Cleanup(func() {
		r.end(r.shim)
		r.end(r.plugin)
		_ = r.conn.Close()
		if t.Failed() {
			for _, log := range []string{"plugin.log", "shim.log"} {
				text, _ := os.ReadFile(r.path(log))
				t.Logf("%s:\n%s", log, text)
			}
		}
	})
	return r
}

func (r *rig) must(err error) {
	r.t.Helper()
	if err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) path(elem ...string) string {
	return filepath.Join(append([]string{r.dir}, elem...)...)
}

// program starts one of this binary's commands.
func (r *rig) program(log, name string, args ...string) *exec.Cmd {
	r.t.Helper()
	return r.programIn(0, log, name, args...)
}

// programIn is program with unshare(2) flags.
func (r *rig) programIn(unshare uintptr, log, name string, args ...string) *exec.Cmd {
	r.t.Helper()
	file, err := os.OpenFile(r.path(log), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	r.must(err)
	defer file.Close()
	cmd := exec.Command("/proc/self/exe", args...)
	cmd.Env = append(os.Environ(), commandVariable+"="+name)
	cmd.Stdout, cmd.Stderr = file, file
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: unshare}
	r.must(cmd.Start())
	return cmd
}

func (r *rig) startPlugin() {
	args := []string{r.driver, "--endpoint", "unix://" + r.path("plugin.sock"), "--state-dir", r.path("state"), "--node-id", "node1"}
	if r.driver == "hostpath" {
		args = append(args, "--grant", "data="+r.path("data"))
	} else {
		args = append(args, "--dir", r.path("data"))
	}
	r.plugin = r.program("plugin.log", "prepare-driver", args...)
}

func (r *rig) startShim() {
	r.t.Helper()
	r.shim = r.programIn(r.unshare, "shim.log", "prepare-shim", "co", "--endpoint", "unix://"+r.path("shim.sock"),
		"--plugin", "unix://"+r.path("plugin.sock"), "--state-dir", r.path("shim"), "--policy", r.path("policy.yaml"))
	r.connect("shim.sock")
}

// connect waits for who serves at a socket.
func (r *rig) connect(socket string) {
	r.t.Helper()
	if r.conn != nil {
		_ = r.conn.Close()
	}
	var err error
	r.conn, err = grpc.NewClient("unix://"+r.path(socket), grpc.WithTransportCredentials(insecure.NewCredentials()))
	r.must(err)
	r.node, r.controller = csi.NewNodeClient(r.conn), csi.NewControllerClient(r.conn)
	ctx, cancel := context.WithTimeout(r.t.Context(), time.Minute)
	defer cancel()
	for {
		_, err = csi.NewIdentityClient(r.conn).Probe(ctx, &csi.ProbeRequest{}, grpc.WaitForReady(true))
		if status.Code(err) != codes.Unavailable || ctx.Err() != nil {
			break
		}
		time.Sleep(20 * time.Millisecond) // the plugin behind it is not there yet
	}
	r.must(err)
}

func (r *rig) kill(cmd *exec.Cmd) {
	_ = cmd.Process.Kill()
	_ = cmd.Wait() // "signal: killed"
}

// end tells a process to stop, and holds it to an exit code of 0.
func (r *rig) end(cmd *exec.Cmd) {
	if cmd.ProcessState != nil {
		return
	}
	_ = cmd.Process.Signal(syscall.SIGTERM)
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	select {
	case err := <-ended:
		if err != nil {
			r.t.Errorf("%s: %v", cmd.Args, err)
		}
	case <-time.After(time.Minute):
		_ = cmd.Process.Kill()
		r.t.Errorf("%s does not end", cmd.Args)
	}
}

// table is every mount of the namespace, by what is mounted where.
func (r *rig) table() string {
	text, err := os.ReadFile("/proc/self/mountinfo")
	r.must(err)
	var b strings.Builder
	for line := range strings.SplitSeq(string(text), "\n") {
		if f := strings.Fields(line); len(f) > 5 {
			fmt.Fprintln(&b, f[2], f[3], f[4], f[5])
		}
	}
	return b.String()
}

// optionsAt are the options of each mount at a path.
func (r *rig) optionsAt(path string) (options []string) {
	for line := range strings.SplitSeq(r.table(), "\n") {
		if f := strings.Fields(line); len(f) == 4 && f[2] == path {
			options = append(options, f[3])
		}
	}
	return options
}

// nothingLeft holds the shim and the plugin to what was there at first.
func (r *rig) nothingLeft() {
	r.t.Helper()
	if now := r.table(); now != r.before {
		r.t.Errorf("mounts before:\n%safter:\n%s", r.before, now)
	}
	for _, pattern := range []string{"shim/ledger/*.json", "shim/prepare/*", "pods/*"} {
		if found, _ := filepath.Glob(r.path(pattern)); len(found) > 0 {
			r.t.Errorf("left: %v", found)
		}
	}
	list, err := preparev1alpha1.NewNodePrepareClient(r.conn).NodeListPreparedVolumes(r.t.Context(), &preparev1alpha1.NodeListPreparedVolumesRequest{})
	r.must(err)
	if len(list.GetEntries()) > 0 {
		r.t.Errorf("still prepared: %v", list.GetEntries())
	}
}

// prepares counts how often the plugin was asked to prepare.
func (r *rig) prepares() int {
	text, err := os.ReadFile(r.path("plugin.log"))
	r.must(err)
	return strings.Count(string(text), "method=NodePrepareVolume")
}

// capability is of the volumes of the rig.
func (r *rig) capability(mode csi.VolumeCapability_AccessMode_Mode) *csi.VolumeCapability {
	c := &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: mode},
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
	}
	if r.blocks {
		c.AccessType = &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}
	}
	return c
}

const volumeSize = 32 << 20

var volumes int

// volume creates a volume, and stages it where the driver stages.
func (r *rig) volume(c *csi.VolumeCapability, size int64) *csi.NodePublishVolumeRequest {
	r.t.Helper()
	volumes++
	create := &csi.CreateVolumeRequest{Name: "v" + strconv.Itoa(volumes), VolumeCapabilities: []*csi.VolumeCapability{c}}
	if r.driver == "block" {
		create.CapacityRange = &csi.CapacityRange{RequiredBytes: size}
	}
	made, err := r.controller.CreateVolume(r.t.Context(), create)
	r.must(err)
	v := &csi.NodePublishVolumeRequest{
		VolumeId: made.GetVolume().GetVolumeId(), VolumeContext: made.GetVolume().GetVolumeContext(),
		VolumeCapability: c, TargetPath: r.path("pods", create.GetName(), "mount"),
	}
	if r.driver == "block" {
		v.StagingTargetPath = r.path("staging-" + create.GetName())
		r.must(os.Mkdir(v.GetStagingTargetPath(), 0o700))
		_, err := r.node.NodeStageVolume(r.t.Context(), &csi.NodeStageVolumeRequest{
			VolumeId: v.GetVolumeId(), StagingTargetPath: v.GetStagingTargetPath(), VolumeCapability: c,
		})
		r.must(err)
	}
	r.t.Cleanup(func() {
		ctx := context.Background() //nolint:usetesting // the test's has ended
		if v.GetStagingTargetPath() != "" {
			_, err := r.node.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: v.GetVolumeId(), StagingTargetPath: v.GetStagingTargetPath()})
			if err != nil {
				r.t.Error(err)
			}
		}
		if _, err := r.controller.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: v.GetVolumeId()}); err != nil {
			r.t.Error(err)
		}
	})
	return v
}

func (r *rig) publish(v *csi.NodePublishVolumeRequest) error {
	_, err := r.node.NodePublishVolume(r.t.Context(), v)
	return err
}

func (r *rig) unpublish(v *csi.NodePublishVolumeRequest) error {
	_, err := r.node.NodeUnpublishVolume(r.t.Context(), &csi.NodeUnpublishVolumeRequest{VolumeId: v.GetVolumeId(), TargetPath: v.GetTargetPath()})
	return err
}

// refused wants an error of a code, with words in it.
func refused(t *testing.T, err error, code codes.Code, words ...string) {
	t.Helper()
	if status.Code(err) != code {
		t.Errorf("%v, want %v", err, code)
		return
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("%v: does not say %q", err, w)
		}
	}
}
