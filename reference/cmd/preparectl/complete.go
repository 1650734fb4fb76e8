package main

import (
	"strings"

	"github.com/spf13/cobra"
)

type completion = func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective)

// completeTargets offers the targets of the ledger, then files.
func completeTargets(dirs *places) completion {
	return func(_ *cobra.Command, args []string, begun string) (found []string, d cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		records, _ := dirs.records()
		for _, r := range records {
			if strings.HasPrefix(r.Target, begun) {
				found = append(found, r.Target+"\t"+r.VolumeID)
			}
		}
		return found, cobra.ShellCompDirectiveDefault
	}
}

// completeVolumes offers the volumes of the ledger, and after one its
// preparations if the command takes two arguments.
func completeVolumes(dirs *places, arguments int) completion {
	return func(_ *cobra.Command, args []string, begun string) (found []string, d cobra.ShellCompDirective) {
		records, _ := dirs.records()
		for _, r := range records {
			switch {
			case len(args) == 0 && strings.HasPrefix(r.VolumeID, begun):
				found = append(found, r.VolumeID+"\t"+r.Target)
			case len(args) == 1 && arguments > 1 && r.VolumeID == args[0] && strings.HasPrefix(r.PrepareID, begun):
				found = append(found, r.PrepareID+"\t"+r.Target)
			}
		}
		return found, cobra.ShellCompDirectiveNoFileComp
	}
}
