package main

import (
	"github.com/spf13/cobra"

	"github.com/csi-prepare/csi-prepare/fakes/sp"
)

// newServeFUSE is what the fake plugin starts for each preparation.
func newServeFUSE() *cobra.Command {
	return &cobra.Command{
		Use: "serve-fuse", Hidden: true, Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := sp.ServeFUSE(cmd.InOrStdin(), cmd.OutOrStdout()); err != nil {
				return failure{err}
			}
			return nil
		},
	}
}
