package co

import (
	"bytes"
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/fakes/sp"
	"github.com/csi-prepare/csi-prepare/reference/mountns"
	"github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// rig is a CO, a plugin in this process whose every call a test can change,
// and a consumer.
type rig struct {
	*testing.T
	ctx    context.Context
	dir    string
	co     *CO
	plugin *sp.Server
	log    bytes.Buffer
	before *mountns.Table

	mu    sync.Mutex
	calls []string
	hook  around
}

func newRig(t *testing.T) *rig {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	r := &rig{T: t, ctx: ctx, dir: tempDir(t)}
	for _, d := range []string{"data", "consumer"} {
		r.must(os.Mkdir(r.path(d), 0o755))
	}
	var err error
	r.plugin, err = sp.New(sp.Config{Grants: map[string]string{"data": r.path("data")}, Staging: true})
	r.must(err)
	serving, stop := context.WithCancel(ctx)
	ended := make(chan error, 1)
	l, err := listen(r.dir)
	r.must(err)
	go func() { ended <- serve(serving, l, r.plugin, r.around) }()
	r.open()
	r.before = r.table()
	t.Cleanup(func() {
		if err := r.co.Close(); err != nil {
			t.Error(err)
		}
		stop()
		<-ended
		cancel()
	})
	return r
}

// tempDir is t.TempDir with a path short enough for a socket.
func tempDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	if err := os.Chmod(dir, 0o711); err != nil {
		t.Fatal(err)
	}
	return dir
}

func (r *rig) around(ctx context.Context, method string, request any, next func(context.Context) (any, error)) (any, error) {
	r.mu.Lock()
	r.calls = append(r.calls, method)
	hook := r.hook
	r.mu.Unlock()
	if hook != nil {
		return hook(ctx, method, request, next)
	}
	return next(ctx)
}

// answering has the plugin's calls changed from now on.
func (r *rig) answering(hook around) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.hook = hook
}

// specs has NodePrepareVolume answer with other mount specs.
func (r *rig) specs(specs ...*preparev1alpha1.MountSpec) {
	r.answering(func(ctx context.Context, method string, _ any, next func(context.Context) (any, error)) (any, error) {
		answer, err := next(ctx)
		if method == "NodePrepareVolume" && err == nil {
			answer = &preparev1alpha1.NodePrepareVolumeResponse{MountSpecs: specs}
		}
		return answer, err
	})
}

// called returns the calls that act on volumes, in order, since the last time.
func (r *rig) called() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	acting := slices.DeleteFunc(r.calls, func(m string) bool { return !strings.HasSuffix(m, "Volume") })
	r.calls = nil
	return acting
}

// open opens the CO's directory, anew if it was open.
func (r *rig) open() {
	r.Helper()
	if r.co != nil {
		r.must(r.co.Close())
	}
	var err error
	r.co, err = Open(Config{
		Dir: r.path("co"), Policy: testPolicy(r.dir),
		Log: slog.New(slog.NewTextHandler(&r.log, &slog.HandlerOptions{Level: slog.LevelDebug})),
	})
	r.must(err)
}

// set changes the policy.
func (r *rig) set(change func(*Settings)) {
	s := r.co.policy.defaults.clone()
	change(&s)
	r.co.policy = &Policy{defaults: s}
}

func (r *rig) path(name string) string { return filepath.Join(r.dir, name) }

func (r *rig) must(err error) {
	r.Helper()
	if err != nil {
		r.Fatal(err)
	}
}

// volume makes a volume with a file "file" in it.
func (r *rig) volume(name string) string {
	r.Helper()
	v, err := r.plugin.CreateVolume(r.ctx, &csi.CreateVolumeRequest{Name: name, VolumeCapabilities: []*csi.VolumeCapability{capability()}})
	r.must(err)
	id := v.GetVolume().GetVolumeId()
	r.must(os.WriteFile(filepath.Join(r.data(id), "file"), []byte(name), 0o644))
	return id
}

// data returns the directory of a volume's data.
func (r *rig) data(id string) string { return filepath.Join(r.dir, "data", id) }

func (r *rig) use(volume string) Use { return useOf(r.dir, volume) }

func (r *rig) up(u Use) *Record {
	r.Helper()
	record, err := r.co.Up(r.ctx, u)
	r.must(err)
	return record
}

func (r *rig) down(k Key) {
	r.Helper()
	r.must(r.co.Down(r.ctx, k))
}

func (r *rig) table() *mountns.Table {
	r.Helper()
	ns, err := mountns.Own()
	r.must(err)
	defer ns.Close()
	t, err := ns.Table(r.ctx)
	r.must(err)
	return t
}

// mountsAt counts the mounts attached at a target.
func (r *rig) mountsAt(path string, want int) {
	r.Helper()
	if got := r.table().At(path); len(got) != want {
		r.Errorf("%d mounts at %s, want %d: %v", len(got), path, want, got)
	}
}

// nothingLeft fails the test unless mounts, records, directories and
// preparations are as in the beginning.
func (r *rig) nothingLeft() {
	r.Helper()
	if c := mountns.Diff(r.before, r.table()); !c.Empty() {
		r.Errorf("the mount table has changed:\n%s", c)
	}
	for _, dir := range []string{"co/ledger", "co/prepare", "co/staging", "consumer"} {
		entries, err := os.ReadDir(r.path(dir))
		r.must(err)
		for _, e := range entries {
			r.Errorf("left: %s/%s", dir, e.Name())
		}
	}
	list, err := r.plugin.NodeListPreparedVolumes(r.ctx, &preparev1alpha1.NodeListPreparedVolumesRequest{})
	r.must(err)
	if len(list.GetEntries()) > 0 {
		r.Errorf("the plugin still has %v", list.GetEntries())
	}
}

// mount mounts, and unmounts at the end of the test if it is still there.
func (r *rig) mount(source, target, fstype, data string) {
	r.Helper()
	r.must(unix.Mount(source, target, fstype, 0, data))
	r.Cleanup(func() { _ = unix.Unmount(target, unix.MNT_DETACH) })
}

// record reads the one record there is, as another process would.
func (r *rig) record() Record {
	r.Helper()
	records, err := ReadLedger(r.path("co"))
	r.must(err)
	if len(records) != 1 {
		r.Fatalf("%d records, want 1: %+v", len(records), records)
	}
	return records[0]
}

// bind is a mount spec for a directory of the grant.
func bind(relative, target string) *preparev1alpha1.MountSpec {
	return &preparev1alpha1.MountSpec{
		Target: target,
		Kind: &preparev1alpha1.MountSpec_Bind{Bind: &preparev1alpha1.BindMount{
			Source: &preparev1alpha1.PathRef{Base: preparev1alpha1.PathRef_GRANTED, Grant: "data", Relative: relative},
		}},
	}
}

// image makes a consumer's root with a directory in it.
func (r *rig) image(dir string) *os.File {
	r.Helper()
	r.must(os.MkdirAll(r.path(filepath.Join("consumer/image", dir)), 0o755))
	root, err := os.Open(r.path("consumer/image"))
	r.must(err)
	r.Cleanup(func() { root.Close() })
	return root
}

func (r *rig) link(to, name string) {
	r.Helper()
	r.must(os.Symlink(to, r.path(name)))
}
