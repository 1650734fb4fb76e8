package report

import (
	"fmt"
	"slices"
	"strings"

	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// Known maps requirements that a plugin is known to break to the reason.
type Known map[requirement.ID]string

// Apply turns the failures that are on the list into known ones. An entry
// has to be needed: one whose requirement no spec found broken is an error,
// unless the specs were filtered out or could not run.
func (k Known) Apply(specs []Spec) error {
	var stale []string
	for id := range k {
		broken, hidden := false, false
		for i := range specs {
			s := &specs[i]
			covers := slices.Contains(s.Requirements, id)
			switch {
			case s.Outcome == Failed && (s.Breaks == id || s.Breaks == "" && covers):
				s.Outcome = KnownFailing
				s.Message = "known to fail: " + k[id] + "\n" + s.Message
				broken = true
			case covers && (s.Outcome == Filtered || s.Outcome == CouldNotRun):
				hidden = true
			}
		}
		if !broken && !hidden {
			stale = append(stale, string(id))
		}
	}
	if len(stale) > 0 {
		slices.Sort(stale)
		return fmt.Errorf("listed as known failures, but nothing failed because of them; take them off the list: %s", strings.Join(stale, ", "))
	}
	return nil
}
