package report

import (
	"fmt"
	"io"
	"slices"
)

// Change is one thing that came out differently in two reports.
type Change struct {
	// What is a requirement, a profile or a feature, Name which one.
	What, Name string
	// Before and After are outcomes, "absent" where there is none.
	Before, After string
	// Worse is true if it takes something from the verdict.
	Worse bool
	// Message is the first line of what a spec found, where After is failed.
	Message string
}

const absent = "absent"

// Diff returns what has changed from one report to a later one: the verdict on
// profiles, what is claimed, and the outcome of requirements, in that order.
// Names and messages of specs may change freely.
func Diff(before, after *Report) []Change {
	changes := differ(before.profiles(), after.profiles(), "profile", nil)
	changes = append(changes, differ(before.claims(), after.claims(), "feature", nil)...)
	return append(changes, differ(before.verdicts(), after.verdicts(), "requirement", after.messages())...)
}

// outcomeOf is a name with its outcome, in the order of the report.
type outcomeOf struct{ name, outcome string }

func (r *Report) profiles() (all []outcomeOf) {
	for _, p := range r.Profiles {
		all = append(all, outcomeOf{p.Name, string(p.Outcome)})
	}
	return all
}

func (r *Report) claims() (all []outcomeOf) {
	for _, f := range r.Features {
		all = append(all, outcomeOf{f, "claimed"})
	}
	return all
}

func (r *Report) verdicts() (all []outcomeOf) {
	for _, q := range r.Requirements {
		all = append(all, outcomeOf{string(q.ID), string(q.Outcome)})
	}
	return all
}

// messages are what failed specs found, by the requirement that broke.
func (r *Report) messages() map[string]string {
	found := map[string]string{}
	for _, s := range r.Specs {
		if s.Outcome != Failed || found[string(s.Breaks)] != "" {
			continue
		}
		found[string(s.Breaks)] = firstLine(s.Message)
		if s.Evidence != nil {
			found[string(s.Breaks)] = "expected " + firstLine(s.Evidence.Expected) + "; actual " + firstLine(s.Evidence.Actual)
		}
	}
	return found
}

func differ(before, after []outcomeOf, what string, messages map[string]string) []Change {
	var changes []Change
	was := map[string]string{}
	for _, b := range before {
		was[b.name] = b.outcome
	}
	for _, a := range after {
		b := orElse(was[a.name], absent)
		delete(was, a.name)
		if a.outcome != b {
			changes = append(changes, Change{what, a.name, b, a.outcome, worse(b, a.outcome), messages[a.name]})
		}
	}
	for _, b := range before {
		if _, gone := was[b.name]; gone {
			changes = append(changes, Change{what, b.name, b.outcome, absent, worse(b.outcome, absent), ""})
		}
	}
	return changes
}

// worse reports whether an outcome takes from a verdict what the one before
// did not. What passed and is now out of sight was not shown to hold any more.
func worse(before, after string) bool {
	rank := func(o string) int {
		i := slices.Index([]string{string(Failed), string(KnownFailing), string(CouldNotRun), string(Filtered), absent, string(Untested), string(Unsupported), "claimed", string(Passed)}, o)
		return i
	}
	return rank(after) < rank(before)
}

// WriteDiff writes changes, one a line, and returns whether any is for the
// worse.
func WriteDiff(w io.Writer, changes []Change) bool {
	bad := false
	for _, c := range changes {
		mark := " "
		if c.Worse {
			mark, bad = "!", true
		}
		fmt.Fprintf(w, "%s %-12s %-36s %s -> %s\n", mark, c.What, c.Name, c.Before, c.After)
		if c.Message != "" && c.After == string(Failed) {
			fmt.Fprintf(w, "      %s\n", c.Message)
		}
	}
	if len(changes) == 0 {
		fmt.Fprintln(w, "Nothing came out differently.")
	}
	return bad
}
