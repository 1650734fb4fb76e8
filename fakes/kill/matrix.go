package kill

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// WriteMatrix writes requirement × mutant × killing spec as Markdown, in the
// order of SPEC.md. It holds nothing that two runs could differ in, so that a
// change of it is one of the suite or of the mutants.
func WriteMatrix(w io.Writer, results []Result) error {
	killed := 0
	of := map[requirement.ID][]Result{}
	for _, r := range results {
		of[r.Breaks] = append(of[r.Breaks], r)
		if r.Killed {
			killed++
		}
	}
	var b strings.Builder
	fmt.Fprintf(&b, `# Kill matrix

Each mutant is an implementation that is wrong in exactly one way. It is killed
when a spec fails because of the very requirement it breaks. The same
implementation without the fault passes. %s writes this page.

**%d of %d mutants are killed**, for %d requirements: %d in the seat of the
plugin, %d in that of the CO.

| requirement | mutant | killed by |
|---|---|---|
`, "`make mutants`", killed, len(results), len(of), seats(results, requirement.SP), seats(results, requirement.CO))
	for _, q := range requirement.All() {
		group := of[q.ID]
		slices.SortFunc(group, func(a, b Result) int { return strings.Compare(a.Name, b.Name) })
		for i, r := range group {
			name := ""
			if i == 0 {
				name = fmt.Sprintf("[%s](../SPEC.md#%s)", q.ID, q.ID)
			}
			fmt.Fprintf(&b, "| %s | %s | %s |\n", name, r.Name, r.killers())
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func seats(results []Result, actor requirement.Actor) int {
	n := 0
	for _, r := range results {
		if r.Actor == string(actor) {
			n++
		}
	}
	return n
}

// killers are the specs that killed a mutant. In a run of the whole suite more
// of them fail than in one of the specs of its requirement; the first is the
// same.
func (r Result) killers() string {
	if !r.Killed {
		return "**lives**"
	}
	return strings.ReplaceAll(r.KilledBy[0], "|", `\|`)
}

// Spread is how far the faults of mutants reach in runs of the whole suite.
type Spread struct {
	Mutants int
	// Contained counts the mutants that at most a tenth of the specs failed
	// or could not run because of.
	Contained int
	// Wide are the others, the widest first.
	Wide []Result
}

// SpreadOf measures results of runs of the whole suite. A mutant that did not
// let the suite end is wide.
func SpreadOf(results []Result) Spread {
	s := Spread{Mutants: len(results)}
	for _, r := range results {
		if r.Killed && 10*(r.FailedSpecs+r.CouldNotRun) <= r.TotalSpecs+r.CouldNotRun {
			s.Contained++
			continue
		}
		s.Wide = append(s.Wide, r)
	}
	slices.SortStableFunc(s.Wide, func(a, b Result) int { return b.FailedSpecs + b.CouldNotRun - a.FailedSpecs - a.CouldNotRun })
	return s
}

// Enough reports whether nine of ten mutants are contained.
func (s Spread) Enough() bool { return 10*s.Contained >= 9*s.Mutants }
