package sanity

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/sanity/report"
	"github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

func TestASpecBelongsToTheProfilesThatHaveWhatItNeeds(t *testing.T) {
	for _, test := range []struct {
		name  string
		of    []Profile
		needs []Feature
		want  []Profile
		and   []Feature // implied
	}{
		{"nothing special", preparing, nil, preparing, []Feature{NodePrepare}},
		{"a directory", preparing, []Feature{accessMount, StageVolume}, []Profile{NodeMount, NodeFUSE, NodeNetwork}, []Feature{NodePrepare}},
		{"a device", preparing, []Feature{accessBlock, KindBlockDevice}, []Profile{NodeBlock}, []Feature{NodePrepare}},
		{"fuse", preparing, []Feature{KindFUSE}, []Profile{NodeFUSE}, []Feature{NodePrepare}},
		{"a network filesystem", preparing, []Feature{NetworkFilesystem}, []Profile{NodeNetwork}, []Feature{NodePrepare, KindFilesystem}},
		{"the controller", []Profile{Controller}, []Feature{CreateDeleteVolume}, []Profile{Controller}, []Feature{ControllerService}},
		{"publishing a device", []Profile{NodePublish}, []Feature{accessBlock}, []Profile{NodePublish}, []Feature{PublishOnNode}},
		{"identity", []Profile{Controller, NodePublish, NodeMount}, nil, []Profile{Controller, NodePublish, NodeMount}, nil},
	} {
		of := belong(test.of, test.needs)
		if diff := cmp.Diff(test.want, of); diff != "" {
			t.Errorf("%s: %s", test.name, diff)
		}
		if diff := cmp.Diff(test.and, implied(of), cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("%s: %s", test.name, diff)
		}
	}
}

func TestEverySpecHasAProfileOfItsSeat(t *testing.T) {
	covered := map[Profile]int{}
	for _, l := range List() {
		for _, name := range l.Profiles {
			if p := profileByName(string(name)); p == nil || p.actor != l.Actor {
				t.Errorf("%s: %s is in profile %s", l.Section, l.Name, name)
			}
			covered[name]++
		}
	}
	for _, p := range profiles {
		t.Logf("%s: %d specs", p.name, covered[p.name])
	}
}

func TestAProfileIsClaimedByFeaturesAndByWhatIsSeen(t *testing.T) {
	answer := &prepareResponse{MountSpecs: []*mountSpec{{Kind: &preparev1alpha1.MountSpec_Filesystem{
		Filesystem: &preparev1alpha1.FilesystemMount{FsType: "nfs4"},
	}}}}
	s := newSuite(&Config{})
	s.features = features{NodePrepare: true, KindFilesystem: true, accessMount: true}
	network := *profileByName(string(NodeNetwork))
	if s.lacks(network) == "" {
		t.Error("a plugin that never named a network filesystem claims the profile")
	}
	s.seen.answer(&prepareRequest{}, answer)
	if why := s.lacks(network); why != "" {
		t.Errorf("a plugin that named nfs4: %s", why)
	}
	if s.lacks(*profileByName(string(NodeFUSE))) == "" {
		t.Error("a plugin without the kind FUSE claims node-fuse")
	}
}

// TestVerdictsOfProfiles shows that what is left out or could not run is in
// the verdict on the profiles it belongs to, and in no other.
func TestVerdictsOfProfiles(t *testing.T) {
	s := newSuite(&Config{})
	s.features = features{NodePrepare: true, accessMount: true, KindFUSE: true, ControllerService: true}
	both := []string{"node-mount", "node-fuse"}
	r := &report.Report{Specs: []report.Spec{
		{Name: "a", Requirements: Covers(requirement.PrepareReadonly), Profiles: both, Outcome: report.Passed},
		{Name: "b", Requirements: Covers(requirement.ListComplete), Profiles: both[:1], Outcome: report.Filtered},
		{Name: "c", Requirements: Covers(requirement.FUSEID), Profiles: both[1:], Outcome: report.CouldNotRun},
		{Name: "d", Requirements: Covers(requirement.PrepareFieldNamed), Profiles: []string{"controller"}, Outcome: report.Passed},
	}}
	got := map[string]report.Outcome{}
	for _, p := range s.verdicts(r) {
		got[p.Name] = p.Outcome
	}
	want := map[string]report.Outcome{
		"controller": report.Passed, "node-publish": report.Unsupported, "node-mount": report.Filtered, "node-block": report.Unsupported,
		"node-fuse": report.CouldNotRun, "node-network": report.Unsupported,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestAClaimedFeatureCannotBeSkipped(t *testing.T) {
	s := started(t, unchanged)
	unserved := func(needs ...Feature) definition {
		return about(func(t *trial) {
			t.journal.add(call{method: "NodeGetVolumeStats", code: codes.Unimplemented, message: "no"})
			t.unsupported(answered(status.Error(codes.Unimplemented, "no")))
		}, needs...)
	}
	if r := s.run(t.Context(), unserved(KindBind)); r.Outcome != report.Failed {
		t.Errorf("a claimed feature that is not served: %s: %s", r.Outcome, r.Message)
	}
	if r := s.run(t.Context(), unserved()); r.Outcome != report.Unsupported {
		t.Errorf("no claim: %s: %s", r.Outcome, r.Message)
	}
}
