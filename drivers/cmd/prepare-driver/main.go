// Command prepare-driver serves one of the reference drivers until SIGTERM or
// SIGINT. It exits 0 when it was told to stop, 1 when it failed, and 2 for an
// error of the command line.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/csi-prepare/csi-prepare/drivers/block"
	"github.com/csi-prepare/csi-prepare/drivers/fuse"
	"github.com/csi-prepare/csi-prepare/drivers/hostpath"
	"github.com/csi-prepare/csi-prepare/drivers/nfs"
	"github.com/csi-prepare/csi-prepare/drivers/server"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	cmd := newCommand()
	err := cmd.ExecuteContext(ctx)
	if err != nil {
		fmt.Fprintln(os.Stderr, "prepare-driver:", err)
	}
	code := server.ExitCode(err)
	if code == 2 {
		fmt.Fprintf(os.Stderr, "See '%s --help'.\n", cmd.Name())
	}
	os.Exit(code)
}

func newCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "prepare-driver",
		Short: "Reference storage drivers that mount nothing",
		Long: `prepare-driver serves a reference driver: a CSI plugin that answers
NodePrepareVolume with mount specs for the CO to perform, instead of mounting.`,
		Version:       server.Version(),
		SilenceErrors: true,
		SilenceUsage:  true,
		Args:          server.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			return server.UsageError{Err: errors.New("name a driver, for example hostpath")}
		},
	}
	cmd.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return server.UsageError{Err: err} })
	cmd.AddCommand(hostpath.NewCommand(), fuse.NewCommand(), block.NewCommand(), nfs.NewCommand())
	return cmd
}
