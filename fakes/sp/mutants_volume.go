package sp

import (
	"maps"
	"os"
	"slices"

	"github.com/csi-prepare/csi-prepare/fakes/mutant"
	preparev1alpha1 "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// What the consumer finds is not the volume.
var volumeMutants = []Mutant{
	seat("empty-source", mutant.Data, requirement.PrepareVolumeData,
		"the source is an empty directory made for the preparation: the consumer starts on nothing, and what it writes goes nowhere",
		specs(func(s *Server, r *prepareRequest, spec *preparev1alpha1.MountSpec) {
			scratch := "." + r.GetPrepareId()
			spec.GetBind().GetSource().Relative += scratch
			_ = os.Mkdir(s.where(r.GetVolumeId())+scratch, 0o777)
		})),
	seat("wrong-volume", mutant.Data, requirement.PrepareVolumeData,
		"the source is the directory of the first volume there is, whichever was asked for: consumers write over each other",
		specs(func(s *Server, _ *prepareRequest, spec *preparev1alpha1.MountSpec) {
			s.mu.Lock()
			defer s.mu.Unlock()
			spec.GetBind().GetSource().Relative = slices.Min(slices.Collect(maps.Keys(s.state.volumes)))
		})),
}
