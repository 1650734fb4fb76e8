package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"

	"github.com/csi-prepare/csi-prepare/drivers/server"
	"github.com/csi-prepare/csi-prepare/reference/shim/pass"
	"github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

type runner struct {
	bin     string
	verbose bool
}

// rig is a driver and a shim before it, in a directory of their own.
type rig struct {
	testcase
	bin string
	dir string

	plugin, shim *exec.Cmd
	rss          int64
	close        []func() error
}

const startTime = 20 * time.Second

func (r *runner) run(ctx context.Context, c testcase) (result Result) {
	result = Result{Suite: c.suite, Driver: c.driver, Access: c.access, Outcome: "could-not-run"}
	if c.cannot != nil {
		if why := c.cannot(); why != "" {
			result.Notes = []string{"could not run: " + why}
			return result
		}
	}
	began := time.Now()
	g := &rig{testcase: c, bin: r.bin}
	fail := func(err error) Result {
		result.Outcome = "failed"
		result.Notes = append(result.Notes, err.Error()+g.logs(r.verbose))
		return result
	}
	defer func() {
		if err := g.end(); err != nil {
			result = fail(err)
		}
		result.Suite, result.Driver, result.Access = c.suite, c.driver, c.access
		result.Seconds = time.Since(began).Seconds()
	}()
	if err := g.start(ctx); err != nil {
		return fail(err)
	}
	done, err := c.test(ctx, g)
	result = done
	if err != nil {
		return fail(err)
	}
	if !c.alone {
		result.ShimRSS = g.peak()
		if result.Left, err = g.left(ctx); err != nil {
			return fail(err)
		}
	}
	left := result.Left
	result.Outcome = "passed"
	if result.Failed > 0 || len(left) > 0 {
		result.Outcome = "failed"
		if r.verbose {
			result.Notes = append(result.Notes, g.logs(true))
		}
	}
	return result
}

// start starts the driver and the shim.
func (g *rig) start(ctx context.Context) (err error) {
	if g.bin, err = filepath.Abs(g.bin); err != nil {
		return err
	}
	if g.dir, err = os.MkdirTemp("", "compat-"); err != nil {
		return err
	}
	if err := os.Chmod(g.dir, 0o711); err != nil { //nolint:gosec // the FUSE driver is meant to run as anybody
		return err
	}
	if err := unix.Mount("compat", g.dir, "tmpfs", 0, "mode=0711,size=1g"); err != nil {
		return fmt.Errorf("tmpfs: %w", err)
	}
	if g.prepare != nil {
		if err := g.prepare(g.dir); err != nil {
			return err
		}
	}
	if err := g.writePolicy(); err != nil {
		return err
	}
	if g.alone {
		return nil
	}
	if err := g.startDriver(); err != nil {
		return err
	}
	return g.startShim(ctx)
}

func (g *rig) startDriver() (err error) {
	args := append(g.arguments(g.dir), "--endpoint", "unix://"+g.path("plugin.sock"), "--state-dir", g.path("driver"), "--node-id", "node1")
	g.plugin, err = g.command("prepare-driver", "driver.log", args...)
	return err
}

func (g *rig) startShim(ctx context.Context) (err error) {
	g.shim, err = g.command("prepare-shim", "shim.log", "co", "--endpoint", "unix://"+g.path("shim.sock"),
		"--plugin", "unix://"+g.path("plugin.sock"), "--state-dir", g.path("shim"), "--policy", g.path("policy.yaml"))
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, startTime)
	defer cancel()
	conn, err := g.dial("shim.sock")
	if err != nil {
		return err
	}
	defer conn.Close()
	_, err = csi.NewIdentityClient(conn).Probe(ctx, &csi.ProbeRequest{}, grpc.WaitForReady(true))
	if err != nil {
		return fmt.Errorf("the shim does not answer: %w", err)
	}
	return nil
}

// command starts one of the programs.
func (g *rig) command(name, log string, args ...string) (*exec.Cmd, error) {
	file, err := os.OpenFile(g.path(log), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	cmd := exec.Command(filepath.Join(g.bin, name), args...)
	cmd.Stdout, cmd.Stderr = file, file
	cmd.Dir = "/"
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	return cmd, nil
}

func (g *rig) path(elem ...string) string {
	return filepath.Join(append([]string{g.dir}, elem...)...)
}

func (g *rig) dial(socket string) (*grpc.ClientConn, error) {
	return grpc.NewClient("unix://"+g.path(socket), grpc.WithTransportCredentials(insecure.NewCredentials()))
}

// kill ends a process as a crash would.
func kill(cmd *exec.Cmd) {
	_ = cmd.Process.Kill()
	_ = cmd.Wait() // "signal: killed"
}

// terminate tells a process to stop, and waits for it.
func terminate(cmd *exec.Cmd) error {
	if cmd == nil || cmd.ProcessState != nil {
		return nil
	}
	_ = cmd.Process.Signal(syscall.SIGTERM)
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	select {
	case err := <-ended:
		return err
	case <-time.After(startTime):
		_ = cmd.Process.Kill()
		<-ended
		return fmt.Errorf("%s does not end", filepath.Base(cmd.Path))
	}
}

// end stops everything and leaves nothing.
func (g *rig) end() error {
	var errs []error
	for i := len(g.close) - 1; i >= 0; i-- {
		errs = append(errs, g.close[i]())
	}
	errs = append(errs, terminate(g.shim), terminate(g.plugin))
	if g.dir == "" {
		return errors.Join(errs...)
	}
	// The mounts are those of this process's own namespace, which ends with
	// it; the directory on the disk is not.
	if err := unix.Unmount(g.dir, unix.MNT_DETACH); err != nil {
		errs = append(errs, fmt.Errorf("detach %s: %w", g.dir, err))
	}
	return errors.Join(append(errs, os.Remove(g.dir))...)
}

// peak is the most memory the shim had resident.
func (g *rig) peak() int64 {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", g.shim.Process.Pid))
	for line := range strings.SplitSeq(string(text), "\n") {
		if rest, found := strings.CutPrefix(line, "VmHWM:"); found {
			kib, _ := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 64)
			g.rss = max(g.rss, kib<<10)
		}
	}
	return g.rss
}

// left is what should be there no more when all volumes are deleted: targets,
// mounts, devices, preparations, records of the shim.
func (g *rig) left(ctx context.Context) (left []string, err error) {
	table, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	for line := range strings.SplitSeq(string(table), "\n") {
		fields := strings.Fields(line)
		if len(fields) < 5 || strings.HasPrefix(fields[4], g.path("grant")+"/") {
			continue // the operator's
		}
		if strings.HasPrefix(fields[4], g.dir+"/") || strings.HasPrefix(fields[4], "/data/") {
			left = append(left, "mount "+fields[4])
		}
	}
	backing, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, file := range backing {
		if text, err := os.ReadFile(file); err == nil && bytes.Contains(text, []byte(g.dir)) {
			left = append(left, "loop device of "+strings.TrimSpace(string(text)))
		}
	}
	for _, pattern := range []string{g.path("shim/ledger/*.json"), g.path("shim/prepare/*"), g.path("target/*"), "/data/published/*"} {
		found, _ := filepath.Glob(pattern)
		for _, f := range found {
			left = append(left, "file "+f)
		}
	}
	conn, err := g.dial("plugin.sock")
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	list, err := preparev1alpha1.NewNodePrepareClient(conn).NodeListPreparedVolumes(ctx, &preparev1alpha1.NodeListPreparedVolumesRequest{})
	if err != nil {
		return nil, fmt.Errorf("NodeListPreparedVolumes: %w", err)
	}
	for _, e := range list.GetEntries() {
		left = append(left, "preparation "+e.GetVolumeId()+" "+e.GetPrepareId())
	}
	return left, nil
}

// logs are the last lines of what was logged, for a failure.
func (g *rig) logs(all bool) string {
	var b strings.Builder
	for _, name := range []string{"driver.log", "shim.log", "suite.log"} {
		text, _ := os.ReadFile(g.path(name))
		if most := 1500; len(text) > most && !all {
			text = text[len(text)-most:]
		}
		if len(text) > 0 {
			fmt.Fprintf(&b, "\n--- %s\n%s", name, text)
		}
	}
	return b.String()
}

func (g *rig) writePolicy() error {
	var b strings.Builder
	fmt.Fprintf(&b, "apiVersion: csi-prepare/v1alpha1\nkind: Policy\ndefaults:\n  grants:\n")
	if g.grants == nil {
		b.WriteString("    {}\n")
		return os.WriteFile(g.path("policy.yaml"), []byte(b.String()), 0o600)
	}
	for name, dir := range g.grants(g.dir) {
		fmt.Fprintf(&b, "    %s: %s\n", name, dir)
	}
	return os.WriteFile(g.path("policy.yaml"), []byte(b.String()), 0o600)
}

// withoutSize serves before the shim and leaves capacity_range out of
// CreateVolume.
type withoutSize struct {
	csi.UnimplementedControllerServer
	next csi.ControllerClient
}

// CreateVolume implements csi.ControllerServer.
func (w *withoutSize) CreateVolume(ctx context.Context, req *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	req = proto.CloneOf(req)
	req.CapacityRange = nil
	return w.next.CreateVolume(ctx, req)
}

// endpoint is the socket for the suite.
func (g *rig) endpoint() (string, error) {
	if !g.sizeless {
		return g.path("shim.sock"), nil
	}
	conn, err := g.dial("shim.sock")
	if err != nil {
		return "", err
	}
	l, err := net.Listen("unix", g.path("sizeless.sock"))
	if err != nil {
		return "", err
	}
	s := grpc.NewServer(pass.Rest(conn, server.DefaultDeadline)...)
	s.RegisterService(pass.Only(csi.Controller_ServiceDesc, "CreateVolume"), &withoutSize{next: csi.NewControllerClient(conn)})
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }()
	g.close = append(g.close, func() error {
		s.Stop()
		return errors.Join(<-served, conn.Close())
	})
	return g.path("sizeless.sock"), nil
}
