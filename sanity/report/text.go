package report

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
)

// WriteTable writes a row for each section of SPEC.md with the number of its
// requirements by outcome. Outcomes that did not occur have no column.
func (r *Report) WriteTable(w io.Writer) {
	var columns []Outcome
	for _, o := range Outcomes() {
		if r.Summary.Count(o) > 0 {
			columns = append(columns, o)
		}
	}
	var order []string
	rows := map[string]*Summary{}
	for _, q := range r.Requirements {
		if rows[q.Section] == nil {
			rows[q.Section] = &Summary{}
			order = append(order, q.Section)
		}
		*rows[q.Section].of(q.Outcome)++
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	write := func(first string, s *Summary) {
		fmt.Fprint(t, first)
		for _, o := range columns {
			if n := s.Count(o); n > 0 {
				fmt.Fprintf(t, "\t%d", n)
			} else {
				fmt.Fprint(t, "\t.")
			}
		}
		fmt.Fprintln(t)
	}
	fmt.Fprint(t, "section of SPEC.md")
	for _, o := range columns {
		fmt.Fprintf(t, "\t%s", o)
	}
	fmt.Fprintln(t)
	for _, section := range order {
		write(section, rows[section])
	}
	write("requirements", &r.Summary)
	_ = t.Flush() // output for people
}

// WriteOpen says what keeps the run from showing more than it did, by reason.
// Specs are named where they could not run or are known to fail; what is
// unsupported is counted, since it takes nothing from the verdict.
func (r *Report) WriteOpen(w io.Writer) {
	for _, o := range []Outcome{KnownFailing, CouldNotRun, Unsupported} {
		var order []string
		names := map[string][]string{}
		for _, s := range r.Specs {
			if s.Outcome != o {
				continue
			}
			reason := firstLine(s.Message)
			if names[reason] == nil {
				order = append(order, reason)
			}
			names[reason] = append(names[reason], s.Name)
		}
		if len(order) > 0 {
			fmt.Fprintf(w, "\n%s\n", o)
		}
		for _, reason := range order {
			fmt.Fprintf(w, "  %3d  %s\n", len(names[reason]), reason)
			if o == Unsupported {
				continue
			}
			for _, name := range names[reason] {
				fmt.Fprintf(w, "         %s\n", name)
			}
		}
	}
}

// Words are the verdict for people.
type Words struct {
	Word     string // "conforms", "does not conform", …
	Sentence string // what the run showed, and what it did not
}

// Words puts the verdict into words.
func (r *Report) Words() Words {
	who := strings.TrimSpace(r.Plugin.Name + " " + r.Plugin.Version)
	of := ""
	if r.Profile != "" {
		of = " to the profile " + r.Profile
	}
	var w Words
	switch r.Verdict() {
	case Passed:
		w = Words{"conforms", who + " conforms" + of + " in all that was tested."}
	case Failed:
		w = Words{"does not conform", who + " does not conform" + of + "."}
	case KnownFailing:
		w = Words{"does not conform", who + " does not conform" + of + ", as its list of known failures says; nothing else failed."}
	case Filtered:
		w = Words{"not a conformance run", "Nothing failed for " + who + "; this was no conformance run, since specs were left out."}
	default:
		w = Words{"not shown", "Nothing failed for " + who + "; conformance is not shown, since specs could not run."}
	}
	if r.AnyFailed() && r.Verdict() != Failed {
		w.Sentence += " What failed is no mandatory requirement."
	}
	return w
}

// WriteVerdict writes the last line: what the run showed, and what it did
// not.
func (r *Report) WriteVerdict(w io.Writer) {
	var texts []string
	for _, c := range outcomes(r.Specs) {
		texts = append(texts, fmt.Sprintf("%d %s", c.N, c.Outcome))
	}
	fmt.Fprintf(w, "%d specs: %s\n", len(r.Specs), strings.Join(texts, ", "))
	for _, p := range r.Profiles {
		if p.Outcome != Unsupported {
			fmt.Fprintf(w, "profile %-13s %s\n", p.Name, p.Outcome)
		}
	}
	fmt.Fprintln(w, r.Words().Sentence)
}
