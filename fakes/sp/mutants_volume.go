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
		"the source is an empty directory made for the call: the consumer starts on nothing, and what it writes goes nowhere",
		specs(func(s *Server, r *prepareRequest, spec *preparev1alpha1.MountSpec) {
			spec.GetBind().GetSource().Relative += ".empty"
			_ = os.Mkdir(s.where(r.GetVolumeId())+".empty", 0o777)
		})),
	seat("wrong-volume", mutant.Data, requirement.PrepareVolumeData,
		"the source is the directory of another volume, as after a lookup by position: two consumers write over each other",
		specs(func(s *Server, r *prepareRequest, spec *preparev1alpha1.MountSpec) {
			s.mu.Lock()
			defer s.mu.Unlock()
			for _, id := range slices.Sorted(maps.Keys(s.state.volumes)) {
				if id != r.GetVolumeId() {
					spec.GetBind().GetSource().Relative = id
				}
			}
		})),
}
