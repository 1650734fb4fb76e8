package requirement

import (
	"strings"
	"testing"
)

func TestEveryRequirementIsComplete(t *testing.T) {
	seen := map[ID]bool{}
	for _, r := range All() {
		if seen[r.ID] {
			t.Errorf("%s twice", r.ID)
		}
		seen[r.ID] = true
		if r.Actor != SP && r.Actor != CO {
			t.Errorf("%s binds %q", r.ID, r.Actor)
		}
		if !strings.Contains(r.Text, " "+r.Level.String()+" ") {
			t.Errorf("%s: level %s is not in %q", r.ID, r.Level, r.Text)
		}
		if got, ok := Lookup(r.ID); !ok || got != r {
			t.Errorf("Lookup(%s) = %+v, %v", r.ID, got, ok)
		}
	}
	if _, ok := Lookup("no.such-thing"); ok {
		t.Error("an id that does not exist was found")
	}
}

func TestAllReturnsACopy(t *testing.T) {
	All()[0].ID = "changed"
	if All()[0].ID == "changed" {
		t.Error("a caller changed the requirements")
	}
}

func TestLevels(t *testing.T) {
	for level, want := range map[Level]struct {
		text      string
		mandatory bool
	}{
		Must: {"MUST", true}, MustNot: {"MUST NOT", true},
		Should: {"SHOULD", false}, ShouldNot: {"SHOULD NOT", false},
		May: {"MAY", false}, 0: {"unknown", false},
	} {
		if level.String() != want.text || level.Mandatory() != want.mandatory {
			t.Errorf("%d: %s, mandatory %v", level, level, level.Mandatory())
		}
	}
}
