// Package kill runs the suite against mutants, each of which it has to fail,
// and against the conformant fakes, which it has to pass.
//
// Suite and fake are commands, each run in processes of its own: a mutant
// that hangs is killed, and what one leaks ends with its mount namespace.
package kill

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/csi-prepare/csi-prepare/fakes/co"
	"github.com/csi-prepare/csi-prepare/fakes/mutant"
	"github.com/csi-prepare/csi-prepare/fakes/sp"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// Mutants returns all mutants of both seats.
func Mutants() []mutant.Mutant {
	var all []mutant.Mutant
	for _, m := range sp.Mutants() {
		all = append(all, m.Mutant)
	}
	for _, m := range co.Mutants() {
		all = append(all, m.Mutant)
	}
	return all
}

// Commands are what is run.
type Commands struct {
	Sanity string // path of prepare-sanity
	Fake   string // path of prepare-fake
	// Deadline bounds one run of the suite. Zero means two minutes.
	Deadline time.Duration
}

// Result is what became of one mutant.
type Result struct {
	Name     string          `json:"name"`
	Actor    string          `json:"actor"`
	Category mutant.Category `json:"category"`
	Breaks   requirement.ID  `json:"breaks"`
	// Killed is true if the suite exited 1 and a spec failed because of the
	// broken requirement: a spec that covers it, or the search for what is
	// left behind that ends every spec.
	Killed   bool     `json:"killed"`
	KilledBy []string `json:"killed_by"` // names of those specs
	// FailedSpecs counts all that failed, TotalSpecs all that ran to an end.
	FailedSpecs int `json:"failed_specs"`
	TotalSpecs  int `json:"total_specs"`
	// CouldNotRun counts the specs that had something in the way.
	CouldNotRun int `json:"could_not_run"`

	// Survived says why the mutant lives.
	Survived string `json:"-"`
}

// Mutant runs the suite against one mutant: the specs of the requirement that
// it breaks, or with full all of them.
func (c Commands) Mutant(ctx context.Context, m mutant.Mutant, full bool) (Result, error) {
	arguments := []string{"--mutant", m.Name}
	r := Result{Name: m.Name, Actor: string(m.Actor), Category: m.Category, Breaks: m.Breaks, KilledBy: []string{}}
	var only requirement.ID
	if !full {
		only = m.Breaks
	}
	// In the order of SPEC.md the specs of a requirement run before those
	// that only build on it, and find its fault first.
	o, err := c.run(ctx, m.Actor, m.Volumes, arguments, only, inOrder)
	if err != nil {
		return r, fmt.Errorf("mutant %s: %w", m.Name, err)
	}
	for _, s := range o.report.Specs {
		switch s.Outcome {
		case "failed":
			r.TotalSpecs++
			r.FailedSpecs++
			if s.Breaks == m.Breaks {
				r.KilledBy = append(r.KilledBy, s.Name)
			}
		case "passed":
			r.TotalSpecs++
		case "could-not-run":
			r.CouldNotRun++
		}
	}
	r.Killed = o.code == 1 && !o.late && len(r.KilledBy) > 0
	if !r.Killed {
		r.Survived = o.String()
	}
	return r, nil
}

// Conformant runs the whole suite against a fake that has no fault and volumes
// of a kind, which only a plugin has, with more arguments for the fake if there are any. An error says what failed.
func (c Commands) Conformant(ctx context.Context, seat requirement.Actor, volumes mutant.Volumes, seed int64, arguments ...string) error {
	o, err := c.run(ctx, seat, volumes, arguments, "", seed)
	if err == nil && (o.code != 0 || o.late) {
		err = errors.New(o.String())
	}
	if err != nil {
		return fmt.Errorf("conformant %s, seed %d: %w", seat, seed, err)
	}
	return nil
}

// outcome is one run of the suite.
type outcome struct {
	code   int
	late   bool // it was ended at its deadline
	report struct {
		Specs []spec `json:"specs"`
	}
	output string
}

type spec struct {
	Name    string `json:"name"`
	Outcome string `json:"outcome"`
	Message string `json:"message"`
	// Breaks is what the spec found broken, whatever else it covers.
	Breaks requirement.ID `json:"breaks"`
}

// String tells how the suite ended, and which specs did not pass.
func (o outcome) String() string {
	text := fmt.Sprintf("the suite exited %d", o.code)
	if o.late {
		text = "the suite did not end, and was ended"
	}
	if len(o.report.Specs) == 0 {
		return text + " without a report: " + o.output
	}
	for _, s := range o.report.Specs {
		if s.Outcome == "failed" || s.Outcome == "could-not-run" {
			text += fmt.Sprintf("\n%s: %s\n%s", s.Outcome, s.Name, s.Message)
		}
	}
	return text
}

// inOrder is the seed of no order but that of SPEC.md.
const inOrder = 0

// run runs the suite once, in a directory that is removed afterwards.
func (c Commands) run(ctx context.Context, seat requirement.Actor, volumes mutant.Volumes, arguments []string, only requirement.ID, seed int64) (outcome, error) {
	directory, err := os.MkdirTemp("", "kill-")
	if err != nil {
		return outcome{}, err
	}
	defer os.RemoveAll(directory) //nolint:errcheck // a directory that stays is found by who looks for leftovers
	in := func(name string) string { return filepath.Join(directory, name) }
	for _, name := range []string{"grant", "state", "report", "work"} {
		if err := os.Mkdir(in(name), 0o755); err != nil {
			return outcome{}, err
		}
	}
	fake := []string{c.Fake, strings.ToLower(string(seat)), "--state-dir", in("state")}
	suite := []string{"executor", "--performer", "new"}
	if seat == requirement.SP {
		fake = append(fake, "--grant", "data="+in("grant"))
		suite = []string{"run", "--grant", "data=" + in("grant"), "--state-dir", in("state")}
	}
	fake = append(fake, arguments...)
	switch volumes {
	case mutant.Directories:
	case mutant.Served:
		fake = append(fake, "--fuse")
	default:
		fake = append(fake, "--block")
	}
	if volumes == mutant.Raw {
		suite = append(suite, "--csi.testvolumeaccesstype", "block")
	}
	suite = append(suite,
		"--exec", strings.Join(fake, " "),
		"--work-dir", in("work"), "--report", in("report"), "--timeout", "5s")
	if seed != inOrder {
		suite = append(suite, "--seed", strconv.FormatInt(seed, 10))
	}
	if only != "" {
		suite = append(suite, "--id", string(only))
	}
	return c.suite(ctx, suite, in("report"))
}

func (c Commands) suite(ctx context.Context, arguments []string, reports string) (o outcome, err error) {
	deadline := c.Deadline
	if deadline == 0 {
		deadline = 2 * time.Minute
	}
	limited, cancel := context.WithTimeout(ctx, deadline)
	defer cancel()
	cmd := exec.CommandContext(limited, c.Sanity, arguments...)
	// It ends what it started when it is asked to; what does not listen is
	// killed, and its children with it.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 10 * time.Second
	output, err := cmd.CombinedOutput()
	o.output, o.code = string(output), cmd.ProcessState.ExitCode()
	var exit *exec.ExitError
	if o.late = limited.Err() != nil; ctx.Err() != nil {
		return o, ctx.Err()
	}
	if err != nil && !o.late && !errors.As(err, &exit) {
		return o, err
	}
	files, err := filepath.Glob(filepath.Join(reports, "*.json"))
	if err != nil || len(files) == 0 {
		return o, err
	}
	data, err := os.ReadFile(files[0])
	if err != nil {
		return o, err
	}
	return o, json.Unmarshal(data, &o.report)
}

// All runs the suite against each of the mutants, jobs at a time, and tells
// progress of each as it ends. Results are in the order of mutants.
func (c Commands) All(ctx context.Context, mutants []mutant.Mutant, full bool, jobs int, progress func(Result)) ([]Result, error) {
	results := make([]Result, len(mutants))
	errs := make([]error, len(mutants))
	var wg sync.WaitGroup
	var mu sync.Mutex
	slots := make(chan struct{}, max(1, jobs))
	for i, m := range mutants {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			results[i], errs[i] = c.Mutant(ctx, m, full)
			mu.Lock()
			defer mu.Unlock()
			progress(results[i])
		})
	}
	wg.Wait()
	return results, errors.Join(errs...)
}
