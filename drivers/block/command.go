package block

import (
	"fmt"
	"log/slog"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/csi-prepare/csi-prepare/drivers/server"
)

const example = `  mkdir -p /srv/volumes
  prepare-driver block --endpoint unix:///run/prepare/csi.sock \
    --state-dir /var/lib/prepare-block --node-id node1 --dir /srv/volumes`

// NewCommand returns the command "block", which serves until its context ends.
func NewCommand() *cobra.Command {
	var (
		c       Config
		disks   []string
		verbose bool
	)
	cmd := &cobra.Command{
		Use:   "block",
		Short: "Volumes that are block devices of this node",
		Long: `block serves CSI and NodePrepare for volumes that are files, attached as loop
devices, or real disks. A block volume is answered with the number of its
device, and the CO makes the node; a mount volume with its filesystem type and
device, and the CO mounts it. The driver makes no mount that anybody sees.

A filesystem (ext4, xfs, btrfs) is made only on a device that is proven blank.

The files are thin: a volume takes space as it is written to. It is for the
operator to see that the directory does not fill up.`,
		Example: example,
		Args:    server.NoArgs,
		PreRunE: func(*cobra.Command, []string) error {
			if c.Endpoint == "" {
				c.Endpoint = os.Getenv("CSI_ENDPOINT")
			}
			for _, text := range disks {
				name, path, found := strings.Cut(text, "=")
				if !found {
					return server.UsageError{Err: fmt.Errorf("disk %q: want NAME=PATH", text)}
				}
				c.Disks = append(c.Disks, Disk{Name: name, Path: path})
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
	f.StringVar(&c.Dir, "dir", "", "`directory` for the files that volumes are, for this driver alone")
	f.StringArrayVar(&disks, "disk", nil, "`NAME=PATH`: a whole disk for one volume, blank at first and erased when the volume is deleted; one that has no world wide name, serial number or device-mapper uuid is known until the next reboot alone; may be repeated")
	f.DurationVar(&c.Grace, "grace", server.DefaultGrace, "how long pending calls may run on after SIGTERM")
	f.BoolVarP(&verbose, "verbose", "v", false, "log requests and responses, without secrets")
	return cmd
}
