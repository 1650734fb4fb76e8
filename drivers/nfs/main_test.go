package nfs_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/csi-prepare/csi-prepare/drivers/nfs"
	"github.com/csi-prepare/csi-prepare/drivers/server"
	"github.com/csi-prepare/csi-prepare/reference/co"
	"github.com/csi-prepare/csi-prepare/reference/mountns"
	"github.com/csi-prepare/csi-prepare/reference/perform"
	"github.com/csi-prepare/csi-prepare/vm/nfsd"
)

func TestMain(m *testing.M) {
	co.Child()
	nfsd.MainIfServer()
	if filepath.Base(os.Args[0]) == helperName {
		os.Exit(helper(os.Args[1:]))
	}
	code := m.Run()
	if theServer.host != nil {
		if err := theServer.host.Close(); err != nil {
			fmt.Fprintln(os.Stderr, "end the server:", err)
			code = max(code, 1)
		}
		_ = os.Remove(theServer.host.Root)
	}
	os.Exit(code)
}

// serverName is the host of the export, which only the driver's resolver knows.
const serverName = "server.test"

// theServer is the one host with a kernel's NFS server that all tests use.
var theServer struct {
	once sync.Once
	host *nfsd.Host
	err  error
}

func startServer() {
	types, err := os.ReadFile("/proc/filesystems")
	if err == nil && !strings.Contains(string(types), "nfsd\n") {
		err = errNoServer
	}
	if err != nil {
		theServer.err = err
		return
	}
	root, err := os.MkdirTemp("", "nfs-server-")
	if err == nil {
		theServer.host, err = nfsd.Start(context.Background(), root)
	}
	if err == nil {
		err = theServer.host.Serve()
	}
	theServer.err = err
}

var errNoServer = errors.New("this kernel has no NFS server; the guest of 'make vm' has")

// site is an export of the server, a driver for it and a CO.
type site struct {
	*testing.T
	ctx      context.Context
	host     *nfsd.Host
	dir      string // of the test: the CO's, the driver's, the consumer's
	export   string // its path at the server
	endpoint string
	co       *co.CO
	policy   string
	stop     func() // ends the driver
	before   *mountns.Table

	mu        sync.Mutex
	addresses []netip.Addr
	helper    string
}

func newSite(t *testing.T, change ...func(*site)) *site {
	t.Helper()
	theServer.once.Do(startServer)
	if errors.Is(theServer.err, errNoServer) {
		t.Skip(theServer.err)
	}
	if theServer.err != nil {
		t.Fatal(theServer.err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	s := &site{T: t, ctx: ctx, host: theServer.host, dir: tempDir(t), export: "/" + strings.NewReplacer("/", "-").Replace(t.Name())}
	s.addresses = []netip.Addr{netip.MustParseAddr(nfsd.Address4)}
	s.endpoint = "unix://" + s.dir + "/csi.sock"
	s.policy = lenient
	for _, c := range change {
		c(s)
	}
	s.must(os.Mkdir(s.atServer(), 0o755))
	s.must(s.host.Export(s.export))
	for _, sub := range []string{"consumer"} {
		s.must(os.Mkdir(filepath.Join(s.dir, sub), 0o755))
	}
	s.before = s.table()
	s.start()
	s.open()
	t.Cleanup(func() {
		s.must(s.co.Close())
		s.stop()
		s.must(s.host.Unexport(s.export))
		cancel()
	})
	return s
}

func tempDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "nfs")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

func (s *site) must(err error) {
	s.Helper()
	if err != nil {
		s.Fatal(err)
	}
}

// atServer is a path in the export, as the server has it.
func (s *site) atServer(elements ...string) string {
	return filepath.Join(append([]string{s.host.Root, s.export}, elements...)...)
}

// start starts the driver.
func (s *site) start() {
	s.Helper()
	ctx, cancel := context.WithCancel(s.ctx)
	ended := make(chan error, 1)
	d, err := nfs.New(nfs.Config{
		Endpoint: s.endpoint, StateDir: filepath.Join(s.dir, "state"), NodeID: "node",
		Export: nfs.Export{Host: serverName, Path: s.export}, Root: s.atServer(), Helper: s.helper,
		Lookup: func(_ context.Context, _, host string) ([]netip.Addr, error) {
			s.mu.Lock()
			defer s.mu.Unlock()
			if host != serverName {
				return nil, &net.DNSError{Err: "no such host", Name: host, IsNotFound: true}
			}
			return s.addresses, nil
		},
	})
	s.must(err)
	go func() {
		err := server.Serve(ctx, server.Options{Endpoint: s.endpoint}, d.Register)
		ended <- errors.Join(err, d.Close())
	}()
	s.stop = func() {
		cancel()
		if err := <-ended; err != nil {
			s.Error(err)
		}
	}
}

// open starts the CO.
func (s *site) open() {
	s.Helper()
	policy, err := co.ParsePolicy([]byte("apiVersion: " + co.PolicyVersion + "\nkind: Policy\n" + s.policy))
	s.must(err)
	s.co, err = co.Open(co.Config{Dir: filepath.Join(s.dir, "co"), Policy: policy})
	s.must(err)
	_, err = s.co.Recover(s.ctx, s.endpoint)
	s.must(err)
}

func (s *site) dial() *grpc.ClientConn {
	s.Helper()
	conn, err := grpc.NewClient(s.endpoint, grpc.WithTransportCredentials(insecure.NewCredentials()))
	s.must(err)
	s.Cleanup(func() { conn.Close() })
	return conn
}

// Policies of the CO: a guest on a busy machine is slow, and a step that never
// ends is to end soon all the same.
const (
	lenient = "defaults: {stepDeadline: 2m, attempts: 2}"
	strict  = "defaults: {stepDeadline: 3s, attempts: 1}"
)

// reopen has the next CO take over, with another policy.
func (s *site) reopen(policy string) {
	s.Helper()
	s.must(s.co.Close())
	s.policy = policy
	s.open()
}

// volume makes a volume.
func (s *site) volume(parameters ...string) *csi.Volume {
	s.Helper()
	p := map[string]string{}
	for i := 0; i < len(parameters); i += 2 {
		p[parameters[i]] = parameters[i+1]
	}
	v, err := csi.NewControllerClient(s.dial()).CreateVolume(s.ctx, &csi.CreateVolumeRequest{
		Name: fmt.Sprint("volume-", time.Now().UnixNano()), Parameters: p,
		VolumeCapabilities: []*csi.VolumeCapability{capability()},
	}, grpc.WaitForReady(true))
	s.must(err)
	return v.GetVolume()
}

func capability(flags ...string) *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{MountFlags: flags}},
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER},
	}
}

// use is one of a volume at a place of its own.
func (s *site) use(v *csi.Volume, id string, flags ...string) co.Use {
	return co.Use{
		Endpoint: s.endpoint, VolumeID: v.GetVolumeId(), VolumeContext: v.GetVolumeContext(), PrepareID: id,
		Capability: capability(flags...), Target: perform.Target{Path: s.place(id)},
	}
}

func (s *site) place(id string, elements ...string) string {
	return filepath.Join(append([]string{s.dir, "consumer", id}, elements...)...)
}

func (s *site) up(u co.Use) *co.Record {
	s.Helper()
	r, err := s.co.Up(s.ctx, u)
	s.must(err)
	return r
}

func (s *site) down(k co.Key) {
	s.Helper()
	s.must(s.co.Down(s.ctx, k))
}

func (s *site) table() *mountns.Table {
	s.Helper()
	ns, err := mountns.Own()
	s.must(err)
	defer ns.Close()
	t, err := ns.Table(s.ctx)
	s.must(err)
	return t
}

// nothingLeft wants mounts, records and directories to be as in the beginning.
func (s *site) nothingLeft() {
	s.Helper()
	if c := mountns.Diff(s.before, s.table()); !c.Empty() {
		s.Errorf("the mount table has changed:\n%s", c)
	}
	for _, dir := range []string{"co/ledger", "co/prepare", "consumer"} {
		entries, err := os.ReadDir(filepath.Join(s.dir, dir))
		s.must(err)
		for _, e := range entries {
			s.Errorf("left: %s/%s", dir, e.Name())
		}
	}
	if children, err := os.ReadFile("/proc/thread-self/children"); err == nil && len(children) > 0 {
		for _, pid := range strings.Fields(string(children)) {
			name, _ := os.ReadFile("/proc/" + pid + "/comm")
			if strings.Contains(string(name), "perform") {
				s.Errorf("left: child %s", pid)
			}
		}
	}
}

// options are what the kernel says of the mount at a place.
func (s *site) options(place string) string {
	s.Helper()
	text, err := os.ReadFile("/proc/self/mountinfo")
	s.must(err)
	for line := range strings.Lines(string(text)) {
		if words := strings.Fields(line); len(words) > 4 && words[4] == place {
			return words[5] + "," + words[len(words)-1]
		}
	}
	s.Fatalf("nothing is mounted at %s", place)
	return ""
}

func (s *site) write(path, text string) {
	s.Helper()
	s.must(os.WriteFile(path, []byte(text), 0o644))
}

func (s *site) holds(path, want string) {
	s.Helper()
	if got, err := os.ReadFile(path); err != nil || string(got) != want {
		s.Errorf("%s has %q, %v; want %q", path, got, err, want)
	}
}

// silent cuts the link to the server until the test ends, or the result is
// called.
func (s *site) silent() (restore func()) {
	s.Helper()
	s.must(s.host.Silence(s.ctx, true))
	var once sync.Once
	restore = func() { once.Do(func() { s.must(s.host.Silence(context.Background(), false)) }) }
	s.Cleanup(restore)
	return restore
}

const helperName = "mount.nfs"

// helper is a mount helper as mount.nfs is: it resolves the name, and mounts.
func helper(args []string) int {
	if len(args) != 4 || args[2] != "-o" {
		fmt.Fprintln(os.Stderr, "usage: mount.nfs SOURCE DIRECTORY -o OPTIONS")
		return 2
	}
	options := args[3] + ",addr=" + nfsd.Address4 + ",clientaddr=0.0.0.0"
	if err := unix.Mount(args[0], args[1], "nfs4", 0, options); err != nil {
		fmt.Fprintln(os.Stderr, "mount.nfs:", err)
		return 32
	}
	return 0
}
