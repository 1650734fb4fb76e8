package main

import (
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/spf13/cobra"

	"github.com/csi-prepare/csi-prepare/reference/co"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
	"github.com/csi-prepare/csi-prepare/reference/mountspec/wire"
	"github.com/csi-prepare/csi-prepare/reference/perform"
)

func newPlan() *cobra.Command {
	var readonly, older bool
	var fsTypes []string
	cmd := &cobra.Command{
		Use:   "plan SPECS.json",
		Short: "Print the system calls that mount specs come to",
		Long: `plan reads a list of mount specs (protojson), checks every rule that whoever
performs them has to check, and prints the system calls. It makes none and needs
no privilege. Grants that the specs name are taken as given.`,
		Example: "  preparectl plan specs.json\n  preparectl plan --fs-type tmpfs --readonly specs.json",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			text, err := os.ReadFile(args[0])
			if err != nil {
				return failure{err}
			}
			messages, err := wire.Unmarshal(text)
			if err != nil {
				return failure{fmt.Errorf("%s: %w", args[0], err)}
			}
			settings := co.DefaultSettings()
			request := mountspec.Request{Performer: settings.Performer(false, false), Readonly: readonly, Staging: true}
			request.Performer.FSTypes = append(request.Performer.FSTypes, fsTypes...)
			for _, m := range messages {
				if g := m.GetBind().GetSource().GetGrant(); g != "" && !slices.Contains(request.Performer.Grants, g) {
					request.Performer.Grants = append(request.Performer.Grants, g)
				}
				request.Block = request.Block || m.GetBlockDevice() != nil
			}
			specs, violations := wire.Validate(messages, request)
			if violations != nil {
				var errs []error
				for _, v := range violations {
					errs = append(errs, v)
				}
				return failure{errors.Join(errs...)}
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
		},
	}
	cmd.Flags().BoolVar(&readonly, "readonly", false, "as for a read-only request")
	cmd.Flags().StringArrayVar(&fsTypes, "fs-type", nil, "allow a filesystem `type` besides the defaults; may be repeated")
	cmd.Flags().BoolVar(&older, "mount2", false, "as on a kernel that has mount(2) alone")
	return cmd
}
