// Command prepare-sanity tests whether a plugin, or whoever performs mount
// specs, conforms to csi.prepare.v1alpha1. It exits 0 if nothing failed, 1 if
// something did, 2 for an error of the command line or a plugin that cannot
// be reached, and 3 if nothing could run here.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/co"
	"github.com/csi-prepare/csi-prepare/sanity"
)

func main() {
	co.Child()
	os.Exit(run(os.Args[1:]))
}

// exit is an error that decides how the command ends. Without err there is
// nothing more to say.
type exit struct {
	code int
	err  error
}

func (e exit) Error() string {
	if e.err == nil {
		return "failed"
	}
	return e.err.Error()
}

func (e exit) Unwrap() error { return e.err }

func run(args []string) int {
	root := newRoot()
	root.SetArgs(twoDashes(args))
	// Ginkgo minds signals while specs run; before that this does.
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM)
	defer stop()
	err := root.ExecuteContext(ctx)
	if err == nil {
		return 0
	}
	e := exit{2, err}
	if !errors.As(err, &e) && errors.Is(err, sanity.ErrNothingToTest) {
		e.code = 3
	}
	if e.err != nil {
		fmt.Fprintln(os.Stderr, "prepare-sanity:", e.err)
	}
	return e.code
}

// twoDashes lets csi-sanity's flags be given with one dash, as its users do.
func twoDashes(args []string) []string {
	out := make([]string, len(args))
	for i, a := range args {
		if strings.HasPrefix(a, "-csi.") || strings.HasPrefix(a, "-ginkgo.") || a == "-version" {
			a = "-" + a
		}
		out[i] = a
	}
	return out
}

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:   "prepare-sanity",
		Short: "Conformance suite of csi.prepare.v1alpha1",
		Long: `prepare-sanity tests a storage plugin that returns mount specs, or whoever
performs them, against the requirements of SPEC.md. Each failure names the
requirement, the call, what was expected and what was found.

It makes mount namespaces, which takes root on Linux. Nothing is mounted in the
namespace it is started in.`,
		Example: `  prepare-sanity run                                       # the reference driver
  prepare-sanity run --csi.endpoint unix:///run/csi.sock   # a plugin that runs
  prepare-sanity run --exec 'my-driver --node n1' --grant data=/srv/data
  prepare-sanity run --id prepare.readonly
  prepare-sanity explain prepare.readonly`,
		Version:       sanity.Version(),
		SilenceErrors: true,
		SilenceUsage:  true,
		Args:          cobra.NoArgs,
	}
	root.AddCommand(completable(newRun()), completable(newExecutor()), newList(), newExplain(), newDoctor(), newReport(), newCall(), newEmbedded(), newEmbeddedExecutor())
	return root
}
