package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/csi-prepare/csi-prepare/reference/co"
	"github.com/csi-prepare/csi-prepare/reference/mountns"
)

func newList() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "ls",
		Short:   "List the preparations of the ledger",
		Example: "  preparectl ls\n  preparectl ls -o json --state-dir /run/co",
		Args:    cobra.NoArgs,
	}
	dir, print := stateDir(cmd), output(cmd)
	cmd.RunE = func(*cobra.Command, []string) error {
		records, damaged := co.ReadLedger(*dir)
		rows := [][]string{}
		for _, r := range records {
			phase := string(r.Phase)
			if r.Uncertain {
				phase += ", uncertain"
			}
			rows = append(rows, []string{r.Driver, r.VolumeID, r.PrepareID, phase, r.Target, r.Changed.Format(time.RFC3339), r.Error})
		}
		if err := print(records, "DRIVER\tVOLUME\tPREPARE ID\tPHASE\tTARGET\tSINCE\tERROR", rows); err != nil {
			return err
		}
		if damaged != nil {
			return failure{damaged}
		}
		return nil
	}
	return cmd
}

// stacked is one mount at a target, the lowest first.
type stacked struct {
	Mount mountns.Mount `json:"mount"`
	// Record is what made it, nil if no record is of it.
	Record *co.Record `json:"record"`
}

func newWhy() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "why TARGET",
		Short: "Say which call made each mount at a target",
		Long: `why lists the mounts at a path, the lowest of the stack first, and for each the
preparation that made it, or "not ours". It reads the mount table alone and never
looks at the path itself, so that a dead server does not matter.`,
		Example: "  preparectl why /var/lib/app/data",
		Args:    cobra.ExactArgs(1),
	}
	dir, print := stateDir(cmd), output(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if !filepath.IsAbs(args[0]) {
			return fmt.Errorf("%s: has to be an absolute path", args[0])
		}
		records, err := co.ReadLedger(*dir)
		if err != nil && records == nil {
			return failure{err}
		}
		ctx, cancel := context.WithTimeout(cmd.Context(), 10*time.Second)
		defer cancel()
		own, openErr := mountns.Own()
		if openErr != nil {
			return failure{openErr}
		}
		defer own.Close()
		t, tableErr := own.Table(ctx)
		if tableErr != nil {
			return failure{tableErr}
		}
		found, rows := []stacked{}, [][]string{}
		for _, m := range t.At(filepath.Clean(args[0])) {
			s := stacked{m, madeBy(records, own.ID(), m.ID)}
			found = append(found, s)
			row := []string{strconv.FormatUint(m.ID, 10), m.Type(), m.Attributes(), "not ours", "", "", ""}
			if r := s.Record; r != nil {
				row = append(row[:3], r.Driver, r.VolumeID, r.PrepareID, r.Changed.Format(time.RFC3339))
			}
			rows = append(rows, row)
		}
		if err := print(found, "MOUNT ID\tTYPE\tATTRIBUTES\tDRIVER\tVOLUME\tPREPARE ID\tSINCE", rows); err != nil {
			return err
		}
		if err != nil {
			return failure{err}
		}
		return nil
	}
	return cmd
}

func madeBy(records []co.Record, namespace, mount uint64) *co.Record {
	for i := range records {
		for _, receipt := range records[i].Receipts {
			if receipt.MntnsID == namespace && receipt.MountID == mount {
				return &records[i]
			}
		}
	}
	return nil
}

func newAudit() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "audit",
		Short: "Compare the ledger with the mounts of the machine",
		Long: `audit compares the ledger with the mount tables of all namespaces and with the
CO's own directories. It changes nothing, and exits 1 if it finds something.`,
		Example: "  preparectl audit\n  preparectl audit -o json",
		Args:    cobra.NoArgs,
	}
	dir, print := stateDir(cmd), output(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		ctx, cancel := context.WithTimeout(cmd.Context(), time.Minute)
		defer cancel()
		found, err := co.Audit(ctx, *dir)
		if err != nil {
			return failure{err}
		}
		rows := [][]string{}
		for _, f := range found {
			key := ""
			if f.Key != nil {
				key = f.Key.String()
			}
			rows = append(rows, []string{string(f.What), key, f.Detail})
		}
		if err := print(found, "FINDING\tPREPARATION\tDETAIL", rows); err != nil {
			return err
		}
		if len(found) > 0 {
			return failure{errors.New(strconv.Itoa(len(found)) + " findings")}
		}
		return nil
	}
	return cmd
}
