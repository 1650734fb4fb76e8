package nfs_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	"github.com/csi-prepare/csi-prepare/reference/co"
	"github.com/csi-prepare/csi-prepare/reference/handoff"
	"github.com/csi-prepare/csi-prepare/reference/mountns"
	"github.com/csi-prepare/csi-prepare/reference/perform"
	prepare "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
	"github.com/csi-prepare/csi-prepare/vm/nfsd"
)

// What a consumer writes is at the server, and what is written at the server
// the consumer reads, in every version and on both families of addresses.
func TestData(t *testing.T) {
	for _, tt := range []struct {
		version, address string
		shown            string
	}{
		{"3", nfsd.Address4, "vers=3"},
		{"3", nfsd.Address6, "proto=tcp6"},
		{"4.0", nfsd.Address4, "vers=4.0"},
		{"4.1", nfsd.Address4, "vers=4.1"},
		{"4.2", nfsd.Address4, "vers=4.2"},
		{"4.2", nfsd.Address6, "proto=tcp6"},
	} {
		t.Run(tt.version+" "+tt.address, func(t *testing.T) {
			s := newSite(t)
			s.addresses = []netip.Addr{netip.MustParseAddr(tt.address)}
			v := s.volume("vers", tt.version)
			r := s.up(s.use(v, "c1"))
			if o := s.options(s.place("c1")); !strings.Contains(o, tt.shown) || !strings.Contains(o, "addr="+tt.address) {
				t.Errorf("mounted with %s, want %s and addr=%s", o, tt.shown, tt.address)
			}
			s.write(s.place("c1", "file"), "from the consumer")
			behind := s.atServer(v.GetVolumeContext()["directory"])
			s.holds(filepath.Join(behind, "file"), "from the consumer")
			s.write(filepath.Join(behind, "other"), "from the server")
			s.holds(s.place("c1", "other"), "from the server")

			readonly := s.use(v, "c2")
			readonly.Readonly = true
			r2 := s.up(readonly)
			s.holds(s.place("c2", "file"), "from the consumer")
			if err := os.WriteFile(s.place("c2", "file"), nil, 0o644); !errors.Is(err, unix.EROFS) {
				t.Errorf("writing where it is read-only: %v", err)
			}
			s.write(s.place("c1", "file"), "still writable")
			s.down(r.Key())
			s.down(r2.Key())
			s.nothingLeft()
			s.holds(filepath.Join(behind, "file"), "still writable")
		})
	}
}

// The address is asked for at each Prepare, and of several the one that answers
// is taken.
func TestAddresses(t *testing.T) {
	s := newSite(t)
	v := s.volume()
	s.addresses = []netip.Addr{netip.MustParseAddr("10.77.0.99"), netip.MustParseAddr(nfsd.Address4)}
	r := s.up(s.use(v, "c1"))
	if o := s.options(s.place("c1")); !strings.Contains(o, "addr="+nfsd.Address4) {
		t.Errorf("mounted with %s, want the address that answers", o)
	}
	s.down(r.Key())
	s.mu.Lock()
	s.addresses = []netip.Addr{netip.MustParseAddr(nfsd.Address6)} // the name has moved
	s.mu.Unlock()
	r = s.up(s.use(v, "c1"))
	if o := s.options(s.place("c1")); !strings.Contains(o, "addr="+nfsd.Address6) {
		t.Errorf("mounted with %s, want the new address", o)
	}
	s.down(r.Key())
	s.nothingLeft()
}

// A plugin with a mount helper hands the mount over: a clone of it, which is all
// that is left of what the helper did.
func TestViaHelper(t *testing.T) {
	s := newSite(t, func(s *site) {
		s.helper = filepath.Join(s.dir, helperName)
		self, err := os.Executable()
		s.must(err)
		s.must(os.Symlink(self, s.helper))
	})
	v := s.volume()
	listener, err := handoff.Listen(handoff.Config{Directory: filepath.Join(s.dir, "handoff"), UID: os.Getuid(), GID: os.Getgid()})
	s.must(err)
	defer listener.Close()
	r := &prepare.NodePrepareVolumeRequest{
		VolumeId: v.GetVolumeId(), PrepareId: "c1", VolumeCapability: capability(), VolumeContext: v.GetVolumeContext(),
		PreparePath: s.place("prepare"), Performer: &prepare.Performer{
			Kernel: prepare.Performer_NODE, Kinds: []prepare.MountKind{prepare.MountKind_MOUNT_KIND_HANDLE},
		},
	}
	s.must(os.Mkdir(r.GetPreparePath(), 0o700))
	call, err := listener.Begin(s.ctx, handoff.Key{VolumeID: r.GetVolumeId(), PrepareID: r.GetPrepareId()})
	s.must(err)
	r.HandleSocket, r.HandoffToken = listener.Path(), call.Token()
	answer, err := prepare.NewNodePrepareClient(s.dial()).NodePrepareVolume(s.ctx, r, grpc.WaitForReady(true))
	s.must(err)
	handle := answer.GetMountSpecs()[0].GetHandle()
	handles, err := call.Finish(handle.GetHandleId())
	s.must(err)
	mount := handles[0].Mount
	if c := mountns.Diff(s.before, s.table()); !c.Empty() {
		t.Errorf("the helper's mount is seen outside:\n%s", c)
	}
	s.write(fmt.Sprintf("/proc/self/fd/%d/file", mount.Fd()), "by a helper")
	s.holds(s.atServer(v.GetVolumeContext()["directory"], "file"), "by a helper")
	if handle.GetFsType() != "nfs4" {
		t.Errorf("it is said to be %s", handle.GetFsType())
	}
	listener.Release(handoff.Key{VolumeID: r.GetVolumeId(), PrepareID: r.GetPrepareId()})
	s.must(os.Remove(r.GetPreparePath()))
	s.nothingLeft()
}

// A server whose port is closed is refused at once, although the mount is hard.
func TestServerStopped(t *testing.T) {
	s := newSite(t)
	v := s.volume()
	s.must(s.host.Stop())
	t.Cleanup(func() { s.must(s.host.Serve()) })
	_, err := s.co.Up(s.ctx, s.use(v, "c1"))
	if !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("got %v, want ECONNREFUSED", err)
	}
	s.nothingLeft()
}

// A server that says nothing holds up its own volume until the deadline of the
// step, and no other.
func TestServerSilent(t *testing.T) {
	s := newSite(t)
	v := s.volume()
	s.reopen(strict)
	restore := s.silent()
	var wg sync.WaitGroup
	wg.Go(func() {
		_, err := s.co.Up(s.ctx, s.use(v, "c1"))
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v, want the deadline", err)
		}
	})
	// Meanwhile another volume comes and goes, by the same executor.
	s.other()
	wg.Wait()
	restore()
	s.reopen(lenient)
	s.nothingLeft()
	r := s.up(s.use(v, "c1"))
	s.down(r.Key())
	s.nothingLeft()
}

// other performs and undoes a volume that needs no server.
func (s *site) other() {
	s.Helper()
	dir := filepath.Join(s.dir, "other")
	s.must(os.MkdirAll(filepath.Join(dir, "data"), 0o755))
	s.must(os.MkdirAll(filepath.Join(dir, "place"), 0o755))
	ctx, cancel := context.WithTimeout(s.ctx, time.Minute)
	defer cancel()
	done, err := perform.Perform(ctx, perform.Target{Path: filepath.Join(dir, "place")}, bindSpecs(), perform.Options{
		Request: bindRequest(), Grants: map[string]string{"data": dir},
	})
	s.must(err)
	s.must(perform.Undo(ctx, nil, done.Receipts))
}

// A server that does not have the directory refuses by its own word, in either
// protocol.
func TestServerRefuses(t *testing.T) {
	for _, version := range []string{"3", "4.2"} {
		t.Run(version, func(t *testing.T) {
			s := newSite(t)
			v := s.volume("vers", version)
			s.must(s.host.Unexport(s.export))
			_, err := s.co.Up(s.ctx, s.use(v, "c1"))
			if !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EACCES) {
				t.Errorf("got %v, want ENOENT or EACCES", err)
			}
			s.nothingLeft()
		})
	}
}

// An export that is taken back leaves stale handles with its consumers, and
// can be undone.
func TestExportRemoved(t *testing.T) {
	for _, version := range []string{"3", "4.2"} {
		t.Run(version, func(t *testing.T) {
			s := newSite(t)
			v := s.volume("vers", version)
			r := s.up(s.use(v, "c1", "actimeo=0"))
			s.write(s.place("c1", "file"), "text")
			s.must(s.host.Unexport(s.export))
			if _, err := os.Stat(s.place("c1", "file")); !errors.Is(err, unix.ESTALE) && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EACCES) {
				t.Errorf("got %v, want a stale handle", err)
			}
			s.down(r.Key())
			s.nothingLeft()
		})
	}
}

// A directory that is removed at the server is stale, and can be undone.
func TestDirectoryRemoved(t *testing.T) {
	s := newSite(t)
	v := s.volume()
	r := s.up(s.use(v, "c1", "actimeo=0"))
	s.must(os.Remove(s.atServer(v.GetVolumeContext()["directory"])))
	if _, err := os.Stat(s.place("c1", "file")); !errors.Is(err, unix.ESTALE) && !errors.Is(err, unix.ENOENT) {
		t.Errorf("got %v, want a stale handle", err)
	}
	s.down(r.Key())
	s.nothingLeft()
}

// What is mounted is undone without a word from the server.
func TestUndoWhileSilent(t *testing.T) {
	for _, version := range []string{"3", "4.2"} {
		t.Run(version, func(t *testing.T) {
			s := newSite(t)
			v := s.volume("vers", version)
			r := s.up(s.use(v, "c1"))
			s.write(s.place("c1", "file"), "text")
			// Long enough for what has to be done, on any machine, and no
			// longer than the farewell to the server may take.
			s.reopen("defaults: {stepDeadline: 1m, attempts: 1}")
			restore := s.silent()
			ctx, cancel := context.WithTimeout(s.ctx, 4*time.Minute)
			defer cancel()
			err := s.co.Down(ctx, r.Key())
			if len(s.table().At(s.place("c1"))) > 0 {
				t.Errorf("it is still mounted: %v", err)
			}
			if ctx.Err() != nil {
				t.Error("it has not ended within its deadline")
			}
			restore()
			s.reopen(lenient)
			s.down(r.Key()) // whatever was left of it
			s.nothingLeft()
		})
	}
}

// A mount that a process waits in is busy. By force it is taken away, each step
// reported, and the process gets an error.
func TestForceWhileSilent(t *testing.T) {
	s := newSite(t)
	v := s.volume()
	r := s.up(s.use(v, "c1"))
	s.write(s.place("c1", "file"), "text")
	restore := s.silent()
	// It waits for the server.
	reader := exec.Command("cat", s.place("c1", "not looked up before"))
	reader.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: unix.SIGKILL}
	s.must(reader.Start())
	ended := make(chan error, 1)
	go func() { ended <- reader.Wait() }()
	for len(waiting(reader.Process.Pid)) == 0 {
		time.Sleep(20 * time.Millisecond)
	}
	if err := perform.Undo(s.ctx, nil, r.Receipts); !errors.Is(err, unix.EBUSY) {
		t.Errorf("undo of what a process waits in: %v, want EBUSY", err)
	}
	steps, err := perform.ForceUndo(s.ctx, nil, r.Receipts, perform.Lazy)
	if err != nil {
		t.Error(err)
	}
	var names []string
	for i, f := range steps {
		names = append(names, f.Step.String())
		if f.Busy == nil || f.Target != s.place("c1") || i == 0 && f.Step != perform.Abort {
			t.Errorf("step %d is %+v", i, f)
		}
	}
	t.Logf("steps: %v", names)
	if len(s.table().At(s.place("c1"))) > 0 {
		t.Error("it is still mounted")
	}
	restore()
	select {
	case <-ended:
	case <-time.After(time.Minute):
		t.Error("who waited for the server still does")
		_ = reader.Process.Kill()
	}
	s.down(r.Key())
	s.nothingLeft()
}

// waiting returns the state of a process in an uninterruptible or killable
// sleep, empty if it is in none.
func waiting(pid int) string {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return ""
	}
	if _, rest, ok := strings.Cut(string(text), ") "); ok && strings.HasPrefix(rest, "D") {
		return "D"
	}
	return ""
}

// The consumer has a network of its own, without a way to the server: the
// volume is on the node's. When the consumer is gone, so is the volume.
func TestConsumersNetwork(t *testing.T) {
	s := newSite(t)
	v := s.volume()
	consumer := exec.Command("sleep", "1000")
	consumer.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET, Unshareflags: unix.CLONE_NEWNS, Pdeathsig: unix.SIGKILL}
	s.must(consumer.Start())
	ended := false
	kill := func() {
		if !ended {
			_ = consumer.Process.Kill()
			_ = consumer.Wait()
			ended = true
		}
	}
	t.Cleanup(kill)
	s.must(os.Mkdir(s.place("c1"), 0o755))
	ns, err := mountns.OfPID(consumer.Process.Pid)
	s.must(err)
	defer ns.Close()
	u := s.use(v, "c1")
	u.Target.Namespace = ns
	r := s.up(u)
	if len(s.table().At(s.place("c1"))) > 0 {
		t.Error("it is mounted in the node's namespace")
	}
	inside := fmt.Sprintf("/proc/%d/root", consumer.Process.Pid)
	s.write(inside+s.place("c1", "file"), "by the node's network")
	s.holds(s.atServer(v.GetVolumeContext()["directory"], "file"), "by the node's network")
	kill()
	_ = ns.Close()
	s.down(r.Key())
	s.must(os.Remove(s.place("c1")))
	s.nothingLeft()
}

// One export with other options is another mount of it, with those options.
func TestOtherOptions(t *testing.T) {
	s := newSite(t)
	v := s.volume()
	one := s.up(s.use(v, "c1", "timeo=300", "soft"))
	two := s.up(s.use(v, "c2", "timeo=900", "hard"))
	for place, want := range map[string]string{"c1": "soft,proto=tcp,timeo=300", "c2": "hard,proto=tcp,timeo=900"} {
		if o := s.options(s.place(place)); !strings.Contains(o, want) {
			t.Errorf("%s is mounted with %s, want %s", place, o, want)
		}
	}
	s.write(s.place("c1", "file"), "one")
	s.holds(s.place("c2", "file"), "one")
	s.down(one.Key())
	s.holds(s.place("c2", "file"), "one")
	s.down(two.Key())
	s.nothingLeft()
}

// Many volumes of one server come and go, each with its own data.
func TestManyVolumes(t *testing.T) {
	many := 50
	if testing.Short() {
		many = 5
	}
	s := newSite(t)
	var keys []co.Key
	for i := range many {
		id := fmt.Sprint("c", i)
		v := s.volume()
		keys = append(keys, s.up(s.use(v, id)).Key())
		s.write(s.place(id, "file"), id)
		s.holds(s.atServer(v.GetVolumeContext()["directory"], "file"), id)
	}
	for i, k := range keys {
		s.holds(s.place(fmt.Sprint("c", i), "file"), fmt.Sprint("c", i))
		s.down(k)
	}
	s.nothingLeft()
}

// A volume outlives the driver and the CO, and the next ones take it back.
func TestRestarts(t *testing.T) {
	s := newSite(t)
	v := s.volume()
	r := s.up(s.use(v, "c1"))
	s.write(s.place("c1", "file"), "text")
	s.must(s.co.Close())
	s.stop()
	s.holds(s.place("c1", "file"), "text")
	s.start()
	s.open()
	s.holds(s.place("c1", "file"), "text")
	s.up(s.use(v, "c1")) // a repeat
	s.down(r.Key())
	s.nothingLeft()
}
