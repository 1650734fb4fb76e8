package main

import (
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/csi-prepare/csi-prepare/fakes/kill"
)

func newControl() *cobra.Command {
	var k killing
	var runs int
	cmd := &cobra.Command{
		Use:   "control",
		Short: "Run the suite in random orders against what conforms",
		Long: `control runs the whole of prepare-sanity against the conformant fakes and the
reference drivers, each time in another order, round after round. The first
failure ends it, with the seed that repeats it, and exit code 1.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			commands, remove, err := k.build(cmd.Context())
			if err != nil {
				return failure{err}
			}
			defer remove()
			commands.Deadline = 10 * time.Minute
			if commands.Sanity, err = filepath.Abs(commands.Sanity); err != nil {
				return failure{err}
			}
			for run := range runs {
				for _, c := range kill.Controls() {
					if err := commands.Pass(cmd.Context(), c, rand.Int64N(1<<31)+1); err != nil { //nolint:gosec // an order of specs, not a secret
						return failure{fmt.Errorf("run %d of %d: %w", run+1, runs, err)}
					}
				}
				fmt.Fprintf(cmd.OutOrStdout(), "run %d of %d: all %d pass\n", run+1, runs, len(kill.Controls()))
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&k.sanity, "sanity", "", "path of prepare-sanity; by default it is built from this checkout")
	cmd.Flags().IntVar(&runs, "runs", 50, "how often each is tested")
	return cmd
}
