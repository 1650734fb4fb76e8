package co

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/csi-prepare/csi-prepare/reference/mountns"
	"github.com/csi-prepare/csi-prepare/reference/perform"
)

// Finding is one thing that is not as the ledger says it should be.
type Finding struct {
	// What is the kind of finding, one of the constants below.
	What FindingKind `json:"what"`
	// Key is the preparation, nil if none is known.
	Key *Key `json:"key,omitempty"`
	// Detail says what was found and what to do.
	Detail string `json:"detail"`
}

// FindingKind is a kind of finding.
type FindingKind string

// What an audit finds.
const (
	DamagedRecord   FindingKind = "damaged-record"
	VoidRecord      FindingKind = "void-record"     // of another boot
	Unfinished      FindingKind = "unfinished"      // neither performed nor gone
	MissingMount    FindingKind = "missing-mount"   // recorded and not in the table
	CoveredMount    FindingKind = "covered-mount"   // with somebody else's on it
	LeftMount       FindingKind = "left-mount"      // below a directory of the CO, of no preparation
	LeftDirectory   FindingKind = "left-directory"  // of no preparation
	LooseDirectory  FindingKind = "loose-directory" // that others may enter
	ForeignOfLedger FindingKind = "foreign-file"    // in the ledger, and none of its own
)

// Audit compares the ledger of the CO that has the directory dir, whether it
// runs or not, with the mount tables of all namespaces and with what lies in
// the directory. It changes nothing and looks at no path of a consumer. While
// the CO acts, what is under way shows as a finding.
func Audit(ctx context.Context, dir string) ([]Finding, error) {
	a := audit{dir: dir}
	records, damaged, err := readRecords(filepath.Join(dir, "ledger"))
	if err != nil {
		return nil, err
	}
	if a.boot, err = bootID(); err != nil {
		return nil, err
	}
	if a.tables, err = tables(ctx); err != nil {
		return nil, err
	}
	for _, position := range sortedKeys(damaged) {
		a.add(DamagedRecord, nil, "%v", damaged[position])
	}
	for _, r := range inOrder(records) {
		a.record(&r)
	}
	if err := a.directories(records, damaged); err != nil {
		return nil, err
	}
	return a.found, nil
}

type audit struct {
	dir, boot string
	tables    map[uint64]*mountns.Table // by namespace
	found     []Finding
}

func tables(ctx context.Context) (map[uint64]*mountns.Table, error) {
	all, err := mountns.All(ctx)
	if err != nil {
		return nil, err
	}
	defer mountns.CloseAll(all)
	tables := make(map[uint64]*mountns.Table, len(all))
	for _, ns := range all {
		if tables[ns.ID()], err = ns.Table(ctx); err != nil {
			return nil, err
		}
	}
	return tables, nil
}

func (a *audit) add(what FindingKind, k *Key, format string, args ...any) {
	a.found = append(a.found, Finding{what, k, fmt.Sprintf(format, args...)})
}

func (a *audit) record(r *Record) {
	k := r.Key()
	switch {
	case r.BootID != a.boot:
		a.add(VoidRecord, &k, "of another boot: start the CO, which ends it")
		return
	case r.Phase != Performed:
		why := ""
		if r.Error != "" {
			why = ": " + r.Error
		}
		a.add(Unfinished, &k, "%s since %s%s", r.Phase, r.Changed.Format("2006-01-02 15:04:05"), why)
	}
	for i := range r.Receipts {
		a.receipt(r, &k, &r.Receipts[i])
	}
}

func (a *audit) receipt(r *Record, k *Key, receipt *perform.Receipt) {
	t := a.tables[receipt.MntnsID]
	if t == nil {
		a.add(MissingMount, k, "mount namespace %d of the consumer is gone: take the volume down", receipt.MntnsID)
		return
	}
	if _, found := t.ByID(receipt.MountID); !found {
		if r.Phase == Performed {
			a.add(MissingMount, k, "mount %d on %s was taken away by somebody else: take the volume down", receipt.MountID, receipt.Target)
		}
		return
	}
	for _, child := range t.Children(receipt.MountID) {
		own := receipt.Tree && child.ID > receipt.MountID && child.ID < receipt.TreeEnd
		if !own && !slices.ContainsFunc(r.Receipts, func(o perform.Receipt) bool { return o.MountID == child.ID }) {
			a.add(CoveredMount, k, "mount %d on %s carries somebody else's mount %s: it is busy until that is gone",
				receipt.MountID, receipt.Target, child)
		}
	}
}

// directories looks for what is left of preparations that are no more.
func (a *audit) directories(records map[string]Record, damaged map[string]*DamagedError) error {
	known := map[string]bool{}
	for _, r := range records {
		known[r.PreparePath], known[r.StagingPath] = true, true
	}
	for position := range damaged {
		volume, _, _ := strings.Cut(position, ".")
		known[filepath.Join(a.dir, "prepare", position)] = true
		known[filepath.Join(a.dir, "staging", volume)] = true
	}
	for _, sub := range []string{"prepare", "staging"} {
		dir := filepath.Join(a.dir, sub)
		entries, err := os.ReadDir(dir)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		for _, e := range entries {
			if path := filepath.Join(dir, e.Name()); !known[path] {
				a.leftDirectory(path)
			}
		}
	}
	for sub, mode := range map[string]os.FileMode{"": 0o711, "ledger": 0o700, "performed": 0o700, "prepare": 0o711, "staging": 0o711, "handoff": 0o711} {
		info, err := os.Lstat(filepath.Join(a.dir, sub))
		if err == nil && info.Mode().Perm()&0o077&^mode != 0 {
			a.add(LooseDirectory, nil, "%s: others may do too much in it (mode %04o): chmod it to %04o", filepath.Join(a.dir, sub), info.Mode().Perm(), mode)
		}
	}
	files, err := os.ReadDir(filepath.Join(a.dir, "ledger"))
	for _, f := range files {
		name := f.Name()
		if !recordFile.MatchString(name) && !unfinished.MatchString(name) && !strings.HasSuffix(name, ".lock") {
			a.add(ForeignOfLedger, nil, "%s: no record of the CO: it is left alone", filepath.Join(a.dir, "ledger", name))
		}
	}
	return err
}

func (a *audit) leftDirectory(path string) {
	clear := true
	for _, ns := range sortedNamespaces(a.tables) {
		for _, m := range a.tables[ns].Below(path) {
			clear = false
			a.add(LeftMount, nil, "%s in mount namespace %d: of no preparation; find out who made it before anything is removed", m, ns)
		}
	}
	if clear {
		a.add(LeftDirectory, nil, "%s: of no preparation; remove it with rmdir, never recursively", path)
	}
}

func sortedNamespaces(tables map[uint64]*mountns.Table) []uint64 {
	ids := make([]uint64, 0, len(tables))
	for id := range tables {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	return ids
}
