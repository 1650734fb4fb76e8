package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/csi-prepare/csi-prepare/reference/co"
	"github.com/csi-prepare/csi-prepare/reference/mountns"
)

// Findings about the directories of a kubelet, besides those of co.Audit.
const (
	leftPlace   co.FindingKind = "left-place"   // with nothing mounted
	stackedAt   co.FindingKind = "stacked"      // several mounts
	copyLeft    co.FindingKind = "copy-left"    // mounted in other namespaces only
	serverGone  co.FindingKind = "server-gone"  // ENOTCONN
	noAnswer    co.FindingKind = "no-answer"    // within the limit
	stagedOnly  co.FindingKind = "staged-only"  // no pod has it
	unknownLeft co.FindingKind = "left-mount"   // below a kubelet's directory, at no place of its
	notRead     co.FindingKind = "not-readable" // a directory or a root
)

func newAudit() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "audit",
		Short: "Compare what should be mounted with the mounts of the machine",
		Long: `audit compares the ledger with the mount tables of all namespaces and with the
CO's own directories, and the places of a kubelet with what is mounted there. It
changes nothing, and exits 1 if it finds something. What is under way at that
moment shows as a finding too.`,
		Example: "  preparectl audit\n  preparectl audit -o json --kubelet-dir /var/lib/kubelet",
		Args:    cobra.NoArgs, ValidArgsFunction: cobra.NoFileCompletions,
	}
	dirs, print := bothDirs(cmd), output(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		ctx, cancel := context.WithTimeout(cmd.Context(), time.Minute)
		defer cancel()
		k := &asker{}
		defer k.close()
		if err := answering(dirs.state); err != nil {
			return failure{err}
		}
		found, err := co.Audit(ctx, dirs.state)
		if errors.Is(err, os.ErrNotExist) && !cmd.Flags().Changed("state-dir") {
			err = nil
		}
		if err != nil {
			return failure{err}
		}
		m, err := readMachine(ctx)
		if err != nil {
			return failure{err}
		}
		all, unread := dirs.published(k, m)
		found = append(found, auditPlaces(dirs.kubelet, all, m)...)
		if found == nil {
			found = []co.Finding{}
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
			unread = errors.Join(errors.New(plural(len(found), "finding", "findings")), unread)
		}
		if unread != nil {
			return failure{unread}
		}
		return nil
	}
	return cmd
}

// auditPlaces says what is not as it should be at rest.
func auditPlaces(dir string, all []published, m *machine) (found []co.Finding) {
	add := func(what co.FindingKind, format string, args ...any) {
		found = append(found, co.Finding{What: what, Detail: fmt.Sprintf(format, args...)})
	}
	known := map[string]bool{}
	for i := range all {
		p := &all[i]
		known[p.Path] = true
		of := fmt.Sprintf("%s (%s, volume %s)", p.Path, p.call(), p.VolumeID)
		switch p.State {
		case notMounted:
			if !p.Block {
				add(leftPlace, "%s: nothing is mounted: being made or removed, or left over: preparectl reap", of)
			}
		case stacked:
			add(stackedAt, "%s: %d mounts, one on the other: one unmount leaves others", of, len(m.own().Table.At(p.Path)))
		case elsewhere:
			add(copyLeft, "%s: mounted in other namespaces only: preparectl explain-busy %s", of, p.VolumeID)
		case dead:
			add(serverGone, "%s: its server is gone: the pod has to be restarted; unmounting works", of)
		case silent:
			add(noAnswer, "%s: did not answer within %s", of, patience)
		case unused:
			add(stagedOnly, "%s: staged, and no pod of this node has it", of)
		case unreadable:
			add(notRead, "%s: %s", of, p.Answers)
		}
	}
	for _, at := range m.where(func(t *mountns.Table) []mountns.Mount { return t.Below(dir) }) {
		point := at.Mount.Point
		ours := strings.Contains(point, "/"+csiVolumes+"/") || below(point, path.Join(dir, "plugins/kubernetes.io/csi"))
		if ours && !known[point] && !belowAny(point, known) {
			add(unknownLeft, "%s in mount namespace %d: at no place of a volume", at.Mount, at.Namespace)
		}
	}
	return found
}

// belowAny says that a mount is inside a volume: a sub-mount of it.
func belowAny(point string, places map[string]bool) bool {
	for dir := path.Dir(point); dir != "/" && dir != "."; dir = path.Dir(dir) {
		if places[dir] {
			return true
		}
	}
	return false
}
