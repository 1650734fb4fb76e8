package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/csi-prepare/csi-prepare/fakes/kill"
	"github.com/csi-prepare/csi-prepare/fakes/mutant"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// killing are the flags of the command.
type killing struct {
	sanity, out   string
	matrix        string
	full          bool
	jobs, control int
	names         []string
}

func newKill() *cobra.Command {
	var k killing
	cmd := &cobra.Command{
		Use:   "kill [--full] [MUTANT…]",
		Short: "Run the suite against every mutant and show what kills it",
		Long: `kill runs prepare-sanity against the conformant fakes, which it has to pass, and
against each mutant, which it has to fail: a mutant is killed when a spec fails
that covers the requirement it breaks. Only those specs are run unless --full is
given. It exits 1 if a mutant survives or a conformant fake fails.`,
		RunE: func(cmd *cobra.Command, names []string) error {
			k.names = names
			return k.run(cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	cmd.Flags().StringVar(&k.sanity, "sanity", "", "path of prepare-sanity; by default it is built from this checkout")
	cmd.Flags().StringVar(&k.out, "out", "", "file for the results as JSON")
	cmd.Flags().StringVar(&k.matrix, "matrix", "", "file for requirement × mutant × killing spec as Markdown")
	cmd.Flags().BoolVar(&k.full, "full", false, "run the whole suite against each mutant, to see how far a fault spreads")
	cmd.Flags().IntVar(&k.jobs, "jobs", runtime.NumCPU(), "runs at a time")
	cmd.Flags().IntVar(&k.control, "control", 1, "runs against each conformant fake")
	return cmd
}

func (k killing) run(ctx context.Context, w, progress io.Writer) error {
	mutants, err := chosen(k.names)
	if err != nil {
		return err
	}
	commands, remove, err := k.build(ctx)
	if err != nil {
		return failure{err}
	}
	defer remove()
	for seed := range int64(k.control) {
		for _, control := range []struct {
			seat    requirement.Actor
			volumes mutant.Volumes
		}{
			{requirement.SP, mutant.Directories},
			{requirement.SP, mutant.Raw},
			{requirement.SP, mutant.Formatted},
			{requirement.SP, mutant.Served},
			{requirement.CO, mutant.Directories},
		} {
			if err := commands.Conformant(ctx, control.seat, control.volumes, seed+1); err != nil {
				return failure{err}
			}
			fmt.Fprintf(progress, "conformant %s passes, seed %d\n", strings.TrimSpace(string(control.seat)+" "+string(control.volumes)), seed+1)
		}
	}
	done := 0
	results, err := commands.All(ctx, mutants, k.full, k.jobs, func(r kill.Result) {
		done++
		if r.Killed {
			fmt.Fprintf(progress, "%d/%d killed: %s\n", done, len(mutants), r.Name)
		} else {
			fmt.Fprintf(progress, "%d/%d SURVIVES: %s: %s\n", done, len(mutants), r.Name, r.Survived)
		}
	})
	if err != nil {
		return failure{err}
	}
	return failureOf(errors.Join(matrix(w, results), k.write(results), k.spread(w, results), verdict(w, results)))
}

// chosen returns the mutants of the given names, or all of them.
func chosen(names []string) ([]mutant.Mutant, error) {
	all := kill.Mutants()
	if len(names) == 0 {
		return all, nil
	}
	var some []mutant.Mutant
	for _, name := range names {
		m, err := find(all, name)
		if err != nil {
			return nil, err
		}
		some = append(some, m)
	}
	return some, nil
}

// build makes the commands that are run: this one, and the suite's.
func (k killing) build(ctx context.Context) (c kill.Commands, remove func(), err error) {
	remove = func() {}
	if c.Fake, err = os.Executable(); err != nil {
		return c, remove, err
	}
	c.Sanity = k.sanity
	if c.Sanity != "" {
		c.Sanity, err = filepath.Abs(c.Sanity)
		return c, remove, err
	}
	directory, err := os.MkdirTemp("", "prepare-fake-")
	if err != nil {
		return c, remove, err
	}
	remove = func() { _ = os.RemoveAll(directory) }
	c.Sanity = filepath.Join(directory, "prepare-sanity")
	output, err := exec.CommandContext(ctx, "go", "build", "-o", c.Sanity,
		"github.com/csi-prepare/csi-prepare/sanity/cmd/prepare-sanity").CombinedOutput()
	if err != nil {
		remove()
		return c, func() {}, fmt.Errorf("building prepare-sanity: %w\n%s", err, output)
	}
	return c, remove, nil
}

// matrix prints requirement × mutant × killing specs.
func matrix(w io.Writer, results []kill.Result) error {
	sorted := slices.Clone(results)
	slices.SortStableFunc(sorted, func(a, b kill.Result) int { return strings.Compare(string(a.Breaks), string(b.Breaks)) })
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "REQUIREMENT\tMUTANT\tFAILED\tKILLED BY")
	for _, r := range sorted {
		by := "SURVIVES"
		if r.Killed {
			by = strings.Join(r.KilledBy, "; ")
		}
		fmt.Fprintf(t, "%s\t%s\t%d/%d\t%s\n", r.Breaks, r.Name, r.FailedSpecs, r.TotalSpecs, by)
	}
	return t.Flush()
}

func (k killing) write(results []kill.Result) error {
	if k.out != "" {
		data, err := json.MarshalIndent(results, "", "  ")
		if err != nil {
			return err
		}
		if err := os.WriteFile(k.out, append(data, '\n'), 0o644); err != nil {
			return err
		}
	}
	if k.matrix == "" {
		return nil
	}
	var page bytes.Buffer
	if err := kill.WriteMatrix(&page, results); err != nil {
		return err
	}
	return os.WriteFile(k.matrix, page.Bytes(), 0o644)
}

// spread says how far faults reach, after runs of the whole suite.
func (k killing) spread(w io.Writer, results []kill.Result) error {
	if !k.full {
		return nil
	}
	s := kill.SpreadOf(results)
	fmt.Fprintf(w, "%d of %d mutants make at most a tenth of the specs fail or stay out\n", s.Contained, s.Mutants)
	for _, r := range s.Wide {
		fmt.Fprintf(w, "  %-32s %d failed, %d could not run, of %d\n", r.Name, r.FailedSpecs, r.CouldNotRun, r.TotalSpecs+r.CouldNotRun)
	}
	if !s.Enough() {
		return errors.New("faults reach too far: that holds for less than nine of ten")
	}
	return nil
}

func verdict(w io.Writer, results []kill.Result) error {
	var alive []string
	for _, r := range results {
		if !r.Killed {
			alive = append(alive, r.Name)
		}
	}
	fmt.Fprintf(w, "%d of %d mutants killed\n", len(results)-len(alive), len(results))
	if len(alive) > 0 {
		return fmt.Errorf("alive: %s", strings.Join(alive, ", "))
	}
	return nil
}

func failureOf(err error) error {
	if err == nil {
		return nil
	}
	return failure{err}
}
