package hostpath

import (
	"log/slog"
	"os"

	"github.com/spf13/cobra"

	"github.com/csi-prepare/csi-prepare/drivers/server"
)

const example = `  mkdir -p /srv/volumes
  prepare-driver hostpath --endpoint unix:///run/prepare/csi.sock \
    --state-dir /var/lib/prepare-hostpath --node-id node1 --grant data=/srv/volumes`

// NewCommand returns the command "hostpath", which serves until its context
// ends.
func NewCommand() *cobra.Command {
	var (
		c             Config
		grants, sized []string
		verbose       bool
	)
	cmd := &cobra.Command{
		Use:   "hostpath",
		Short: "Volumes that are directories of this node",
		Long: `hostpath serves CSI and NodePrepare for volumes that are directories below a
directory the operator grants it. It mounts nothing and needs no privilege to:
the CO, which was given the same directory by the same name, binds from it.

A directory cannot be held to a size. A volume with a capacity_range needs a
--sized-grant: a mounted filesystem for one volume, whose size is that of the
filesystem. Otherwise CreateVolume answers OUT_OF_RANGE.`,
		Example: example,
		Args:    server.NoArgs,
		PreRunE: func(*cobra.Command, []string) error {
			if c.Endpoint == "" {
				c.Endpoint = os.Getenv("CSI_ENDPOINT")
			}
			for i, list := range [][]string{grants, sized} {
				for _, text := range list {
					g, err := ParseGrant(text, i == 1)
					if err != nil {
						return server.UsageError{Err: err}
					}
					c.Grants = append(c.Grants, g)
				}
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
	f.StringArrayVar(&grants, "grant", nil, "`NAME=DIR`: a directory for volumes without a size, given to the CO by the same name; may be repeated")
	f.StringArrayVar(&sized, "sized-grant", nil, "`NAME=DIR`: a filesystem mounted at DIR for one volume of its size; may be repeated")
	f.DurationVar(&c.Grace, "grace", server.DefaultGrace, "how long pending calls may run on after SIGTERM")
	f.BoolVarP(&verbose, "verbose", "v", false, "log requests and responses, without secrets")
	return cmd
}
