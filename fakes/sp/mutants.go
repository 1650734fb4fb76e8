package sp

import (
	"slices"

	"github.com/csi-prepare/csi-prepare/fakes/mutant"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// Mutants returns every wrong SP there is.
func Mutants() []Mutant {
	return slices.Concat(
		dataMutants, volumeMutants, attributeMutants, repeatMutants, leakMutants, specMutants,
		fieldMutants, refusalMutants, listMutants, discoveryMutants, lifeMutants,
		rawMutants, formattedMutants, servedMutants, networkMutants, kindMutants, handleMutants,
		csiVolumeMutants, csiCopyMutants, csiNodeMutants,
	)
}

// seat makes the entry of the tables below.
func seat(name string, c mutant.Category, breaks requirement.ID, story string, f fault) Mutant {
	return Mutant{
		Mutant: mutant.Mutant{Name: name, Actor: requirement.SP, Category: c, Breaks: breaks, Story: story},
		fault:  f,
	}
}
