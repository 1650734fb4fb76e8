package report

import (
	"encoding/xml"
	"fmt"
	"io"
	"strings"

	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

type junitSuites struct {
	XMLName xml.Name     `xml:"testsuites"`
	Suites  []junitSuite `xml:"testsuite"`
}

type junitSuite struct {
	Name     string      `xml:"name,attr"`
	Tests    int         `xml:"tests,attr"`
	Failures int         `xml:"failures,attr"`
	Skipped  int         `xml:"skipped,attr"`
	Seconds  float64     `xml:"time,attr"`
	Cases    []junitCase `xml:"testcase"`
}

type junitCase struct {
	Class   string     `xml:"classname,attr"`
	Name    string     `xml:"name,attr"`
	Seconds float64    `xml:"time,attr"`
	Failure *junitText `xml:"failure,omitempty"`
	Skipped *junitText `xml:"skipped,omitempty"`
}

type junitText struct {
	Message string `xml:"message,attr"`
	Text    string `xml:",chardata"`
}

// WriteJUnit writes the specs as JUnit XML, as CI systems read it: what is
// neither passed nor failed is skipped, with the outcome in the message.
func (r *Report) WriteJUnit(w io.Writer) error {
	suite := junitSuite{Name: r.Plugin.Name, Tests: len(r.Specs), Seconds: r.Seconds}
	for _, s := range r.Specs {
		c := junitCase{Class: section(s), Name: s.title(), Seconds: s.Seconds}
		switch s.Outcome {
		case Passed:
		case Failed:
			suite.Failures++
			c.Failure = &junitText{Message: firstLine(s.Message), Text: s.Message}
		default:
			suite.Skipped++
			c.Skipped = &junitText{Message: string(s.Outcome) + ": " + firstLine(s.Message)}
		}
		suite.Cases = append(suite.Cases, c)
	}
	if _, err := io.WriteString(w, xml.Header); err != nil {
		return fmt.Errorf("writing JUnit: %w", err)
	}
	e := xml.NewEncoder(w)
	e.Indent("", "  ")
	if err := e.Encode(junitSuites{Suites: []junitSuite{suite}}); err != nil {
		return fmt.Errorf("writing JUnit: %w", err)
	}
	_, err := io.WriteString(w, "\n")
	return err
}

// title is the name with the requirements, which is all JUnit has room for.
func (s Spec) title() string {
	ids := make([]string, len(s.Requirements))
	for i, id := range s.Requirements {
		ids[i] = string(id)
	}
	return s.Name + " [" + strings.Join(ids, ", ") + "]"
}

// section is the section of SPEC.md the first requirement of s stands in.
func section(s Spec) string {
	if len(s.Requirements) > 0 {
		if q, ok := requirement.Lookup(s.Requirements[0]); ok {
			return q.Section
		}
	}
	return "unknown"
}

func firstLine(s string) string {
	line, _, _ := strings.Cut(strings.TrimSpace(s), "\n")
	return line
}
