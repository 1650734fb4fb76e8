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

// WriteVerdict writes the last line: what the run showed, and what it did
// not.
func (r *Report) WriteVerdict(w io.Writer) {
	specs := map[Outcome]int{}
	for _, s := range r.Specs {
		specs[s.Outcome]++
	}
	var counts []string
	for _, o := range Outcomes() {
		if specs[o] > 0 {
			counts = append(counts, fmt.Sprintf("%d %s", specs[o], o))
		}
	}
	who := strings.TrimSpace(r.Plugin.Name + " " + r.Plugin.Version)
	fmt.Fprintf(w, "%d specs: %s\n", len(r.Specs), strings.Join(counts, ", "))
	switch r.Verdict() {
	case Passed:
		fmt.Fprintf(w, "%s conforms in all that was tested.\n", who)
	case Failed:
		fmt.Fprintf(w, "%s does not conform.\n", who)
	case KnownFailing:
		fmt.Fprintf(w, "%s does not conform, as its list of known failures says; nothing else failed.\n", who)
	case Filtered:
		fmt.Fprintf(w, "Nothing failed for %s; this was no conformance run, since specs were left out.\n", who)
	default:
		fmt.Fprintf(w, "Nothing failed for %s; conformance is not shown, since specs could not run.\n", who)
	}
	if r.AnyFailed() && r.Verdict() != Failed {
		fmt.Fprintln(w, "What failed is no mandatory requirement.")
	}
}
