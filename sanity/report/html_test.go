package report

import (
	"bytes"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

func withEvidence() *Report {
	r := &Report{
		Plugin: Plugin{Name: "p<script>", Version: "2"}, Profiles: []Profile{{Name: "node-mount", Outcome: Failed}, {Name: "node-block", Outcome: Unsupported, Reason: "not claimed"}},
		Features: []string{"node-prepare"},
		Specs: []Spec{
			{Name: "List: holds", Section: "List", Requirements: []requirement.ID{requirement.ListComplete}, Outcome: Passed, Profiles: []string{"node-mount"}},
			{
				Name: "Answer: breaks", Section: "Answer", Requirements: []requirement.ID{requirement.PrepareReadonly}, Outcome: Failed, Breaks: requirement.PrepareNoMount,
				Message: "message", Evidence: &Evidence{
					Requirement: requirement.PrepareNoMount, Expected: "nothing & no <mount>", Actual: "a mount", Rerun: "prepare-sanity run --id x",
					Table: []string{"+ 7 tmpfs on /a", "- 8 ext4 on /b", "~ 9 xfs on /c"}, ByHand: []string{"prepare-sanity call Probe '{}'"}, Calls: []string{"Probe -> OK"},
				},
			},
		},
	}
	r.Judge(requirement.SP)
	return r
}

func TestHTMLIsOnePageThatNeedsNothingElse(t *testing.T) {
	var b bytes.Buffer
	if err := withEvidence().WriteHTML(&b); err != nil {
		t.Fatal(err)
	}
	text := b.String()
	for _, want := range []string{
		"p&lt;script&gt;", "does not conform", "nothing &amp; no &lt;mount&gt;",
		`<div class="a">&#43; 7 tmpfs on /a</div>`, `<div class="r">- 8 ext4 on /b</div>`, `<div class="c">~ 9 xfs on /c</div>`,
		"prepare-sanity call Probe", `data-outcome="failed"`, "<option>Answer</option>", `data-profile="node-block"`,
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q", want)
		}
	}
	if found := regexp.MustCompile(`(?i)(src|href)\s*=\s*["'](https?:)?//|@import|url\(`).FindString(text); found != "" {
		t.Errorf("asks for something beyond the page: %s", found)
	}
	if strings.Contains(text, "p<script>") {
		t.Error("a name of the plugin is taken for HTML")
	}
	if strings.Index(text, "What does not hold") > strings.Index(text, "List: holds") && strings.Contains(text, "List: holds") {
		t.Error("what is wrong does not come first")
	}
}

func TestMarked(t *testing.T) {
	if got := marked("a `b<` c"); got != "a <code>b&lt;</code> c" {
		t.Errorf("%s", got)
	}
}

func TestDiff(t *testing.T) {
	was, now := withEvidence(), withEvidence()
	if changes := Diff(was, now); len(changes) > 0 {
		t.Errorf("two alike: %v", changes)
	}
	was.Profiles[0].Outcome = Passed
	was.Specs[1].Outcome, was.Specs[1].Breaks = Passed, ""
	was.Judge(requirement.SP)
	now.Features = []string{"node-prepare", "node-prepare.kind.fuse"}
	changes := Diff(was, now)
	want := []Change{
		{What: "profile", Name: "node-mount", Before: "passed", After: "failed", Worse: true},
		{What: "feature", Name: "node-prepare.kind.fuse", Before: absent, After: "claimed"},
		{What: "requirement", Name: "prepare.readonly", Before: "passed", After: "could-not-run", Worse: true},
		{What: "requirement", Name: "prepare.no-mount", Before: "untested", After: "failed", Worse: true, Message: "expected nothing & no <mount>; actual a mount"},
	}
	if diff := cmp.Diff(want, changes, cmp.Transformer("sorted", func(all []Change) map[string]Change {
		byName := map[string]Change{}
		for _, c := range all {
			byName[c.Name] = c
		}
		return byName
	})); diff != "" {
		t.Error(diff)
	}
	var b bytes.Buffer
	if !WriteDiff(&b, changes) || !strings.Contains(b.String(), "! requirement  prepare.no-mount") {
		t.Error(b.String())
	}
	b.Reset()
	if WriteDiff(&b, Diff(now, was)) != true { // a claim that is gone is worse
		t.Error(b.String())
	}
	was.Features = now.Features
	if WriteDiff(&b, Diff(now, was)) {
		t.Error("what is repaired is worse")
	}
}
