package kill

import (
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/csi-prepare/csi-prepare/fakes/mutant"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// built makes both commands once for all tests.
var built = sync.OnceValues(func() (Commands, error) {
	directory, err := os.MkdirTemp("", "kill-test-")
	if err != nil {
		return Commands{}, err
	}
	made = directory
	c := Commands{Sanity: filepath.Join(directory, "prepare-sanity"), Fake: filepath.Join(directory, "prepare-fake")}
	for path, of := range map[string]string{c.Sanity: "sanity/cmd/prepare-sanity", c.Fake: "fakes/cmd/prepare-fake"} {
		if output, err := exec.Command("go", "build", "-o", path, "github.com/csi-prepare/csi-prepare/"+of).CombinedOutput(); err != nil {
			return c, fmt.Errorf("building %s: %w\n%s", of, err, output)
		}
	}
	return c, nil
})

// made is the directory of the commands, once they are built.
var made string

func TestMain(m *testing.M) {
	code := m.Run()
	if made != "" {
		os.RemoveAll(made)
	}
	os.Exit(code)
}

func commands(t *testing.T) Commands {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("the suite mounts, and needs root")
	}
	c, err := built()
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// TestSuitePassesConformantFakes is the other half of the evidence: a suite
// that fails everything would kill every mutant. The long form takes 20 rounds,
// make controls 50, and the reference drivers besides.
func TestSuitePassesConformantFakes(t *testing.T) {
	c := commands(t)
	for _, control := range Controls() {
		if control.Reference != nil {
			continue // has tests of its own
		}
		t.Run(control.Name, func(t *testing.T) {
			t.Parallel()
			runs := 20
			if testing.Short() {
				runs = 1
			}
			for range runs {
				if err := c.Pass(t.Context(), control, rand.Int64N(1<<31)+1); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}

// TestSuiteWaitsForASlowPlugin has every answer take half a second.
func TestSuiteWaitsForASlowPlugin(t *testing.T) {
	if testing.Short() {
		t.Skip("takes a quarter of an hour")
	}
	c := commands(t)
	c.Deadline = 40 * time.Minute
	if err := c.Conformant(t.Context(), requirement.SP, mutant.Directories, 1, "--delay", "500ms"); err != nil {
		t.Fatal(err)
	}
}

// TestSuiteKillsEveryMutant takes one in eight in short form; make mutants
// takes all.
func TestSuiteKillsEveryMutant(t *testing.T) {
	c := commands(t)
	for i, m := range Mutants() {
		if testing.Short() && i%8 != 0 {
			continue
		}
		t.Run(m.Name, func(t *testing.T) {
			t.Parallel()
			r, err := c.Mutant(t.Context(), m, false)
			if err != nil {
				t.Fatal(err)
			}
			if !r.Killed {
				t.Errorf("%s, yet the suite lets it live: %s", m.Story, r.Survived)
			}
		})
	}
}

// TestMutant judges the judge: a suite that is a script ends in various ways.
func TestMutant(t *testing.T) {
	const report = `{"specs": [
		{"name": "right", "breaks": "prepare.readonly", "outcome": "%s"},
		{"name": "other", "breaks": "list.forgets", "outcome": "%s"},
		{"name": "left out", "outcome": "filtered"}]}`
	m := mutant.Mutant{Name: "m", Actor: requirement.SP, Breaks: requirement.PrepareReadonly}
	for _, test := range []struct {
		name           string
		script, report string
		killed         bool
		failed, total  int
		lives          string
	}{
		{name: "the right spec fails", script: "exit 1", report: fmt.Sprintf(report, "failed", "passed"), killed: true, failed: 1, total: 2},
		{name: "another spec fails", script: "exit 1", report: fmt.Sprintf(report, "passed", "failed"), failed: 1, total: 2},
		{name: "the suite is content", script: "exit 0", report: fmt.Sprintf(report, "passed", "passed"), total: 2},
		{name: "a failed spec and exit 0", script: "exit 0", report: fmt.Sprintf(report, "failed", "passed"), failed: 1, total: 2},
		{name: "could not run", script: "exit 1", report: fmt.Sprintf(report, "could-not-run", "could-not-run")},
		{name: "no report", script: "exit 2"},
		{name: "hangs", script: "exec sleep 60", lives: "did not end"},
		{name: "fails and hangs", script: "exec sleep 60", report: fmt.Sprintf(report, "failed", "passed"), failed: 1, total: 2, lives: "did not end"},
	} {
		t.Run(test.name, func(t *testing.T) {
			directory := t.TempDir()
			reportFile := filepath.Join(directory, "report")
			if err := os.WriteFile(reportFile, []byte(test.report), 0o600); err != nil {
				t.Fatal(err)
			}
			script := "#!/bin/sh\nwhile [ \"$1\" != --report ]; do shift; done\n"
			if test.report != "" {
				script += "cp " + reportFile + " \"$2/sanity-m.json\"\n"
			}
			suite := filepath.Join(directory, "suite")
			if err := os.WriteFile(suite, []byte(script+test.script+"\n"), 0o700); err != nil {
				t.Fatal(err)
			}
			c := Commands{Sanity: suite, Fake: "unused", Deadline: 20 * time.Second}
			if test.lives != "" {
				c.Deadline = 500 * time.Millisecond
			}
			r, err := c.Mutant(t.Context(), m, true)
			if err != nil {
				t.Fatal(err)
			}
			if r.Killed != test.killed || r.FailedSpecs != test.failed || r.TotalSpecs != test.total {
				t.Errorf("killed %v, %d of %d failed; want %v, %d of %d", r.Killed, r.FailedSpecs, r.TotalSpecs, test.killed, test.failed, test.total)
			}
			if !r.Killed && (r.Survived == "" || !strings.Contains(r.Survived, test.lives)) {
				t.Errorf("why it lives is not said: %q", r.Survived)
			}
		})
	}
}
