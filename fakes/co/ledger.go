package co

import (
	"encoding/json"
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/google/renameio/v2"
)

// record is what the ledger knows of one performance. It is written before
// the first mount is visible, and again when all are.
type record struct {
	Target    Target   `json:"target"`
	Digest    string   `json:"digest"`
	Receipts  []string `json:"receipts"`
	Performed bool     `json:"performed"`
	BootID    string   `json:"boot_id"`
}

// ofAnotherBoot is void: what it stood for ended with that boot.
func ofAnotherBoot(r record, boot string) bool { return r.BootID != boot }

// ledger holds a record for each performance, in memory and, if it has a
// directory, in a file each that is replaced in one step.
type ledger struct {
	directory string
	boot      string

	mu      *sync.Mutex
	records map[string]record
}

// openLedger reads the records of a predecessor. Those of another boot are
// void, for no mount outlives a boot.
func openLedger(directory string, void func(r record, boot string) bool) (ledger, error) {
	boot, err := bootID()
	if err != nil {
		return ledger{}, err
	}
	l := ledger{
		directory: directory, boot: boot,
		mu: new(sync.Mutex), records: make(map[string]record),
	}
	if directory == "" {
		return l, nil
	}
	files, err := filepath.Glob(filepath.Join(directory, "*.json"))
	if err != nil {
		return l, err
	}
	for _, name := range files {
		var r record
		data, err := os.ReadFile(name)
		if err != nil {
			return l, err
		}
		if err := json.Unmarshal(data, &r); err != nil {
			return l, err
		}
		if void(r, l.boot) {
			if err := os.Remove(name); err != nil {
				return l, err
			}
			continue
		}
		l.records[strings.TrimSuffix(filepath.Base(name), ".json")] = r
	}
	return l, nil
}

func (l *ledger) file(id string) string { return filepath.Join(l.directory, id+".json") }

func (l *ledger) get(id string) (record, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	r, found := l.records[id]
	return r, found
}

func (l *ledger) put(id string, r record) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	r.BootID = l.boot
	if l.directory != "" {
		data, err := json.Marshal(r)
		if err != nil {
			return err
		}
		if err := renameio.WriteFile(l.file(id), data, 0o600, renameio.WithTempDir(l.directory)); err != nil {
			return err
		}
	}
	l.records[id] = r
	return nil
}

func (l *ledger) drop(id string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, found := l.records[id]; found && l.directory != "" {
		if err := os.Remove(l.file(id)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	delete(l.records, id)
	return nil
}

func (l *ledger) ids() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Sorted(maps.Keys(l.records))
}

func bootID() (string, error) {
	id, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(id)), err
}
