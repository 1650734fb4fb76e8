package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/csi-prepare/csi-prepare/reference/mountspec"
	"github.com/csi-prepare/csi-prepare/reference/perform"
)

func newPlan() *cobra.Command {
	var older bool
	cmd := &cobra.Command{
		Use:   "plan SPECS.json",
		Short: "Print the system calls that mount specs come to",
		Long: `plan reads a list of mount specs (protojson), checks every rule that whoever
performs them has to check, and prints the system calls. It makes none and needs
no privilege. Grants that the specs name are taken as given.`,
		Example: "  preparectl plan specs.json\n  preparectl plan --fs-type tmpfs --readonly specs.json",
		Args:    cobra.ExactArgs(1),
	}
	f := addSpecFlags(cmd)
	cmd.Flags().BoolVar(&older, "mount2", false, "as on a kernel that has mount(2) alone")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		settings, err := f.settings()
		if err != nil {
			return failure{err}
		}
		specs, _, err := f.read(args[0], &settings)
		if err != nil {
			return failure{err}
		}
		features := perform.Features()
		if older {
			features = mountspec.Features{}
		}
		plan, err := mountspec.NewPlan(specs, features, settings.Mount())
		if err != nil {
			return failure{err}
		}
		fmt.Fprint(cmd.OutOrStdout(), plan)
		return nil
	}
	return cmd
}
