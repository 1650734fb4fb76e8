// Command preparectl is the operator's tool for volumes that are prepared by
// mount specs: what is performed, which call made a mount, and what a list of
// mount specs comes to. It exits 0 when done, 1 if something failed or an
// audit found something, and 2 for an error of the command line.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"text/tabwriter"

	"github.com/spf13/cobra"
)

func main() { os.Exit(run()) }

func run() int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	err := newRoot().ExecuteContext(ctx)
	if err == nil {
		return 0
	}
	fmt.Fprintln(os.Stderr, "preparectl:", err)
	var failed failure
	if errors.As(err, &failed) {
		return 1
	}
	return 2
}

// failure is an error of what was done, not of the command line.
type failure struct{ error }

// Unwrap returns the reason.
func (f failure) Unwrap() error { return f.error }

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:   "preparectl",
		Short: "See and understand volumes that are performed from mount specs",
		Example: `  preparectl ls
  preparectl why /var/lib/app/data
  preparectl audit
  preparectl plan specs.json`,
		SilenceErrors: true, SilenceUsage: true,
	}
	root.AddCommand(newPlan(), newList(), newWhy(), newAudit())
	return root
}

// output adds -o and returns what prints: a table for people, or JSON.
func output(cmd *cobra.Command) func(value any, header string, rows [][]string) error {
	format := cmd.Flags().StringP("output", "o", "table", "table or json")
	return func(value any, header string, rows [][]string) error {
		switch *format {
		case "json":
			e := json.NewEncoder(cmd.OutOrStdout())
			e.SetIndent("", "  ")
			return e.Encode(value)
		case "table":
			return table(cmd.OutOrStdout(), header, rows)
		}
		return fmt.Errorf("--output %s: has to be table or json", *format)
	}
}

func table(w io.Writer, header string, rows [][]string) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, header)
	for _, row := range rows {
		for i, cell := range row {
			if i > 0 {
				fmt.Fprint(t, "\t")
			}
			fmt.Fprint(t, cell)
		}
		fmt.Fprintln(t)
	}
	return t.Flush()
}

// stateDir adds the flag for the CO's directory.
func stateDir(cmd *cobra.Command) *string {
	return cmd.Flags().String("state-dir", "/var/lib/csi-prepare", "`directory` of the CO, which may be running")
}
