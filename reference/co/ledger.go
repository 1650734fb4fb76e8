package co

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/google/renameio/v2"
	"golang.org/x/sys/unix"
)

// ledger is the durable record of preparations: a JSON file each, replaced as
// a whole, in a directory that one CO at a time has. Whoever may enter the
// directory can read it meanwhile, with ReadLedger.
//
// What is performed has a copy of its record in a directory beside it, since
// mounts whose record is lost could be told from nobody's by nothing else.
type ledger struct {
	dir    string
	copies string
	lock   *os.File

	mu      sync.RWMutex
	records map[string]Record        // by position
	damaged map[string]*DamagedError // by position
}

// DamagedError is a record that cannot be read. What it was of is not known,
// so it is neither dropped nor taken for nothing.
type DamagedError struct {
	File string
	Err  error
}

// Error names the file and what to do.
func (e *DamagedError) Error() string {
	return fmt.Sprintf("damaged record %s: %v; restore the file, or remove it once nothing of it is mounted", e.File, e.Err)
}

// Unwrap returns the reason.
func (e *DamagedError) Unwrap() error { return e.Err }

var (
	recordFile = regexp.MustCompile(`^[0-9a-f]{32}\.[0-9a-f]{32}\.json$`)
	unfinished = regexp.MustCompile(`^\.[0-9a-f]{32}\.[0-9a-f]{32}\.json[0-9]+$`)
)

// ReadLedger reads the records of the CO that has the directory dir, whether
// it runs or not, in the order of drivers, volumes and prepare ids. Each
// record that cannot be read is a *DamagedError in the error, which leaves the
// others valid.
func ReadLedger(dir string) ([]Record, error) {
	records, damaged, err := readRecords(filepath.Join(dir, "ledger"))
	if err != nil {
		return nil, err
	}
	var errs []error
	for _, position := range sortedKeys(damaged) {
		errs = append(errs, damaged[position])
	}
	return inOrder(records), errors.Join(errs...)
}

func readRecords(dir string) (map[string]Record, map[string]*DamagedError, error) {
	files, err := os.ReadDir(dir)
	if err != nil {
		return nil, nil, fmt.Errorf("read the ledger: %w", err)
	}
	records, damaged := map[string]Record{}, map[string]*DamagedError{}
	for _, f := range files {
		if !recordFile.MatchString(f.Name()) {
			continue
		}
		path := filepath.Join(dir, f.Name())
		position := strings.TrimSuffix(f.Name(), ".json")
		r, err := readRecord(path, position)
		switch {
		case errors.Is(err, fs.ErrNotExist): // gone since the directory was read
		case err != nil:
			damaged[position] = &DamagedError{path, err}
		default:
			records[position] = r
		}
	}
	return records, damaged, nil
}

func readRecord(path, position string) (Record, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return Record{}, err
	}
	return decodeRecord(text, position)
}

func decodeRecord(text []byte, position string) (Record, error) {
	var v struct {
		Version int `json:"version"`
	}
	if err := json.Unmarshal(text, &v); err != nil {
		return Record{}, err
	}
	if v.Version != recordVersion {
		return Record{}, fmt.Errorf("version %d, this CO reads version %d", v.Version, recordVersion)
	}
	var r Record
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(&r); err != nil {
		return Record{}, err
	}
	if err := r.check(); err != nil {
		return Record{}, err
	}
	if r.Key().position() != position {
		return Record{}, errors.New("its file name belongs to another preparation")
	}
	return r, nil
}

// openLedger takes the ledger in the CO's directory for this process.
func openLedger(dir string) (*ledger, error) {
	l := &ledger{dir: filepath.Join(dir, "ledger"), copies: filepath.Join(dir, "performed")}
	for _, d := range []string{l.dir, l.copies} {
		if err := makeDir(d, 0o700); err != nil {
			return nil, err
		}
	}
	if err := syncDir(dir); err != nil {
		return nil, err
	}
	lock, err := lockFile(filepath.Join(dir, "lock"))
	if errors.Is(err, unix.EWOULDBLOCK) {
		return nil, &InUseError{Dir: dir, PID: readPID(filepath.Join(dir, "lock"))}
	}
	if err != nil {
		return nil, fmt.Errorf("lock %s: %w", dir, err)
	}
	l.lock = lock
	if l.records, l.damaged, err = readRecords(l.dir); err == nil {
		err = l.restore()
	}
	if err == nil {
		err = errors.Join(l.tidy(l.dir), l.tidy(l.copies))
	}
	if err == nil {
		_ = lock.Truncate(0)
		_, err = lock.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
	}
	if err != nil {
		return nil, errors.Join(err, lock.Close())
	}
	return l, nil
}

// restore takes the copy of each record that is lost. A copy that cannot be
// read stands for the record it is of.
func (l *ledger) restore() error {
	copies, damaged, err := readRecords(l.copies)
	if err != nil {
		return err
	}
	for position, r := range copies {
		if l.records[position].Version != 0 || l.damaged[position] != nil {
			continue
		}
		r.Error = "its record was lost; this is a copy"
		if err := l.put(&r); err != nil {
			return err
		}
	}
	for position, d := range damaged {
		if l.records[position].Version == 0 && l.damaged[position] == nil {
			l.damaged[position] = d
		}
	}
	return nil
}

// tidy removes the files that a killed CO was writing and had not renamed, and
// the locks of preparations that it had not written down yet.
func (l *ledger) tidy(dir string) error {
	files, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, f := range files {
		path := filepath.Join(dir, f.Name())
		if position, isLock := strings.CutSuffix(f.Name(), ".lock"); isLock && l.records[position].Version == 0 && l.damaged[position] == nil {
			lock, err := lockFile(path)
			if err != nil {
				continue // a step still runs
			}
			defer lock.Close()
		} else if !unfinished.MatchString(f.Name()) {
			continue
		}
		if err := os.Remove(path); err != nil {
			return fmt.Errorf("remove what is unfinished: %w", err)
		}
	}
	return nil
}

// InUseError says that another process has the directory.
type InUseError struct{ Dir, PID string }

// Error names the process.
func (e *InUseError) Error() string {
	return fmt.Sprintf("%s: another CO uses it (pid %s); stop that one, or name a directory of your own", e.Dir, e.PID)
}

func readPID(path string) string {
	text, _ := os.ReadFile(path)
	return strings.TrimSpace(string(text))
}

// makeDir makes a directory of a mode, or sees that others may not do more
// with the one that is there.
func makeDir(dir string, mode os.FileMode) error {
	err := os.Mkdir(dir, mode)
	if err == nil {
		return os.Chmod(dir, mode) // whatever the umask
	}
	if !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("make a directory: %w", err)
	}
	info, err := os.Lstat(dir)
	switch {
	case err != nil:
		return err
	case !info.IsDir():
		return fmt.Errorf("%s: is not a directory", dir)
	case info.Mode().Perm()&0o077&^mode != 0:
		return fmt.Errorf("%s: others may do too much in it (mode %04o); chmod it to %04o, or name another", dir, info.Mode().Perm(), mode)
	}
	return nil
}

// lockFile opens a file and locks it without waiting. The lock is gone when
// every process that has inherited the descriptor is.
func lockFile(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

func (l *ledger) close() error { return l.lock.Close() }

func (l *ledger) file(position string) string { return filepath.Join(l.dir, position+".json") }

// get returns a record, nil if there is none, or a *DamagedError.
func (l *ledger) get(k Key) (*Record, error) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	if err, found := l.damaged[k.position()]; found {
		return nil, err
	}
	if r, found := l.records[k.position()]; found {
		return &r, nil
	}
	return nil, nil
}

// put makes r durable: when it returns, r outlives process and machine.
func (l *ledger) put(r *Record) error {
	r.Version, r.Changed = recordVersion, time.Now().UTC().Truncate(time.Millisecond)
	text, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return fmt.Errorf("write the ledger: %w", err)
	}
	position := r.Key().position()
	if len(r.Receipts) > 0 && (r.Phase == Performing || r.Phase == Performed) {
		err = l.write(l.copies, position, text)
	}
	if err == nil {
		err = l.write(l.dir, position, text)
	}
	if err != nil {
		return fmt.Errorf("write the ledger: %w", err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	stored := *r
	stored.Receipts, stored.Devices = slices.Clone(r.Receipts), slices.Clone(r.Devices)
	l.records[position] = stored
	return nil
}

func (l *ledger) write(dir, position string, text []byte) error {
	// The temporary file is made in the directory itself: $TMPDIR, which
	// renameio would try first, may be anyone's.
	err := renameio.WriteFile(filepath.Join(dir, position+".json"), append(text, '\n'), 0o600, renameio.WithTempDir(dir), renameio.WithStaticPermissions(0o600))
	if err == nil {
		err = syncDir(dir)
	}
	return err
}

// drop forgets a preparation of which nothing is left. Nobody may hold it.
func (l *ledger) drop(k Key) error {
	position := k.position()
	// The copy first: alone it would stand for the record.
	for _, path := range []string{filepath.Join(l.copies, position+".json"), l.file(position), l.lockPath(position)} {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove a record: %w", err)
		}
		if err := syncDir(filepath.Dir(path)); err != nil {
			return fmt.Errorf("remove a record: %w", err)
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.records, position)
	return nil
}

func (l *ledger) lockPath(position string) string { return filepath.Join(l.dir, position+".lock") }

// all returns the records and the damaged ones.
func (l *ledger) all() ([]Record, []*DamagedError) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	var damaged []*DamagedError
	for _, position := range sortedKeys(l.damaged) {
		damaged = append(damaged, l.damaged[position])
	}
	return inOrder(l.records), damaged
}

// mountsOf are the mounts of a volume that are performed.
func (l *ledger) mountsOf(k Key) (ids []uint64) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	for _, r := range l.records {
		if r.Key().volume() == k.volume() {
			ids = append(ids, mountIDs(r.Receipts)...)
		}
	}
	return ids
}

// usedByOthers says whether a preparation of the volume other than k's needs
// it staged. A damaged record might be of one that does.
func (l *ledger) usedByOthers(k Key, boot string) (bool, error) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	for position, r := range l.records {
		if position != k.position() && r.Key().volume() == k.volume() && r.uses(boot) {
			return true, nil
		}
	}
	for position, err := range l.damaged {
		if position != k.position() && strings.HasPrefix(position, k.volume()+".") {
			return false, err
		}
	}
	return false, nil
}

func inOrder(m map[string]Record) []Record {
	all := make([]Record, 0, len(m))
	for _, r := range m {
		all = append(all, r)
	}
	slices.SortFunc(all, func(a, b Record) int {
		return slices.Compare([]string{a.Driver, a.VolumeID, a.PrepareID}, []string{b.Driver, b.VolumeID, b.PrepareID})
	})
	return all
}

func sortedKeys[V any](m map[string]V) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

func syncDir(path string) error {
	d, err := os.Open(path)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}
