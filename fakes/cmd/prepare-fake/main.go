// Command prepare-fake serves the conformant fakes of both seats and their
// mutants, and runs the suite against them.
//
// It exits 0 when it was told to stop or all went well, 1 when it failed or a
// mutant survived, and 2 for an error of the command line.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/csi-prepare/csi-prepare/reference/co"
)

func main() {
	co.Child()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	err := newCommand().ExecuteContext(ctx)
	if err != nil {
		fmt.Fprintln(os.Stderr, "prepare-fake:", err)
	}
	os.Exit(exitCode(err))
}

// failure is an error of what was done, not of the command line.
type failure struct{ error }

func (f failure) Unwrap() error { return f.error }

func exitCode(err error) int {
	var f failure
	switch {
	case err == nil:
		return 0
	case errors.As(err, &f):
		return 1
	default:
		return 2
	}
}

func newCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "prepare-fake",
		Short: "Fakes of both seats of the contract, conformant or wrong in one way",
		Long: `prepare-fake serves an in-memory plugin (sp) or an executor of mount specs (co)
that keeps every rule of the contract, or with --mutant one that breaks exactly
one of them. A suite that is worth anything passes the former and fails the
latter; "prepare-fake kill" shows whether it does.`,
		SilenceErrors: true,
		SilenceUsage:  true,
	}
	cmd.AddCommand(newSP(), newCO(), newList(), newKill(), newControl(), newServeFUSE())
	return cmd
}
