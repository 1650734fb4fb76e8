package main

import (
	"context"
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
	"github.com/csi-prepare/csi-prepare/reference/mountns"
)

func newDoctor() *cobra.Command {
	return &cobra.Command{
		Use:   "doctor",
		Short: "Say what this machine can test",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			out := cmd.OutOrStdout()
			able := true
			for _, c := range checks(cmd.Context()) {
				mark := "yes"
				switch {
				case c.ok:
				case c.needed:
					mark, able = "NO", false
				default:
					mark = "no"
				}
				fmt.Fprintf(out, "%-4s %s\n", mark, c.what)
				if !c.ok {
					fmt.Fprintf(out, "       %s\n", c.without)
				}
			}
			if !able {
				return exit{3, fmt.Errorf("nothing can run here: see NO above")}
			}
			return nil
		},
	}
}

// check is one thing a run makes use of.
type check struct {
	what    string
	ok      bool
	needed  bool
	without string
}

func checks(ctx context.Context) []check {
	f := kernel.Probe()
	namespace := func() error {
		ns, err := mountns.New(ctx)
		if err != nil {
			return err
		}
		return ns.Close()
	}()
	reason := "start it as root"
	if namespace != nil {
		reason = namespace.Error() + "; start it as root, in a container with CAP_SYS_ADMIN"
	}
	_, all := mountns.All(ctx)
	return []check{
		{"runs as root", os.Geteuid() == 0, false, "a plugin of another user cannot be looked at, and mounting takes a capability"},
		{"can make mount namespaces", namespace == nil, true, reason},
		{"can see every mount namespace of the machine", all == nil, false, "leaks into namespaces without a process go unnoticed; they need Linux 6.12 and CAP_SYS_ADMIN"},
		{"mount ids are unique (Linux 6.8)", f.UniqueID && f.Statmount && f.Listmount, false, "a mount that replaces another may be taken for it"},
		{"mounts can be made detached (Linux 5.12)", f.NewMountAPI && f.MountSetattr, false, "the suite's own performing is visible before it is narrowed"},
	}
}
