package co

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	gofuse "github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	"github.com/csi-prepare/csi-prepare/drivers/fuse"
	"github.com/csi-prepare/csi-prepare/drivers/fuse/attach"
	"github.com/csi-prepare/csi-prepare/fakes/sp"
	"github.com/csi-prepare/csi-prepare/reference/handoff"
	"github.com/csi-prepare/csi-prepare/reference/perform"
	"github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// The test binary is several programs: the tests, which run in a mount
// namespace of their own, a plugin, and a CO that kills itself.
const (
	roleVariable = "CO_TEST_ROLE"
	inside       = "inside"
	rolePlugin   = "plugin"
	roleCO       = "co"
	roleWait     = "wait" // until its standard input ends
	roleFUSE     = "fuse" // the FUSE driver
	roleServe    = "serve"
)

func TestMain(m *testing.M) {
	Child()
	switch role := os.Getenv(roleVariable); {
	case role == inside:
		os.Exit(runTests(m))
	case slices.ContainsFunc(os.Args, func(a string) bool { return strings.HasPrefix(a, "-test.fuzz") }):
		os.Exit(m.Run()) // a process of the fuzzer's, which makes no mounts
	case role == rolePlugin:
		os.Exit(runPlugin())
	case role == roleCO:
		os.Exit(runCO())
	case role == roleFUSE:
		os.Exit(runFUSE())
	case role == roleServe:
		os.Exit(exitOf(fuse.ServeInherited(slog.New(slog.NewTextHandler(os.Stderr, nil)), os.Args[2:]...)))
	case role == roleWait:
		_, _ = io.Copy(io.Discard, os.Stdin)
		return
	}
	if os.Getuid() != 0 {
		fmt.Println("skipped: mount namespaces need root")
		return
	}
	dir, err := os.MkdirTemp("", "co-test-")
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	cmd := program(inside, "CO_TEST_TMP="+dir)
	cmd.Args = append(cmd.Args, os.Args[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	err = cmd.Run()
	_ = os.Remove(dir)
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit):
		os.Exit(max(exit.ExitCode(), 1))
	case err != nil:
		fmt.Println(err)
		os.Exit(1)
	}
}

// runTests runs the tests with temporary files in memory: there are thousands
// of fsync(2), which would cost most of the time.
func runTests(m *testing.M) int {
	dir := os.Getenv("CO_TEST_TMP")
	if err := unix.Mount("tests", dir, "tmpfs", 0, "mode=711"); err != nil {
		fmt.Println("tmpfs:", err)
		return 1
	}
	defer unix.Unmount(dir, unix.MNT_DETACH)
	_ = os.Setenv("CO_TEST_DISK", os.TempDir())
	_ = os.Setenv("TMPDIR", dir)
	return m.Run()
}

// program is this binary in another role, in a private copy of the mount
// namespace, with further variables.
func program(role string, variables ...string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), append(variables, roleVariable+"="+role)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	return cmd
}

// runPlugin serves the in-memory plugin until it is killed, and appends a line
// for each call to a file.
func runPlugin() int {
	dir := os.Getenv("CO_TEST_DIR")
	config := sp.Config{Grants: map[string]string{"data": dir + "/data"}, Staging: true}
	if os.Getenv("CO_TEST_STATE") != "" {
		config.StateDir = dir + "/state"
	}
	l, err := listen(dir)
	var server *sp.Server
	if err == nil {
		server, err = sp.New(config)
	}
	if err == nil {
		err = serve(context.Background(), l, server, func(ctx context.Context, method string, request any, next func(context.Context) (any, error)) (any, error) {
			log, err := os.OpenFile(dir+"/calls", os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
			if err != nil {
				return nil, err
			}
			defer log.Close()
			fmt.Fprintln(log, method)
			answer, err := next(ctx)
			if p, ok := request.(*preparev1alpha1.NodePrepareVolumeRequest); ok && err == nil && os.Getenv("CO_TEST_FUSE") != "" {
				return serveFUSE(ctx, p)
			}
			return answer, err
		})
	}
	fmt.Fprintln(os.Stderr, err)
	return 1
}

// serveFUSE answers with a FUSE mount that this process serves, and no other
// can go on with.
func serveFUSE(ctx context.Context, p *preparev1alpha1.NodePrepareVolumeRequest) (any, error) {
	specs := &preparev1alpha1.NodePrepareVolumeResponse{MountSpecs: []*preparev1alpha1.MountSpec{{
		Kind: &preparev1alpha1.MountSpec_Fuse{Fuse: &preparev1alpha1.FuseMount{HandleId: "f"}},
	}}}
	if slices.Contains(p.GetHeldHandles(), "f") {
		return specs, nil
	}
	conn, err := handoff.Dial(ctx, p.GetHandleSocket(), handoff.Key{VolumeID: p.GetVolumeId(), PrepareID: p.GetPrepareId()}, p.GetHandoffToken())
	if err != nil {
		return nil, err
	}
	device, err := conn.RequestFUSE(ctx, "f", handoff.FUSERequest{RootMode: unix.S_IFDIR | 0o755})
	if err != nil {
		return nil, err
	}
	server, _, err := attach.Start(ctx, device, emptyFS{gofuse.NewDefaultRawFileSystem()}, gofuse.MountOptions{})
	if err != nil {
		return nil, err
	}
	go server.Serve()
	return specs, conn.Serving(ctx, "f", handoff.Session{})
}

// emptyFS has a root and nothing in it.
type emptyFS struct{ gofuse.RawFileSystem }

func (emptyFS) GetAttr(_ <-chan struct{}, _ *gofuse.GetAttrIn, out *gofuse.AttrOut) gofuse.Status {
	out.Mode = unix.S_IFDIR | 0o755
	return gofuse.OK
}

// runFUSE serves the FUSE driver until it is killed. Its serving processes are
// this program again.
func runFUSE() int {
	dir := os.Getenv("CO_TEST_DIR")
	_ = os.Setenv(roleVariable, roleServe)
	return exitOf(fuse.Run(context.Background(), fuse.Config{
		Endpoint: "unix://" + dir + "/plugin/csi.sock", StateDir: dir + "/plugin/state", NodeID: "node1",
		Dir: dir + "/plugin/volumes", Server: []string{"/proc/self/exe", roleServe},
		Log: slog.New(slog.NewTextHandler(os.Stderr, nil)),
	}))
}

func exitOf(err error) int {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// around is called for each RPC of a plugin; next serves it.
type around func(ctx context.Context, method string, request any, next func(context.Context) (any, error)) (any, error)

func listen(dir string) (net.Listener, error) {
	_ = os.Remove(dir + "/csi.sock")
	return net.Listen("unix", dir+"/csi.sock")
}

func serve(ctx context.Context, l net.Listener, server *sp.Server, hook around) error {
	g := grpc.NewServer(append(server.Options(), grpc.ChainUnaryInterceptor(
		func(ctx context.Context, request any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
			return hook(ctx, path.Base(info.FullMethod), request, func(ctx context.Context) (any, error) { return next(ctx, request) })
		}))...)
	server.Serve(g)
	stop := context.AfterFunc(ctx, g.Stop)
	defer stop()
	return g.Serve(l)
}

// runCO does one act and kills itself at one of its steps, or exits 0 if there
// are not that many.
func runCO() int {
	dir := os.Getenv("CO_TEST_DIR")
	steps, err := strconv.Atoi(os.Getenv("CO_TEST_STEPS"))
	if err != nil {
		return 2
	}
	c, err := Open(Config{Dir: dir + "/co", Policy: testPolicy(dir)})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	var mu sync.Mutex
	c.before = func(step string) {
		mu.Lock()
		defer mu.Unlock()
		if steps--; steps == 0 {
			fmt.Println(step)
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	u := useOf(dir, os.Getenv("CO_TEST_VOLUME"))
	if os.Getenv("CO_TEST_ACT") == "up" {
		_, err = c.Up(ctx, u)
	} else {
		err = c.Down(ctx, Key{sp.Name, u.VolumeID, u.PrepareID})
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 3
	}
	return 0
}

func testPolicy(dir string) *Policy {
	s := DefaultSettings()
	s.Grants = map[string]string{"data": dir + "/data"}
	s.FSTypes = append(s.FSTypes, "tmpfs")
	s.CallDeadline, s.StepDeadline = Duration(time.Minute), Duration(time.Minute)
	s.Attempts, s.Backoff = 3, Duration(10*time.Millisecond)
	return &Policy{defaults: s}
}

// useOf is how the tests use a volume of the plugin in dir.
func useOf(dir, volume string) Use {
	return Use{
		Endpoint: "unix://" + dir + "/csi.sock", VolumeID: volume, PrepareID: "c1",
		Capability: capability(), Target: perform.Target{Path: dir + "/consumer/c1/place"},
	}
}

func capability() *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER},
	}
}
