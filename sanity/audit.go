package sanity

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
	"github.com/csi-prepare/csi-prepare/reference/mountns"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// snapshot is what is to be the same again after a spec.
type snapshot struct {
	tables []tableOf
	// watermark is a mount id: what is mounted later anywhere has a greater
	// one.
	watermark uint64
}

// tableOf is the mount table of one namespace.
type tableOf struct {
	whose   string
	ns      *mountns.Namespace
	table   *mountns.Table
	private bool // nothing but the run changes it
}

// look reads the tables of the namespaces that take part in the run.
func (t *trial) look(ctx context.Context) (*snapshot, error) {
	snap := &snapshot{}
	add := func(whose string, ns *mountns.Namespace, private bool) error {
		for _, known := range snap.tables {
			if known.ns.ID() == ns.ID() {
				return nil
			}
		}
		table, err := ns.Table(ctx)
		if err != nil {
			return err
		}
		if n := table.Len(); n > 0 {
			snap.watermark = max(snap.watermark, table.Mounts[n-1].ID)
		}
		snap.tables = append(snap.tables, tableOf{whose, ns, table, private})
		return nil
	}
	if err := add("the spec", t.ns, true); err != nil {
		return nil, err
	}
	if err := add("the suite", t.own, false); err != nil {
		return nil, err
	}
	if t.beyond != nil {
		return snap, add("the plugin", t.beyond, true)
	}
	if t.pluginNS != nil {
		return snap, add("the plugin", t.pluginNS, true)
	}
	return snap, nil
}

// changes returns the difference of every table to what it was when the spec
// began, a line for each mount, and what is new in any other namespace of
// the machine as far as it has to do with the run.
func (t *trial) changes(ctx context.Context, skip *mountns.Namespace) (string, error) {
	var lines []string
	known := map[uint64]bool{}
	for _, was := range t.before.tables {
		known[was.ns.ID()] = true
		if was.ns == skip {
			continue
		}
		now, err := was.ns.Table(ctx)
		if err != nil {
			return "", err
		}
		diff := mountns.Diff(was.table, now)
		if !was.private {
			diff = t.ours(diff)
		}
		lines = appendChanges(lines, diff, was.whose)
	}
	others, err := mountns.All(ctx)
	if err != nil {
		return "", err
	}
	for _, ns := range others {
		if !known[ns.ID()] {
			added, err := t.newMounts(ctx, ns)
			if err != nil {
				_ = ns.Close() // it was only looked at
				continue       // it ended while it was looked at
			}
			lines = appendChanges(lines, t.ours(mountns.Changes{Added: added}), "another namespace, "+ns.String())
		}
		_ = ns.Close() // it was only looked at
	}
	return strings.Join(lines, "\n"), nil
}

func appendChanges(lines []string, c mountns.Changes, whose string) []string {
	if text := c.String(); text != "" {
		for _, line := range strings.Split(text, "\n") {
			lines = append(lines, line+"   in the namespace of "+whose)
		}
	}
	return lines
}

// newMounts returns what was mounted in a namespace since the spec began.
func (t *trial) newMounts(ctx context.Context, ns *mountns.Namespace) ([]mountns.Mount, error) {
	var ids []uint64
	var err error
	if f := kernel.Probe(); f.ListmountByNS {
		// The kernel skips what is older: other namespaces may be huge.
		ids, err = kernel.ListMounts(t.ids[:0], ns.ID(), kernel.Root, t.before.watermark)
		t.ids = ids
	} else if ids, err = ns.IDs(ctx, nil); err == nil {
		first, _ := slices.BinarySearch(ids, t.before.watermark+1)
		ids = ids[first:]
	}
	if err != nil || len(ids) == 0 {
		return nil, err
	}
	return ns.Lookup(ctx, ids...)
}

// ours keeps the changes that have to do with the run: others may mount and
// unmount on this machine at any time.
func (t *trial) ours(c mountns.Changes) mountns.Changes {
	var kept mountns.Changes
	for _, m := range c.Added {
		if t.isOurs(m) {
			kept.Added = append(kept.Added, m)
		}
	}
	for _, m := range c.Removed {
		if t.isOurs(m) {
			kept.Removed = append(kept.Removed, m)
		}
	}
	for _, ch := range c.Changed {
		if t.isOurs(ch.Before) || t.isOurs(ch.After) {
			kept.Changed = append(kept.Changed, ch)
		}
	}
	return kept
}

func (t *trial) isOurs(m mountns.Mount) bool {
	// The spec's own namespace copies the plugin's mounts, this directory
	// among them, when it is made; that is no change.
	for _, text := range []string{m.Point, m.Root, m.Source} {
		if t.mentions(text) && m.Point != t.Suite.dir {
			return true
		}
	}
	return false
}

// mentions reports whether a path is of the run.
func (s *Suite) mentions(path string) bool {
	if strings.Contains(path, filepath.Base(s.dir)) {
		return true
	}
	if s.config.StateDir != "" && strings.Contains(path, s.config.StateDir) {
		return true
	}
	for _, dir := range s.config.Grants {
		if strings.Contains(path, dir) {
			return true
		}
	}
	return slices.ContainsFunc(s.config.DataDirs, func(dir string) bool { return strings.Contains(path, dir) })
}

// tableNow is the difference at this moment, for a failure message.
func (t *trial) tableNow() string {
	text, err := t.changes(context.WithoutCancel(t.ctx), nil)
	if err != nil {
		return "unknown: " + err.Error()
	}
	return text
}

// compare fails the spec if anything is left that was not there before it.
func (t *trial) compare() *ending {
	ctx := context.WithoutCancel(t.ctx)
	if left, err := t.changes(ctx, t.ns); err != nil {
		return couldNotRun("reading the mount tables: %v", err)
	} else if left != "" {
		return t.leak(t.mountRule(), "the mount tables as before the spec", "mounts are not as before", left)
	}
	now, err := t.ns.Table(ctx)
	if err != nil {
		return couldNotRun("reading the mount table: %v", err)
	}
	if diff := mountns.Diff(t.before.tables[0].table, now); !diff.Empty() {
		return t.leak(requirement.AuditTableRestored, "the mount table of the consumer as before the spec", "mounts are not as before", diff.String())
	}
	for device, file := range loops() {
		if t.mentions(file) && t.firstSeen(device) {
			return t.leak(t.resourceRule(), "no loop device left", fmt.Sprintf("/dev/%s is attached to %s", device, file), "")
		}
	}
	return nil
}

// removeDirectories removes what the spec made for the plugin, as a CO does:
// each with one rmdir, after leaks were counted, since a rmdir takes mounts in
// other namespaces with it.
func (t *trial) removeDirectories() *ending {
	for _, dir := range slices.Backward(t.directories) {
		if err := os.Remove(dir); err == nil || errors.Is(err, os.ErrNotExist) {
			continue
		}
		if t.actor == requirement.SP {
			rule := requirement.UnpreparePathEmptied
			if t.publishes() {
				rule = t.unclean(dir)
			}
			return t.leak(rule, "an empty directory that one rmdir removes", filepath.Base(dir)+" holds "+contents(dir), "")
		}
	}
	if left := contents(t.dir); left != "nothing" {
		return t.leak(t.placeRule(), "nothing beside the directories the suite made", "the directory of the suite holds "+left, "")
	}
	return nil
}

func (t *trial) placeRule() requirement.ID {
	if t.actor == requirement.CO {
		return requirement.UndoCreatedRemoved
	}
	if t.publishes() {
		return requirement.CSIUnpublishClean
	}
	return requirement.PrepareStaysBelow
}

// contents lists a directory.
func contents(dir string) string {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return "what cannot be listed: " + err.Error()
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return orElse(strings.Join(names, ", "), "nothing")
}

// firstSeen reports whether a loop device was not found left before: it is
// the fault of one spec only.
func (t *trial) firstSeen(device string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if slices.Contains(t.leftLoops, device) {
		return false
	}
	t.leftLoops = append(t.leftLoops, device)
	return true
}

func (t *trial) leak(id requirement.ID, expected, actual, table string) *ending {
	if q, ok := requirement.Lookup(id); !ok || q.Actor != t.actor {
		return couldNotRun("%s; %s\n%s", actual, "that is a fault of the suite", table)
	}
	if spec, known := t.brokenIn(id); known && spec != t.definition.name {
		return couldNotRun("%s, which breaks %s: see %q", actual, id, spec)
	}
	return t.failed(id, t.lastCall(), expected, actual, table)
}

// mountRule is the requirement a mount breaks that is left outside the
// namespace of the consumer.
func (t *trial) mountRule() requirement.ID {
	if t.actor == requirement.CO {
		return requirement.AuditTableRestored
	}
	if t.publishes() {
		return requirement.CSIUnpublishClean
	}
	return requirement.PrepareNoMount
}

func (t *trial) resourceRule() requirement.ID {
	if t.actor == requirement.CO {
		return requirement.AuditTableRestored
	}
	return requirement.PrepareNothingLeft
}

// loops returns the loop devices that are attached, with their files.
func loops() map[string]string {
	found := map[string]string{}
	for _, device := range names("/sys/block") {
		if !strings.HasPrefix(device, "loop") {
			continue
		}
		if text, err := os.ReadFile("/sys/block/" + device + "/loop/backing_file"); err == nil {
			found[device] = strings.TrimSpace(string(text))
		}
	}
	return found
}

// descriptors returns how many descriptors the plugin has open on what, by
// the names /proc gives them; sockets and pipes are counted together.
func descriptors(pid int) map[string]int {
	found := map[string]int{}
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return found
	}
	for _, e := range entries {
		to, err := os.Readlink(filepath.Join(dir, e.Name()))
		if err != nil {
			continue
		}
		if kind, _, special := strings.Cut(to, ":["); special {
			to = kind
		}
		found[to]++
	}
	return found
}

// children returns the processes a process has started that live.
func children(pid int) []string {
	var found []string
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	if err != nil {
		return nil
	}
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			continue
		}
		for _, child := range strings.Fields(string(text)) {
			name, err := os.ReadFile(filepath.Join("/proc", filepath.Base(child), "comm"))
			if err == nil {
				found = append(found, child+" "+strings.TrimSpace(string(name)))
			}
		}
	}
	slices.Sort(found)
	return found
}

// difference renders how two tables of one namespace differ.
func difference(before, after *mountns.Table) string { return mountns.Diff(before, after).String() }
