// Command prepare-vm runs the project's tests in guests: those that need a
// kernel with NFS, and those that have to hold on an older kernel. It builds
// what it runs from this module, which is the working directory, and leaves
// reports. It exits 0 if nothing failed, 1 if something did, 2 for an error of
// the command line, and 3 if no guest can run here.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/csi-prepare/csi-prepare/vm"
	"github.com/csi-prepare/csi-prepare/vm/job"
)

// The exit codes.
const (
	exitFailed      = 1
	exitUsage       = 2
	exitCouldNotRun = job.ExitCouldNotRun
)

var errFailed = errors.New("something failed in the guests")

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	err := newCommand().ExecuteContext(ctx)
	var unavailable *vm.UnavailableError
	switch {
	case err == nil:
		return
	case errors.As(err, &unavailable):
		fmt.Fprintln(os.Stderr, "prepare-vm: could not run:", unavailable.Reason)
		os.Exit(exitCouldNotRun)
	}
	fmt.Fprintln(os.Stderr, "prepare-vm:", err)
	if errors.Is(err, errFailed) {
		os.Exit(exitFailed)
	}
	os.Exit(exitUsage)
}

func newCommand() *cobra.Command {
	var o options
	cmd := &cobra.Command{
		Use:   "prepare-vm",
		Short: "Run tests in guests with kernel NFS and an older kernel",
		Long: `prepare-vm boots guests, from nothing and without root: User-Mode Linux with the
kernel of the distribution and its NFS server inside. There it runs the NFS
driver, the suite, the executor and the CO, and what else has to hold on that
kernel, which is older than most.`,
		Args:          cobra.NoArgs,
		SilenceErrors: true,
		SilenceUsage:  true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			o.console = cmd.OutOrStdout()
			return o.run(cmd.Context())
		},
	}
	f := cmd.Flags()
	f.SortFlags = false
	f.StringVar(&o.out, "out", "out", "`directory` for reports and logs, vm-*.*; made if missing")
	f.StringVar(&o.only, "only", "", "`regexp` of the steps to run; all if empty")
	f.BoolVar(&o.short, "short", false, "run the short forms")
	f.DurationVar(&o.timeout, "timeout", 40*time.Minute, "how long a guest may take, on a machine that does other things too")
	return cmd
}
