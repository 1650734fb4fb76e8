package kill

import (
	"strings"
	"testing"

	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

func TestMatrix(t *testing.T) {
	results := []Result{
		{Name: "b", Actor: "SP", Breaks: requirement.PrepareReadonly, Killed: true, KilledBy: []string{"one", "two"}},
		{Name: "a", Actor: "SP", Breaks: requirement.PrepareReadonly},
		{Name: "c", Actor: "CO", Breaks: requirement.UndoByID, Killed: true, KilledBy: []string{"x | y"}},
	}
	var b strings.Builder
	if err := WriteMatrix(&b, results); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"**2 of 3 mutants are killed**, for 2 requirements: 2 in the seat of the\nplugin, 1 in that of the CO",
		"| [prepare.readonly](../SPEC.md#prepare.readonly) | a | **lives** |\n|  | b | one |\n",
		`| c | x \| y |`,
	} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("no %q in\n%s", want, b.String())
		}
	}
}

func TestSpread(t *testing.T) {
	s := SpreadOf([]Result{
		{Name: "narrow", Killed: true, FailedSpecs: 2, CouldNotRun: 8, TotalSpecs: 92},
		{Name: "wide", Killed: true, FailedSpecs: 3, CouldNotRun: 8, TotalSpecs: 92},
		{Name: "hangs"},
	})
	if s.Contained != 1 || len(s.Wide) != 2 || s.Wide[0].Name != "wide" || s.Enough() {
		t.Errorf("%+v", s)
	}
}
