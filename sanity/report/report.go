// Package report turns the outcomes of specs into what people and machines
// read: a verdict for each requirement, JSON, JUnit and text.
//
// It knows neither Ginkgo nor gRPC. A report holds no secret as long as the
// messages it is given hold none.
package report

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"

	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// Outcome is how a spec, a requirement or a profile came out.
type Outcome string

// The outcomes. Only a passed or unsupported one is no obstacle to
// conformance.
const (
	// Passed: it ran and held.
	Passed Outcome = "passed"
	// Failed: it ran and did not hold.
	Failed Outcome = "failed"
	// KnownFailing: it failed as the list of known failures says.
	KnownFailing Outcome = "known-failing"
	// Unsupported: it belongs to an optional feature that is not claimed.
	Unsupported Outcome = "unsupported"
	// Filtered: the user left it out.
	Filtered Outcome = "filtered"
	// CouldNotRun: the environment, or an earlier failure, did not let it.
	CouldNotRun Outcome = "could-not-run"
	// Untested: no spec covers it. Requirements only.
	Untested Outcome = "untested"
)

// Outcomes lists every outcome, the best first.
func Outcomes() []Outcome {
	return []Outcome{Passed, Failed, KnownFailing, Unsupported, Filtered, CouldNotRun, Untested}
}

// The identity of the JSON document.
const (
	APIVersion = "csi-prepare/v1alpha1"
	Kind       = "ConformanceReport"
)

// Report is the result of one run, as it is written to disk.
type Report struct {
	APIVersion string   `json:"apiVersion"`
	Kind       string   `json:"kind"`
	Suite      Suite    `json:"suite"`
	Plugin     Plugin   `json:"plugin"`
	Kernel     string   `json:"kernel"`
	Features   []string `json:"features"`
	// Profile is the one the run was restricted to, "" if to none.
	Profile      string        `json:"profile,omitempty"`
	Profiles     []Profile     `json:"profiles"`
	Requirements []Requirement `json:"requirements"`
	Specs        []Spec        `json:"specs"`
	Summary      Summary       `json:"summary"`
	Seconds      float64       `json:"seconds"`
}

// Suite says what the plugin was measured with.
type Suite struct {
	Version    string `json:"version"`
	SpecDigest string `json:"specDigest"`
	Seed       int64  `json:"seed"`
}

// Plugin is who was tested. For an executor the name is its endpoint.
type Plugin struct {
	Name    string `json:"name"`
	Version string `json:"version"`
}

// Profile is a named set of features with the verdict on it.
type Profile struct {
	Name    string  `json:"name"`
	Outcome Outcome `json:"outcome"`
	About   string  `json:"about,omitempty"`
	// Reason says why the profile is not claimed.
	Reason string `json:"reason,omitempty"`
	// Requirements counts by outcome those its specs cover.
	Requirements Summary `json:"requirements"`
}

// Requirement is one normative sentence with the verdict on it.
type Requirement struct {
	ID      requirement.ID `json:"id"`
	Level   string         `json:"level"`
	Actor   string         `json:"actor"`
	Section string         `json:"section"`
	Outcome Outcome        `json:"outcome"`
	Specs   []string       `json:"specs"`
}

// Spec is one test with its outcome.
type Spec struct {
	Name         string           `json:"name"`
	Section      string           `json:"section"`
	Requirements []requirement.ID `json:"requirements"`
	// Profiles are those the spec belongs to.
	Profiles []string `json:"profiles"`
	Outcome  Outcome  `json:"outcome"`
	Seconds  float64  `json:"seconds"`
	Message  string   `json:"message"`
	// Breaks is the requirement a failed spec found broken. It may be one
	// the spec does not cover, when what the spec builds on failed. Empty
	// means everything the spec covers.
	Breaks requirement.ID `json:"breaks,omitempty"`
	// Evidence is what a failed spec found.
	Evidence *Evidence `json:"evidence,omitempty"`
}

// Summary counts requirements by outcome.
type Summary struct {
	Passed       int `json:"passed"`
	Failed       int `json:"failed"`
	KnownFailing int `json:"known_failing"`
	Unsupported  int `json:"unsupported"`
	Filtered     int `json:"filtered"`
	CouldNotRun  int `json:"could_not_run"`
	Untested     int `json:"untested"`
}

// Count returns the number of requirements with an outcome.
func (s *Summary) Count(o Outcome) int { return *s.of(o) }

func (s *Summary) of(o Outcome) *int {
	switch o {
	case Passed:
		return &s.Passed
	case Failed:
		return &s.Failed
	case KnownFailing:
		return &s.KnownFailing
	case Unsupported:
		return &s.Unsupported
	case Filtered:
		return &s.Filtered
	case CouldNotRun:
		return &s.CouldNotRun
	default:
		return &s.Untested
	}
}

// Judge fills Requirements and Summary of r from its Specs, for the
// requirements of one seat in the order of SPEC.md.
func (r *Report) Judge(actor requirement.Actor) {
	r.APIVersion, r.Kind = APIVersion, Kind
	r.Requirements, r.Summary = nil, Summary{}
	broken := map[requirement.ID]Outcome{}
	for _, s := range r.Specs {
		if s.Outcome != Failed && s.Outcome != KnownFailing {
			continue
		}
		found := s.Requirements
		if s.Breaks != "" {
			found = []requirement.ID{s.Breaks}
		}
		for _, id := range found {
			if broken[id] != Failed {
				broken[id] = s.Outcome
			}
		}
	}
	for _, q := range requirement.All() {
		if q.Actor != actor {
			continue
		}
		entry := Requirement{
			ID: q.ID, Level: q.Level.String(), Actor: string(q.Actor), Section: q.Section,
			Outcome: Untested, Specs: []string{},
		}
		var outcomes []Outcome
		for _, s := range r.Specs {
			if slices.Contains(s.Requirements, q.ID) {
				entry.Specs = append(entry.Specs, s.Name)
				outcomes = append(outcomes, s.Outcome)
			}
		}
		entry.Outcome = verdict(outcomes)
		if o, ok := broken[q.ID]; ok {
			entry.Outcome = o
		}
		*r.Summary.of(entry.Outcome)++
		r.Requirements = append(r.Requirements, entry)
	}
}

// JudgeProfile is the verdict on a profile from the specs that belong to it.
// If lacks says why the profile is not claimed, it is unsupported.
func (r *Report) JudgeProfile(actor requirement.Actor, name, about, lacks string) Profile {
	p := Profile{Name: name, About: about, Reason: lacks}
	part := Report{}
	for _, s := range r.Specs {
		if slices.Contains(s.Profiles, name) {
			part.Specs = append(part.Specs, s)
		}
	}
	part.Judge(actor)
	p.Requirements, p.Outcome = part.Summary, part.Verdict()
	p.Requirements.Untested = 0 // those are of other profiles
	switch {
	case lacks != "":
		p.Outcome = Unsupported
	case len(part.Specs) == 0:
		p.Outcome = Untested
	}
	return p
}

// verdict is what specs show about a requirement that none of them found
// broken. A spec that failed because of another requirement shows nothing
// about this one.
func verdict(specs []Outcome) Outcome {
	switch {
	case len(specs) == 0:
		return Untested
	case slices.Contains(specs, CouldNotRun), slices.Contains(specs, Failed), slices.Contains(specs, KnownFailing):
		return CouldNotRun
	case slices.Contains(specs, Filtered):
		return Filtered
	case slices.Contains(specs, Passed):
		return Passed
	default:
		return Unsupported
	}
}

// Verdict is the outcome over the mandatory requirements: the worst of them,
// in the order failed, known-failing, could-not-run, filtered. Requirements
// that no spec covers do not count. Of a run that was restricted to a profile
// it is the verdict on that.
func (r *Report) Verdict() Outcome {
	for _, p := range r.Profiles {
		if r.Profile != "" && p.Name == r.Profile {
			return p.Outcome
		}
	}
	have := map[Outcome]bool{}
	for _, q := range r.Requirements {
		if l := q.Level; l == requirement.Must.String() || l == requirement.MustNot.String() {
			have[q.Outcome] = true
		}
	}
	for _, o := range []Outcome{Failed, KnownFailing, CouldNotRun, Filtered, Passed} {
		if have[o] {
			return o
		}
	}
	return CouldNotRun
}

// Ran reports whether any spec came to an end of its own.
func (r *Report) Ran() bool {
	return slices.ContainsFunc(r.Specs, func(s Spec) bool {
		return s.Outcome == Passed || s.Outcome == Failed || s.Outcome == KnownFailing
	})
}

// AnyFailed reports whether a spec failed that was not known to.
func (r *Report) AnyFailed() bool {
	return slices.ContainsFunc(r.Specs, func(s Spec) bool { return s.Outcome == Failed })
}

// WriteJSON writes the report as indented JSON.
func (r *Report) WriteJSON(w io.Writer) error {
	if r.Features == nil {
		r.Features = []string{}
	}
	if r.Profiles == nil {
		r.Profiles = []Profile{}
	}
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	if err := e.Encode(r); err != nil {
		return fmt.Errorf("writing the report: %w", err)
	}
	return nil
}

// Read reads a report that WriteJSON wrote.
func Read(in io.Reader) (*Report, error) {
	var r Report
	if err := json.NewDecoder(in).Decode(&r); err != nil {
		return nil, fmt.Errorf("reading a report: %w", err)
	}
	if r.APIVersion != APIVersion || r.Kind != Kind {
		return nil, fmt.Errorf("reading a report: is a %s %s, want %s %s", r.APIVersion, r.Kind, APIVersion, Kind)
	}
	return &r, nil
}
