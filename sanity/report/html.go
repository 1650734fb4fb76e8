package report

import (
	_ "embed"
	"fmt"
	"html/template"
	"io"
	"slices"
	"strings"

	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

//go:embed page.html.tmpl
var pageText string

var page = template.Must(template.New("page").Funcs(template.FuncMap{
	"counted": func(s Summary) []count { return counts(s.Count) },
	"change":  change,
	"marked":  marked,
}).Parse(pageText))

// count is how often an outcome occurred.
type count struct {
	Outcome Outcome
	N       int
}

// counts are the outcomes that occurred, the best first.
func counts(of func(Outcome) int) []count {
	var all []count
	for _, o := range Outcomes() {
		if n := of(o); n > 0 {
			all = append(all, count{o, n})
		}
	}
	return all
}

func outcomes(specs []Spec) []count {
	return counts(func(o Outcome) int {
		n := 0
		for _, s := range specs {
			if s.Outcome == o {
				n++
			}
		}
		return n
	})
}

// change is the class of a line of a mount table's difference.
func change(line string) string {
	switch {
	case strings.HasPrefix(line, "+"):
		return "a"
	case strings.HasPrefix(line, "-"):
		return "r"
	case strings.HasPrefix(line, "~"):
		return "c"
	default:
		return ""
	}
}

// marked sets what stands between backticks as code.
func marked(text string) template.HTML {
	var b strings.Builder
	for i, part := range strings.Split(text, "`") {
		part = template.HTMLEscapeString(part)
		if i%2 == 1 {
			part = "<code>" + part + "</code>"
		}
		b.WriteString(part)
	}
	return template.HTML(b.String()) //nolint:gosec // every part is escaped
}

// pageSpec is a spec as the page shows it.
type pageSpec struct {
	Spec
	Short     string // name without the section
	Anchor    string // of it in the page
	Millis    float64
	Sentences []requirement.Requirement
}

type pageSection struct {
	Name   string
	Counts []count
	Specs  []pageSpec
}

// finding is what a failed spec found, at the top of the page.
type finding struct {
	Anchor, Spec string
	Outcome      Outcome
	Requirement  requirement.ID
	Actual       string
}

// pageRequirement is a requirement with its sentence.
type pageRequirement struct {
	Requirement
	Text string
}

// WriteHTML writes the report as one page that needs nothing else: no other
// file, no network.
func (r *Report) WriteHTML(w io.Writer) error {
	data := struct {
		R            *Report
		Who          string
		Outcome      Outcome
		Verdict      Words
		Counts       []count
		SpecCounts   []count
		Broken       []finding
		Sections     []pageSection
		Requirements []pageRequirement
	}{
		R: r, Who: orElse(r.Plugin.Name, "unnamed"), Outcome: r.Verdict(), Verdict: r.Words(),
		Counts: counts(r.Summary.Count), SpecCounts: outcomes(r.Specs), Sections: r.pageSections(),
	}
	for i, s := range r.Specs {
		if s.Outcome != Failed && s.Outcome != KnownFailing {
			continue
		}
		f := finding{Anchor: anchor(i), Spec: s.Name, Outcome: s.Outcome, Requirement: s.Breaks, Actual: firstLine(s.Message)}
		if s.Evidence != nil {
			f.Actual = firstLine(s.Evidence.Actual)
		}
		data.Broken = append(data.Broken, f)
	}
	for _, q := range r.Requirements {
		known, _ := requirement.Lookup(q.ID)
		data.Requirements = append(data.Requirements, pageRequirement{q, known.Text})
	}
	if err := page.Execute(w, data); err != nil {
		return fmt.Errorf("writing the page: %w", err)
	}
	return nil
}

// pageSections are the sections in the order of the specs; in each, what is
// wrong comes first.
func (r *Report) pageSections() []pageSection {
	var all []pageSection
	for number, s := range r.Specs {
		i := slices.IndexFunc(all, func(sec pageSection) bool { return sec.Name == s.Section })
		if i < 0 {
			i = len(all)
			all = append(all, pageSection{Name: s.Section})
		}
		shown := pageSpec{Spec: s, Short: strings.TrimPrefix(s.Name, s.Section+": "), Anchor: anchor(number), Millis: 1000 * s.Seconds}
		for _, id := range s.Requirements {
			if q, ok := requirement.Lookup(id); ok {
				shown.Sentences = append(shown.Sentences, q)
			}
		}
		if q, ok := requirement.Lookup(s.Breaks); ok && !slices.Contains(s.Requirements, s.Breaks) {
			shown.Sentences = append(shown.Sentences, q)
		}
		all[i].Specs = append(all[i].Specs, shown)
	}
	for i := range all {
		var specs []Spec
		for _, s := range all[i].Specs {
			specs = append(specs, s.Spec)
		}
		all[i].Counts = outcomes(specs)
		slices.SortStableFunc(all[i].Specs, func(a, b pageSpec) int { return urgency(a.Outcome) - urgency(b.Outcome) })
	}
	return all
}

func anchor(number int) string { return fmt.Sprintf("spec-%d", number) }

// urgency orders outcomes by how soon a reader wants to see them.
func urgency(o Outcome) int {
	return slices.Index([]Outcome{Failed, KnownFailing, CouldNotRun, Passed, Filtered, Unsupported, Untested}, o)
}
