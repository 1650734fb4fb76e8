package main

import "github.com/spf13/cobra"

// completable lets a shell complete values of flags. `prepare-sanity
// completion bash` and its like print what the shell has to read.
func completable(cmd *cobra.Command) *cobra.Command {
	for flag, values := range map[string]func() []string{
		"id": ids, "profile": profileNames, "driver": drivers,
		"csi.testvolumeaccesstype": func() []string { return []string{"mount", "block"} },
	} {
		if cmd.Flags().Lookup(flag) == nil {
			continue
		}
		complete := func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			return values(), cobra.ShellCompDirectiveNoFileComp
		}
		if err := cmd.RegisterFlagCompletionFunc(flag, complete); err != nil {
			panic(err) // a flag is registered twice
		}
	}
	return cmd
}

// drivers are the reference drivers the command has built in.
func drivers() []string { return []string{"hostpath", "block", "nfs", "fuse", "fuse-classic"} }
