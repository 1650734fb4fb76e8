package sp

import (
	"context"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/fakes/mutant"
	preparev1alpha1 "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

type entry = preparev1alpha1.NodeListPreparedVolumesResponse_Entry

// Lists that are not what is prepared.
var listMutants = []Mutant{
	seat("list-incomplete", mutant.Listing, requirement.ListComplete,
		"the last preparation is missing from the list: a CO that lost its record never finds it",
		listed(func(r *listRequest, a *listResponse) {
			if a.GetNextToken() == "" && r.GetStartingToken() == "" && len(a.Entries) > 0 {
				a.Entries = a.Entries[:len(a.Entries)-1]
			}
		})),
	seat("list-forgets-nothing", mutant.Listing, requirement.ListForgets,
		"what was unprepared stays in the list: the CO unprepares it again with every pass",
		func(s *Server) {
			var seen memory[pair, *entry]
			listed(func(r *listRequest, a *listResponse) {
				if r.GetMaxEntries() != 0 || r.GetStartingToken() != "" {
					return
				}
				now := make(map[pair]bool)
				for _, e := range a.Entries {
					key := pair{e.GetVolumeId(), e.GetPrepareId()}
					now[key] = true
					seen.swap(key, e)
				}
				for key, e := range seen.all() {
					if !now[key] {
						a.Entries = append(a.Entries, e)
					}
				}
			})(s)
		}),
	seat("list-loses-readonly", mutant.Listing, requirement.ListAsRequested,
		"readonly is not repeated in the list",
		listed(func(_ *listRequest, a *listResponse) { each(a, func(e *entry) { e.Readonly = false }) })),
	seat("list-loses-path", mutant.Listing, requirement.ListAsRequested,
		"prepare_path is not repeated in the list: a CO that lost its record cannot unprepare",
		listed(func(_ *listRequest, a *listResponse) { each(a, func(e *entry) { e.PreparePath = "" }) })),
	seat("list-ignores-page-size", mutant.Listing, requirement.ListPageSize,
		"max_entries is ignored: a large list does not fit a message",
		asked(func(_ *Server, r *listRequest) { r.MaxEntries = max(0, r.MaxEntries) * 1000 })),
	seat("list-skips-between-pages", mutant.Listing, requirement.ListPagesComplete,
		"the first entry of every later page is lost",
		listed(func(r *listRequest, a *listResponse) {
			if r.GetStartingToken() != "" && len(a.Entries) > 0 {
				a.Entries = a.Entries[1:]
			}
		})),
	seat("list-accepts-negative", mutant.Validation, requirement.ListNegativeMax,
		"a negative max_entries means everything",
		asked(func(_ *Server, r *listRequest) { r.MaxEntries = max(0, r.MaxEntries) })),
	seat("list-accepts-any-token", mutant.Validation, requirement.ListBadToken,
		"a token it never gave starts the list anew: a CO that pages across a restart may page for ever",
		instead(func(_ context.Context, _ *Server, r *listRequest, next func() (*listResponse, error)) (*listResponse, error) {
			answer, err := next()
			if status.Code(err) == codes.Aborted {
				r.StartingToken = ""
				return next()
			}
			return answer, err
		})),
}

func listed(change func(*listRequest, *listResponse)) fault {
	return answered(func(_ *Server, r *listRequest, a *listResponse) { change(r, a) })
}

func each(a *listResponse, change func(*entry)) {
	for _, e := range a.Entries {
		change(e)
	}
}

// Capabilities that are not so.
var discoveryMutants = []Mutant{
	seat("capability-rpc-unreported", mutant.Discovery, requirement.CapabilitiesRPC,
		"PREPARE_UNPREPARE_VOLUME is not reported by a plugin that serves it",
		capabilities(func(c *preparev1alpha1.NodePrepareServiceCapability) bool { return c.GetRpc() == nil })),
	seat("capability-kind-unreported", mutant.Discovery, requirement.CapabilitiesKinds,
		"the kind it returns is not reported: the CO does not offer it, or does not expect it",
		capabilities(func(c *preparev1alpha1.NodePrepareServiceCapability) bool { return c.GetKind() == nil })),
	seat("capability-other-kind", mutant.Discovery, requirement.PrepareKindReported,
		"FILESYSTEM is reported and BIND is returned",
		answered(func(_ *Server, _ *capabilitiesQuery, a *capabilitiesReply) {
			for _, c := range a.Capabilities {
				if k := c.GetKind(); k != nil {
					k.Kind = preparev1alpha1.MountKind_MOUNT_KIND_FILESYSTEM
				}
			}
		})),
	seat("capability-untyped", mutant.Discovery, requirement.CapabilitiesTyped,
		"a capability without a type stands among the others",
		answered(func(_ *Server, _ *capabilitiesQuery, a *capabilitiesReply) {
			a.Capabilities = append(a.Capabilities, &preparev1alpha1.NodePrepareServiceCapability{})
		})),
	seat("capability-flickers", mutant.Discovery, requirement.CapabilitiesStable,
		"every second answer lacks the refreshable keys",
		func(s *Server) {
			var odd memory[struct{}, bool]
			answered(func(_ *Server, _ *capabilitiesQuery, a *capabilitiesReply) {
				was, _ := odd.swap(struct{}{}, true)
				if was {
					odd.swap(struct{}{}, false)
					a.Capabilities = a.Capabilities[:2]
				}
			})(s)
		}),
}

// capabilities keeps only some of them.
func capabilities(keep func(*preparev1alpha1.NodePrepareServiceCapability) bool) fault {
	return answered(func(_ *Server, _ *capabilitiesQuery, a *capabilitiesReply) {
		var kept []*preparev1alpha1.NodePrepareServiceCapability
		for _, c := range a.Capabilities {
			if keep(c) {
				kept = append(kept, c)
			}
		}
		a.Capabilities = kept
	})
}
