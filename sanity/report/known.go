package report

import (
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// Known maps requirements that a plugin is known to break to the reason. A
// key is an id, or a pattern of ids as path.Match reads it: "idempotency.*".
type Known map[requirement.ID]string

// Check reports keys that no requirement of the seat has.
func (k Known) Check(actor requirement.Actor) error {
	for pattern := range k {
		if _, err := path.Match(string(pattern), ""); err != nil {
			return fmt.Errorf("known failing: %q: %w", pattern, err)
		}
		if !slices.ContainsFunc(requirement.All(), func(q requirement.Requirement) bool { return q.Actor == actor && names(pattern, q.ID) }) {
			return fmt.Errorf("known failing: requirement %q: no such id in this seat; `prepare-sanity list` has them all", pattern)
		}
	}
	return nil
}

// Apply turns the failures that are on the list into known ones. An entry
// has to be needed: one that no failure is due to is an error, unless specs of
// what it names were filtered out or could not run.
func (k Known) Apply(specs []Spec) error {
	var stale []string
	due := make([][]requirement.ID, len(specs)) // before any of them is known
	for i := range specs {
		due[i] = specs[i].due()
	}
	for pattern, reason := range k {
		broken, hidden := false, false
		for i := range specs {
			s := &specs[i]
			switch named := func(id requirement.ID) bool { return names(pattern, id) }; {
			case slices.ContainsFunc(due[i], named):
				if broken = true; s.Outcome == Failed {
					s.Outcome, s.Message = KnownFailing, "known to fail: "+reason+"\n"+s.Message
				}
			case s.Outcome == Filtered || s.Outcome == CouldNotRun:
				hidden = hidden || slices.ContainsFunc(s.Requirements, named)
			}
		}
		if !broken && !hidden {
			stale = append(stale, string(pattern))
		}
	}
	if len(stale) > 0 {
		slices.Sort(stale)
		return fmt.Errorf("listed as known failures, but nothing failed because of them; take them off the list: %s", strings.Join(stale, ", "))
	}
	return nil
}

// names reports whether a key of the list names a requirement.
func names(pattern, id requirement.ID) bool {
	named, err := path.Match(string(pattern), string(id))
	return err == nil && named
}

// due are the requirements a failed spec failed because of.
func (s *Spec) due() []requirement.ID {
	switch {
	case s.Outcome != Failed:
		return nil
	case s.Breaks != "":
		return []requirement.ID{s.Breaks}
	default:
		return s.Requirements
	}
}
