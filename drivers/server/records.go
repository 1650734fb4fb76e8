package server

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"

	"github.com/google/renameio/v2"
)

// recordVersion is the version of the files below. Any change of what a record
// holds makes a new one.
const recordVersion = 1

// Key names a record: the volume's id and a name that is unique within the
// volume. Both are foreign text of any length.
type Key struct{ Volume, Name string }

// Position is where the key stands in a list, and the name of its file less
// the suffix: a digest of each part. No text a caller chose reaches the file
// system, and a file that cannot be read still tells whose it is.
func (k Key) Position() string { return digest(k.Volume) + "." + digest(k.Name) }

func digest(s string) string {
	sum := sha256.Sum256([]byte(s))
	return hex.EncodeToString(sum[:16])
}

var recordFile = regexp.MustCompile(`^[0-9a-f]{32}\.[0-9a-f]{32}\.json$`)

// Entry is a record with its key.
type Entry[T any] struct {
	Key   Key
	Value T
}

// Records are the durable records of one kind, a JSON file each. A record is
// replaced as a whole: whoever reads it finds the old one or the new one. When
// Put returns it outlives the process, and the machine too unless the records
// are those of one boot. Calls for different keys may run at the same time.
type Records[T any] struct {
	dir     string
	oneBoot bool // a reboot makes them void, so nothing is gained by fsync(2)

	mu      sync.RWMutex
	entries map[string]Entry[T] // by position
	damaged map[string]error    // by position
}

// DamagedError tells of a record that cannot be read. The driver neither
// guesses nor drops it.
type DamagedError struct {
	File string
	Err  error
}

// Error names the file and what to do.
func (e *DamagedError) Error() string {
	return fmt.Sprintf("damaged record %s: %v; stop the driver and restore the file, or remove it if what it describes is no longer needed", e.File, e.Err)
}

// Unwrap returns the reason.
func (e *DamagedError) Unwrap() error { return e.Err }

// OpenRecords reads the records in the directory of the state's that the
// elements of sub name, and makes it where it is missing. Files that writing
// left behind unfinished are removed. A record that cannot be read is logged;
// whoever asks for it, or for a list that should hold it, gets a
// *DamagedError.
func OpenRecords[T any](s *State, sub ...string) (*Records[T], error) {
	dir := filepath.Join(append([]string{s.dir}, sub...)...)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make a directory for records: %w", err)
	}
	if err := syncDir(filepath.Dir(dir)); err != nil {
		return nil, err
	}
	files, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("read records: %w", err)
	}
	r := &Records[T]{dir: dir, entries: map[string]Entry[T]{}, damaged: map[string]error{}}
	for _, f := range files {
		path := filepath.Join(dir, f.Name())
		switch {
		case isUnfinished(f.Name()):
			if err := os.Remove(path); err != nil {
				return nil, fmt.Errorf("remove an unfinished record: %w", err)
			}
		case recordFile.MatchString(f.Name()):
			position := strings.TrimSuffix(f.Name(), ".json")
			e, err := read[T](path, position)
			if err != nil {
				r.damaged[position] = &DamagedError{File: path, Err: err}
				s.log.Error("record cannot be read", "error", r.damaged[position])
				continue
			}
			r.entries[position] = e
		default:
			s.log.Warn("not a record of the driver, left alone", "file", path)
		}
	}
	return r, nil
}

// isUnfinished knows the names renameio gives to files it has not yet renamed.
func isUnfinished(name string) bool {
	name, ok := strings.CutPrefix(name, ".")
	i := strings.LastIndex(name, ".json")
	return ok && i >= 0 && recordFile.MatchString(name[:i+len(".json")])
}

// stored is a record as it lies on disk.
type stored[T any] struct {
	Version  int    `json:"version"`
	VolumeID string `json:"volume_id"`
	Name     string `json:"name"`
	Record   T      `json:"record"`
}

func read[T any](path, position string) (Entry[T], error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return Entry[T]{}, err
	}
	return decode[T](text, position)
}

func decode[T any](text []byte, position string) (Entry[T], error) {
	var none Entry[T]
	var v struct {
		Version int `json:"version"`
	}
	if err := json.Unmarshal(text, &v); err != nil {
		return none, err
	}
	if v.Version != recordVersion {
		return none, fmt.Errorf("version %d, this driver reads version %d", v.Version, recordVersion)
	}
	var s stored[T]
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(&s); err != nil {
		return none, err
	}
	e := Entry[T]{Key: Key{s.VolumeID, s.Name}, Value: s.Record}
	if e.Key.Position() != position {
		return none, errors.New("its file name belongs to another record")
	}
	return e, nil
}

func (r *Records[T]) file(position string) string {
	return filepath.Join(r.dir, position+".json")
}

// Get returns the record of a key, and whether there is one.
func (r *Records[T]) Get(k Key) (T, bool, error) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	if err := r.damaged[k.Position()]; err != nil {
		var none T
		return none, false, err
	}
	e, ok := r.entries[k.Position()]
	return e.Value, ok, nil
}

// Put makes v the record of a key, in place of a damaged one too.
func (r *Records[T]) Put(k Key, v T) error {
	text, err := json.MarshalIndent(stored[T]{recordVersion, k.Volume, k.Name, v}, "", "  ")
	if err != nil {
		return fmt.Errorf("record: %w", err)
	}
	position := k.Position()
	if err := r.write(position, append(text, '\n')); err != nil {
		return fmt.Errorf("write record: %w", err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.damaged, position)
	r.entries[position] = Entry[T]{k, v}
	return nil
}

func (r *Records[T]) write(position string, text []byte) error {
	if !r.oneBoot {
		// The temporary file is made in the directory itself: $TMPDIR,
		// which renameio would try first, may be anyone's.
		err := renameio.WriteFile(r.file(position), text, 0o600, renameio.WithTempDir(r.dir), renameio.WithStaticPermissions(0o600))
		if err != nil {
			return err
		}
		return syncDir(r.dir)
	}
	// renameio without its fsync: the rename alone keeps the record whole for
	// every process of this boot.
	f, err := os.CreateTemp(r.dir, "."+position+".json*")
	if err != nil {
		return err
	}
	_, err = f.Write(text)
	if closed := f.Close(); err == nil {
		err = closed
	}
	if err == nil {
		err = os.Rename(f.Name(), r.file(position))
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return nil
}

// Delete removes the record of a key, a damaged one too. It is no error if
// there is none.
func (r *Records[T]) Delete(k Key) error {
	position := k.Position()
	err := os.Remove(r.file(position))
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return fmt.Errorf("remove record: %w", err)
	case !r.oneBoot:
		if err := syncDir(r.dir); err != nil {
			return fmt.Errorf("remove record: %w", err)
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.damaged, position)
	delete(r.entries, position)
	return nil
}

// All returns every record, sorted by position.
func (r *Records[T]) All() ([]Entry[T], error) {
	return r.matching(func(string) bool { return true })
}

// OfVolume returns the records of one volume, sorted by position.
func (r *Records[T]) OfVolume(id string) ([]Entry[T], error) {
	prefix := digest(id) + "."
	return r.matching(func(position string) bool { return strings.HasPrefix(position, prefix) })
}

// Named returns the records of one name, sorted by position.
func (r *Records[T]) Named(name string) ([]Entry[T], error) {
	suffix := "." + digest(name)
	return r.matching(func(position string) bool { return strings.HasSuffix(position, suffix) })
}

func (r *Records[T]) matching(want func(position string) bool) ([]Entry[T], error) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	for position, err := range r.damaged {
		if want(position) {
			return nil, err
		}
	}
	var found []Entry[T]
	for position, e := range r.entries {
		if want(position) {
			found = append(found, e)
		}
	}
	slices.SortFunc(found, func(a, b Entry[T]) int { return strings.Compare(a.Key.Position(), b.Key.Position()) })
	return found, nil
}
