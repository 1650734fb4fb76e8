package sanity

import (
	"flag"
	"io"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/onsi/ginkgo/v2"
	"github.com/onsi/ginkgo/v2/formatter"
	"github.com/onsi/ginkgo/v2/types"
	"sigs.k8s.io/yaml"

	"github.com/csi-prepare/csi-prepare/sanity/report"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// Ginkgo has one tree of specs a process. Both seats are in it, with
// configurations that are filled in when they run.
var (
	pluginConfig   Config
	executorConfig = Config{Performer: "filled in later"}
	_              = Register(&pluginConfig)
	_              = Register(&executorConfig)
)

var update = flag.Bool("update", false, "write testdata/untested.txt")

// specs are those Ginkgo would run, without running them.
func specs() []ginkgo.SpecReport {
	var found []ginkgo.SpecReport
	for _, s := range ginkgo.PreviewSpecs("csi-prepare").SpecReports {
		if s.LeafNodeType.Is(types.NodeTypeIt) {
			found = append(found, s)
		}
	}
	return found
}

func TestEverySpecCoversARequirementOfItsSeat(t *testing.T) {
	all := specs()
	if len(all) < 100 {
		t.Fatalf("only %d specs", len(all))
	}
	names := map[string]bool{}
	for _, s := range all {
		actor := requirement.SP
		if strings.Contains(s.ContainerHierarchyTexts[0], "executor") {
			actor = requirement.CO
		}
		if len(s.Labels()) == 0 {
			t.Errorf("%s covers nothing", s.FullText())
		}
		for _, label := range s.Labels() {
			if q, ok := requirement.Lookup(requirement.ID(label)); !ok || q.Actor != actor {
				t.Errorf("%s covers %s, which does not bind the seat it tests", s.FullText(), label)
			}
		}
		if names[s.FullText()] {
			t.Errorf("two specs are called %s", s.FullText())
		}
		names[s.FullText()] = true
	}
}

// TestUntested keeps the list of requirements no spec covers, so that a
// change of coverage shows in a review.
func TestUntested(t *testing.T) {
	covered := map[requirement.ID]bool{}
	for _, s := range specs() {
		for _, label := range s.Labels() {
			covered[requirement.ID(label)] = true
		}
	}
	untestable := map[requirement.ID]string{}
	text, err := os.ReadFile("../spec/untestable.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if err := yaml.UnmarshalStrict(text, &untestable); err != nil {
		t.Fatal(err)
	}
	for id, reason := range untestable {
		if _, ok := requirement.Lookup(id); !ok {
			t.Errorf("untestable.yaml: %s is no requirement", id)
		}
		if covered[id] {
			t.Errorf("untestable.yaml: %s has a spec", id)
		}
		if strings.TrimSpace(reason) == "" {
			t.Errorf("untestable.yaml: %s has no reason", id)
		}
	}
	var untested []string
	for _, q := range requirement.All() {
		if !covered[q.ID] && untestable[q.ID] == "" {
			untested = append(untested, string(q.Actor)+" "+q.Level.String()+" "+string(q.ID))
		}
	}
	slices.Sort(untested)
	const file = "testdata/untested.txt"
	now := strings.Join(untested, "\n") + "\n"
	if *update {
		if err := os.WriteFile(file, []byte(now), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	was, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(was), now); diff != "" {
		t.Errorf("other requirements are untested than %s says (-file +now); go test ./sanity -run TestUntested -update writes it:\n%s", file, diff)
	}
}

// TestRun runs both seats against conformant fakes in this process. What
// needs a process of its own could not run.
func TestRun(t *testing.T) {
	needRoot(t)
	reports := map[string]*report.Report{}
	for name, c := range map[string]*Config{"plugin": &pluginConfig, "executor": &executorConfig} {
		if name == "plugin" {
			*c = plugin(t)
		} else {
			*c = executor(t)
		}
		c.Report = func(r *report.Report) error { reports[name] = r; return nil }
	}
	formatter.ColorableStdOut = io.Discard
	if !ginkgo.RunSpecs(t, "csi-prepare") {
		t.Error("a spec failed")
	}
	for name, least := range map[string]int{"plugin": 85, "executor": 28} {
		r := reports[name]
		if r == nil {
			t.Errorf("%s: no report", name)
			continue
		}
		if r.Summary.Failed > 0 || r.Summary.Passed < least {
			t.Errorf("%s: %+v, want at least %d passed and none failed", name, r.Summary, least)
			for _, s := range r.Specs {
				if s.Outcome == report.Failed {
					t.Error(s.Message)
				}
			}
		}
		for _, s := range r.Specs {
			if s.Outcome == report.CouldNotRun && !strings.Contains(s.Message, "--exec") {
				t.Errorf("%s: %s: %s", name, s.Name, s.Message)
			}
		}
	}
}
