// Command prepare-shim stands between the two ways of the Container Storage
// Interface: `prepare-shim driver` lets a CO that performs mount specs use a
// plugin that mounts by itself, and `prepare-shim co` lets a CO of today use a
// plugin that serves NodePrepare. Neither the CO nor the plugin is changed. It
// exits 0 when it was told to stop, 1 when it failed, and 2 for an error of the
// command line.
package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"runtime"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/csi-prepare/csi-prepare/drivers/server"
	"github.com/csi-prepare/csi-prepare/reference/co"
)

func init() {
	// A plugin that is started here gets a signal when the thread that
	// started it ends: that has to be the one that ends with the process.
	runtime.LockOSThread()
}

func main() {
	co.Child()
	os.Exit(run())
}

func run() int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	cmd := newRoot()
	err := cmd.ExecuteContext(ctx)
	if err != nil {
		fmt.Fprintln(os.Stderr, "prepare-shim:", err)
	}
	code := server.ExitCode(err)
	if code == 2 {
		fmt.Fprintf(os.Stderr, "See '%s --help'.\n", cmd.Name())
	}
	return code
}

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:   "prepare-shim",
		Short: "Plugins and COs of today, with mount specs",
		Long: `prepare-shim stands before a CSI plugin and serves what the plugin does not:

  driver   NodePrepare, for a plugin that mounts by itself
  co       NodePublishVolume, for a plugin that answers with mount specs

All other calls go on to the plugin as they are.`,
		Version:       server.Version(),
		SilenceErrors: true,
		SilenceUsage:  true,
		Args:          server.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			return server.UsageError{Err: errors.New("name a direction, driver or co")}
		},
	}
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return server.UsageError{Err: err} })
	root.AddCommand(newDriver(), newCO())
	return root
}

// flags are those of both directions.
type flags struct {
	endpoint, plugin, stateDir string
	grace                      time.Duration
	verbose                    bool
}

func (f *flags) add(cmd *cobra.Command) {
	set := cmd.Flags()
	set.SortFlags = false
	set.StringVar(&f.endpoint, "endpoint", "", "`socket` to serve on, unix:///PATH; $CSI_ENDPOINT if not given")
	set.StringVar(&f.plugin, "plugin", "", "`socket` of the plugin, unix:///PATH")
	set.StringVar(&f.stateDir, "state-dir", "", "`directory` of the shim's records, for this process alone; made if missing")
	set.DurationVar(&f.grace, "grace", server.DefaultGrace, "how long pending calls may run on after SIGTERM")
	set.BoolVarP(&f.verbose, "verbose", "v", false, "log requests and responses, without secrets")
	cmd.Args = func(cmd *cobra.Command, args []string) error {
		if n := cmd.ArgsLenAtDash(); len(args) > 0 && n != 0 {
			return server.UsageError{Err: fmt.Errorf("argument %q: write -- before the command that starts the plugin", args[0])}
		}
		return nil
	}
}

func (f *flags) complete() {
	if f.endpoint == "" {
		f.endpoint = os.Getenv("CSI_ENDPOINT")
	}
}

func (f *flags) log(cmd *cobra.Command) *slog.Logger {
	level := slog.LevelInfo
	if f.verbose {
		level = slog.LevelDebug
	}
	return slog.New(slog.NewTextHandler(cmd.ErrOrStderr(), &slog.HandlerOptions{Level: level}))
}
