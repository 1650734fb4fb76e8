// Command speccheck keeps everything that is derived from SPEC.md equal to
// it: prepare.proto, the Go code of the protos, the requirement constants and
// the table of requirements.
//
// It needs nothing but Go: protos are compiled in process and the code
// generators are the tools pinned in go.mod. Only the search for breaking
// changes runs a foreign program, buf, which it takes from npm.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
)

// errFaults is what a command ends with after it has printed its faults.
var errFaults = errors.New("faults found")

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	os.Exit(run(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

// run returns the exit status: 0 done, 1 faults or failed, 2 usage.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	ran := false // a command was found and its arguments are in order
	root := &cobra.Command{
		Use:           "speccheck",
		Short:         "Derive and check what comes from SPEC.md",
		SilenceUsage:  true,
		SilenceErrors: true,
		Args:          cobra.NoArgs,
		// To be runnable is what makes cobra refuse an unknown command.
		RunE: func(*cobra.Command, []string) error {
			ran = false
			return errors.New("give a command: generate, check or accept")
		},
		PersistentPreRun: func(*cobra.Command, []string) {
			ran = true
		},
	}
	var dir string
	root.PersistentFlags().StringVar(&dir, "root", "", "directory of the checkout (default: the module of the working directory)")

	tree := func(ctx context.Context) (*tree, error) {
		if dir == "" {
			found, err := moduleRoot(ctx)
			if err != nil {
				return nil, err
			}
			dir = found
		}
		return readTree(dir)
	}

	root.AddCommand(&cobra.Command{
		Use:   "generate",
		Short: "Write prepare.proto, the Go code, the constants and the table",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			t, err := tree(cmd.Context())
			if err != nil {
				return err
			}
			return generate(cmd.Context(), t, stdout)
		},
	})

	var complete bool
	check := &cobra.Command{
		Use:   "check",
		Short: "Report every fault of SPEC.md and every file that drifted from it",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			t, err := tree(cmd.Context())
			if err != nil {
				return err
			}
			return check(cmd.Context(), t, complete, stdout)
		},
	}
	check.Flags().BoolVar(&complete, "complete", false, "fail if a part of the check could not run here")
	root.AddCommand(check)

	root.AddCommand(&cobra.Command{
		Use:   "accept",
		Short: "Make the present contract the one that later changes are compared with",
		Long: `Make the present contract the one that later changes are compared with.

It copies prepare.proto and the requirement ids to spec/accepted. Run it when a
contract is released, or when a breaking change is meant; the change of
spec/accepted is then part of the review.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			t, err := tree(cmd.Context())
			if err != nil {
				return err
			}
			return accept(cmd.Context(), t, stdout)
		},
	})

	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	err := root.ExecuteContext(ctx)
	switch {
	case err == nil:
		return 0
	case errors.Is(err, errFaults):
		return 1
	case !ran:
		fmt.Fprintln(stderr, "speccheck:", err)
		return 2
	default:
		fmt.Fprintln(stderr, "speccheck:", err)
		return 1
	}
}

func generate(ctx context.Context, t *tree, out io.Writer) error {
	files, faults, err := t.derive(ctx)
	if err != nil {
		return err
	}
	if len(faults) > 0 {
		return report(out, faults)
	}
	for _, f := range files {
		path := filepath.Join(t.root, f.path)
		if old, err := os.ReadFile(path); err == nil && string(old) == string(f.content) {
			continue
		}
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(path, f.content, 0o644); err != nil {
			return err
		}
		fmt.Fprintln(out, "wrote", f.path)
	}
	return nil
}

func check(ctx context.Context, t *tree, complete bool, out io.Writer) error {
	files, faults, err := t.derive(ctx)
	if err != nil {
		return err
	}
	faults = append(faults, t.drift(files)...)
	broken, couldNot, err := t.breaking(ctx)
	if err != nil {
		return err
	}
	faults = append(faults, broken...)

	fmt.Fprintf(out, "SPEC.md: %d requirements\n", len(t.doc.requirements))
	fmt.Fprintf(out, "generated files: %d\n", len(files))
	switch {
	case couldNot != "":
		fmt.Fprintf(out, "breaking changes: COULD NOT RUN: %s\n", couldNot)
	case len(broken) == 0:
		fmt.Fprintf(out, "breaking changes: none against %s\n", acceptedProto)
	}
	if couldNot != "" && complete {
		faults = append(faults, fault{acceptedProto, 0, "not compared: " + couldNot})
	}
	if len(faults) > 0 {
		return report(out, faults)
	}
	return nil
}

func accept(ctx context.Context, t *tree, out io.Writer) error {
	files, faults, err := t.derive(ctx)
	if err != nil {
		return err
	}
	faults = append(faults, t.drift(files)...)
	if len(faults) > 0 {
		return report(out, faults)
	}
	for _, f := range t.accepted() {
		path := filepath.Join(t.root, f.path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(path, f.content, 0o644); err != nil {
			return err
		}
		fmt.Fprintln(out, "wrote", f.path)
	}
	return nil
}

func report(out io.Writer, faults []fault) error {
	for _, f := range faults {
		fmt.Fprintln(out, f)
	}
	fmt.Fprintf(out, "%d faults\n", len(faults))
	return errFaults
}

func moduleRoot(ctx context.Context) (string, error) {
	cmd := exec.CommandContext(ctx, "go", "env", "GOMOD")
	b, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("find the module: go env GOMOD: %w", err)
	}
	mod := strings.TrimSpace(string(b))
	if mod == "" || mod == os.DevNull {
		return "", errors.New("not in a Go module: give --root, the directory of SPEC.md")
	}
	return filepath.Dir(mod), nil
}
