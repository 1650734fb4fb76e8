package server

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

type note struct {
	Text string `json:"text"`
}

func openState(t *testing.T, dir string) *State {
	t.Helper()
	s, err := OpenState(dir, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func openNotes(t *testing.T, s *State) *Records[note] {
	t.Helper()
	r, err := OpenRecords[note](s, "notes")
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// hostile are texts a caller may choose for ids and names.
var hostile = []string{
	"../../../../etc/passwd", "..", ".", "/", "/etc", "a/b", "a\x00b", "a\nb", "", " ", "é💾", "\u202egnp.exe",
	strings.Repeat("x", 4096), "-rf", "*", "$(id)", "con", "a.json", ".hidden",
}

func TestRecordsSurviveTheProcess(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	s := openState(t, dir)
	r := openNotes(t, s)
	for _, h := range hostile {
		for _, k := range []Key{{h, "n"}, {"v", h}, {h, h}} {
			if err := r.Put(k, note{h}); err != nil {
				t.Fatalf("%q: %v", k, err)
			}
		}
	}
	if err := r.Put(Key{"gone", "n"}, note{"x"}); err != nil {
		t.Fatal(err)
	}
	if err := r.Delete(Key{"gone", "n"}); err != nil {
		t.Fatal(err)
	}
	want, err := r.All()
	if err != nil {
		t.Fatal(err)
	}
	s.Close()

	r = openNotes(t, openState(t, dir))
	got, err := r.All()
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("after reopening (-before +after):\n%s", diff)
	}
	for _, h := range hostile {
		if v, ok, err := r.Get(Key{h, h}); !ok || err != nil || v.Text != h {
			t.Errorf("%q: %v %v %v", h, v, ok, err)
		}
	}
	if found, _ := r.OfVolume("v"); len(found) != len(hostile) {
		t.Errorf("%d records of v, want %d", len(found), len(hostile))
	}
	if found, _ := r.Named("n"); len(found) != len(hostile) {
		t.Errorf("%d records named n, want %d", len(found), len(hostile))
	}
	onlyBelow(t, dir)
}

// onlyBelow wants nothing in a state directory but what its modes and names
// should be.
func onlyBelow(t *testing.T, dir string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		switch {
		case d.IsDir() && info.Mode() != fs.ModeDir|0o700, !d.IsDir() && info.Mode() != 0o600:
			t.Errorf("%s: mode %v", path, info.Mode())
		case !d.IsDir() && d.Name() != "lock" && !recordFile.MatchString(d.Name()):
			t.Errorf("unexpected file %s", path)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// A record that cannot be read is an error that names the file, for whoever
// needs it; others are served, and nothing is dropped.
func TestDamagedRecords(t *testing.T) {
	k, other := Key{"v1", "n"}, Key{"v2", "m"}
	good := func(t *testing.T, dir string) []byte {
		t.Helper()
		text, err := os.ReadFile(filepath.Join(dir, "notes", other.Position()+".json"))
		if err != nil {
			t.Fatal(err)
		}
		return text
	}
	for name, damage := range map[string]func(t *testing.T, dir string) []byte{
		"empty":           func(*testing.T, string) []byte { return nil },
		"cut off":         func(t *testing.T, dir string) []byte { return good(t, dir)[:20] },
		"not JSON":        func(*testing.T, string) []byte { return []byte("\x00\x00\x00\x00") },
		"of another key":  good,
		"a later version": func(*testing.T, string) []byte { return []byte(`{"version":2}`) },
		"no version":      func(*testing.T, string) []byte { return []byte(`{}`) },
		"an unknown field": func(*testing.T, string) []byte {
			return []byte(`{"version":1,"volume_id":"v1","name":"n","record":{"text":"x","more":1}}`)
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "state")
			s := openState(t, dir)
			r := openNotes(t, s)
			for _, k := range []Key{k, other} {
				if err := r.Put(k, note{"x"}); err != nil {
					t.Fatal(err)
				}
			}
			s.Close()
			file := filepath.Join(dir, "notes", k.Position()+".json")
			if err := os.WriteFile(file, damage(t, dir), 0o600); err != nil {
				t.Fatal(err)
			}

			r = openNotes(t, openState(t, dir))
			isDamaged := func(what string, err error) {
				t.Helper()
				var damaged *DamagedError
				if !errors.As(err, &damaged) || damaged.File != file || !strings.Contains(err.Error(), file) {
					t.Errorf("%s: got %v, want an error naming %s", what, err, file)
				}
			}
			_, _, err := r.Get(k)
			isDamaged("Get", err)
			_, err = r.All()
			isDamaged("All", err)
			_, err = r.OfVolume("v1")
			isDamaged("OfVolume", err)
			_, err = r.Named("n")
			isDamaged("Named", err)
			if _, ok, err := r.Get(other); !ok || err != nil {
				t.Errorf("the other record: %v %v", ok, err)
			}
			if _, err := r.OfVolume("v2"); err != nil {
				t.Errorf("the other volume: %v", err)
			}
			if err := r.Delete(k); err != nil {
				t.Fatal(err)
			}
			if all, err := r.All(); len(all) != 1 || err != nil {
				t.Errorf("after Delete: %v, %v", all, err)
			}
		})
	}
}

func TestUnfinishedWritesAreRemoved(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	s := openState(t, dir)
	r := openNotes(t, s)
	k := Key{"v", "n"}
	if err := r.Put(k, note{"whole"}); err != nil {
		t.Fatal(err)
	}
	unfinished := filepath.Join(dir, "notes", "."+k.Position()+".json8362518")
	foreign := filepath.Join(dir, "notes", "README")
	for _, f := range []string{unfinished, foreign} {
		if err := os.WriteFile(f, []byte("{"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	s.Close()
	r = openNotes(t, openState(t, dir))
	if all, err := r.All(); len(all) != 1 || err != nil || all[0].Value.Text != "whole" {
		t.Errorf("got %v, %v", all, err)
	}
	if _, err := os.Stat(unfinished); !os.IsNotExist(err) {
		t.Errorf("unfinished file left: %v", err)
	}
	if _, err := os.Stat(foreign); err != nil {
		t.Errorf("a file that is not the driver's was removed: %v", err)
	}
}

func TestStateBelongsToOneProcess(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	s := openState(t, dir)
	_, err := OpenState(dir, nil)
	if err == nil || !strings.Contains(err.Error(), dir) || !strings.Contains(err.Error(), fmt.Sprintf("pid %d", os.Getpid())) {
		t.Errorf("second open: %v", err)
	}
	s.Close()
	openState(t, dir)
}

func TestStateDirectoryIsPrivate(t *testing.T) {
	parent := t.TempDir()
	open := filepath.Join(parent, "open")
	if err := os.Mkdir(open, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(open, 0o770); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(parent, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(parent, "link")
	if err := os.Symlink(parent, link); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{open, file, link, "relative", "", filepath.Join(parent, "no", "parent")} {
		if s, err := OpenState(dir, nil); err == nil || !strings.Contains(err.Error(), "state directory") {
			t.Errorf("%q: %v", dir, err)
			if err == nil {
				s.Close()
			}
		}
	}
}

func FuzzDecodeRecord(f *testing.F) {
	position := Key{"v", "n"}.Position()
	f.Add([]byte(`{"version":1,"volume_id":"v","name":"n","record":{"prepare_path":"/p","readonly":true,"access_mode":"SINGLE_NODE_WRITER","arguments":{}}}`))
	f.Add([]byte(`{"version":1,"volume_id":"v","name":"n","record":null}`))
	f.Add([]byte(`{"version":9}`))
	f.Add([]byte(``))
	f.Fuzz(func(t *testing.T, text []byte) {
		e, err := decode[preparation](text, position)
		if err == nil && e.Key != (Key{"v", "n"}) {
			t.Errorf("a record of %q was read as that of v, n", e.Key)
		}
	})
}
