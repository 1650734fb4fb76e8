package nfs

import (
	"log/slog"
	"os"

	"github.com/spf13/cobra"

	"github.com/csi-prepare/csi-prepare/drivers/server"
)

const example = `  prepare-driver nfs --endpoint unix:///run/prepare/csi.sock \
    --state-dir /var/lib/prepare-nfs --node-id node1 \
    --export nfs.example.org:/srv/volumes --root /srv/volumes`

// NewCommand returns the command "nfs", which serves until its context ends.
func NewCommand() *cobra.Command {
	var (
		c       Config
		export  string
		verbose bool
	)
	cmd := &cobra.Command{
		Use:   "nfs",
		Short: "Volumes that are directories of an NFS export",
		Long: `nfs serves CSI and NodePrepare for volumes that are directories of an NFS export.
It mounts nothing: NodePrepareVolume answers with a filesystem that the CO mounts
by one system call, the server's name resolved and the version always said.

The Controller service needs --root: a directory of this machine at which the
export can be reached, as it is on the server itself. Without, the driver serves
a node and takes the place of a volume from its volume_context.

NFS holds no directory to a size: a capacity_range is answered OUT_OF_RANGE.

--via-helper shows a plugin that cannot do without a mount helper: the helper
mounts where nobody else sees it, and the CO gets a HANDLE. That takes
CAP_SYS_ADMIN; without --via-helper the driver needs no privilege.`,
		Example: example,
		Args:    server.NoArgs,
		PreRunE: func(*cobra.Command, []string) error {
			if c.Endpoint == "" {
				c.Endpoint = os.Getenv("CSI_ENDPOINT")
			}
			if export != "" {
				var err error
				if c.Export, err = ParseExport(export); err != nil {
					return server.UsageError{Err: err}
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
	f.StringVar(&export, "export", "", "`HOST:PATH` of the export; an IPv6 address in brackets")
	f.StringVar(&c.Root, "root", "", "`directory` at which this machine reaches the export, for the Controller service")
	f.StringVar(&c.Helper, "via-helper", "", "mount `program` to mount with, for example /sbin/mount.nfs; the CO gets a HANDLE")
	f.DurationVar(&c.Grace, "grace", server.DefaultGrace, "how long pending calls may run on after SIGTERM")
	f.BoolVarP(&verbose, "verbose", "v", false, "log requests and responses, without secrets")
	return cmd
}
