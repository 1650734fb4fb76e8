package fuse

import (
	"log/slog"
	"os"

	"github.com/spf13/cobra"

	"github.com/csi-prepare/csi-prepare/drivers/server"
)

const (
	commandName = "fuse"
	serveName   = "serve-inherited"
)

const example = `  install -d -o prepare -m 0700 /srv/prepare-fuse
  setpriv --reuid prepare --clear-groups --bounding-set -all \
    prepare-driver fuse --endpoint unix:///run/prepare/csi.sock \
    --state-dir /var/lib/prepare-fuse --node-id node1 --dir /srv/prepare-fuse`

// NewCommand returns the command "fuse", which serves until its context ends.
func NewCommand() *cobra.Command {
	var (
		c       Config
		verbose bool
	)
	cmd := &cobra.Command{
		Use:   commandName,
		Short: "Volumes served over FUSE by an ordinary user",
		Long: `fuse serves CSI and NodePrepare for volumes that processes of its own serve over
FUSE. It mounts nothing and needs neither root nor a capability nor /dev/fuse:
the CO makes the mount and hands the device over.

Serving processes outlive this one; do not kill them with it. One that is killed
is replaced without the consumers' noticing more than a delay.`,
		Example: example,
		Args:    server.NoArgs,
		PreRunE: func(*cobra.Command, []string) error {
			if c.Endpoint == "" {
				c.Endpoint = os.Getenv("CSI_ENDPOINT")
			}
			if err := c.Check(); err != nil {
				return server.UsageError{Err: err}
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			level := slog.LevelInfo
			if verbose {
				level = slog.LevelDebug
			}
			c.Log = slog.New(slog.NewTextHandler(cmd.ErrOrStderr(), &slog.HandlerOptions{Level: level}))
			return Run(cmd.Context(), c)
		},
	}
	f := cmd.Flags()
	f.SortFlags = false
	f.StringVar(&c.Endpoint, "endpoint", "", "`socket` to serve on, unix:///PATH; $CSI_ENDPOINT if not given")
	f.StringVar(&c.StateDir, "state-dir", "", "`directory` of the driver's records, for this process alone; made if missing")
	f.StringVar(&c.NodeID, "node-id", "", "`id` of this node: 1 to 63 bytes of [A-Za-z0-9._-]")
	f.StringVar(&c.Dir, "dir", "", "`directory` of the volumes, the driver's alone")
	f.StringVar(&c.MemoryDir, "memory-dir", "", "`directory` on a tmpfs for volumes with medium=memory")
	f.DurationVar(&c.Grace, "grace", server.DefaultGrace, "how long pending calls may run on after SIGTERM")
	f.BoolVarP(&verbose, "verbose", "v", false, "log requests and responses, without secrets")
	cmd.AddCommand(&cobra.Command{
		Use:    serveName,
		Short:  "Serve one preparation (started by the driver)",
		Hidden: true,
		Args:   server.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return ServeInherited(slog.New(slog.NewTextHandler(cmd.ErrOrStderr(), nil)))
		},
	})
	return cmd
}
