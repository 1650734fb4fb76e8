package sanity

import (
	"context"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/sanity/report"
	"github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

func TestFailureHasEveryLineInItsOrder(t *testing.T) {
	f := report.Evidence{
		Requirement: requirement.PrepareReadonly, Plugin: "p 1, pid 7, mount namespace mnt:[1]", Call: "NodePrepareVolume -> OK",
		Expected: "this", Actual: "that", Table: []string{"+ one", "- two"}, KnownAs: KnownAs(requirement.PrepareReadonly),
		Rerun:  "prepare-sanity run --id prepare.readonly --seed 1",
		ByHand: []string{"mkdir -p /d", "prepare-sanity call Probe '{}'"},
	}
	q, _ := requirement.Lookup(requirement.PrepareReadonly)
	want := "[prepare.readonly] MUST   SPEC.md#prepare.readonly   since " + q.Since + "\n" +
		"  " + q.Text + "\n" +
		`  plugin    p 1, pid 7, mount namespace mnt:[1]
  call      NodePrepareVolume -> OK
  expected  this
  actual    that
  table     + one
            - two
  kernel    no error
  known as  a read-only volume that is writable: kubernetes/kubernetes#61008, kubernetes-csi/csi-driver-smb#987
  rerun     prepare-sanity run --id prepare.readonly --seed 1
  by hand   mkdir -p /d
            prepare-sanity call Probe '{}'`
	if diff := cmp.Diff(want, f.String()); diff != "" {
		t.Error(diff)
	}
	empty := report.Evidence{Requirement: requirement.ListComplete}.String()
	for _, line := range []string{"plugin    unknown", "call      none", "table     no change", "known as  no known case"} {
		if !strings.Contains(empty, line) {
			t.Errorf("no %q in\n%s", line, empty)
		}
	}
}

func TestKnownCasesAreOfRequirementsThatExist(t *testing.T) {
	for id, text := range knownAs {
		if _, ok := requirement.Lookup(id); !ok || !strings.ContainsAny(text, "#C") {
			t.Errorf("%s: %q", id, text)
		}
	}
}

func TestACallShowsNoSecret(t *testing.T) {
	const canary = "do-not-show"
	request := &preparev1alpha1.NodePrepareVolumeRequest{
		VolumeId: "v 1", PrepareId: "p1", Secrets: map[string]string{"password": canary}, HandoffToken: []byte(canary), Readonly: true,
		VolumeContext: map[string]string{"k": "v"}, Performer: &preparev1alpha1.Performer{
			Kernel: preparev1alpha1.Performer_NODE, Kinds: []preparev1alpha1.MountKind{preparev1alpha1.MountKind_MOUNT_KIND_BIND},
		},
	}
	got := describe(request)
	want := `volume_id="v 1" prepare_id=p1 readonly=true secrets=***stripped*** volume_context={"k":"v"} performer={"kernel":"NODE","kinds":["MOUNT_KIND_BIND"]} handoff_token=***stripped***`
	if got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	spec := &preparev1alpha1.MountSpec{Kind: &preparev1alpha1.MountSpec_Filesystem{Filesystem: &preparev1alpha1.FilesystemMount{
		FsType: "cifs", Parameters: []*preparev1alpha1.FsParameter{{Key: "password", Value: &preparev1alpha1.FsParameter_Secret{Secret: canary}}},
	}}}
	if text := describe(spec); strings.Contains(text, canary) || !strings.Contains(text, "password") {
		t.Error(text)
	}
}

func TestEveryCallHasADeadlineAndIsKept(t *testing.T) {
	j := new(journal)
	intercept := record(time.Minute, nil)
	for _, test := range []struct {
		err  error
		want string
	}{
		{nil, "DeleteVolume volume_id=v -> OK"},
		{status.Error(codes.FailedPrecondition, "in use"), "DeleteVolume volume_id=v -> FAILED_PRECONDITION: in use"},
	} {
		err := intercept(recorded(t.Context(), j), "/csi.v1.Controller/DeleteVolume", &csi.DeleteVolumeRequest{VolumeId: "v"}, &csi.DeleteVolumeResponse{}, nil,
			func(ctx context.Context, _ string, _, _ any, _ *grpc.ClientConn, _ ...grpc.CallOption) error {
				if _, ok := ctx.Deadline(); !ok {
					t.Error("the call has no deadline")
				}
				return test.err
			})
		if c, ok := j.last(); !ok || c.String() != test.want || status.Code(err) != status.Code(test.err) {
			t.Errorf("got %s, want %s", c, test.want)
		}
	}
}

func TestCommandMakesTheCallAgainWithoutItsSecrets(t *testing.T) {
	got := command("/csi.prepare.v1alpha1.NodePrepare/NodePrepareVolume", &preparev1alpha1.NodePrepareVolumeRequest{
		VolumeId: "it's", Secrets: map[string]string{"password": "do-not-show"}, HandoffToken: []byte("do-not-show"),
	})
	if want := `prepare-sanity call NodePrepareVolume '{"volume_id":"it'\''s"}'`; got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	if command("/csi.v1.Node/NodeStageVolume", &csi.NodeStageVolumeRequest{VolumeId: strings.Repeat("v", 3000)}) != "" {
		t.Error("a command nobody could type")
	}
}

// TestReportsShowNoSecret has a plugin quote a secret in an error.
func TestReportsShowNoSecret(t *testing.T) {
	const password = "hunter2-of-the-user"
	s := started(t, func(c *Config) {
		c.Secrets = map[string]map[string]string{"CreateVolumeSecret": {"password": password}}
	})
	var drawn string
	r := s.run(t.Context(), about(func(t *trial) {
		drawn = t.canary()
		t.journal.add(call{method: "NodePrepareVolume", code: codes.Internal, message: password + " " + drawn, command: "prepare-sanity call " + drawn})
		t.fail(requirement.PrepareReadonly, "no secret", "it says "+password+" and "+drawn)
	}))
	text, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(text), password) || strings.Contains(string(text), drawn) || !strings.Contains(string(text), "[hidden]") {
		t.Errorf("%s", text)
	}
}

func TestCodeNames(t *testing.T) {
	for code, want := range map[codes.Code]string{
		codes.OK: "OK", codes.InvalidArgument: "INVALID_ARGUMENT", codes.Canceled: "CANCELLED", codes.DeadlineExceeded: "DEADLINE_EXCEEDED",
		codes.NotFound: "NOT_FOUND", codes.Internal: "INTERNAL",
	} {
		if got := codeName(code); got != want {
			t.Errorf("%d is %s, want %s", code, got, want)
		}
	}
}

func TestEquivalent(t *testing.T) {
	fs := func(address, secret string, readonly bool) *prepareResponse {
		return &prepareResponse{MountSpecs: []*mountSpec{{
			Attributes: &attributes{Readonly: readonly},
			Kind: &preparev1alpha1.MountSpec_Filesystem{Filesystem: &preparev1alpha1.FilesystemMount{
				FsType: "nfs4", Source: &preparev1alpha1.FilesystemMount_Opaque{Opaque: "a:/b"},
				Parameters: []*preparev1alpha1.FsParameter{
					textParameter("addr", address), {Key: "password", Value: &preparev1alpha1.FsParameter_Secret{Secret: secret}},
				},
			}},
		}}}
	}
	if !equivalent(fs("192.0.2.1", "a", false), fs("192.0.2.2", "b", false)) {
		t.Error("another address and another secret make a difference")
	}
	if equivalent(fs("192.0.2.1", "a", false), fs("192.0.2.1", "a", true)) {
		t.Error("another attribute makes no difference")
	}
	one := &prepareResponse{MountSpecs: []*mountSpec{bind("", "x", nil)}}
	two := &prepareResponse{MountSpecs: []*mountSpec{bind("", "y", nil)}}
	if equivalent(one, two) || !equivalent(one, one) || equivalent(one, &prepareResponse{}) {
		t.Error("sources of binds are not compared")
	}
}

func TestConfigNamesWhatIsWrong(t *testing.T) {
	for _, test := range []struct {
		config Config
		want   string
	}{
		{Config{}, "endpoint"},
		{Config{Endpoint: "unix:///x", Only: []requirement.ID{"no.such"}}, "no.such"},
		{Config{Endpoint: "unix:///x", Profile: "odd"}, "odd"},
		{Config{Endpoint: "unix:///x", Grants: map[string]string{"a": "relative"}}, "grant a"},
		{Config{Endpoint: "unix:///x", Timeout: -1}, "timeout"},
		{Config{Endpoint: "unix:///x", KnownFailing: map[requirement.ID]string{"no.such": ""}}, "no.such"},
	} {
		if _, err := test.config.complete(); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%+v: %v", test.config, err)
		}
	}
	c, err := Config{Endpoint: "unix:///x", Grants: map[string]string{"b": "/b", "a": "/a"}}.complete()
	if err != nil || c.Timeout != DefaultTimeout || c.Seed == 0 || c.Rerun != "prepare-sanity run --csi.endpoint unix:///x --grant a=/a --grant b=/b" {
		t.Errorf("%+v, %v", c, err)
	}
}

func TestFeaturesThatAreDeclaredHaveToBeClaimed(t *testing.T) {
	claimed := features{NodePrepare: true, KindBind: true}
	for _, test := range []struct {
		declared []string
		want     string
	}{
		{[]string{"node-prepare", "node-prepare.kind.bind"}, ""},
		{[]string{"node-prepare", "node-prepare.kind.bind", "node-prepare.kind.fuse"}, "does not report"},
		{[]string{"node-prepare"}, "not declared for it"},
	} {
		err := compareFeatures(test.declared, claimed)
		if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
			t.Errorf("%v: %v", test.declared, err)
		}
	}
}
