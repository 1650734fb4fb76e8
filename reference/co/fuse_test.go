package co

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/csi-prepare/csi-prepare/drivers/fuse"
	"github.com/csi-prepare/csi-prepare/reference/handoff"
	"github.com/csi-prepare/csi-prepare/reference/mountns"
	"github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// ordinary is the user the FUSE driver runs as.
const ordinary = 12345

// fuseRig is a rig with the FUSE driver in a process of its own, which serves
// from others.
type fuseRig struct {
	*rig
	driver *exec.Cmd
	said   bytes.Buffer
}

func newFUSERig(t *testing.T) *fuseRig {
	t.Helper()
	if _, err := os.Stat("/dev/fuse"); err != nil {
		t.Skipf("this machine has no FUSE: %v", err)
	}
	r := &fuseRig{rig: newRig(t)}
	r.must(os.Chmod(r.path("co"), 0o711))
	for _, d := range []string{"plugin", "plugin/state", "plugin/volumes"} {
		r.must(os.Mkdir(r.path(d), 0o711))
		r.must(os.Chown(r.path(d), ordinary, ordinary))
	}
	t.Cleanup(func() {
		r.stop()
		if t.Failed() {
			t.Logf("the driver said:\n%s", r.said.String())
		}
		for range 5000 {
			if len(r.servers()) == 0 {
				return
			}
			time.Sleep(10 * time.Millisecond)
		}
		for _, pid := range r.servers() {
			t.Errorf("serving process %d is left", pid)
			_ = unix.Kill(pid, unix.SIGKILL)
		}
	})
	r.start()
	return r
}

func (r *fuseRig) endpoint() string { return "unix://" + r.path("plugin/csi.sock") }

func (r *fuseRig) start() {
	r.Helper()
	r.driver = exec.Command("/proc/self/exe")
	r.driver.Env = append(os.Environ(), roleVariable+"="+roleFUSE, "CO_TEST_DIR="+r.dir)
	r.driver.Stderr = &r.said
	r.driver.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: ordinary, Gid: ordinary}, Pdeathsig: syscall.SIGKILL}
	r.must(r.driver.Start())
}

func (r *fuseRig) stop() {
	if r.driver != nil {
		_ = r.driver.Process.Kill()
		_ = r.driver.Wait()
		r.driver = nil
	}
}

func (r *fuseRig) volume(name string) Use {
	r.Helper()
	conn, err := grpc.NewClient(r.endpoint(), grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithConnectParams(reconnect))
	r.must(err)
	defer conn.Close()
	v, err := csi.NewControllerClient(conn).CreateVolume(r.ctx, &csi.CreateVolumeRequest{
		Name: name, VolumeCapabilities: []*csi.VolumeCapability{fuseCapability()},
	}, grpc.WaitForReady(true))
	r.must(err)
	u := r.use(v.GetVolume().GetVolumeId())
	u.Endpoint, u.Capability = r.endpoint(), fuseCapability()
	return u
}

func fuseCapability() *csi.VolumeCapability {
	c := capability()
	c.AccessMode.Mode = csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER
	return c
}

// servers are the processes that serve this rig's volumes, by the log each
// writes to.
func (r *fuseRig) servers() (pids []int) {
	names, err := filepath.Glob("/proc/[0-9]*")
	r.must(err)
	for _, n := range names {
		log, err := os.Readlink(n + "/fd/2")
		if err != nil || !strings.HasPrefix(log, r.path("plugin/state")) || strings.Contains(log, "spare-") {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(n))
		r.must(err)
		pids = append(pids, pid)
	}
	return pids
}

func (r *fuseRig) killServer() {
	r.Helper()
	pids := r.servers()
	if len(pids) != 1 {
		r.Fatalf("%d serving processes, want 1", len(pids))
	}
	r.must(unix.Kill(pids[0], unix.SIGKILL))
}

// eventually waits until something is so.
func (r *rig) eventually(what string, so func() bool) {
	r.Helper()
	for range 10000 {
		if so() {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	r.Fatalf("it never came to be: %s", what)
}

// reads has a process read the consumer's file, since one that hangs must not
// hang the tests.
func (r *rig) reads(u *Use, want string) {
	r.Helper()
	ctx, cancel := context.WithTimeout(r.ctx, 2*time.Minute)
	defer cancel()
	out, err := exec.CommandContext(ctx, "cat", u.Target.Path+"/f").CombinedOutput()
	if err != nil || string(out) != want {
		r.Errorf("the consumer reads %q, %v; want %q", out, err, want)
	}
}

func TestFUSEByAnOrdinaryUser(t *testing.T) {
	r := newFUSERig(t)
	u := r.volume("v")
	record := r.up(u)
	r.must(os.WriteFile(u.Target.Path+"/f", []byte("data"), 0o644))
	r.up(u) // a repeat changes nothing
	r.mountsAt(u.Target.Path, 1)
	r.reads(&u, "data")
	r.down(record.Key())
	r.nothingLeft()
	if n := r.co.channels[fuse.Name].Descriptors(); n != 0 {
		t.Errorf("%d descriptors are held", n)
	}
	record = r.up(u)
	r.reads(&u, "data")
	r.down(record.Key())
	r.nothingLeft()
}

// TestFUSEServerIsKilled has the server die and the consumer not notice, also
// after the CO was started anew and got the device by deposit.
func TestFUSEServerIsKilled(t *testing.T) {
	for _, restarted := range []bool{false, true} {
		t.Run(fmt.Sprintf("CO restarted %v", restarted), func(t *testing.T) {
			r := newFUSERig(t)
			u := r.volume("v")
			record := r.up(u)
			r.must(os.WriteFile(u.Target.Path+"/f", []byte("data"), 0o644))
			before := r.table()
			if restarted {
				r.open()
				done, err := r.co.Recover(r.ctx)
				r.must(err)
				if len(done.Kept) != 1 {
					t.Errorf("recovered %+v, want it kept", done)
				}
				r.up(u)
				if n := r.co.channels[fuse.Name].Descriptors(); n != 3 {
					t.Errorf("%d descriptors after a deposit, want connection, device and mount", n)
				}
			}
			first := r.servers()
			r.killServer()
			r.reads(&u, "data")
			if now := r.servers(); len(now) != 1 || now[0] == first[0] {
				t.Errorf("served by %v, before by %v", now, first)
			}
			if c := mountns.Diff(before, r.table()); !c.Empty() {
				t.Errorf("the table has changed:\n%s", c)
			}
			r.down(record.Key())
			r.nothingLeft()
		})
	}
}

// TestFUSEDeadline has no successor in time: whoever waits is let go, and a
// later server's mount takes the place of the dead one.
func TestFUSEDeadline(t *testing.T) {
	r := newFUSERig(t)
	r.set(func(s *Settings) {
		s.Failover = Duration(300 * time.Millisecond)
		s.Attempts, s.Backoff = 200, Duration(50*time.Millisecond)
	})
	u := r.volume("v")
	record := r.up(u)
	r.must(os.WriteFile(u.Target.Path+"/f", []byte("data"), 0o644))
	held, err := os.Open(u.Target.Path)
	r.must(err)
	defer held.Close()
	r.stop()
	r.killServer()
	r.eventually("the connection is aborted", func() bool {
		var st unix.Statfs_t
		return errors.Is(unix.Fstatfs(int(held.Fd()), &st), unix.ENOTCONN)
	})
	r.start()
	r.eventually("a mount that is served took the place", func() bool {
		now := r.record()
		return now.Phase == Performed && now.Receipts[0].MountID != record.Receipts[0].MountID
	})
	r.reads(&u, "data")
	r.mountsAt(u.Target.Path, 1)
	held.Close()
	r.down(record.Key())
	r.nothingLeft()
}

// TestFUSEConnectionOutlivesItsPerformance has a copy of the mount in somebody's
// namespace, by which the plugin sees the connection live on.
func TestFUSEConnectionOutlivesItsPerformance(t *testing.T) {
	r := newFUSERig(t)
	r.mkdir("consumer/c1/place") // what is there already is not removed, nor the copies on it
	u := r.volume("v")
	record := r.up(u)
	bystander, err := mountns.New(r.ctx)
	r.must(err)
	defer bystander.Close()
	r.down(record.Key())
	r.eventually("the server ends", func() bool { return len(r.servers()) == 0 })
	r.must(bystander.Close())
	r.must(os.RemoveAll(r.path("consumer/c1")))
	r.nothingLeft()
}

// TestFUSEWithoutAServer has plugins that claim to serve and do not.
func TestFUSEWithoutAServer(t *testing.T) {
	for _, test := range []struct {
		name string
		lie  func(ctx context.Context, conn *handoff.Conn) error
		want error
	}{
		{"that never says so", func(context.Context, *handoff.Conn) error { return nil }, nil},
		{"that never answers", func(ctx context.Context, conn *handoff.Conn) error {
			return conn.Serving(ctx, "f", handoff.Session{})
		}, context.DeadlineExceeded},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := newRig(t)
			r.set(func(s *Settings) { s.StepDeadline = Duration(2 * time.Second) })
			var kept []*handoff.Conn
			var devices []*os.File
			r.answering(func(ctx context.Context, method string, request any, next func(context.Context) (any, error)) (any, error) {
				answer, err := next(ctx)
				p, prepares := request.(*preparev1alpha1.NodePrepareVolumeRequest)
				if !prepares || err != nil {
					return answer, err
				}
				conn, err := handoff.Dial(ctx, p.GetHandleSocket(), handoff.Key{VolumeID: p.GetVolumeId(), PrepareID: p.GetPrepareId()}, p.GetHandoffToken())
				if err != nil {
					return nil, err
				}
				device, err := conn.RequestFUSE(ctx, "f", handoff.FUSERequest{RootMode: unix.S_IFDIR | 0o755})
				if err != nil {
					return nil, err
				}
				kept, devices = append(kept, conn), append(devices, device)
				// It takes the first request, so that who waits for the
				// second cannot be killed.
				if err := test.lie(ctx, conn); err != nil {
					return nil, err
				}
				go func() { _, _ = device.Read(make([]byte, 1<<20)); _, _ = device.Read(make([]byte, 1<<20)) }()
				return &preparev1alpha1.NodePrepareVolumeResponse{MountSpecs: []*preparev1alpha1.MountSpec{{
					Kind: &preparev1alpha1.MountSpec_Fuse{Fuse: &preparev1alpha1.FuseMount{HandleId: "f"}},
				}}}, nil
			})
			_, err := r.co.Up(r.ctx, r.use(r.volume("v")))
			if err == nil || test.want != nil && !errors.Is(err, test.want) {
				t.Errorf("got %v, want %v", err, test.want)
			}
			r.nothingLeft()
			for _, c := range kept {
				c.Close()
			}
			for _, d := range devices {
				d.Close()
			}
		})
	}
}

// TestFUSEMountIsReplacedForARunningConsumer has a server that cannot be
// resumed die, and another begin anew.
func TestFUSEMountIsReplacedForARunningConsumer(t *testing.T) {
	g := newGround(t)
	g.kill()
	g.serves = true
	g.start()
	c := g.open()
	defer c.Close()
	u := useOf(g.dir, g.volume)
	u.PrepareID, u.Target.Path = "f1", filepath.Join(g.dir, "consumer", "f1")
	record, err := c.Up(g.ctx, u)
	g.must(err)
	g.kill()
	g.start()
	r := &rig{T: t, ctx: g.ctx, dir: g.dir, co: c}
	r.eventually("the mount was replaced", func() bool {
		now := r.record()
		return now.Phase == Performed && now.Receipts[0].MountID != record.Receipts[0].MountID
	})
	if out, err := exec.CommandContext(g.ctx, "stat", "--format=%F", u.Target.Path).CombinedOutput(); err != nil || !bytes.Contains(out, []byte("directory")) {
		t.Errorf("the consumer sees %s, %v", out, err)
	}
	r.mountsAt(u.Target.Path, 1)
	g.must(c.Down(g.ctx, record.Key()))
	g.state("taken down")
}
