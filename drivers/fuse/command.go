package fuse

import (
	"fmt"
	"log/slog"
	"os"
	"strings"

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
    --state-dir /var/lib/prepare-fuse --node-id node1 --dir /srv/prepare-fuse \
    --program 'sshfs=/usr/bin/sshfs {source} {device} -f -o IdentityFile={secret:key}'`

func addPrograms(c *Config, programs []string) error {
	for _, text := range programs {
		name, command, found := strings.Cut(text, "=")
		if !found {
			return fmt.Errorf("--program %s: is not NAME=COMMAND", text)
		}
		p, err := ParseProgram(command)
		if err != nil {
			return fmt.Errorf("--program %s: %w", name, err)
		}
		if c.Programs == nil {
			c.Programs = map[string]Program{}
		}
		c.Programs[name] = p
	}
	return nil
}

// NewCommand returns the command "fuse", which serves until its context ends.
func NewCommand() *cobra.Command {
	var (
		c        Config
		programs []string
		verbose  bool
	)
	cmd := &cobra.Command{
		Use:   commandName,
		Short: "Volumes served over FUSE by an ordinary user",
		Long: `fuse serves CSI and NodePrepare for volumes that processes of its own serve over
FUSE. It mounts nothing and needs neither root nor a capability nor /dev/fuse:
the CO makes the mount and hands the device over.

Serving processes outlive this one; do not kill them with it. One that is killed
is replaced without the consumers' noticing more than a delay.

Programs: an unmodified FUSE program serves a volume. In its command {device}
stands for its mount point if it takes /dev/fd/N for one, as programs on
libfuse 3 do, or {mountpoint} if it calls fusermount, as others do; {source} for
the volume's parameter source, {uid} and {gid} for its owner, and {secret:KEY}
for a file in memory with that secret of the call. It has to stay in the
foreground (-f), and is not resumed when it dies.`,
		Example: example,
		Args:    server.NoArgs,
		PreRunE: func(*cobra.Command, []string) error {
			if c.Endpoint == "" {
				c.Endpoint = os.Getenv("CSI_ENDPOINT")
			}
			if err := addPrograms(&c, programs); err != nil {
				return server.UsageError{Err: err}
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
			// Serving processes come by the way this one came.
			c.Server = append([]string{"/proc/self/exe"}, append(strings.Fields(cmd.CommandPath())[1:], serveName)...)
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
	f.StringArrayVar(&programs, "program", nil, "`NAME=COMMAND` that serves volumes with program=NAME, on {device}; may be repeated, see Programs above")
	f.BoolVar(&c.Classic, "classic", false, "mount below prepare_path, as root, for a CO that can only bind; needs propagation")
	f.DurationVar(&c.Grace, "grace", server.DefaultGrace, "how long pending calls may run on after SIGTERM")
	f.BoolVarP(&verbose, "verbose", "v", false, "log requests and responses, without secrets")
	cmd.AddCommand(&cobra.Command{
		Use:    serveName,
		Short:  "Serve one preparation (started by the driver)",
		Hidden: true,
		// The arguments are another program's, options and all.
		DisableFlagParsing: true,
		RunE: func(cmd *cobra.Command, arguments []string) error {
			return ServeInherited(slog.New(slog.NewTextHandler(cmd.ErrOrStderr(), nil)), arguments...)
		},
	})
	return cmd
}
