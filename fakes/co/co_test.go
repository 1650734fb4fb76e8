package co

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/fakes/mutant"
	"github.com/csi-prepare/csi-prepare/reference/mountns"
	preparev1alpha1 "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
	testingv1alpha1 "github.com/csi-prepare/csi-prepare/spec/testingv1alpha1"
)

// rig is a consumer: a mount namespace of its own with a root in it, and a
// granted directory with a volume.
type rig struct {
	t     *testing.T
	ns    *mountns.Namespace
	root  string
	grant string
}

func newRig(t *testing.T) *rig {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("mounting needs root")
	}
	ns, err := mountns.New(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ns.Close() })
	r := &rig{t: t, ns: ns, root: t.TempDir(), grant: t.TempDir()}
	r.mkdir(r.root, "place")
	r.mkdir(r.grant, "volume/inner")
	r.write(filepath.Join(r.grant, "volume/data"), "payload")
	return r
}

func (r *rig) mkdir(directory, name string) {
	r.t.Helper()
	if err := os.MkdirAll(filepath.Join(directory, name), 0o755); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) write(name, text string) {
	r.t.Helper()
	if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
		r.t.Fatal(err)
	}
}

// in runs f in the consumer's namespace.
func (r *rig) in(f func() error) error { return r.ns.Do(r.t.Context(), f) }

func (r *rig) place() string { return filepath.Join(r.root, "place") }

func (r *rig) request(id string, specs ...*preparev1alpha1.MountSpec) *testingv1alpha1.PerformRequest {
	return &testingv1alpha1.PerformRequest{
		Id: id,
		Target: &testingv1alpha1.Target{
			Namespace: fmt.Sprintf("/proc/self/fd/%d", r.ns.FD()), Root: r.root, Path: "/place",
		},
		Request: &testingv1alpha1.Request{
			Performer: &preparev1alpha1.Performer{
				Kernel: preparev1alpha1.Performer_NODE,
				Kinds: []preparev1alpha1.MountKind{
					preparev1alpha1.MountKind_MOUNT_KIND_BIND, preparev1alpha1.MountKind_MOUNT_KIND_FILESYSTEM,
				},
				FsTypes: []string{"tmpfs"},
				Grants:  []string{"data"},
			},
			Grants: map[string]string{"data": r.grant},
		},
		MountSpecs: specs,
	}
}

func bind(relative, target string) *preparev1alpha1.MountSpec {
	return &preparev1alpha1.MountSpec{
		Target: target,
		Kind: &preparev1alpha1.MountSpec_Bind{Bind: &preparev1alpha1.BindMount{Source: &preparev1alpha1.PathRef{
			Base: preparev1alpha1.PathRef_GRANTED, Grant: "data", Relative: relative,
		}}},
		Attributes: &preparev1alpha1.MountAttributes{},
	}
}

func tmpfs(target string) *preparev1alpha1.MountSpec {
	return &preparev1alpha1.MountSpec{
		Target: target,
		Kind: &preparev1alpha1.MountSpec_Filesystem{Filesystem: &preparev1alpha1.FilesystemMount{
			FsType:     "tmpfs",
			Parameters: []*preparev1alpha1.FsParameter{{Key: "size", Value: &preparev1alpha1.FsParameter_Text{Text: "1m"}}},
		}},
	}
}

// each runs a test against both executors.
func each(t *testing.T, test func(*testing.T, *rig, Executor)) {
	t.Run("plain", func(t *testing.T) { test(t, newRig(t), NewPlain()) })
	t.Run("reference", func(t *testing.T) { test(t, newRig(t), new(Reference)) })
}

// serve returns a conformant Server whose records lie in directory.
func serve(t *testing.T, e Executor, directory string) *Server {
	t.Helper()
	s, err := New(e, directory)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// points are the mount points below the consumer's root.
func (r *rig) points() []string {
	r.t.Helper()
	var points []string
	table, err := r.ns.Table(r.t.Context())
	if err != nil {
		r.t.Fatal(err)
	}
	for _, m := range table.Mounts {
		if strings.HasPrefix(m.Point, r.root) {
			points = append(points, strings.TrimPrefix(m.Point, r.root))
		}
	}
	return points
}

func (r *rig) wantPoints(want ...string) {
	r.t.Helper()
	if got := r.points(); strings.Join(got, " ") != strings.Join(want, " ") {
		r.t.Errorf("mounted at %q, want %q", got, want)
	}
}

func undo(p *testingv1alpha1.PerformRequest, receipts []string) *testingv1alpha1.UndoRequest {
	return &testingv1alpha1.UndoRequest{Id: p.GetId(), Target: p.GetTarget(), Receipts: receipts}
}

func TestPerformsAListAndUndoesIt(t *testing.T) {
	each(t, func(t *testing.T, r *rig, e Executor) {
		s := serve(t, e, "")
		p := r.request("one", bind("volume", ""), tmpfs("inner"))
		p.MountSpecs[0].Attributes.Readonly = true
		answer, err := s.Perform(t.Context(), p)
		if err != nil {
			t.Fatal(err)
		}
		r.wantPoints("/place", "/place/inner")
		if err := r.in(func() error {
			if data, err := os.ReadFile(filepath.Join(r.place(), "data")); err != nil || string(data) != "payload" {
				t.Errorf("the consumer reads %q, %v", data, err)
			}
			if err := os.WriteFile(filepath.Join(r.place(), "data"), nil, 0o644); err == nil {
				t.Error("the consumer writes to what is read-only")
			}
			return os.WriteFile(filepath.Join(r.place(), "inner", "new"), nil, 0o644)
		}); err != nil {
			t.Error(err)
		}
		for range 2 {
			if _, err := s.Undo(t.Context(), undo(p, answer.GetReceipts())); err != nil {
				t.Fatal(err)
			}
			r.wantPoints()
		}
	})
}

func TestRepeatPerformsNothing(t *testing.T) {
	each(t, func(t *testing.T, r *rig, e Executor) {
		s := serve(t, e, "")
		p := r.request("one", bind("volume", ""))
		first, err := s.Perform(t.Context(), p)
		if err != nil {
			t.Fatal(err)
		}
		second, err := s.Perform(t.Context(), p)
		if err != nil || second.GetReceipts()[0] != first.GetReceipts()[0] {
			t.Errorf("the repeat answers %v, %v", second, err)
		}
		r.wantPoints("/place")
		if _, err := s.Perform(t.Context(), r.request("one", bind("volume/inner", ""))); status.Code(err) != codes.AlreadyExists {
			t.Errorf("other arguments under the same id: %v", err)
		}
	})
}

func TestMissingTargetComesAndGoes(t *testing.T) {
	each(t, func(t *testing.T, r *rig, e Executor) {
		s := serve(t, e, "")
		p := r.request("one", bind("volume", ""))
		p.Target.Path = "/new"
		answer, err := s.Perform(t.Context(), p)
		if err != nil {
			t.Fatal(err)
		}
		r.wantPoints("/new")
		if _, err := s.Undo(t.Context(), undo(p, answer.GetReceipts())); err != nil {
			t.Fatal(err)
		}
		if _, err := os.Lstat(filepath.Join(r.root, "new")); !os.IsNotExist(err) {
			t.Errorf("the target it made is left: %v", err)
		}
	})
}

func TestRefusals(t *testing.T) {
	for _, test := range []struct {
		name   string
		change func(*rig, *testingv1alpha1.PerformRequest)
		want   codes.Code
		text   string
	}{
		{"a rule broken", func(_ *rig, p *testingv1alpha1.PerformRequest) { p.Request.Readonly = true }, codes.InvalidArgument, "prepare.readonly"},
		{"a later rule broken", func(_ *rig, p *testingv1alpha1.PerformRequest) {
			p.MountSpecs = append(p.MountSpecs, bind("volume", "/abs"))
		}, codes.InvalidArgument, "spec.target-relative"},
		{"a field of a later version", func(_ *rig, p *testingv1alpha1.PerformRequest) {
			p.MountSpecs[0].ProtoReflect().SetUnknown([]byte{0x98, 0x06, 0x01})
		}, codes.InvalidArgument, "spec.no-unknown-fields"},
		{"a link in the source", func(r *rig, p *testingv1alpha1.PerformRequest) {
			if err := os.Symlink("volume", filepath.Join(r.grant, "link")); err != nil {
				r.t.Fatal(err)
			}
			p.MountSpecs[0] = bind("link/inner", "")
		}, codes.FailedPrecondition, "source"},
		{"no such source", func(_ *rig, p *testingv1alpha1.PerformRequest) { p.MountSpecs[0] = bind("none", "") }, codes.FailedPrecondition, "source"},
		{"a file as a directory", func(_ *rig, p *testingv1alpha1.PerformRequest) { p.MountSpecs[0] = bind("volume/data", "") }, codes.FailedPrecondition, "directory"},
		{"the mount of the source is missing", func(_ *rig, p *testingv1alpha1.PerformRequest) {
			p.MountSpecs[0].GetBind().MountFsType = "tmpfs"
		}, codes.FailedPrecondition, "base"},
		{"no such target in the volume", func(_ *rig, p *testingv1alpha1.PerformRequest) {
			p.MountSpecs = append(p.MountSpecs, tmpfs("none"))
		}, codes.FailedPrecondition, "target"},
		{"a link as the target in the volume", func(r *rig, p *testingv1alpha1.PerformRequest) {
			if err := os.Symlink("inner", filepath.Join(r.grant, "volume/link")); err != nil {
				r.t.Fatal(err)
			}
			p.MountSpecs = append(p.MountSpecs, tmpfs("link"))
		}, codes.FailedPrecondition, "target"},
		{"a target in procfs", func(_ *rig, p *testingv1alpha1.PerformRequest) {
			p.Target.Root, p.Target.Path = "/", "/proc/sys"
		}, codes.FailedPrecondition, "proc"},
		{"a parameter the kernel does not know", func(_ *rig, p *testingv1alpha1.PerformRequest) {
			p.MountSpecs[0] = tmpfs("")
			p.MountSpecs[0].GetFilesystem().Parameters[0] = &preparev1alpha1.FsParameter{Key: "bogus", Value: &preparev1alpha1.FsParameter_Secret{Secret: "canary"}}
		}, codes.Internal, "bogus"},
	} {
		t.Run(test.name, func(t *testing.T) {
			each(t, func(t *testing.T, r *rig, e Executor) {
				s := serve(t, e, t.TempDir())
				p := r.request("one", bind("volume", ""))
				test.change(r, p)
				_, err := s.Perform(t.Context(), p)
				if status.Code(err) != test.want || !strings.Contains(err.Error(), test.text) {
					t.Errorf("got %v, want %s with %q", err, test.want, test.text)
				}
				if strings.Contains(err.Error(), "canary") {
					t.Error("the error shows a secret")
				}
				r.wantPoints()
			})
		})
	}
}

func TestBusyMountStaysAndIsReported(t *testing.T) {
	each(t, func(t *testing.T, r *rig, e Executor) {
		s := serve(t, e, "")
		p := r.request("one", bind("volume", ""))
		answer, err := s.Perform(t.Context(), p)
		if err != nil {
			t.Fatal(err)
		}
		fd := -1
		if err := r.in(func() (err error) {
			fd, err = unix.Open(filepath.Join(r.place(), "data"), unix.O_RDONLY|unix.O_CLOEXEC, 0)
			return err
		}); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Undo(t.Context(), undo(p, answer.GetReceipts())); status.Code(err) != codes.FailedPrecondition {
			t.Errorf("undo of a busy mount: %v", err)
		}
		r.wantPoints("/place")
		if err := unix.Close(fd); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Undo(t.Context(), undo(p, answer.GetReceipts())); err != nil {
			t.Error(err)
		}
	})
}

func TestUndoKeepsWhatABystanderMounted(t *testing.T) {
	each(t, func(t *testing.T, r *rig, e Executor) {
		s := serve(t, e, "")
		p := r.request("one", bind("volume", ""))
		answer, err := s.Perform(t.Context(), p)
		if err != nil {
			t.Fatal(err)
		}
		cover := func() error { return unix.Mount("bystander", r.place(), "tmpfs", 0, "size=64k") }
		uncover := func() error { return unix.Unmount(r.place(), 0) }
		if err := r.in(cover); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Undo(t.Context(), undo(p, answer.GetReceipts())); status.Code(err) != codes.FailedPrecondition {
			t.Errorf("undo of a covered mount: %v", err)
		}
		r.wantPoints("/place", "/place")
		if err := r.in(uncover); err != nil {
			t.Fatal(err)
		}
		// Ours is taken away by somebody, and another comes in its place.
		if err := r.in(uncover); err != nil {
			t.Fatal(err)
		}
		if err := r.in(cover); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Undo(t.Context(), undo(p, answer.GetReceipts())); err != nil {
			t.Errorf("undo of what is gone: %v", err)
		}
		r.wantPoints("/place")
	})
}

func TestSuccessorRecovers(t *testing.T) {
	each(t, func(t *testing.T, r *rig, e Executor) {
		directory := t.TempDir()
		s := serve(t, e, directory)
		whole := r.request("whole", bind("volume", ""))
		if _, err := s.Perform(t.Context(), whole); err != nil {
			t.Fatal(err)
		}
		// Killed after the mounts were attached and before that was recorded.
		half := r.request("half", bind("volume", ""))
		half.Target.Path = "/half"
		if _, err := s.Perform(t.Context(), half); err != nil {
			t.Fatal(err)
		}
		record, _ := s.ledger.get("half")
		record.Performed = false
		if err := s.ledger.put("half", record); err != nil {
			t.Fatal(err)
		}
		answer, err := serve(t, e, directory).Recover(t.Context(), &testingv1alpha1.RecoverRequest{})
		if err != nil {
			t.Fatal(err)
		}
		if fmt.Sprint(answer.GetPerformed(), answer.GetUndone()) != "[whole] [half]" {
			t.Errorf("performed %v, undone %v", answer.GetPerformed(), answer.GetUndone())
		}
		r.wantPoints("/place")
		if _, err := os.Lstat(filepath.Join(r.root, "half")); !os.IsNotExist(err) {
			t.Errorf("the target of what is undone is left: %v", err)
		}
	})
}

func TestEveryMutantIsUsableAsEvidence(t *testing.T) {
	var all []mutant.Mutant
	for _, m := range Mutants() {
		all = append(all, m.Mutant)
		if _, err := m.New(t.TempDir()); err != nil {
			t.Error(err)
		}
	}
	if err := mutant.Check(all); err != nil {
		t.Error(err)
	}
}
