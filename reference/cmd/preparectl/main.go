// Command preparectl is the operator's tool for volumes on a node: which call
// made a mount, who keeps it busy, what was asked for and what the kernel made
// of it, and what is left over. It reads the ledger of a CO that performs
// mount specs, and the directories of a kubelet that calls NodePublishVolume;
// it can take a volume through its whole life by itself.
//
// It never hangs on a server that does not answer: mount tables are read first,
// and a path is looked at by a child process that is given up after a second.
//
// It exits 0 when done, 1 if something failed or was found, and 2 for an error
// of the command line.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path"
	"strings"
	"syscall"
	"text/tabwriter"
	"unicode"

	"github.com/spf13/cobra"

	"github.com/csi-prepare/csi-prepare/reference/co"
	"github.com/csi-prepare/csi-prepare/reference/perform"
)

func main() {
	children()
	os.Exit(run())
}

// children does what this program does as a child of itself.
func children() {
	askChild()
	co.Child()
	perform.MainIfChild()
}

func run() int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	err := newRoot().ExecuteContext(ctx)
	if err == nil {
		return 0
	}
	fmt.Fprintln(os.Stderr, "preparectl:", err)
	var failed failure
	if errors.As(err, &failed) {
		return 1
	}
	return 2
}

// failure is an error of what was done, not of the command line.
type failure struct{ error }

// Unwrap returns the reason.
func (f failure) Unwrap() error { return f.error }

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:   "preparectl",
		Short: "See and understand the volumes of a node",
		Long: `preparectl tells which call made a mount, who keeps it busy, what was asked for
and what the kernel made of it, and what is left over. It reads the ledger of a
CO that performs mount specs (--state-dir), and the directories of a kubelet
that calls NodePublishVolume (--kubelet-dir); either may be missing. It changes
nothing, except by volume, perform, undo, and reap --yes.`,
		Example: `  preparectl ls
  preparectl why /var/lib/app/data
  preparectl explain-busy /dev/sdb
  preparectl diff vol-1
  preparectl volume up vol-1 --endpoint unix:///run/csi.sock --target /mnt`,
		SilenceErrors: true, SilenceUsage: true,
	}
	root.AddCommand(
		newVolume(), newPlan(), newPerform(), newUndo(),
		newList(), newWhy(), newDiff(), newBusy(),
		newDoctor(), newReap(), newAudit(),
	)
	return root
}

// output adds -o and returns what prints: a table for people, or JSON.
func output(cmd *cobra.Command) func(value any, header string, rows [][]string) error {
	format := cmd.Flags().StringP("output", "o", "table", "table or json")
	_ = cmd.RegisterFlagCompletionFunc("output", cobra.FixedCompletions([]string{"table", "json"}, cobra.ShellCompDirectiveNoFileComp))
	return func(value any, header string, rows [][]string) error {
		switch *format {
		case "json":
			e := json.NewEncoder(cmd.OutOrStdout())
			e.SetIndent("", "  ")
			return e.Encode(value)
		case "table":
			return table(cmd.OutOrStdout(), header, rows)
		}
		return fmt.Errorf("--output %s: has to be table or json", *format)
	}
}

func table(w io.Writer, header string, rows [][]string) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, header)
	for _, row := range rows {
		for i, cell := range row {
			if i > 0 {
				fmt.Fprint(t, "\t")
			}
			fmt.Fprint(t, plain(cell))
		}
		fmt.Fprintln(t)
	}
	return t.Flush()
}

// plain keeps what others have named from moving the cursor or tearing a line.
func plain(text string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return '�'
	}, text)
}

// places are the directories to read.
type places struct {
	state, kubelet string
	cmd            *cobra.Command
}

const defaultState, defaultKubelet = "/var/lib/csi-prepare", "/var/lib/kubelet"

// stateDir adds the flag for the CO's directory.
func stateDir(cmd *cobra.Command) *string {
	dir := cmd.Flags().String("state-dir", defaultState, "`directory` of the CO, which may be running")
	_ = cmd.MarkFlagDirname("state-dir")
	return dir
}

// bothDirs adds the flags for the CO's and the kubelet's directory.
func bothDirs(cmd *cobra.Command) *places {
	p := &places{cmd: cmd}
	cmd.Flags().StringVar(&p.state, "state-dir", defaultState, "`directory` of the CO, which may be running")
	cmd.Flags().StringVar(&p.kubelet, "kubelet-dir", defaultKubelet, "`directory` of a kubelet")
	_ = cmd.MarkFlagDirname("state-dir")
	_ = cmd.MarkFlagDirname("kubelet-dir")
	return p
}

// records reads the ledger. None at the default place, or at any if a kubelet
// was asked for by name, is no error: a node may have one without the other.
func (p *places) records() ([]co.Record, error) {
	if err := answering(p.state); err != nil {
		return nil, err
	}
	records, err := co.ReadLedger(p.state)
	changed := p.cmd.Flags().Changed
	if errors.Is(err, os.ErrNotExist) && !changed("state-dir") {
		return nil, nil
	}
	return records, err
}

// answering sees that a directory of the CO answers at all, if it is there:
// what is in it is read without a child then.
func answering(dir string) error {
	k := &asker{}
	defer k.close()
	_, err := k.ask("list", path.Join(dir, "ledger"))
	var silent *SilentError
	if errors.As(err, &silent) {
		return err
	}
	return nil
}

// published finds the volumes of a kubelet, as records does.
func (p *places) published(k *asker, m *machine) ([]published, error) {
	if !p.cmd.Flags().Changed("kubelet-dir") {
		if _, err := k.ask("lstat", p.kubelet); errors.Is(err, os.ErrNotExist) {
			return nil, nil
		}
	} else if a, err := k.ask("lstat", p.kubelet); err != nil || !a.directory() {
		return nil, errors.Join(err, fmt.Errorf("--kubelet-dir %s: no directory", p.kubelet))
	}
	return (&kubelet{p.kubelet, k}).volumes(m)
}
