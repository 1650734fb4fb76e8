package sanity

import (
	"fmt"

	"google.golang.org/grpc/codes"

	"github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

func listSpecs(s *section) {
	s.spec("a preparation is listed until it is unprepared", Covers(requirement.ListComplete, requirement.ListForgets), func(t *trial) {
		a, b := t.request(t.volume()), t.request(t.volume())
		t.want(requirement.ListForgets, t.entry(a) == nil, "no pair in the list that was never prepared", "it is listed")
		t.prepared(a)
		t.prepared(b)
		t.want(requirement.ListComplete, t.entry(a) != nil, "the first preparation in the list", "it is not listed")
		t.want(requirement.ListComplete, t.entry(b) != nil, "the second preparation in the list", "it is not listed")
		t.unprepared(a)
		t.want(requirement.ListForgets, t.entry(a) == nil, "no pair in the list that is unprepared", "it is listed")
		t.want(requirement.ListComplete, t.entry(b) != nil, "the preparation that lives in the list", "it went with the other")
	})
	s.spec("the list repeats what was asked for", Covers(requirement.ListAsRequested), func(t *trial) {
		for _, readonly := range []bool{true, false} {
			r := t.request(t.volume())
			r.Readonly = readonly
			t.prepared(r)
			e := t.entry(r)
			if e == nil {
				end(couldNotRun("the preparation is not listed, which breaks %s", requirement.ListComplete))
			}
			for _, f := range []struct{ name, want, got string }{
				{"prepare_path", r.GetPreparePath(), e.GetPreparePath()},
				{"staging_target_path", r.GetStagingTargetPath(), e.GetStagingTargetPath()},
				{"readonly", fmt.Sprint(r.GetReadonly()), fmt.Sprint(e.GetReadonly())},
			} {
				t.want(requirement.ListAsRequested, f.want == f.got, f.name+" as in the call: "+f.want, "%q", f.got)
			}
		}
	})
	s.spec("a negative max_entries is INVALID_ARGUMENT", Covers(requirement.ListNegativeMax), func(t *trial) {
		_, err := t.page(-1, "")
		t.wantCode(requirement.ListNegativeMax, err, codes.InvalidArgument)
	})
	s.spec("a page has at most max_entries", Covers(requirement.ListPageSize), func(t *trial) {
		t.several()
		for _, most := range []int32{1, 2} {
			page, err := t.page(most, "")
			t.wantCode(requirement.ListPageSize, err, codes.OK)
			t.want(requirement.ListPageSize, len(page.GetEntries()) <= int(most), fmt.Sprintf("at most %d in the answer", most), "%s", count(len(page.GetEntries()), "entry"))
		}
	})
	s.spec("the pages hold every entry once", Covers(requirement.ListPagesComplete), func(t *trial) {
		mine := t.several()
		for _, most := range []int32{1, 2} {
			seen := map[string]int{}
			token := ""
			for range 1000 {
				page, err := t.page(most, token)
				t.wantCode(requirement.ListPagesComplete, err, codes.OK)
				for _, e := range page.GetEntries() {
					seen[e.GetVolumeId()+" "+e.GetPrepareId()]++
				}
				if token = page.GetNextToken(); token == "" {
					break
				}
			}
			t.want(requirement.ListPagesComplete, token == "", "a last page", "1000 pages, and still a next_token")
			for _, r := range mine {
				n := seen[r.GetVolumeId()+" "+r.GetPrepareId()]
				t.want(requirement.ListPagesComplete, n == 1, fmt.Sprintf("each preparation once over pages of %d", most), "prepare_id %s is there %s", r.GetPrepareId(), count(n, "time"))
			}
		}
	})
	s.spec("a starting_token it never gave is ABORTED", Covers(requirement.ListBadToken), func(t *trial) {
		t.several()
		_, err := t.page(1, t.canary())
		t.wantCode(requirement.ListBadToken, err, codes.Aborted)
	})
}

func (t *trial) page(most int32, token string) (*preparev1alpha1.NodeListPreparedVolumesResponse, error) {
	return t.clients.prepare.NodeListPreparedVolumes(t.ctx, &preparev1alpha1.NodeListPreparedVolumesRequest{MaxEntries: most, StartingToken: token})
}

// several makes as many preparations as there are volumes for, three at most.
func (t *trial) several() []*prepareRequest {
	var made []*prepareRequest
	most := 3
	if !t.features[CreateDeleteVolume] {
		most = min(most, len(t.config.VolumeIDs))
	}
	for range most {
		r := t.request(t.volume())
		t.prepared(r)
		made = append(made, r)
	}
	return made
}
