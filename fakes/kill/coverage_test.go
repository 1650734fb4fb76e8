package kill

import (
	"slices"
	"testing"

	"github.com/csi-prepare/csi-prepare/fakes/mutant"
	"github.com/csi-prepare/csi-prepare/sanity"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// TestEveryTestedMustHasAMutant asks for evidence that a spec can fail: each
// mandatory requirement that has a spec is broken by a mutant.
func TestEveryTestedMustHasAMutant(t *testing.T) {
	all := Mutants()
	if err := mutant.Check(all); err != nil {
		t.Error(err)
	}
	broken := map[requirement.ID]bool{}
	for _, m := range all {
		broken[m.Breaks] = true
	}
	tested := map[requirement.ID]bool{}
	for _, l := range sanity.List() {
		for _, id := range l.Covers {
			tested[id] = true
		}
	}
	for _, q := range requirement.All() {
		if q.Level.Mandatory() && tested[q.ID] && !broken[q.ID] {
			t.Errorf("%s has a spec and no mutant that breaks it", q.ID)
		}
		if broken[q.ID] && !tested[q.ID] {
			t.Errorf("%s has a mutant and no spec that could kill it", q.ID)
		}
	}
	count := func(actor requirement.Actor) int {
		return len(slices.DeleteFunc(slices.Clone(all), func(m mutant.Mutant) bool { return m.Actor != actor }))
	}
	if sp, co := count(requirement.SP), count(requirement.CO); sp+co < 150 || co < 60 {
		t.Errorf("%d mutants, %d of them in the seat of the CO; want 150, and 60", sp+co, co)
	}
}
