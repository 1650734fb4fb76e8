package loopback

import (
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// world is one of two directories in which the same things are done.
type world struct {
	root string
	open map[int]*os.File
}

// act does one random thing and tells what came of it.
func (w *world) act(r *rand.Rand) string {
	name := func() string {
		dirs := []string{"", "d0", "d1", "d0/d2"}
		return filepath.Join(w.root, dirs[r.IntN(len(dirs))], fmt.Sprintf("f%d", r.IntN(6)))
	}
	dir := func() string { return filepath.Join(w.root, []string{"d0", "d1", "d0/d2", "d1/d3"}[r.IntN(4)]) }
	short := func(p string) string { return strings.TrimPrefix(p, w.root) }
	errno := func(err error) string {
		var e unix.Errno
		switch {
		case err == nil:
			return "ok"
		case errors.As(err, &e):
			return e.Error()
		}
		return err.Error()
	}
	say := func(what string, err error, paths ...string) string {
		for i := range paths {
			paths[i] = short(paths[i])
		}
		return fmt.Sprintf("%s %q: %s", what, paths, errno(err))
	}
	slot, text := r.IntN(4), fmt.Sprintf("text %d", r.IntN(1000))
	switch r.IntN(22) {
	case 0, 1, 2:
		n := name()
		return say("write", os.WriteFile(n, []byte(text), 0o644), n)
	case 3:
		n := name()
		b, err := os.ReadFile(n)
		return say("read "+string(b), err, n)
	case 4:
		d := dir()
		return say("mkdir", unix.Mkdir(d, 0o755), d)
	case 5:
		d := dir()
		return say("rmdir", unix.Rmdir(d), d)
	case 6, 7:
		n := name()
		return say("unlink", unix.Unlink(n), n)
	case 8, 9:
		a, b := name(), name()
		return say("rename", unix.Rename(a, b), a, b)
	case 10:
		a, b := dir(), dir()
		return say("rename dir", unix.Rename(a, b), a, b)
	case 11:
		a, b := name(), name()
		return say("exchange", unix.Renameat2(unix.AT_FDCWD, a, unix.AT_FDCWD, b, unix.RENAME_EXCHANGE), a, b)
	case 12:
		a, b := name(), name()
		return say("link", unix.Link(a, b), a, b)
	case 13:
		n := name()
		return say("symlink", unix.Symlink(text, n), n)
	case 14:
		n := name()
		to, err := os.Readlink(n)
		return say("readlink "+to, err, n)
	case 15:
		n := name()
		return say("chmod", unix.Chmod(n, 0o600|uint32(r.IntN(8))), n)
	case 16:
		n := name()
		return say("truncate", unix.Truncate(n, int64(r.IntN(20))), n)
	case 17:
		n := name()
		if f := w.open[slot]; f != nil {
			f.Close()
		}
		f, err := os.OpenFile(n, os.O_RDWR|os.O_CREATE|[]int{0, os.O_APPEND, os.O_EXCL}[r.IntN(3)], 0o644)
		w.open[slot] = f
		return say("open", err, n)
	case 18, 19:
		f := w.open[slot]
		if f == nil {
			return "nothing open"
		}
		_, err := f.Write([]byte(text))
		return say(fmt.Sprintf("write to %d", slot), err)
	case 20:
		f := w.open[slot]
		if f == nil {
			return "nothing open"
		}
		b := make([]byte, 100)
		n, err := f.ReadAt(b, int64(r.IntN(10)))
		if err == io.EOF {
			err = nil
		}
		return say(fmt.Sprintf("read %q of %d", b[:n], slot), err)
	default:
		n := name()
		return say("setxattr", unix.Setxattr(n, "user.a", []byte(text), 0), n)
	}
}

// tree tells everything below a directory.
func tree(root string) (lines []string, err error) {
	err = filepath.WalkDir(root, func(path string, e os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			return err
		}
		line := fmt.Sprintf("%s %o", strings.TrimPrefix(path, root), st.Mode)
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFREG:
			b, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			line += fmt.Sprintf(" %d links, %q", st.Nlink, b)
			a := make([]byte, 100)
			if n, err := unix.Getxattr(path, "user.a", a); err == nil {
				line += " " + string(a[:n])
			}
		case unix.S_IFLNK:
			to, err := os.Readlink(path)
			if err != nil {
				return err
			}
			line += " -> " + to
		}
		lines = append(lines, line)
		return nil
	})
	return lines, err
}

// TestItDoesWhatADirectoryDoes does random things in a served directory and in
// a plain one, and wants the same answers; in between, serving processes are
// killed.
func TestItDoesWhatADirectoryDoes(t *testing.T) {
	for name, deaths := range map[string]int{"with one server": 0, "with many": 15} {
		t.Run(name, func(t *testing.T) {
			v := newVolume(t)
			model := filepath.Join(v.base, "model")
			v.must(os.Mkdir(model, 0o755))
			const steps = 1500
			seed := rand.Uint64()
			t.Logf("seed %d", seed)
			a := &world{root: v.point, open: map[int]*os.File{}}
			b := &world{root: model, open: map[int]*os.File{}}
			ra, rb := rand.New(rand.NewPCG(seed, 0)), rand.New(rand.NewPCG(seed, 0))
			for i := 0; i < steps; i++ {
				if deaths > 0 && i > 0 && i%(steps/deaths) == 0 {
					v.failover()
				}
				var got string
				v.in(func() error { got = a.act(ra); return nil })
				if want := b.act(rb); got != want {
					t.Fatalf("step %d: got %s, want %s", i, got, want)
				}
			}
			var got []string
			v.in(func() (err error) { got, err = tree(v.point); return err })
			want, err := tree(model)
			v.must(err)
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("the trees differ (-plain +served):\n%s", diff)
			}
			for _, w := range []*world{a, b} {
				for _, f := range w.open {
					if f != nil {
						f.Close()
					}
				}
			}
		})
	}
}

func TestAnOpenFileSurvivesItsServer(t *testing.T) {
	for name, c := range map[string]struct {
		flags  int
		mode   os.FileMode
		before func(v *volume) error // between open and the death
		after  func(v *volume) error // between the death and the use
	}{
		"plain":         {os.O_RDWR, 0o644, nil, nil},
		"read only":     {os.O_RDWR, 0o444, nil, nil},
		"no permission": {os.O_RDWR, 0, nil, nil},
		"renamed": {os.O_RDWR, 0o644, func(v *volume) error {
			return os.Rename(v.path("f"), v.path("g"))
		}, nil},
		"renamed later": {os.O_RDWR, 0o644, nil, func(v *volume) error {
			return os.Rename(v.path("f"), v.path("g"))
		}},
		"removed":       {os.O_RDWR, 0o644, func(v *volume) error { return os.Remove(v.path("f")) }, nil},
		"removed later": {os.O_RDWR, 0o644, nil, func(v *volume) error { return os.Remove(v.path("f")) }},
		"replaced": {os.O_RDWR, 0o644, func(v *volume) error {
			if err := os.WriteFile(v.path("g"), []byte("other"), 0o644); err != nil {
				return err
			}
			return os.Rename(v.path("g"), v.path("f"))
		}, nil},
		"replaced later": {os.O_RDWR, 0o644, nil, func(v *volume) error {
			if err := os.WriteFile(v.path("g"), []byte("other"), 0o644); err != nil {
				return err
			}
			return os.Rename(v.path("g"), v.path("f"))
		}},
	} {
		t.Run(name, func(t *testing.T) {
			v := newVolume(t)
			var f *os.File
			v.in(func() (err error) {
				f, err = os.OpenFile(v.path("f"), os.O_CREATE|c.flags, c.mode)
				if err == nil {
					_, err = f.WriteString("before ")
				}
				if err == nil && c.before != nil {
					err = c.before(v)
				}
				return err
			})
			defer f.Close()
			for range 2 {
				v.failover()
			}
			v.in(func() error {
				if c.after != nil {
					if err := c.after(v); err != nil {
						return err
					}
				}
				if _, err := f.WriteString("after"); err != nil {
					return err
				}
				b := make([]byte, 100)
				n, err := f.ReadAt(b, 0)
				if err != io.EOF {
					return err
				}
				if string(b[:n]) != "before after" {
					t.Errorf("it holds %q", b[:n])
				}
				var st unix.Stat_t
				if err := unix.Fstat(int(f.Fd()), &st); err != nil {
					return err
				}
				if got := os.FileMode(st.Mode & 0o777); got != c.mode {
					t.Errorf("its mode is %v, want %v", got, c.mode)
				}
				return f.Close()
			})
		})
	}
}

func TestADirectoryIsReadOnAfterADeath(t *testing.T) {
	v := newVolume(t)
	const files = 2000
	for i := range files {
		v.must(os.WriteFile(filepath.Join(v.data, fmt.Sprintf("file-%d", i)), nil, 0o644))
	}
	var names []string
	v.in(func() error {
		d, err := os.Open(v.point)
		if err != nil {
			return err
		}
		defer d.Close()
		for {
			n, err := d.Readdirnames(500)
			names = append(names, n...)
			if err == io.EOF {
				return nil
			}
			if err != nil {
				return err
			}
			v.failover()
		}
	})
	slices.Sort(names)
	if distinct := len(slices.Compact(slices.Clone(names))); len(names) != files || distinct != files {
		t.Errorf("%d names, %d distinct, want %d", len(names), distinct, files)
	}
}

// TestLinksLeadNowhere has the contents of the volume change under the server:
// what a name meant is not looked for through a link.
func TestLinksLeadNowhere(t *testing.T) {
	v := newVolume(t)
	outside := filepath.Join(v.base, "outside")
	v.must(os.Mkdir(outside, 0o755))
	v.must(os.WriteFile(filepath.Join(outside, "f"), []byte("secret"), 0o644))
	v.must(os.Mkdir(filepath.Join(v.data, "d"), 0o755))
	v.must(os.WriteFile(filepath.Join(v.data, "d", "f"), []byte("volume"), 0o644))
	v.in(func() error {
		_, err := os.ReadFile(v.path("d/f"))
		return err
	})
	v.must(os.Rename(filepath.Join(v.data, "d"), filepath.Join(v.data, "e")))
	v.must(os.Symlink(outside, filepath.Join(v.data, "d")))
	v.in(func() error {
		b, err := os.ReadFile(v.path("d/f"))
		if string(b) == "secret" && err == nil {
			// The link is the consumer's to follow, in its own tree, where
			// the test's namespace has the same paths. What must not be is
			// that the server followed it: then it would be no link.
			to, lerr := os.Readlink(v.path("d"))
			if lerr != nil || to != outside {
				t.Errorf("the server followed a link: %q, %v", to, lerr)
			}
		}
		return nil
	})
}

func TestWhatNeedsPrivilegeIsRefused(t *testing.T) {
	v := newVolume(t)
	v.in(func() error {
		f := v.path("f")
		if err := os.WriteFile(f, nil, 0o644); err != nil {
			return err
		}
		for name, c := range map[string]struct{ got, want error }{
			"chown":          {unix.Chown(f, 1, 1), unix.EPERM},
			"chown the same": {unix.Chown(f, 0, 0), nil},
			"mknod b":        {unix.Mknod(v.path("b"), unix.S_IFBLK|0o600, 0), unix.EPERM},
			"mknod c":        {unix.Mknod(v.path("c"), unix.S_IFCHR|0o600, int(unix.Mkdev(1, 3))), unix.EPERM},
			"mkfifo":         {unix.Mkfifo(v.path("p"), 0o600), nil},
			"trusted xattr":  {unix.Setxattr(f, "trusted.a", []byte("x"), 0), unix.EOPNOTSUPP},
		} {
			if !errors.Is(c.got, c.want) {
				t.Errorf("%s: %v, want %v", name, c.got, c.want)
			}
		}
		return nil
	})
}

func TestOrphansAreRemovedWithTheMount(t *testing.T) {
	v := newVolume(t)
	v.in(func() error {
		f, err := os.Create(v.path("f"))
		if err != nil {
			return err
		}
		defer f.Close()
		if err := os.Remove(v.path("f")); err != nil {
			return err
		}
		left, err := os.ReadDir(v.orphans)
		if err != nil || len(left) != 1 {
			t.Errorf("an open file that was removed is in no reach of a successor: %v, %v", left, err)
		}
		var st unix.Stat_t
		if err := unix.Fstat(int(f.Fd()), &st); err != nil || st.Nlink != 0 {
			t.Errorf("%d links, %v", st.Nlink, err)
		}
		return nil
	})
	for range 500 {
		left, err := os.ReadDir(v.orphans)
		v.must(err)
		if len(left) == 0 {
			return
		}
		v.in(func() error { _, err := os.Stat(v.point); return err })
	}
	t.Error("the orphan stays after the last use")
}
