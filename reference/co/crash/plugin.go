package crash

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// ordinary is the user the FUSE driver runs as.
const ordinary = 12345

// plugin is a reference driver, its volumes, and the proxy before it.
type plugin struct {
	name   string // of its command
	driver string // GetPluginInfo
	dir    string
	start  []string // what starts drivers
	log    *os.File
	*proxy
	calls *calls

	mu  sync.Mutex
	cmd *exec.Cmd
	// moments counts down to the one at which the plugin is killed.
	moments int
	killed  string
}

// flags are those of the driver's command besides the ones all have.
func (p *plugin) flags() []string {
	switch p.name {
	case "hostpath":
		return []string{"--grant", "data=" + p.dir + "/data"}
	case "block":
		return []string{"--dir", p.dir + "/data"}
	default:
		return []string{"--dir", p.dir + "/data"}
	}
}

// owner is the user it runs as.
func (p *plugin) owner() int {
	if p.name == "fuse" {
		return ordinary
	}
	return 0
}

func (c *Campaign) newPlugin(name string) (*plugin, error) {
	p := &plugin{name: name, dir: filepath.Join(c.dir, name), start: c.Driver, log: c.driverLog}
	for _, d := range []string{"", "/data", "/state"} {
		if err := os.Mkdir(p.dir+d, 0o711); err != nil {
			return nil, err
		}
		if err := os.Chown(p.dir+d, p.owner(), p.owner()); err != nil {
			return nil, err
		}
	}
	p.calls = newCalls(c.isPerformed)
	var err error
	p.proxy, err = newProxy(p.front(), p.dir+"/csi.sock", p.around)
	if err != nil {
		return nil, err
	}
	if err := p.run(); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	conn, err := p.connect()
	if err != nil {
		return nil, err
	}
	defer func() { _ = conn.Close() }()
	info, err := csi.NewIdentityClient(conn).GetPluginInfo(ctx, &csi.GetPluginInfoRequest{}, grpc.WaitForReady(true))
	p.driver = info.GetName()
	return p, err
}

func (p *plugin) front() string    { return p.dir + "/co.sock" }
func (p *plugin) endpoint() string { return "unix://" + p.front() }

func (p *plugin) connect() (*grpc.ClientConn, error) {
	return grpc.NewClient("unix://"+p.dir+"/csi.sock", grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithConnectParams(soon))
}

// run starts the driver. Its serving processes, if it has any, outlive it.
func (p *plugin) run() error {
	args := append(append(p.start[1:len(p.start):len(p.start)], p.name, "--endpoint", "unix://"+p.dir+"/csi.sock",
		"--state-dir", p.dir+"/state", "--node-id", "node1"), p.flags()...)
	cmd := exec.Command(p.start[0], args...)
	cmd.Stderr = p.log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if p.owner() != 0 {
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: uint32(p.owner()), Gid: uint32(p.owner())}
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start driver %s: %w", p.name, err)
	}
	p.cmd = cmd
	return nil
}

func (p *plugin) create(ctx context.Context, name string) (string, error) {
	conn, err := p.connect()
	if err != nil {
		return "", err
	}
	defer func() { _ = conn.Close() }()
	request := &csi.CreateVolumeRequest{Name: name, VolumeCapabilities: []*csi.VolumeCapability{capability()}}
	if p.name == "block" {
		request.CapacityRange = &csi.CapacityRange{RequiredBytes: 32 << 20}
	}
	v, err := csi.NewControllerClient(conn).CreateVolume(ctx, request, grpc.WaitForReady(true))
	return v.GetVolume().GetVolumeId(), err
}

func (p *plugin) delete(ctx context.Context, volume string) error {
	conn, err := p.connect()
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	_, err = csi.NewControllerClient(conn).DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: volume}, grpc.WaitForReady(true))
	return err
}

// around logs a call, and kills the plugin when its moment has come: before a
// call, after it, or while it is served.
func (p *plugin) around(method string, request []byte) func(error) {
	done := p.calls.begin(method, request)
	p.moment("before " + method)
	return func(err error) {
		done(err)
		p.moment("after " + method)
	}
}

// killAt has the plugin killed at the n-th moment from now.
func (p *plugin) killAt(n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.moments, p.killed = n, ""
}

func (p *plugin) moment(name string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.moments--; p.moments == 0 {
		p.killed = name
		if err := p.again(); err != nil {
			p.killed = err.Error()
		}
	}
}

// kill kills the driver and starts it again; one that serves may have a serving
// process killed instead.
func (p *plugin) kill() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if pids := p.servers(); len(pids) > 0 && chance(2) == 0 {
		return unix.Kill(pids[int(chance(time.Duration(len(pids))))], unix.SIGKILL)
	}
	return p.again()
}

func (p *plugin) again() error {
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait()
	return p.run()
}

// servers are the driver's serving processes, known by the log they write to.
func (p *plugin) servers() (pids []int) {
	if p.name != "fuse" {
		return nil
	}
	dir, err := os.Open("/proc")
	if err != nil {
		return nil
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil
	}
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		log, err := os.Readlink("/proc/" + name + "/fd/2")
		if err == nil && strings.HasPrefix(log, p.dir+"/state/") && !strings.Contains(log, "spare-") {
			pids = append(pids, pid)
		}
	}
	return pids
}

// end ends the driver.
func (p *plugin) end() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait()
	return p.close()
}
