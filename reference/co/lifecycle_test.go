package co

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/fakes/sp"
	"github.com/csi-prepare/csi-prepare/reference/mountns"
	"github.com/csi-prepare/csi-prepare/reference/perform"
	"github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

func TestUpAndDown(t *testing.T) {
	r := newRig(t)
	u := r.use(r.volume("v"))
	record := r.up(u)
	if got, err := os.ReadFile(u.Target.Path + "/file"); string(got) != "v" {
		t.Errorf("the consumer reads %q, %v", got, err)
	}
	r.mountsAt(u.Target.Path, 1)
	if r.record().Phase != Performed || r.record().Uncertain {
		t.Errorf("record %+v, want performed and certain", r.record())
	}
	r.down(record.Key())
	r.nothingLeft()
	want := []string{"NodeStageVolume", "NodePrepareVolume", "NodeUnprepareVolume", "NodeUnstageVolume"}
	if diff := cmp.Diff(want, r.called()); diff != "" {
		t.Errorf("calls (-want +got):\n%s", diff)
	}
	r.down(record.Key())
	if calls := r.called(); calls != nil {
		t.Errorf("a second Down made calls: %v", calls)
	}
}

func TestStageIsCounted(t *testing.T) {
	r := newRig(t)
	first := r.use(r.volume("v"))
	second := first
	second.PrepareID, second.Target.Path = "c2", r.path("consumer/c2")
	a, b := r.up(first), r.up(second)
	r.called()
	r.down(a.Key())
	r.mountsAt(second.Target.Path, 1)
	if got := r.called(); !slices.Equal(got, []string{"NodeUnprepareVolume"}) {
		t.Errorf("the first of two consumers left by %v", got)
	}
	r.down(b.Key())
	if got := r.called(); !slices.Equal(got, []string{"NodeUnprepareVolume", "NodeUnstageVolume"}) {
		t.Errorf("the last consumer left by %v", got)
	}
	r.nothingLeft()
}

func TestEphemeralIsNeverStaged(t *testing.T) {
	r := newRig(t)
	r.answering(func(ctx context.Context, method string, request any, next func(context.Context) (any, error)) (any, error) {
		if p, ok := request.(*preparev1alpha1.NodePrepareVolumeRequest); ok {
			if !slices.Contains(p.GetPerformer().GetFsTypes(), "tmpfs") {
				t.Error("tmpfs is not offered for an ephemeral volume")
			}
			return &preparev1alpha1.NodePrepareVolumeResponse{MountSpecs: []*preparev1alpha1.MountSpec{{
				Kind: &preparev1alpha1.MountSpec_Filesystem{Filesystem: &preparev1alpha1.FilesystemMount{FsType: "tmpfs"}},
			}}}, nil
		}
		return next(ctx)
	})
	u := r.use("ephemeral")
	u.Ephemeral = true
	record := r.up(u)
	if top, _ := r.table().Top(u.Target.Path); top.FSType != "tmpfs" {
		t.Errorf("the consumer has %v, want a tmpfs", top)
	}
	r.down(record.Key())
	r.nothingLeft()
	if got := r.called(); !slices.Equal(got, []string{"NodePrepareVolume", "NodeUnprepareVolume"}) {
		t.Errorf("calls %v", got)
	}
}

func TestRefreshLeavesTheConsumerAlone(t *testing.T) {
	const token = "csi.storage.k8s.io/serviceAccount.tokens"
	r := newRig(t)
	u := r.use(r.volume("v"))
	u.VolumeContext = map[string]string{token: "old-token"}
	record := r.up(u)
	before := r.table()
	same := func(what string) {
		t.Helper()
		if c := mountns.Diff(before, r.table()); !c.Empty() {
			t.Errorf("%s changed the table:\n%s", what, c)
		}
		if got := r.record(); got.Phase != Performed {
			t.Errorf("%s left the phase %s", what, got.Phase)
		}
	}

	u.VolumeContext, u.Secrets = map[string]string{token: "new-token"}, map[string]string{"password": "new"}
	var got *preparev1alpha1.NodePrepareVolumeRequest
	r.answering(func(ctx context.Context, _ string, request any, next func(context.Context) (any, error)) (any, error) {
		got, _ = request.(*preparev1alpha1.NodePrepareVolumeRequest)
		return next(ctx)
	})
	r.up(u)
	if got.GetVolumeContext()[token] != "new-token" || got.GetSecrets()["password"] != "new" {
		t.Errorf("the plugin got %v", got)
	}
	same("a refresh")

	other := u
	other.Readonly = true
	if _, err := r.co.Up(r.ctx, other); !errors.Is(err, ErrConflict) {
		t.Errorf("other arguments: %v, want ErrConflict", err)
	}
	same("a conflict")

	r.specs(bind("elsewhere", ""))
	if _, err := r.co.Up(r.ctx, u); !errors.Is(err, ErrNotEquivalent) {
		t.Errorf("another answer: %v, want ErrNotEquivalent", err)
	}
	r.specs()
	var invalid *perform.InvalidError
	if _, err := r.co.Up(r.ctx, u); !errors.As(err, &invalid) {
		t.Errorf("an invalid answer: %v, want an InvalidError", err)
	}
	same("a refused answer")

	r.answering(nil)
	r.called()
	r.down(record.Key())
	r.nothingLeft()
}

func TestRefusedAnswerIsUnprepared(t *testing.T) {
	for _, test := range []struct {
		name  string
		specs []*preparev1alpha1.MountSpec
	}{
		{"no spec", nil},
		{"no kind", []*preparev1alpha1.MountSpec{{}}},
		{"a grant that was not offered", []*preparev1alpha1.MountSpec{{Kind: &preparev1alpha1.MountSpec_Bind{Bind: &preparev1alpha1.BindMount{
			Source: &preparev1alpha1.PathRef{Base: preparev1alpha1.PathRef_GRANTED, Grant: "other"},
		}}}}},
		{"a kind that was not offered", []*preparev1alpha1.MountSpec{{Kind: &preparev1alpha1.MountSpec_Handle{Handle: &preparev1alpha1.MountHandle{HandleId: "h", FsType: "tmpfs"}}}}},
		{"a forbidden type", []*preparev1alpha1.MountSpec{{Kind: &preparev1alpha1.MountSpec_Filesystem{Filesystem: &preparev1alpha1.FilesystemMount{FsType: "overlay"}}}}},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := newRig(t)
			u := r.use(r.volume("v"))
			r.specs(test.specs...)
			_, err := r.co.Up(r.ctx, u)
			var invalid *perform.InvalidError
			if !errors.As(err, &invalid) {
				t.Errorf("%v, want an InvalidError", err)
			}
			r.nothingLeft()
			want := []string{"NodeStageVolume", "NodePrepareVolume", "NodeUnprepareVolume", "NodeUnstageVolume"}
			if got := r.called(); !slices.Equal(got, want) {
				t.Errorf("calls %v, want %v", got, want)
			}
		})
	}
}

func TestOneCallInFlightForAVolume(t *testing.T) {
	r := newRig(t)
	var mu sync.Mutex
	flying := map[string]int{}
	overlapped := make(chan struct{})
	var once sync.Once
	r.answering(func(ctx context.Context, _ string, request any, next func(context.Context) (any, error)) (any, error) {
		v, ok := request.(interface{ GetVolumeId() string })
		if !ok {
			return next(ctx)
		}
		mu.Lock()
		flying[v.GetVolumeId()]++
		if flying[v.GetVolumeId()] > 1 {
			t.Errorf("two calls at a time for volume %s", v.GetVolumeId())
		}
		if len(flying) > 1 {
			once.Do(func() { close(overlapped) })
		}
		mu.Unlock()
		defer func() {
			mu.Lock()
			defer mu.Unlock()
			if flying[v.GetVolumeId()]--; flying[v.GetVolumeId()] == 0 {
				delete(flying, v.GetVolumeId())
			}
		}()
		// The calls for two volumes wait for each other.
		select {
		case <-overlapped:
		case <-ctx.Done():
		}
		return next(ctx)
	})
	var wg sync.WaitGroup
	for _, volume := range []string{r.volume("v"), r.volume("w")} {
		for _, id := range []string{"c1", "c2", "c3"} {
			u := r.use(volume)
			u.PrepareID, u.Target.Path = id, r.path(filepath.Join("consumer", volume+id))
			wg.Go(func() {
				record, err := r.co.Up(r.ctx, u)
				if err == nil {
					err = r.co.Down(r.ctx, record.Key())
				}
				if err != nil {
					t.Error(err)
				}
			})
		}
	}
	wg.Wait()
	r.nothingLeft()
}

func TestNoService(t *testing.T) {
	r := newRig(t)
	r.answering(func(ctx context.Context, method string, _ any, next func(context.Context) (any, error)) (any, error) {
		if method == "NodePrepareGetCapabilities" {
			return nil, status.Error(codes.Unimplemented, "unknown service")
		}
		return next(ctx)
	})
	for range 2 {
		var absent *NoServiceError
		if _, err := r.co.Up(r.ctx, r.use("v")); !errors.As(err, &absent) {
			t.Errorf("%v, want a NoServiceError", err)
		}
	}
	asked := 0
	for _, m := range r.calls {
		if m == "NodePrepareGetCapabilities" {
			asked++
		}
	}
	if asked != 1 {
		t.Errorf("asked %d times on one connection, want 1", asked)
	}
	r.nothingLeft()
}

func TestOtherNamespace(t *testing.T) {
	r := newRig(t)
	u := r.use(r.volume("v"))
	ns, err := mountns.New(r.ctx)
	r.must(err)
	defer ns.Close()
	u.Target.Namespace = ns
	record := r.up(u)
	r.mountsAt(u.Target.Path, 0)
	there := func(want int) {
		t.Helper()
		table, err := ns.Table(r.ctx)
		r.must(err)
		if got := table.At(u.Target.Path); len(got) != want {
			t.Errorf("%d mounts in the consumer's namespace, want %d", len(got), want)
		}
	}
	there(1)
	// A successor finds the namespace by its id.
	r.open()
	_, err = r.co.Recover(r.ctx)
	r.must(err)
	r.down(record.Key())
	there(0)
	r.nothingLeft()
}

func TestConsumerGoneWhileTheCOWasDown(t *testing.T) {
	r := newRig(t)
	u := r.use(r.volume("v"))
	ns, err := mountns.New(r.ctx)
	r.must(err)
	u.Target.Namespace = ns
	record := r.up(u)
	r.called()
	r.must(ns.Close())
	r.open()
	done, err := r.co.Recover(r.ctx)
	r.must(err)
	if diff := cmp.Diff([]Key{record.Key()}, done.Taken); diff != "" {
		t.Errorf("taken back (-want +got):\n%s", diff)
	}
	if got := r.called(); !slices.Equal(got, []string{"NodeUnprepareVolume", "NodeUnstageVolume"}) {
		t.Errorf("calls %v", got)
	}
	// What was created in the consumer's directory is not the CO's to find:
	// it was created through the namespace that is gone.
	_ = os.RemoveAll(r.path("consumer/c1"))
	r.nothingLeft()
}

func TestKeyOfAnotherDriverIsAnother(t *testing.T) {
	a, b := Key{sp.Name, "v", "c"}, Key{sp.Name + "v", "", "c"}
	if a.position() == b.position() {
		t.Error("two keys with one position")
	}
}
