package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/google/renameio/v2"
	"github.com/spf13/cobra"

	"github.com/csi-prepare/csi-prepare/reference/co"
	"github.com/csi-prepare/csi-prepare/reference/mountns"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
	"github.com/csi-prepare/csi-prepare/reference/mountspec/wire"
	"github.com/csi-prepare/csi-prepare/reference/perform"
)

// specFlags are what mount specs from a file are judged by.
type specFlags struct {
	policy   func() (*co.Policy, error)
	driver   string
	readonly bool
	fsTypes  []string
}

func addSpecFlags(cmd *cobra.Command) *specFlags {
	f := &specFlags{policy: policyFlag(cmd)}
	cmd.Flags().StringVar(&f.driver, "driver", "", "`name` of the driver whose part of the policy holds")
	cmd.Flags().BoolVar(&f.readonly, "readonly", false, "as for a read-only request")
	cmd.Flags().StringArrayVar(&f.fsTypes, "fs-type", nil, "allow a filesystem `type` besides those of the policy; may be repeated")
	return f
}

// settings are the operator's.
func (f *specFlags) settings() (co.Settings, error) {
	p, err := f.policy()
	if err != nil {
		return co.Settings{}, err
	}
	return p.For(f.driver), nil
}

// read reads and validates mount specs. The grants that they name are taken as
// given.
func (f *specFlags) read(file string, s *co.Settings) ([]mountspec.Spec, mountspec.Request, error) {
	text, err := readFile(file)
	if err != nil {
		return nil, mountspec.Request{}, err
	}
	messages, err := wire.Unmarshal(text)
	if err != nil {
		return nil, mountspec.Request{}, fmt.Errorf("%s: %w", file, err)
	}
	request := mountspec.Request{Performer: s.Performer(false, false), Readonly: f.readonly, Staging: true}
	request.Performer.FSTypes = append(request.Performer.FSTypes, f.fsTypes...)
	for _, m := range messages {
		if g := m.GetBind().GetSource().GetGrant(); g != "" && !slices.Contains(request.Performer.Grants, g) {
			request.Performer.Grants = append(request.Performer.Grants, g)
		}
		request.Block = request.Block || m.GetBlockDevice() != nil
	}
	specs, violations := wire.Validate(messages, request)
	var errs []error
	for _, v := range violations {
		errs = append(errs, v)
	}
	return specs, request, errors.Join(errs...)
}

func newPerform() *cobra.Command {
	var target, receipts, staging, prepare string
	var pid int
	var grants map[string]string
	cmd := &cobra.Command{
		Use:   "perform SPECS.json",
		Short: "Perform mount specs from a file, without a driver or a ledger",
		Long: `perform reads a list of mount specs (protojson) and performs it, all or nothing, at
a directory or with --pid at a path as a process sees it. What undo needs is
written to the --receipts file before anything becomes visible. Kinds that need
a driver during the call, HANDLE and FUSE, need volume up.`,
		Example: `  preparectl perform specs.json --target /mnt/data --receipts /run/data.json --grant pool=/srv/pool
  preparectl perform specs.json --pid 4711 --target /data --receipts /run/data.json`,
		Args: cobra.ExactArgs(1),
	}
	flags := cmd.Flags()
	flags.StringVar(&target, "target", "", "absolute `path` to perform at")
	flags.IntVar(&pid, "pid", 0, "`process` that is to have it; the target is a path as it sees it")
	flags.StringVar(&receipts, "receipts", "", "`file` for what undo needs; must not exist")
	flags.StringToStringVar(&grants, "grant", nil, "`name=directory` that binds may start from")
	flags.StringVar(&staging, "staging", "", "`directory` for sources below STAGING")
	flags.StringVar(&prepare, "prepare", "", "`directory` for sources below PREPARE")
	f, print := addSpecFlags(cmd), output(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if !filepath.IsAbs(target) || receipts == "" {
			return errors.New("--target has to be an absolute path, and --receipts a file")
		}
		settings, err := f.settings()
		if err != nil {
			return failure{err}
		}
		specs, request, err := f.read(args[0], &settings)
		if err != nil {
			return failure{err}
		}
		if err := answers(filepath.Dir(receipts)); err != nil {
			return failure{err}
		}
		if err := settings.CheckTarget(target, request.Block); err != nil {
			return failure{err}
		}
		at := perform.Target{Path: target}
		if pid != 0 {
			consumer, err := co.ConsumerOf(pid)
			if err != nil {
				return failure{err}
			}
			defer func() { _ = consumer.Close() }()
			at = consumer.Target(target)
		}
		all := settings.Grants
		if all == nil {
			all = map[string]string{}
		}
		for name, dir := range grants {
			all[name] = dir
		}
		done, err := perform.Perform(cmd.Context(), at, specs, perform.Options{
			Request: request, Staging: staging, Prepare: prepare, Grants: all, Policy: settings.Mount(),
			Journal: func(r []perform.Receipt) error { return firstReceipts(receipts, r) },
		})
		if err != nil {
			var left *perform.LeftError
			if errors.As(err, &left) {
				return failure{errors.Join(err, fmt.Errorf("what is left: preparectl undo %s", receipts))}
			}
			return failure{errors.Join(err, forget(receipts, err))}
		}
		if err := writeReceipts(receipts, done.Receipts); err != nil {
			return failure{err}
		}
		return print(done.Receipts, receiptHeader, receiptRows(done.Receipts))
	}
	return cmd
}

// answers sees that a directory answers.
func answers(dir string) error {
	_, err := readFile(filepath.Join(dir, "."))
	var silent *SilentError
	if errors.As(err, &silent) {
		return err
	}
	return nil
}

const receiptHeader = "KIND\tTARGET\tNAMESPACE\tMOUNT ID\tCREATED"

func receiptRows(receipts []perform.Receipt) (rows [][]string) {
	for _, r := range receipts {
		created := ""
		if n := len(r.Created); n > 0 {
			created = r.Created[n-1].Path
		}
		rows = append(rows, []string{string(r.Kind), r.Target, number(r.MntnsID), number(r.MountID), created})
	}
	return rows
}

var errReceipts = errors.New("the receipts file is there already: undo that first, or name another")

// firstReceipts writes receipts where no others are.
func firstReceipts(file string, receipts []perform.Receipt) error {
	f, err := os.OpenFile(file, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if errors.Is(err, os.ErrExist) {
		return fmt.Errorf("%s: %w", file, errReceipts)
	}
	if err != nil {
		return err
	}
	_ = f.Close()
	return writeReceipts(file, receipts)
}

func writeReceipts(file string, receipts []perform.Receipt) error {
	text, err := json.MarshalIndent(receipts, "", "  ")
	if err != nil {
		return err
	}
	return renameio.WriteFile(file, append(text, '\n'), 0o600)
}

// forget removes the receipts of a performance that failed, of which nothing
// is left; not those of another, which is why it may have failed.
func forget(file string, why error) error {
	if errors.Is(why, errReceipts) {
		return nil
	}
	if err := os.Remove(file); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

func newUndo() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "undo RECEIPTS.json",
		Short: "Undo exactly what receipts record",
		Long: `undo takes away what perform has recorded and nothing else, by the ids of the
mounts, in whichever namespace they are. What is in use stays, and the error says
by whom. When all is gone the file is removed.`,
		Example: "  preparectl undo /run/data.json",
		Args:    cobra.ExactArgs(1),
	}
	print := output(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		text, err := readFile(args[0])
		if err != nil {
			return failure{err}
		}
		var receipts []perform.Receipt
		if err := json.Unmarshal(text, &receipts); err != nil {
			return failure{fmt.Errorf("%s: %w", args[0], err)}
		}
		if err := undo(cmd.Context(), receipts); err != nil {
			return failure{withBusy(err)}
		}
		if err := os.Remove(args[0]); err != nil {
			return failure{err}
		}
		return print(receipts, receiptHeader, receiptRows(receipts))
	}
	return cmd
}

// undo finds the namespace of receipts first. One that is gone has taken its
// mounts along.
func undo(ctx context.Context, receipts []perform.Receipt) error {
	if len(receipts) == 0 {
		return nil
	}
	own, err := mountns.OwnID()
	if err != nil {
		return err
	}
	if receipts[0].MntnsID == own {
		return perform.Undo(ctx, nil, receipts)
	}
	all, err := mountns.All(ctx)
	if err != nil {
		return err
	}
	defer mountns.CloseAll(all)
	for _, ns := range all {
		if ns.ID() == receipts[0].MntnsID {
			return perform.Undo(ctx, ns, receipts)
		}
	}
	return nil
}
