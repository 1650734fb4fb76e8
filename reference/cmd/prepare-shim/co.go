package main

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/csi-prepare/csi-prepare/drivers/server"
	"github.com/csi-prepare/csi-prepare/reference/co"
	"github.com/csi-prepare/csi-prepare/reference/shim/publish"
)

func newCO() *cobra.Command {
	var (
		f      flags
		policy string
	)
	cmd := &cobra.Command{
		Use:   "co",
		Short: "Serve NodePublishVolume for a plugin that answers with mount specs",
		Long: `co serves NodePublishVolume and NodeUnpublishVolume for a plugin that serves
NodePrepare: it prepares, and performs at target_path what the plugin answers. It
stands where the plugin of today stands: the CO's directory of targets is shared
with it (mountPropagation: Bidirectional), and it needs root. The plugin needs
neither.

What the plugin may have performed is the policy's to say, and so are the
directories it may have bound from: see --policy and the guide of the reference
CO. On a tmpfs such as /run the state directory costs least; after a reboot
nothing in it is of use.

A command after -- is started as the plugin, and ends with the shim.`,
		Example: `  prepare-shim co --endpoint unix:///run/shim/csi.sock \
    --plugin unix:///run/prepare/csi.sock --state-dir /run/prepare-shim \
    --policy /etc/csi-prepare/policy.yaml`,
		RunE: func(cmd *cobra.Command, args []string) error {
			f.complete()
			c := publish.Config{
				Endpoint: f.endpoint, Plugin: f.plugin, StateDir: f.stateDir, Grace: f.grace, Log: f.log(cmd),
			}
			var err error
			if policy != "" {
				c.Policy, err = co.ReadPolicy(policy)
			}
			if err == nil {
				err = c.Check()
			}
			if err != nil {
				return server.UsageError{Err: err}
			}
			return withPlugin(cmd.Context(), args, func(ctx context.Context) error { return publish.Run(ctx, c) })
		},
	}
	f.add(cmd)
	cmd.Flags().StringVar(&policy, "policy", "", "`file` that says what the plugin may have performed, and its grants")
	return cmd
}
