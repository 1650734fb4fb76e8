package e2e

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"text/tabwriter"
)

// outcome is one line of the report.
type outcome struct {
	Runtime string `json:"runtime"`
	Way     string `json:"way"`
	What    string `json:"what"`
	Outcome string `json:"outcome"`
	// Note is why it could not run, or what a converter said.
	Note string `json:"note,omitempty"`
}

var outcomes struct {
	sync.Mutex
	all []*outcome
}

// tell has the outcome of a test go into the report.
func tell(t *testing.T, runtime, way, what string) *outcome {
	t.Helper()
	o := &outcome{Runtime: runtime, Way: way, What: what}
	outcomes.Lock()
	outcomes.all = append(outcomes.all, o)
	outcomes.Unlock()
	t.Cleanup(func() {
		switch {
		case t.Failed():
			o.Outcome = "failed"
		case t.Skipped():
			o.Outcome = "could-not-run"
		default:
			o.Outcome = "passed"
		}
	})
	return o
}

// cannot ends a test that this machine cannot run.
func (o *outcome) cannot(t *testing.T, reason string) {
	t.Helper()
	o.Note = reason
	t.Skip(reason)
}

// report writes the outcomes to E2E_REPORT, and as a table to stdout.
func report() error {
	file := os.Getenv("E2E_REPORT")
	if file == "" || len(outcomes.all) == 0 {
		return nil
	}
	text, err := json.MarshalIndent(outcomes.all, "", "  ")
	if err == nil {
		err = os.WriteFile(file, append(text, '\n'), 0o644)
	}
	if err != nil {
		return err
	}
	type row struct{ way, what string }
	var rows []row
	cells, counts, lacking := map[row]map[string]string{}, map[string]int{}, map[string]bool{}
	for _, o := range outcomes.all {
		r := row{o.Way, o.What}
		if cells[r] == nil {
			rows, cells[r] = append(rows, r), map[string]string{}
		}
		cell := o.Outcome
		if o.Outcome == "passed" && strings.HasPrefix(o.Note, "refused") {
			cell = "refused"
		}
		if o.Outcome == "could-not-run" {
			lacking[o.Runtime+": "+o.Note] = true
		}
		cells[r][o.Runtime] = cell
		counts[o.Outcome]++
	}
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprint(w, "WAY\tWHAT")
	for _, e := range engines {
		fmt.Fprint(w, "\t", e.name)
	}
	for _, r := range rows {
		fmt.Fprintf(w, "\n%s\t%s", r.way, r.what)
		for _, e := range engines {
			fmt.Fprint(w, "\t", cells[r][e.name])
		}
	}
	fmt.Fprintln(w)
	if err := w.Flush(); err != nil {
		return err
	}
	for _, l := range slices.Sorted(maps.Keys(lacking)) {
		fmt.Println("could not run:", l)
	}
	fmt.Printf("%d passed, %d failed, %d could not run. Refused, as it has to be, is what the configuration of a\n"+
		"container cannot carry or keep; the field and the reason are in %s.\n",
		counts["passed"], counts["failed"], counts["could-not-run"], file)
	return nil
}
