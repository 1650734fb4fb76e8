package main

import (
	"encoding/json"
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/csi-prepare/csi-prepare/fakes/kill"
)

func newList() *cobra.Command {
	var output string
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List the mutants, and the requirement each breaks",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			switch output {
			case "table":
				return table(cmd.OutOrStdout())
			case "json":
				e := json.NewEncoder(cmd.OutOrStdout())
				e.SetIndent("", "  ")
				return e.Encode(kill.Mutants())
			default:
				return fmt.Errorf("--output %s: has to be table or json", output)
			}
		},
	}
	cmd.Flags().StringVarP(&output, "output", "o", "table", "table or json")
	return cmd
}

func table(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "NAME\tSEAT\tCATEGORY\tBREAKS\tSTORY")
	for _, m := range kill.Mutants() {
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\n", m.Name, m.Actor, m.Category, m.Breaks, m.Story)
	}
	return t.Flush()
}
