package co

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/csi-prepare/csi-prepare/reference/perform"
)

func testRecord() *Record {
	return &Record{
		BootID: "b", Driver: "d", Endpoint: "unix:///run/d.sock", VolumeID: "../../etc/passwd", PrepareID: "c1",
		PreparePath: "/p", StagingPath: "/s", Target: "/t", Phase: Performed,
		Receipts: []perform.Receipt{{Version: 1, BootID: "b", MountID: 7, Target: "/t"}},
	}
}

func testLedger(t *testing.T) (*ledger, string) {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "co")
	if err := makeDir(dir, 0o711); err != nil {
		t.Fatal(err)
	}
	l, err := openLedger(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.close() })
	return l, dir
}

func TestLedgerIsReadWhileInUse(t *testing.T) {
	l, dir := testLedger(t)
	r := testRecord()
	if err := l.put(r); err != nil {
		t.Fatal(err)
	}
	got, err := ReadLedger(dir)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]Record{*r}, got); diff != "" {
		t.Errorf("read (-want +got):\n%s", diff)
	}
	var inUse *InUseError
	if _, err := openLedger(dir); !errors.As(err, &inUse) || inUse.PID == "" {
		t.Errorf("a second ledger: %v, want an InUseError with a pid", err)
	}
	if err := l.drop(r.Key()); err != nil {
		t.Fatal(err)
	}
	if got, err := ReadLedger(dir); err != nil || len(got) > 0 {
		t.Errorf("after drop: %v, %v", got, err)
	}
}

func TestLedgerIsPrivate(t *testing.T) {
	l, dir := testLedger(t)
	r := testRecord()
	if err := l.put(r); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]os.FileMode{dir: 0o711, l.dir: 0o700, l.file(r.Key().position()): 0o600} {
		if info, err := os.Stat(path); err != nil || info.Mode().Perm() != want {
			t.Errorf("%s: %v, %v; want %v", path, info.Mode(), err, want)
		}
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := makeDir(dir, 0o711); err == nil {
		t.Error("a directory that others may list was taken")
	}
}

func TestUnfinishedRecordIsNoRecord(t *testing.T) {
	l, dir := testLedger(t)
	position := testRecord().Key().position()
	half := filepath.Join(l.dir, "."+position+".json123")
	stranger := filepath.Join(l.dir, "notes.txt")
	for _, f := range []string{half, stranger} {
		if err := os.WriteFile(f, []byte("{"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	l.close()
	l, err := openLedger(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer l.close()
	if _, err := os.Stat(half); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the unfinished record: %v", err)
	}
	if _, err := os.Stat(stranger); err != nil {
		t.Errorf("what is not the ledger's: %v", err)
	}
	if records, damaged := l.all(); len(records)+len(damaged) > 0 {
		t.Errorf("records %v, damaged %v", records, damaged)
	}
}

func TestDecodeRecordRefuses(t *testing.T) {
	l, _ := testLedger(t)
	if err := l.put(testRecord()); err != nil {
		t.Fatal(err)
	}
	position := testRecord().Key().position()
	good, err := os.ReadFile(l.file(position))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := decodeRecord(good, position); err != nil {
		t.Fatal(err)
	}
	replace := func(old, with string) []byte { return []byte(strings.Replace(string(good), old, with, 1)) }
	for _, test := range []struct {
		name string
		text []byte
	}{
		{"nothing", nil},
		{"half of it", good[:len(good)/2]},
		{"null", []byte("null")},
		{"a later version", replace(`"version": 1`, `"version": 2`)},
		{"a later field", replace(`"phase"`, `"later": 1, "phase"`)},
		{"a phase that is none", replace(`"performed"`, `"done"`)},
		{"no boot id", replace(`"boot_id": "b"`, `"boot_id": ""`)},
		{"performed without receipts", replace(`"receipts"`, `"spec_digests": [], "rec`)},
		{"a prepare path that is the root", replace(`"/p"`, `"/"`)},
		{"a staging path with dots", replace(`"/s"`, `"/s/../.."`)},
		{"another volume", replace(`passwd`, `shadow`)},
	} {
		t.Run(test.name, func(t *testing.T) {
			if r, err := decodeRecord(test.text, position); err == nil {
				t.Errorf("accepted: %+v", r)
			}
		})
	}
}

func FuzzDecodeRecord(f *testing.F) {
	f.Add([]byte(`{"version":1}`))
	f.Add([]byte(`{"version":1,"boot_id":"b","driver":"d","endpoint":"e","volume_id":"v","prepare_id":"c","prepare_path":"/p","phase":"removing"}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		r, err := decodeRecord(text, testRecord().Key().position())
		if err == nil && r.check() != nil {
			t.Errorf("accepted %+v", r)
		}
	})
}
