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

// layer is one mount of the stack at a target.
type layer struct {
	Mount mountns.Mount `json:"mount"`
	// Record is of what made it, nil if no record is.
	Record *co.Record `json:"record"`
	// Published is the place of a kubelet that it is at, nil if it is none.
	Published *published `json:"published,omitempty"`
	// Answers is what its root answers: of the topmost alone, and only in the
	// own mount namespace.
	Answers string `json:"answers,omitempty"`
}

func newWhy() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "why TARGET",
		Short: "Say which call made each mount at a target",
		Long: `why lists the mounts at a path, the lowest of the stack first, and for each the
call that made it: the preparation of the ledger, known by the id of the mount,
or the kubelet's call, known by the path; or "not ours". With --pid the path is
one that the process sees.`,
		Example: "  preparectl why /var/lib/app/data\n  preparectl why --pid 4711 /data",
		Args:    cobra.ExactArgs(1),
	}
	dirs, print := bothDirs(cmd), output(cmd)
	pid := cmd.Flags().Int("pid", 0, "`process` in whose mount namespace the target is")
	cmd.ValidArgsFunction = completeTargets(dirs)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if !filepath.IsAbs(args[0]) {
			return fmt.Errorf("%s: has to be an absolute path", args[0])
		}
		target := filepath.Clean(args[0])
		ctx, cancel := context.WithTimeout(cmd.Context(), limit)
		defer cancel()
		k := &asker{}
		defer k.close()
		records, damaged := dirs.records()
		ns, err := namespaceOf(*pid)
		if err != nil {
			return failure{err}
		}
		defer ns.Close()
		t, err := ns.Table(ctx)
		if err != nil {
			return failure{err}
		}
		var place *published
		var unread error
		if *pid == 0 {
			var all []published
			all, unread = dirs.published(k, &machine{spaces: []space{{ns.ID(), ns.Inode(), t}}})
			place = at(all, target)
		}
		layers, rows := []layer{}, [][]string{}
		stack := t.At(target)
		for i, m := range stack {
			l := layer{Mount: m, Record: madeBy(records, ns.ID(), m.ID)}
			if l.Record == nil {
				l.Published = place
			}
			if i == len(stack)-1 && *pid == 0 {
				l.Answers = k.health(target)
			}
			layers = append(layers, l)
			rows = append(rows, append([]string{strconv.FormatUint(m.ID, 10), m.Type(), m.Attributes()}, append(l.maker(), l.Answers)...))
		}
		if err := print(layers, "MOUNT ID\tTYPE\tATTRIBUTES\tMADE BY\tDRIVER\tVOLUME\tSINCE\tANSWERS", rows); err != nil {
			return err
		}
		if len(stack) == 0 {
			in := "nothing"
			if m, found := covering(t, target); found {
				in = m.String()
			}
			fmt.Fprintf(cmd.ErrOrStderr(), "nothing is mounted at %s; it is in %s\n", target, in)
		}
		if err := errors.Join(damaged, unread); err != nil {
			return failure{err}
		}
		return nil
	}
	return cmd
}

// maker is the call that made a mount, its driver, its volume, and when.
func (l *layer) maker() []string {
	switch {
	case l.Record != nil:
		r := l.Record
		return []string{"NodePrepareVolume " + r.PrepareID, r.Driver, r.VolumeID, r.Changed.Format(time.RFC3339)}
	case l.Published != nil:
		p := l.Published
		return []string{"most likely " + p.call(), p.Driver, p.VolumeID, ""}
	}
	return []string{"not ours", "", "", ""}
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

// plural is "1 mount" or "3 mounts".
func plural(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return strconv.Itoa(n) + " " + many
}
