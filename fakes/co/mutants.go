package co

import (
	"slices"
)

// Mutants returns every wrong executor there is.
func Mutants() []Mutant {
	return slices.Concat(attributeMutants, performMutants, sourceMutants, blockMutants, refusalMutants, undoMutants, lifeMutants, hostMutants, owingMutants, extensionMutants, attackedMutants)
}
