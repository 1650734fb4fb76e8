package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/csi-prepare/csi-prepare/sanity/report"
)

func newReport() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "report",
		Short: "Work with reports that were written as JSON",
		Args:  cobra.NoArgs,
	}
	cmd.AddCommand(newDiff(), newHTML())
	return cmd
}

func newDiff() *cobra.Command {
	return &cobra.Command{
		Use:   "diff BEFORE.json AFTER.json",
		Short: "Say what came out differently; exit 1 if anything is worse",
		Args:  cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			before, err := readReport(args[0])
			if err != nil {
				return err
			}
			after, err := readReport(args[1])
			if err != nil {
				return err
			}
			if before.Plugin.Name != after.Plugin.Name {
				fmt.Fprintf(cmd.OutOrStdout(), "These are of two plugins: %s and %s.\n", before.Plugin.Name, after.Plugin.Name)
			}
			if before.Suite.SpecDigest != after.Suite.SpecDigest {
				fmt.Fprintln(cmd.OutOrStdout(), "They were measured against two versions of SPEC.md.")
			}
			if report.WriteDiff(cmd.OutOrStdout(), report.Diff(before, after)) {
				return exit{code: 1}
			}
			return nil
		},
	}
}

func newHTML() *cobra.Command {
	return &cobra.Command{
		Use:   "html REPORT.json",
		Short: "Write a report as one HTML page to standard output",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			r, err := readReport(args[0])
			if err != nil {
				return err
			}
			return r.WriteHTML(cmd.OutOrStdout())
		},
	}
}

func readReport(path string) (*report.Report, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	r, err := report.Read(f)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return r, nil
}
