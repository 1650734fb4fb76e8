package sp

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/csi-prepare/csi-prepare/fakes/mutant"
	preparev1alpha1 "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// plugin is a Server as its CO sees it.
type plugin struct {
	csi.ControllerClient
	csi.NodeClient
	preparev1alpha1.NodePrepareClient
}

func serve(t *testing.T, s Service, err error) plugin {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	listener := bufconn.Listen(1 << 16)
	server := grpc.NewServer(s.Options()...)
	s.Serve(server)
	go func() {
		if err := server.Serve(listener); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
			t.Error(err)
		}
	}()
	t.Cleanup(server.Stop)
	conn, err := grpc.NewClient("passthrough:fake", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return plugin{csi.NewControllerClient(conn), csi.NewNodeClient(conn), preparev1alpha1.NewNodePrepareClient(conn)}
}

func start(t *testing.T, c Config) plugin {
	t.Helper()
	s, err := New(c)
	return serve(t, s, err)
}

func capability(m csi.VolumeCapability_AccessMode_Mode) *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: m},
	}
}

func create(t *testing.T, p plugin, name string) string {
	t.Helper()
	v, err := p.CreateVolume(t.Context(), &csi.CreateVolumeRequest{
		Name: name, VolumeCapabilities: []*csi.VolumeCapability{capability(csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER)},
	})
	if err != nil {
		t.Fatal(err)
	}
	return v.GetVolume().GetVolumeId()
}

func request(t *testing.T, volume, id string) *preparev1alpha1.NodePrepareVolumeRequest {
	return &preparev1alpha1.NodePrepareVolumeRequest{
		VolumeId: volume, PrepareId: id, PreparePath: t.TempDir(),
		VolumeCapability: capability(csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER),
		Performer: &preparev1alpha1.Performer{
			Kernel: preparev1alpha1.Performer_NODE,
			Kinds:  []preparev1alpha1.MountKind{preparev1alpha1.MountKind_MOUNT_KIND_BIND},
			Grants: []string{"data"},
		},
	}
}

func unprepare(r *preparev1alpha1.NodePrepareVolumeRequest) *preparev1alpha1.NodeUnprepareVolumeRequest {
	return &preparev1alpha1.NodeUnprepareVolumeRequest{
		VolumeId: r.GetVolumeId(), PrepareId: r.GetPrepareId(), PreparePath: r.GetPreparePath(),
	}
}

func TestAnswersABindOfTheVolumeInItsGrant(t *testing.T) {
	grant := t.TempDir()
	p := start(t, Config{Grants: map[string]string{"data": grant}})
	r := request(t, create(t, p, "a"), "one")
	r.Readonly = true
	r.VolumeCapability.GetMount().MountFlags = []string{"noexec"}
	got, err := p.NodePrepareVolume(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	want := &preparev1alpha1.NodePrepareVolumeResponse{MountSpecs: []*preparev1alpha1.MountSpec{{
		Kind: &preparev1alpha1.MountSpec_Bind{Bind: &preparev1alpha1.BindMount{Source: &preparev1alpha1.PathRef{
			Base: preparev1alpha1.PathRef_GRANTED, Grant: "data", Relative: r.GetVolumeId(),
		}}},
		Attributes: &preparev1alpha1.MountAttributes{Readonly: true, Noexec: true},
	}}}
	if d := cmp.Diff(want, got, protocmp.Transform()); d != "" {
		t.Error(d)
	}
	if _, err := os.Stat(filepath.Join(grant, r.GetVolumeId())); err != nil {
		t.Error(err)
	}
}

// TestSecondPrepare runs the idempotency table: what a second call is
// answered after a first one.
func TestSecondPrepare(t *testing.T) {
	const (
		multi  = csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER
		single = csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER
		writer = csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER
		reader = csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY
	)
	other := func(r *preparev1alpha1.NodePrepareVolumeRequest) {
		r.PrepareId, r.PreparePath = "two", filepath.Dir(r.GetPreparePath())+"/two"
	}
	for _, test := range []struct {
		name   string
		legacy bool
		first  csi.VolumeCapability_AccessMode_Mode
		second csi.VolumeCapability_AccessMode_Mode
		change func(*preparev1alpha1.NodePrepareVolumeRequest)
		want   codes.Code
	}{
		{name: "identical", first: multi, second: multi, want: codes.OK},
		{name: "identical single writer", first: single, second: single, want: codes.OK},
		{name: "other secrets", first: multi, second: multi, want: codes.OK, change: func(r *preparev1alpha1.NodePrepareVolumeRequest) {
			r.Secrets = map[string]string{"token": "new"}
		}},
		{name: "refreshed context", first: multi, second: multi, want: codes.OK, change: func(r *preparev1alpha1.NodePrepareVolumeRequest) {
			r.VolumeContext = map[string]string{refreshable: "new"}
		}},
		{name: "other context", first: multi, second: multi, want: codes.AlreadyExists, change: func(r *preparev1alpha1.NodePrepareVolumeRequest) {
			r.VolumeContext = map[string]string{"pool": "new"}
		}},
		{name: "readonly now", first: multi, second: multi, want: codes.AlreadyExists, change: func(r *preparev1alpha1.NodePrepareVolumeRequest) {
			r.Readonly = true
		}},
		{name: "wider performer", first: multi, second: multi, want: codes.OK, change: func(r *preparev1alpha1.NodePrepareVolumeRequest) {
			r.Performer.Kinds = append(r.Performer.Kinds, preparev1alpha1.MountKind_MOUNT_KIND_FILESYSTEM, 99)
			r.Performer.Grants = append(r.Performer.Grants, "unknown")
		}},
		{name: "performer without the grant", first: multi, second: multi, want: codes.FailedPrecondition, change: func(r *preparev1alpha1.NodePrepareVolumeRequest) {
			r.Performer.Grants = nil
		}},
		{name: "performer of another kernel", first: multi, second: multi, want: codes.FailedPrecondition, change: func(r *preparev1alpha1.NodePrepareVolumeRequest) {
			r.Performer.Kernel = preparev1alpha1.Performer_OTHER
		}},
		{name: "second consumer, multi writer", first: multi, second: multi, change: other, want: codes.OK},
		{name: "second consumer, single writer", first: single, second: single, change: other, want: codes.FailedPrecondition},
		{name: "second consumer, writer", first: writer, second: writer, change: other, want: codes.FailedPrecondition},
		{name: "second consumer, reader", first: reader, second: reader, change: other, want: codes.FailedPrecondition},
		{name: "second consumer, the first exclusive", first: single, second: multi, change: other, want: codes.FailedPrecondition},
		{name: "second consumer, the second exclusive", first: multi, second: single, change: other, want: codes.FailedPrecondition},
		{name: "legacy, second consumer, writer", legacy: true, first: writer, second: writer, change: other, want: codes.OK},
		{name: "legacy, second consumer, single writer", legacy: true, first: single, second: single, change: other, want: codes.FailedPrecondition},
	} {
		t.Run(test.name, func(t *testing.T) {
			p := start(t, Config{Grants: map[string]string{"data": t.TempDir()}, LegacyWriters: test.legacy})
			first := request(t, create(t, p, "a"), "one")
			first.VolumeCapability = capability(test.first)
			want, err := p.NodePrepareVolume(t.Context(), first)
			if err != nil {
				t.Fatal(err)
			}
			second := proto.CloneOf(first)
			second.VolumeCapability = capability(test.second)
			if test.change != nil {
				test.change(second)
			}
			if err := os.MkdirAll(second.GetPreparePath(), 0o700); err != nil {
				t.Fatal(err)
			}
			got, err := p.NodePrepareVolume(t.Context(), second)
			if status.Code(err) != test.want {
				t.Fatalf("got %v, want %v", err, test.want)
			}
			if err == nil && !proto.Equal(got, want) {
				t.Errorf("the second answer differs: %s", cmp.Diff(want, got, protocmp.Transform()))
			}
			list, err := p.NodeListPreparedVolumes(t.Context(), &preparev1alpha1.NodeListPreparedVolumesRequest{})
			if err != nil || list.GetEntries()[0].GetPrepareId() != "one" {
				t.Errorf("the first preparation is not listed any more: %v, %v", list, err)
			}
		})
	}
}

func TestStateOutlivesTheProcessWhenAsked(t *testing.T) {
	c := Config{Grants: map[string]string{"data": t.TempDir()}, StateDir: t.TempDir()}
	p := start(t, c)
	r := request(t, create(t, p, "a"), "one")
	r.Secrets = map[string]string{"password": "canary"}
	if _, err := p.NodePrepareVolume(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	kept, err := os.ReadFile(file(c.StateDir))
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(kept), "canary") {
		t.Errorf("a secret is kept: %s", kept)
	}

	p = start(t, c)
	if _, err := p.NodePrepareVolume(t.Context(), r); err != nil {
		t.Errorf("repeat after a restart: %v", err)
	}
	list, err := p.NodeListPreparedVolumes(t.Context(), &preparev1alpha1.NodeListPreparedVolumesRequest{})
	if err != nil || len(list.GetEntries()) != 1 {
		t.Errorf("list after a restart: %v, %v", list, err)
	}
	if _, err := p.NodeUnprepareVolume(t.Context(), unprepare(r)); err != nil {
		t.Errorf("unprepare after a restart: %v", err)
	}
}

func TestPreparationsOfAnotherBootAreVoid(t *testing.T) {
	c := Config{Grants: map[string]string{"data": t.TempDir()}, StateDir: t.TempDir()}
	boot := func(id string) plugin {
		s, err := build(c, func(s *Server) { s.rules.boot = func() (string, error) { return id, nil } })
		return serve(t, s, err)
	}
	p := boot("one")
	r := request(t, create(t, p, "a"), "one")
	if _, err := p.NodePrepareVolume(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	p = boot("two")
	list, err := p.NodeListPreparedVolumes(t.Context(), &preparev1alpha1.NodeListPreparedVolumesRequest{})
	if err != nil || len(list.GetEntries()) != 0 {
		t.Errorf("listed %v, %v", list, err)
	}
	volumes, err := p.ListVolumes(t.Context(), &csi.ListVolumesRequest{})
	if err != nil || len(volumes.GetEntries()) != 1 {
		t.Errorf("volumes %v, %v", volumes, err)
	}
}

func TestPagesHoldEachEntryOnce(t *testing.T) {
	p := start(t, Config{Grants: map[string]string{"data": t.TempDir()}})
	volume := create(t, p, "a")
	for _, id := range []string{"a", "b", "c", "d", "e"} {
		if _, err := p.NodePrepareVolume(t.Context(), request(t, volume, id)); err != nil {
			t.Fatal(err)
		}
	}
	var got []string
	for r := (&preparev1alpha1.NodeListPreparedVolumesRequest{MaxEntries: 2}); ; {
		page, err := p.NodeListPreparedVolumes(t.Context(), r)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range page.GetEntries() {
			got = append(got, e.GetPrepareId())
		}
		if r.StartingToken = page.GetNextToken(); r.StartingToken == "" {
			break
		}
	}
	if d := cmp.Diff([]string{"a", "b", "c", "d", "e"}, got); d != "" {
		t.Error(d)
	}
	for _, token := range []string{"1", "abcd", "!", "YWZ0ZXI"} {
		_, err := p.NodeListPreparedVolumes(t.Context(), &preparev1alpha1.NodeListPreparedVolumesRequest{StartingToken: token})
		if status.Code(err) != codes.Aborted {
			t.Errorf("token %q: %v", token, err)
		}
	}
}

func TestDeleteStopsAtAPreparation(t *testing.T) {
	p := start(t, Config{Grants: map[string]string{"data": t.TempDir()}})
	r := request(t, create(t, p, "a"), "one")
	if _, err := p.NodePrepareVolume(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	remove := &csi.DeleteVolumeRequest{VolumeId: r.GetVolumeId()}
	if _, err := p.DeleteVolume(t.Context(), remove); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("deleted while prepared: %v", err)
	}
	if _, err := p.NodeUnprepareVolume(t.Context(), unprepare(r)); err != nil {
		t.Fatal(err)
	}
	if _, err := p.DeleteVolume(t.Context(), remove); err != nil {
		t.Error(err)
	}
}

func TestEveryMutantIsUsableAsEvidence(t *testing.T) {
	var all []mutant.Mutant
	for _, m := range Mutants() {
		all = append(all, m.Mutant)
		c := Config{Grants: map[string]string{"data": t.TempDir()}}
		s, err := m.New(c)
		p := serve(t, s, err)
		// Whatever is wrong with it, it starts, and makes a volume.
		create(t, p, "a")
	}
	if err := mutant.Check(all); err != nil {
		t.Error(err)
	}
}
