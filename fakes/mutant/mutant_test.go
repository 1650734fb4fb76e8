package mutant

import (
	"strings"
	"testing"

	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

func TestCheckFindsWhatMakesASetUseless(t *testing.T) {
	good := Mutant{Name: "good", Actor: requirement.SP, Category: Data, Breaks: requirement.UnprepareDataKept, Story: "it wipes"}
	change := func(f func(*Mutant)) []Mutant {
		m := good
		f(&m)
		return []Mutant{m}
	}
	for _, test := range []struct {
		name    string
		mutants []Mutant
		want    string
	}{
		{"nothing wrong", []Mutant{good}, ""},
		{"no name", change(func(m *Mutant) { m.Name = "" }), "no name"},
		{"a name twice", []Mutant{good, good}, "twice"},
		{"no requirement", change(func(m *Mutant) { m.Breaks = "data.eaten" }), "no requirement"},
		{"the other seat", change(func(m *Mutant) { m.Actor = requirement.CO }), "binds SP"},
		{"no story", change(func(m *Mutant) { m.Story = "" }), "story"},
		{"no category", change(func(m *Mutant) { m.Category = "" }), "category"},
	} {
		t.Run(test.name, func(t *testing.T) {
			err := Check(test.mutants)
			switch {
			case test.want == "" && err != nil:
				t.Error(err)
			case test.want != "" && (err == nil || !strings.Contains(err.Error(), test.want)):
				t.Errorf("got %v, want an error with %q", err, test.want)
			}
		})
	}
}
