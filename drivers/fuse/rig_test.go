package fuse

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/csi-prepare/csi-prepare/reference/fusemount"
	"github.com/csi-prepare/csi-prepare/reference/handoff"
	"github.com/csi-prepare/csi-prepare/reference/kernel"
	"github.com/csi-prepare/csi-prepare/reference/mountns"
	prepare "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// The test binary is also the driver, its serving processes, and a consumer.
const roleVariable = "FUSE_TEST_ROLE"

// plugin is the user the driver runs as, if nothing else is said.
const plugin = 12345

func TestMain(m *testing.M) {
	var err error
	role, argument, _ := strings.Cut(os.Getenv(roleVariable), " ")
	if len(os.Args) > 1 && os.Args[1] == "serve" {
		role = "serve"
	}
	switch role {
	case "driver":
		err = runDriver(argument)
	case "serve":
		err = ServeInherited(slog.New(slog.NewTextHandler(os.Stderr, nil)), os.Args[2:]...)
	case "consume":
		err = consume(argument)
	case "wait":
		_, err = io.Copy(io.Discard, os.Stdin)
	default:
		if err = enterRootless(); err == nil {
			os.Exit(m.Run())
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, role, err)
		os.Exit(1)
	}
}

func runDriver(argument string) error {
	var c Config
	if err := json.Unmarshal([]byte(argument), &c); err != nil {
		return err
	}
	if err := os.Setenv(roleVariable, "serve"); err != nil { // to be found by
		return err
	}
	c.Server = []string{"/proc/self/exe", "serve"}
	c.Log = slog.New(slog.NewTextHandler(os.Stderr, nil))
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	return Run(ctx, c)
}

// writings are of several processes and goroutines.
type writings struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (w *writings) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.text.Write(p)
}

func (w *writings) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.text.String()
}

// site is a node: a CO in this process, and a driver that is an ordinary user.
type site struct {
	t       *testing.T
	base    string
	config  Config
	uid     int               // of the driver
	secrets map[string]string // of each call
	// patience with a call; 30 seconds if zero
	patience time.Duration

	driver     *exec.Cmd
	stderr     *writings
	conn       *grpc.ClientConn
	controller csi.ControllerClient
	prepare    prepare.NodePrepareClient

	listener *handoff.Listener
	consumer *mountns.Namespace
	home     *mountns.Namespace // of the driver; the CO's if nil
	program  string             // the driver's; this one if empty
	gone     chan handoff.Notice
}

func newSite(t *testing.T, change func(*handoff.Config)) *site {
	t.Helper()
	return newSiteOf(t, plugin, nil, change)
}

// newSiteOf is a site with a driver of another user or configuration.
func newSiteOf(t *testing.T, uid int, configure func(*Config), change func(*handoff.Config)) *site {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("a CO needs root to make FUSE mounts")
	}
	if _, err := os.Stat("/dev/fuse"); err != nil {
		t.Skipf("this machine has no FUSE: %v", err)
	}
	s := &site{
		t: t, base: t.TempDir(), uid: uid, stderr: new(writings), gone: make(chan handoff.Notice, 1000),
	}
	s.must(os.Chmod(filepath.Dir(s.base), 0o711))
	for _, d := range []string{"run", "state", "volumes", "prepare"} {
		s.must(os.Mkdir(filepath.Join(s.base, d), 0o700))
		s.must(os.Chown(filepath.Join(s.base, d), uid, uid))
	}
	s.must(os.Mkdir(filepath.Join(s.base, "consumer"), 0o755))
	memory, err := os.MkdirTemp("/dev/shm", "prepare-fuse-test")
	s.must(err)
	s.must(os.Chown(memory, uid, uid))
	t.Cleanup(func() { s.must(os.RemoveAll(memory)) })
	s.config = Config{
		Endpoint: "unix://" + filepath.Join(s.base, "run", "csi.sock"),
		StateDir: filepath.Join(s.base, "state"), NodeID: "node1",
		Dir: filepath.Join(s.base, "volumes"), MemoryDir: memory,
	}
	if configure != nil {
		configure(&s.config)
	}
	s.consumer, err = mountns.New(t.Context())
	s.must(err)
	t.Cleanup(func() { s.consumer.Close() })
	s.listen(change)
	s.start()
	t.Cleanup(func() {
		s.stop(syscall.SIGKILL)
		s.listener.Close()
		s.leaveNobody()
		if t.Failed() {
			t.Logf("driver: %s", s.stderr.String())
		}
	})
	return s
}

func (s *site) must(err error) {
	s.t.Helper()
	if err != nil {
		s.t.Fatal(err)
	}
}

// listen starts the CO's end of the handoff.
func (s *site) listen(change func(*handoff.Config)) {
	s.t.Helper()
	c := handoff.Config{
		Directory: filepath.Join(s.base, "handoff"), UID: s.uid, GID: s.uid,
		Mount: fusemount.Policy{}.Mount, Abort: fusemount.Abort, Adopt: s.adopt,
		Gone: func(n handoff.Notice) { s.gone <- n },
		Log:  slog.New(slog.NewTextHandler(s.stderr, nil)),
	}
	if change != nil {
		change(&c)
	}
	l, err := handoff.Listen(c)
	s.must(err)
	s.listener = l
}

// adopt finds the mount of a deposited device where it is attached.
func (s *site) adopt(ctx context.Context, key handoff.Key, _ string, device *os.File) (mount *os.File, err error) {
	err = s.consumer.Do(ctx, func() error {
		fd, err := kernel.OpenTree(unix.AT_FDCWD, s.point(key.PrepareID), unix.OPEN_TREE_CLONE)
		if err != nil {
			return err
		}
		mount = os.NewFile(uintptr(fd), "adopted")
		same, err := fusemount.Same(device, mount)
		if err == nil && !same {
			err = errors.New("the device is of another mount")
		}
		return err
	})
	return mount, err
}

// start starts the driver and waits until it serves.
func (s *site) start() {
	s.t.Helper()
	text, err := json.Marshal(s.config)
	s.must(err)
	program := s.program
	if program == "" {
		program = "/proc/self/exe"
	}
	s.driver = exec.Command(program)
	s.driver.Env = append(os.Environ(), roleVariable+"=driver "+string(text))
	s.driver.Stderr = s.stderr
	s.driver.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(s.uid), Gid: uint32(s.uid)}, Pdeathsig: syscall.SIGKILL}
	if s.home != nil {
		s.must(s.home.Do(s.t.Context(), s.driver.Start))
	} else {
		s.must(s.driver.Start())
	}
	s.conn, err = grpc.NewClient(s.config.Endpoint, grpc.WithTransportCredentials(insecure.NewCredentials()))
	s.must(err)
	s.controller, s.prepare = csi.NewControllerClient(s.conn), prepare.NewNodePrepareClient(s.conn)
	_, err = csi.NewIdentityClient(s.conn).Probe(s.t.Context(), &csi.ProbeRequest{}, grpc.WaitForReady(true))
	s.must(err)
}

func (s *site) stop(signal syscall.Signal) {
	if s.driver == nil {
		return
	}
	s.conn.Close()
	_ = s.driver.Process.Signal(signal)
	_ = s.driver.Wait()
	s.driver = nil
}

// point is where a preparation is attached in the consumer.
func (s *site) point(prepareID string) string { return filepath.Join(s.base, "consumer", prepareID) }

func (s *site) create(name string, parameters map[string]string) string {
	s.t.Helper()
	resp, err := s.createVolume(name, parameters)
	s.must(err)
	return resp.GetVolume().GetVolumeId()
}

func (s *site) createVolume(name string, parameters map[string]string) (*csi.CreateVolumeResponse, error) {
	return s.controller.CreateVolume(s.t.Context(), &csi.CreateVolumeRequest{
		Name: name, VolumeCapabilities: []*csi.VolumeCapability{capability()}, Parameters: parameters,
	})
}

func (s *site) tryCreate(name string, parameters map[string]string) error {
	_, err := s.createVolume(name, parameters)
	return err
}

func capability() *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER},
	}
}

// call prepares, and returns the handle once it is proven to be served.
func (s *site) call(key handoff.Key) (handoff.Handle, error) {
	path := filepath.Join(s.base, "prepare", key.PrepareID)
	if err := os.Mkdir(path, 0o700); err == nil {
		if err := os.Chown(path, s.uid, s.uid); err != nil {
			return handoff.Handle{}, err
		}
	}
	patience := s.patience
	if patience == 0 {
		patience = 30 * time.Second
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	c, err := s.listener.Begin(ctx, key)
	if err != nil {
		return handoff.Handle{}, err
	}
	resp, err := s.prepare.NodePrepareVolume(ctx, &prepare.NodePrepareVolumeRequest{
		VolumeId: key.VolumeID, PrepareId: key.PrepareID, PreparePath: path, VolumeCapability: capability(),
		Secrets:      s.secrets,
		Performer:    &prepare.Performer{Kernel: prepare.Performer_NODE, Kinds: []prepare.MountKind{prepare.MountKind_MOUNT_KIND_FUSE}},
		HandleSocket: s.listener.Path(), HandoffToken: c.Token(), HeldHandles: c.Held(),
	})
	if err != nil {
		c.Drop()
		return handoff.Handle{}, err
	}
	handles, err := c.Finish(resp.GetMountSpecs()[0].GetFuse().GetHandleId())
	if err != nil {
		return handoff.Handle{}, err
	}
	proving, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	go func() {
		select {
		case <-handles[0].Gone:
			stop(errors.New("the server died"))
		case <-proving.Done():
		}
	}()
	return handles[0], fusemount.Prove(proving, handles[0].Mount)
}

// up prepares and attaches for the consumer.
func (s *site) up(key handoff.Key) handoff.Handle {
	s.t.Helper()
	h, err := s.call(key)
	s.must(err)
	s.must(os.MkdirAll(s.point(key.PrepareID), 0o755))
	s.must(s.consumer.Do(s.t.Context(), func() error {
		fd, err := kernel.OpenTree(int(h.Mount.Fd()), "", unix.OPEN_TREE_CLONE)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		return kernel.MoveMountAt(fd, "", unix.AT_FDCWD, s.point(key.PrepareID), 0)
	}))
	return h
}

// detach takes the mount from the consumer.
func (s *site) detach(key handoff.Key) {
	s.t.Helper()
	s.must(s.consumer.Do(s.t.Context(), func() error { return kernel.Unmount(s.point(key.PrepareID), 0) }))
}

func (s *site) unprepare(key handoff.Key) error {
	_, err := s.prepare.NodeUnprepareVolume(s.t.Context(), &prepare.NodeUnprepareVolumeRequest{
		VolumeId: key.VolumeID, PrepareId: key.PrepareID, PreparePath: filepath.Join(s.base, "prepare", key.PrepareID),
	})
	return err
}

func (s *site) down(key handoff.Key) {
	s.t.Helper()
	s.detach(key)
	s.listener.Release(key)
	s.must(s.unprepare(key))
}

// failover has the CO repeat the call whenever a server is gone, until the
// function it returns is called, which returns how often that was.
func (s *site) failover() (stop func() int) {
	ended, done, count := make(chan struct{}), make(chan struct{}), 0
	go func() {
		defer close(done)
		for {
			select {
			case n := <-s.gone:
				if n.Until.IsZero() {
					s.t.Errorf("no server any more: %+v", n)
					continue
				}
				count++
				for try := 1; ; try++ { // a successor may be killed as well
					_, err := s.call(n.Key)
					if err == nil {
						break
					}
					if try == 10 {
						s.t.Errorf("no successor: %v", err)
						break
					}
				}
			case <-ended:
				return
			}
		}
	}()
	return func() int { close(ended); <-done; return count }
}

// servers are the processes of this test's driver that serve a device.
func (s *site) servers() (pids []int) {
	for _, pid := range s.processes() {
		fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
		if err != nil {
			continue
		}
		for _, fd := range fds {
			if to, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", pid, fd.Name())); err == nil && to == "/dev/fuse" {
				pids = append(pids, pid)
				break
			}
		}
	}
	return pids
}

// processes are those and the ones that wait for an order.
func (s *site) processes() (pids []int) {
	names, err := os.ReadDir("/proc")
	s.must(err)
	for _, n := range names {
		pid, err := strconv.Atoi(n.Name())
		if err != nil {
			continue
		}
		env, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
		if err != nil || !bytes.Contains(env, []byte(roleVariable+"=serve")) {
			continue
		}
		// Of this site: the log it writes to lies in the state directory.
		log, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/2", pid))
		if err == nil && strings.HasPrefix(log, s.config.StateDir+"/") {
			pids = append(pids, pid)
		}
	}
	return pids
}

// waitFor waits until something is so.
func (s *site) waitFor(so func() bool) {
	s.t.Helper()
	for range 2000 {
		if so() {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	s.t.Fatal("it never came to be")
}

// leaveNobody sees that every serving process ends once the CO and the
// consumer have let go.
func (s *site) leaveNobody() {
	s.t.Helper()
	s.consumer.Close()
	var left []int
	for range 500 {
		if left = s.processes(); len(left) == 0 {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	for _, pid := range left {
		if p, err := os.FindProcess(pid); err == nil {
			_ = p.Kill()
		}
	}
	s.t.Errorf("serving processes are left: %v", left)
}

// consumerProcess is a process in the consumer's namespace. Nothing but it has
// files of the volume open.
type consumerProcess struct {
	*exec.Cmd
	in  io.WriteCloser
	out bytes.Buffer
	err bytes.Buffer
}

func (s *site) consume(prepareID string) *consumerProcess {
	s.t.Helper()
	c := &consumerProcess{Cmd: exec.Command("/proc/self/exe")}
	c.Env = append(os.Environ(), roleVariable+"=consume "+s.point(prepareID))
	c.Stdout, c.Stderr = &c.out, &c.err
	c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	var err error
	c.in, err = c.StdinPipe()
	s.must(err)
	s.must(s.consumer.Do(s.t.Context(), c.Start))
	s.t.Cleanup(func() {
		if c.ProcessState == nil {
			_ = c.Process.Kill()
			_ = c.Wait()
		}
	})
	return c
}

// finish ends the load and returns what came of it.
func (c *consumerProcess) finish(t *testing.T) outcome {
	t.Helper()
	c.in.Close()
	done := make(chan error, 1)
	go func() { done <- c.Wait() }()
	select {
	case err := <-done:
		if err != nil {
			t.Fatalf("consumer: %v: %s", err, c.err.String())
		}
	case <-time.After(2 * time.Minute):
		t.Fatal("the consumer hangs")
	}
	var o outcome
	if err := json.Unmarshal(c.out.Bytes(), &o); err != nil {
		t.Fatalf("%v: %s", err, c.out.String())
	}
	return o
}
