package activate

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/mount/manager"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/errdefs"
	gofuse "github.com/hanwen/go-fuse/v2/fuse"
	bolt "go.etcd.io/bbolt"
	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/drivers/fuse/attach"
	"github.com/csi-prepare/csi-prepare/drivers/fuse/loopback"
	"github.com/csi-prepare/csi-prepare/reference/fusemount"
	"github.com/csi-prepare/csi-prepare/reference/handoff"
	"github.com/csi-prepare/csi-prepare/reference/kernel"
	"github.com/csi-prepare/csi-prepare/reference/master"
	"github.com/csi-prepare/csi-prepare/reference/mountns"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
	"github.com/csi-prepare/csi-prepare/reference/mountspec/containerd"
	"github.com/csi-prepare/csi-prepare/reference/perform"
)

const roleVariable = "CSI_PREPARE_ACTIVATE_ROLE"

// TestMain runs the tests in a mount namespace of their own.
func TestMain(m *testing.M) {
	perform.MainIfChild()
	role, argument, _ := strings.Cut(os.Getenv(roleVariable), " ")
	switch {
	case role == "serve":
		if err := serve(argument); err != nil {
			fmt.Fprintln(os.Stderr, "serve:", err)
			os.Exit(1)
		}
		os.Exit(0)
	case role == "inside" || os.Getuid() != 0:
		os.Unsetenv(roleVariable)
		os.Exit(m.Run())
	}
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), roleVariable+"=inside")
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: unix.CLONE_NEWNS, Pdeathsig: unix.SIGKILL}
	if err := cmd.Run(); err != nil && cmd.ProcessState == nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(cmd.ProcessState.ExitCode())
}

// serve serves the FUSE device at descriptor 3 with what is in a directory.
func serve(dir string) error {
	fs, err := loopback.New(dir, dir+"-orphans", loopback.Options{})
	if err != nil {
		return err
	}
	device := os.NewFile(3, "device")
	s, _, err := attach.Start(context.Background(), device, fs, gofuse.MountOptions{})
	if err != nil {
		return err
	}
	device.Close()
	return s.Serve()
}

// site is containerd's part of a node: the mount manager and its database.
type site struct {
	*testing.T
	ctx     context.Context
	dir     string
	mounter *Mounter
	manager mount.Manager
	db      *bolt.DB
}

func newSite(t *testing.T) *site {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root: it mounts")
	}
	s := &site{T: t, ctx: namespaces.WithNamespace(t.Context(), "test"), dir: t.TempDir()}
	s.open()
	t.Cleanup(func() {
		s.db.Close()
		// What a failed test has left goes with its namespace; nothing is to
		// be removed through it.
		for _, m := range slices.Backward(s.table().Below(s.dir)) {
			_ = unix.Unmount(m.Point, unix.MNT_DETACH)
		}
	})
	return s
}

// open opens what a daemon opens, as after a restart.
func (s *site) open() {
	s.Helper()
	var err error
	s.db, err = bolt.Open(filepath.Join(s.dir, "mounts.db"), 0o600, nil)
	s.must(err)
	s.mounter, err = New(filepath.Join(s.dir, "receipts"))
	s.must(err)
	s.manager, err = manager.NewManager(s.db, filepath.Join(s.dir, "m"), manager.WithMountHandler(Type, s.mounter))
	s.must(err)
}

func (s *site) must(err error) {
	s.Helper()
	if err != nil {
		s.Fatal(err)
	}
}

func (s *site) table() *mountns.Table {
	s.Helper()
	own, err := mountns.Own()
	s.must(err)
	defer own.Close()
	t, err := own.Table(context.WithoutCancel(s.ctx))
	s.must(err)
	return t
}

// target is a place on a mount that does not propagate.
func (s *site) target() string {
	dir := filepath.Join(s.dir, "target")
	s.must(os.MkdirAll(dir, 0o755))
	return dir
}

// handle is a mount as a plugin sends it, with a word in it.
func (s *site) handle() (Offer, string) {
	s.Helper()
	fs, err := kernel.OpenFS("tmpfs")
	s.must(err)
	defer fs.Close()
	s.must(fs.Create())
	fd, err := fs.Mount(0)
	s.must(err)
	sent, word := os.NewFile(uintptr(fd), "sent"), rand.Text()
	defer sent.Close()
	f, err := unix.Openat(fd, "word", unix.O_CREAT|unix.O_WRONLY|unix.O_CLOEXEC, 0o644)
	s.must(err)
	_, err = unix.Write(f, []byte(word))
	s.must(err)
	unix.Close(f)
	received, err := master.Receive(s.ctx, sent, master.Expected{FSType: "tmpfs"})
	s.must(err)
	s.Cleanup(func() { received.Close() })
	return Offer{
		Spec:   mountspec.Spec{Kind: &mountspec.Handle{ID: "h", FSType: "tmpfs"}, Attributes: mountspec.Attributes{Readonly: true}},
		Master: received,
	}, word
}

// fuse is a FUSE mount that another process serves.
func (s *site) fuse() (Offer, string) {
	s.Helper()
	dir, word := filepath.Join(s.dir, "served"), rand.Text()
	s.must(os.MkdirAll(dir, 0o755))
	s.must(os.MkdirAll(dir+"-orphans", 0o755))
	s.must(os.WriteFile(dir+"/word", []byte(word), 0o644))
	device, made, err := fusemount.Policy{}.Mount(s.ctx, handoff.Key{}, handoff.FUSERequest{RootMode: unix.S_IFDIR | 0o755})
	if err != nil {
		s.Skipf("no FUSE: %v", err)
	}
	server := exec.Command("/proc/self/exe")
	server.Env = append(os.Environ(), roleVariable+"=serve "+dir)
	server.Stderr, server.ExtraFiles = os.Stderr, []*os.File{device}
	s.must(server.Start())
	device.Close()
	s.Cleanup(func() {
		s.must(fusemount.Abort(context.Background(), made))
		_ = server.Process.Kill()
		_ = server.Wait()
		made.Close()
	})
	s.must(fusemount.Prove(s.ctx, made))
	return Offer{
		Spec: mountspec.Spec{Kind: &mountspec.FUSE{ID: "f"}, Attributes: mountspec.Attributes{Noexec: true}}, Master: master.Made(made),
	}, word
}

func TestHandlesAndFUSEAreActivated(t *testing.T) {
	for name, make := range map[string]func(*site) (Offer, string){"HANDLE": (*site).handle, "FUSE": (*site).fuse} {
		t.Run(name, func(t *testing.T) {
			s := newSite(t)
			offer, word := make(s)
			before := s.table()
			s.must(s.mounter.Offer("v1", offer))
			list, err := s.mounter.List("v1")
			s.must(err)
			info, err := s.manager.Activate(s.ctx, "container", list)
			s.must(err)
			if len(info.Active) != 1 || len(info.System) != 1 || info.System[0].Type != "bind" {
				t.Fatalf("got %+v, want one active mount and a bind of it", info)
			}
			target := s.target()
			s.must(mount.All(info.System, target))
			if got, _ := os.ReadFile(target + "/word"); string(got) != word {
				t.Errorf("read %q, want %q", got, word)
			}
			m, found := s.table().Top(target)
			want, _ := mountspec.Policy{}.Effective(offer.Spec)
			if !found || mountspec.Attr(m.Attr)&want != want {
				t.Errorf("bound with %s, want at least %s", m.Attributes(), want)
			}
			s.must(mount.UnmountMounts(info.System, target, 0))
			s.must(s.manager.Deactivate(s.ctx, "container"))
			if c := mountns.Diff(before, s.table()); !c.Empty() {
				t.Errorf("left:\n%s", c)
			}
			if left, _ := os.ReadDir(filepath.Join(s.dir, "receipts")); len(left) > 0 {
				t.Errorf("receipts are left: %v", left)
			}
		})
	}
}

func TestADaemonThatRestartsTakesAwayWhatItActivated(t *testing.T) {
	s := newSite(t)
	before := s.table()
	offer, _ := s.handle()
	s.must(s.mounter.Offer("v1", offer))
	list, err := s.mounter.List("v1")
	s.must(err)
	_, err = s.manager.Activate(s.ctx, "container", list)
	s.must(err)
	s.must(s.db.Close())
	s.open()
	s.must(s.manager.Deactivate(s.ctx, "container"))
	if c := mountns.Diff(before, s.table()); !c.Empty() {
		t.Errorf("left:\n%s", c)
	}
	if _, err := s.manager.Activate(s.ctx, "container", list); err == nil {
		t.Error("an offer outlived the daemon it was made to")
	}
	if c := mountns.Diff(before, s.table()); !c.Empty() {
		t.Errorf("failed, and left:\n%s", c)
	}
}

func TestWhatIsInUseStaysActive(t *testing.T) {
	s := newSite(t)
	offer, _ := s.handle()
	s.must(s.mounter.Offer("v1", offer))
	list, err := s.mounter.List("v1")
	s.must(err)
	info, err := s.manager.Activate(s.ctx, "container", list)
	s.must(err)
	f, err := os.Open(info.Active[0].MountPoint + "/word")
	s.must(err)
	err = s.mounter.Unmount(s.ctx, info.Active[0].MountPoint)
	if !errors.Is(err, unix.EBUSY) {
		t.Errorf("got %v, want EBUSY", err)
	}
	f.Close()
	s.must(s.manager.Deactivate(s.ctx, "container"))
}

func TestOtherSpecsAreNotOffered(t *testing.T) {
	s := newSite(t)
	for _, spec := range []mountspec.Spec{
		{Kind: &mountspec.Bind{}},
		{},
		{Kind: &mountspec.FUSE{ID: "f"}, Target: "below"},
	} {
		if err := s.mounter.Offer("v", Offer{Spec: spec}); err == nil {
			t.Errorf("%+v was taken", spec)
		}
	}
	place := filepath.Join(s.dir, "place")
	for _, entry := range []mount.Mount{
		{Type: Type, Source: "nobody"},
		{Type: Type, Source: "v", Options: []string{"ro"}},
		{Type: "bind", Source: "v"},
	} {
		if _, err := s.mounter.Mount(s.ctx, entry, place, nil); err == nil {
			t.Errorf("%+v was mounted", entry)
		}
	}
	if _, err := os.Lstat(place); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the place was made: %v", err)
	}
}

// TestConvertedMountsAreMadeByContainerd has the mounts of package containerd
// made by containerd's own code. The manager leaves such a list to the runtime.
func TestConvertedMountsAreMadeByContainerd(t *testing.T) {
	s := newSite(t)
	source, word := filepath.Join(s.dir, "source"), rand.Text()
	s.must(os.MkdirAll(source, 0o755))
	s.must(unix.Mount("tmpfs", source, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, ""))
	t.Cleanup(func() { s.must(unix.Unmount(source, 0)) })
	s.must(os.WriteFile(source+"/word", []byte(word), 0o644))
	m, found := s.table().Top(source)
	if !found {
		t.Fatal("no source")
	}
	spec := mountspec.Spec{
		Kind:       &mountspec.Bind{Source: mountspec.PathRef{Base: mountspec.BaseGranted, Grant: "g"}},
		Attributes: mountspec.Attributes{Readonly: true},
	}
	list, err := containerd.Convert([]mountspec.Spec{spec},
		[]mountspec.Place{{Found: source, Attributes: mountspec.Attr(m.Attr), Private: true}},
		containerd.Options{PrivateParent: true})
	s.must(err)
	var mounts []mount.Mount
	for _, e := range list {
		mounts = append(mounts, mount.Mount{Type: e.GetType(), Source: e.GetSource(), Target: e.GetTarget(), Options: e.GetOptions()})
	}
	if _, err := s.manager.Activate(s.ctx, "plain", mounts); !errdefs.IsNotImplemented(err) {
		t.Errorf("got %v, want that there is nothing to activate", err)
	}
	target := s.target()
	s.must(mount.All(mounts, target))
	if got, _ := os.ReadFile(target + "/word"); string(got) != word {
		t.Errorf("read %q, want %q", got, word)
	}
	if err := os.WriteFile(target+"/new", nil, 0o644); !errors.Is(err, unix.EROFS) {
		t.Errorf("written: %v", err)
	}
	bound, _ := s.table().Top(target)
	want, _ := mountspec.Policy{}.Effective(spec)
	if mountspec.Attr(bound.Attr)&want != want {
		t.Errorf("bound with %s, want at least %s", bound.Attributes(), want)
	}
	s.must(mount.UnmountMounts(mounts, target, 0))
}
