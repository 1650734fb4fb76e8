package report

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

func spec(o Outcome, ids ...requirement.ID) Spec {
	return Spec{Name: string(o) + " spec", Requirements: ids, Outcome: o, Message: "first line\nsecond"}
}

func breaking(id requirement.ID, s Spec) Spec {
	s.Breaks = id
	return s
}

func TestJudge(t *testing.T) {
	const a, b = requirement.PrepareReadonly, requirement.ListComplete
	for _, test := range []struct {
		name  string
		specs []Spec
		a, b  Outcome
		whole Outcome
	}{
		{"no spec", nil, Untested, Untested, CouldNotRun},
		{"one passes", []Spec{spec(Passed, a)}, Passed, Untested, Passed},
		{"one of two passes, the other is unsupported", []Spec{spec(Passed, a), spec(Unsupported, a)}, Passed, Untested, Passed},
		{"all unsupported", []Spec{spec(Unsupported, a, b)}, Unsupported, Unsupported, CouldNotRun},
		{"one fails", []Spec{spec(Passed, a), breaking(a, spec(Failed, a))}, Failed, Untested, Failed},
		{"a failure shows nothing about what else the spec covers", []Spec{breaking(a, spec(Failed, a, b))}, Failed, CouldNotRun, Failed},
		{"a failure that names nothing is of all", []Spec{spec(Failed, a, b)}, Failed, Failed, Failed},
		{"a failure of what the spec builds on", []Spec{breaking(b, spec(Failed, a)), spec(Passed, b)}, CouldNotRun, Failed, Failed},
		{"known to fail", []Spec{breaking(a, spec(KnownFailing, a)), spec(Passed, b)}, KnownFailing, Passed, KnownFailing},
		{"known and new failures", []Spec{breaking(a, spec(KnownFailing, a)), breaking(a, spec(Failed, a))}, Failed, Untested, Failed},
		{"could not run", []Spec{spec(Passed, a), spec(CouldNotRun, a)}, CouldNotRun, Untested, CouldNotRun},
		{"filtered", []Spec{spec(Passed, a), spec(Filtered, b)}, Passed, Filtered, Filtered},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := Report{Specs: test.specs}
			r.Judge(requirement.SP)
			got := map[requirement.ID]Outcome{}
			for _, q := range r.Requirements {
				if q.Actor != "SP" {
					t.Errorf("%s is of the other seat", q.ID)
				}
				got[q.ID] = q.Outcome
			}
			if got[a] != test.a || got[b] != test.b || r.Verdict() != test.whole {
				t.Errorf("got %s, %s and %s as a whole; want %s, %s and %s", got[a], got[b], r.Verdict(), test.a, test.b, test.whole)
			}
			total := 0
			for _, o := range Outcomes() {
				total += r.Summary.Count(o)
			}
			if total != len(r.Requirements) {
				t.Errorf("the summary counts %d of %d requirements", total, len(r.Requirements))
			}
		})
	}
}

func TestKnown(t *testing.T) {
	const a, b = requirement.PrepareReadonly, requirement.ListComplete
	specs := []Spec{breaking(a, spec(Failed, a, b)), spec(Failed, b), spec(Passed, a)}
	if err := (Known{a: "the driver ignores it"}).Apply(specs); err != nil {
		t.Fatal(err)
	}
	if specs[0].Outcome != KnownFailing || !strings.HasPrefix(specs[0].Message, "known to fail: the driver ignores it\n") {
		t.Errorf("the known failure is %s: %s", specs[0].Outcome, specs[0].Message)
	}
	if specs[1].Outcome != Failed || specs[2].Outcome != Passed {
		t.Errorf("the others are %s and %s", specs[1].Outcome, specs[2].Outcome)
	}
	specs = []Spec{breaking(a, spec(Failed, a)), spec(Passed, b)}
	if err := (Known{"prepare.read*": "one", a: "other"}).Apply(specs); err != nil || specs[0].Outcome != KnownFailing {
		t.Errorf("a pattern and an id for one failure: %v, %s", err, specs[0].Outcome)
	}
	if err := (Known{"list.*": "one"}).Apply(specs); err == nil {
		t.Error("a pattern that no failure is due to is no error")
	}
	for _, test := range []struct {
		known Known
		ok    bool
	}{
		{Known{a: ""}, true}, {Known{"prepare.*": ""}, true}, {Known{"no.such": ""}, false}, {Known{"perform.*": ""}, false}, {Known{"[": ""}, false},
	} {
		if err := test.known.Check(requirement.SP); (err == nil) != test.ok {
			t.Errorf("%v: %v", test.known, err)
		}
	}
	for _, test := range []struct {
		name  string
		specs []Spec
		stale bool
	}{
		{"passes now", []Spec{spec(Passed, a)}, true},
		{"matches nothing", nil, true},
		{"left out", []Spec{spec(Filtered, a)}, false},
		{"could not run", []Spec{spec(CouldNotRun, a)}, false},
	} {
		if err := (Known{a: "reason"}).Apply(test.specs); (err != nil) != test.stale {
			t.Errorf("%s: %v", test.name, err)
		}
	}
}

func sample() *Report {
	r := &Report{
		Suite: Suite{Version: "v1", SpecDigest: "d", Seed: 7}, Plugin: Plugin{Name: "p", Version: "2"}, Kernel: "Linux 6.18",
		Specs: []Spec{
			spec(Passed, requirement.ListComplete),
			breaking(requirement.PrepareReadonly, spec(Failed, requirement.PrepareReadonly)),
			spec(Unsupported, requirement.FUSEID), spec(CouldNotRun, requirement.CrashBootID),
		},
		Seconds: 1.5,
	}
	r.Judge(requirement.SP)
	return r
}

func TestJSONHasTheAgreedFields(t *testing.T) {
	var b bytes.Buffer
	if err := sample().WriteJSON(&b); err != nil {
		t.Fatal(err)
	}
	var raw map[string]any
	if err := json.Unmarshal(b.Bytes(), &raw); err != nil {
		t.Fatal(err)
	}
	keys := func(v any) string {
		var names []string
		for k := range v.(map[string]any) {
			names = append(names, k)
		}
		slices.Sort(names)
		return strings.Join(names, " ")
	}
	for _, want := range []struct {
		of   any
		keys string
	}{
		{raw, "apiVersion features kernel kind plugin profiles requirements seconds specs suite summary"},
		{raw["suite"], "seed specDigest version"},
		{raw["plugin"], "name version"},
		{raw["requirements"].([]any)[0], "actor id level outcome section specs"},
		{raw["specs"].([]any)[0], "message name outcome profiles requirements seconds section"},
		{raw["summary"], "could_not_run failed filtered known_failing passed unsupported untested"},
	} {
		if diff := cmp.Diff(want.keys, keys(want.of)); diff != "" {
			t.Error(diff)
		}
	}
	if raw["apiVersion"] != "csi-prepare/v1alpha1" || raw["kind"] != "ConformanceReport" {
		t.Errorf("is a %v %v", raw["apiVersion"], raw["kind"])
	}
	again, err := Read(&b)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(sample().Requirements, again.Requirements); diff != "" {
		t.Error(diff)
	}
	if _, err := Read(strings.NewReader(`{"apiVersion": "other/v1", "kind": "ConformanceReport"}`)); err == nil {
		t.Error("another kind of document is a report")
	}
}

func TestJUnit(t *testing.T) {
	var b bytes.Buffer
	if err := sample().WriteJUnit(&b); err != nil {
		t.Fatal(err)
	}
	var got junitSuites
	if err := xml.Unmarshal(b.Bytes(), &got); err != nil {
		t.Fatal(err)
	}
	s := got.Suites[0]
	if s.Tests != 4 || s.Failures != 1 || s.Skipped != 2 {
		t.Errorf("%d tests, %d failures, %d skipped", s.Tests, s.Failures, s.Skipped)
	}
	if !strings.Contains(s.Cases[1].Name, "[prepare.readonly]") || s.Cases[1].Failure.Message != "first line" || !strings.Contains(s.Cases[1].Failure.Text, "second") {
		t.Errorf("the failed case is %+v", s.Cases[1])
	}
	if s.Cases[2].Skipped.Message != "unsupported: first line" {
		t.Errorf("the skipped case says %q", s.Cases[2].Skipped.Message)
	}
}

func TestText(t *testing.T) {
	var b bytes.Buffer
	r := sample()
	r.WriteOpen(&b)
	r.WriteTable(&b)
	r.WriteVerdict(&b)
	text := b.String()
	for _, want := range []string{
		"could-not-run\n    1  first line\n         could-not-run spec\n", "unsupported\n    1  first line\n", "NodeListPreparedVolumes", "p 2 does not conform.",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	if strings.Contains(text, string(Filtered)) {
		t.Error("an outcome that did not occur has a column")
	}
}

func TestVerdictSaysWhatWasNotShown(t *testing.T) {
	for outcome, want := range map[Outcome]string{
		Passed: "conforms in all that was tested", Failed: "does not conform.", KnownFailing: "as its list of known failures says",
		Filtered: "no conformance run", CouldNotRun: "conformance is not shown",
	} {
		r := &Report{Specs: []Spec{spec(outcome, requirement.ListComplete)}}
		r.Judge(requirement.SP)
		var b bytes.Buffer
		r.WriteVerdict(&b)
		if !strings.Contains(b.String(), want) {
			t.Errorf("%s: %q", outcome, b.String())
		}
	}
}

func TestProgress(t *testing.T) {
	var plain, terminal bytes.Buffer
	p, q := Progress{Out: &plain, Total: 2}, Progress{Out: &terminal, Total: 2, Terminal: true}
	for _, s := range []Spec{spec(Passed), spec(Filtered), spec(Failed)} {
		p.Show(s)
		q.Show(s)
	}
	q.End()
	if got := plain.String(); strings.Count(got, "spec\n") != 2 || !strings.Contains(got, "  first line\n  second\n") || strings.ContainsAny(got, "\r\x1b") {
		t.Errorf("plain: %q", got)
	}
	if got := terminal.String(); !strings.Contains(got, "[2/2]") || !strings.Contains(got, "first line") || !strings.HasSuffix(got, "\r\x1b[K") {
		t.Errorf("terminal: %q", got)
	}
}
