package main

import (
	"fmt"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/csi-prepare/csi-prepare/sanity"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

func newList() *cobra.Command {
	var untested bool
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List the requirements, with how many specs test each",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			specs := map[requirement.ID]int{}
			for _, l := range sanity.List() {
				for _, id := range l.Covers {
					specs[id]++
				}
			}
			w := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 0, 2, ' ', 0)
			fmt.Fprintln(w, "requirement\tseat\tlevel\tspecs")
			for _, q := range requirement.All() {
				if untested && specs[q.ID] > 0 {
					continue
				}
				fmt.Fprintf(w, "%s\t%s\t%s\t%d\n", q.ID, q.Actor, q.Level, specs[q.ID])
			}
			return w.Flush()
		},
	}
	cmd.Flags().BoolVar(&untested, "untested", false, "only those that no spec tests")
	return cmd
}

func newExplain() *cobra.Command {
	return &cobra.Command{
		Use:   "explain REQUIREMENT",
		Short: "Say what a requirement means and how it is tested",
		Args:  cobra.ExactArgs(1),
		ValidArgsFunction: func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			return ids(), cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			out := cmd.OutOrStdout()
			q, ok := requirement.Lookup(requirement.ID(args[0]))
			if !ok {
				return fmt.Errorf("%s: there is no such requirement%s", args[0], near(args[0]))
			}
			seat := "the plugin"
			if q.Actor == requirement.CO {
				seat = "the CO, or whoever performs for it"
			}
			fmt.Fprintf(out, "%s   %s   SPEC.md#%s, section %q, since %s\n\n  %s\n\nIt binds %s.\n", q.ID, q.Level, q.ID, q.Section, q.Since, q.Text, seat)
			if known := sanity.KnownAs(q.ID); known != "" {
				fmt.Fprintf(out, "What happens without it: %s\n", known)
			}
			var found []sanity.Listing
			for _, l := range sanity.List() {
				if slices.Contains(l.Covers, q.ID) {
					found = append(found, l)
				}
			}
			if len(found) == 0 {
				fmt.Fprintln(out, "No spec tests it.")
				return nil
			}
			fmt.Fprintln(out, "Specs that test it:")
			for _, l := range found {
				fmt.Fprintf(out, "  %s: %s\n", l.Section, l.Name)
				for _, f := range l.Features {
					fmt.Fprintf(out, "    only for a plugin that claims %s\n", f)
				}
			}
			command := "run"
			if q.Actor == requirement.CO {
				command = "executor"
			}
			fmt.Fprintf(out, "To run them: prepare-sanity %s --id %s\n", command, q.ID)
			return nil
		},
	}
}

func ids() []string {
	var all []string
	for _, q := range requirement.All() {
		all = append(all, string(q.ID))
	}
	return all
}

// near suggests requirements with a word of the one asked for.
func near(id string) string {
	_, last, _ := strings.Cut(id, ".")
	var found []string
	for _, known := range ids() {
		if last != "" && strings.Contains(known, last) || strings.HasPrefix(known, id) {
			found = append(found, known)
		}
	}
	if len(found) == 0 {
		return "; `prepare-sanity list` has them all"
	}
	return "; there is " + strings.Join(found, ", ")
}
