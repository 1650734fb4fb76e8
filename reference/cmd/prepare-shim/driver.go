package main

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/csi-prepare/csi-prepare/drivers/server"
	"github.com/csi-prepare/csi-prepare/reference/shim/prepare"
)

func newDriver() *cobra.Command {
	var (
		f           flags
		refreshable []string
	)
	cmd := &cobra.Command{
		Use:   "driver",
		Short: "Serve NodePrepare for a plugin that mounts by itself",
		Long: `driver serves NodePrepare for an unmodified CSI plugin: the plugin publishes into
prepare_path, and the CO is told what is there, as HANDLE, BIND or BLOCK_DEVICE.

The plugin's mounts have to reach this process. Run the two in one mount
namespace, or share the CO's directory between them: mountPropagation
Bidirectional for the plugin, HostToContainer for the shim. It needs root.

A command after -- is started as the plugin, and ends with the shim.`,
		Example: `  prepare-shim driver --endpoint unix:///run/shim/csi.sock \
    --plugin unix:///run/hostpath/csi.sock --state-dir /var/lib/prepare-shim

  prepare-shim driver --endpoint unix:///run/shim/csi.sock \
    --plugin unix:///run/hostpath/csi.sock --state-dir /var/lib/prepare-shim \
    -- hostpathplugin --endpoint unix:///run/hostpath/csi.sock --nodeid node1`,
		RunE: func(cmd *cobra.Command, args []string) error {
			f.complete()
			c := prepare.Config{
				Endpoint: f.endpoint, Plugin: f.plugin, StateDir: f.stateDir, Grace: f.grace,
				Refreshable: refreshable, Log: f.log(cmd),
			}
			if err := c.Check(); err != nil {
				return server.UsageError{Err: err}
			}
			return withPlugin(cmd.Context(), args, func(ctx context.Context) error { return prepare.Run(ctx, c) })
		},
	}
	f.add(cmd)
	cmd.Flags().StringArrayVar(&refreshable, "refreshable", nil, "`key` of volume_context that may differ in a repeated call, besides "+prepare.TokensKey+"; may be repeated")
	return cmd
}
