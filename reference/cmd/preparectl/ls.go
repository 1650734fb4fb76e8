package main

import (
	"context"
	"errors"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/csi-prepare/csi-prepare/reference/co"
)

// limit bounds what a command does that only looks.
const limit = 30 * time.Second

// item is one use of a volume, by whoever keeps track of it.
type item struct {
	// By is "ledger" or "kubelet".
	By        string     `json:"by"`
	Record    *co.Record `json:"record,omitempty"`
	Published *published `json:"published,omitempty"`
}

func newList() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "ls",
		Short: "List the volumes of the node",
		Long: `ls lists the preparations of the ledger, and the places where a kubelet has
published or staged volumes, each with its mounts and whether they answer.`,
		Example: "  preparectl ls\n  preparectl ls -o json --state-dir /run/co\n  preparectl ls --kubelet-dir /var/lib/k0s/kubelet",
		Args:    cobra.NoArgs, ValidArgsFunction: cobra.NoFileCompletions,
	}
	dirs, print := bothDirs(cmd), output(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		ctx, cancel := context.WithTimeout(cmd.Context(), limit)
		defer cancel()
		k := &asker{}
		defer k.close()
		records, damaged := dirs.records()
		m, err := readMachine(ctx)
		if err != nil {
			return failure{err}
		}
		places, unread := dirs.published(k, m)
		items, rows := []item{}, [][]string{}
		for i := range records {
			r := &records[i]
			items = append(items, item{By: "ledger", Record: r})
			rows = append(rows, []string{r.Driver, r.VolumeID, r.PrepareID, phaseOf(r), r.Target, r.Changed.Format(time.RFC3339), r.Error})
		}
		for i := range places {
			p := &places[i]
			items = append(items, item{By: "kubelet", Published: p})
			user := "staging"
			if p.Pod != "" {
				user = "pod " + p.Pod
			}
			rows = append(rows, []string{p.Driver, p.VolumeID, user, p.State, p.Path, "", noteOf(p)})
		}
		if err := print(items, "DRIVER\tVOLUME\tFOR\tSTATE\tTARGET\tSINCE\tNOTE", rows); err != nil {
			return err
		}
		if err := errors.Join(damaged, unread); err != nil {
			return failure{err}
		}
		return nil
	}
	return cmd
}

func phaseOf(r *co.Record) string {
	if r.Uncertain {
		return string(r.Phase) + ", uncertain"
	}
	return string(r.Phase)
}

// noteOf says what is remarkable about a place.
func noteOf(p *published) string {
	var notes []string
	switch p.State {
	case notMounted:
		notes = append(notes, "being made or removed, or left over: see preparectl reap")
	case silent, dead, unreadable:
		notes = append(notes, p.Answers)
	case unused:
		notes = append(notes, "no pod of this node has it")
	}
	if others := len(p.Mounts) - 1; others > 0 && p.State != elsewhere {
		notes = append(notes, plural(others, "more mount of this place", "more mounts of this place"))
	}
	return strings.Join(notes, "; ")
}
