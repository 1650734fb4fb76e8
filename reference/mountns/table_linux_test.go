package mountns

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
)

// asSmall writes a table by unique id in the numbering of mountinfo.
func asSmall(t *Table) []Mount {
	small := map[uint64]uint64{}
	for _, m := range t.Mounts {
		small[m.ID] = uint64(m.SmallID)
	}
	byID := NewTable(false)
	for _, m := range t.Mounts {
		m.ID = small[m.ID]
		m.ParentID = small[m.ParentID] // 0 where the parent is outside
		byID.Mounts = append(byID.Mounts, m)
	}
	return NewTable(false, byID.Mounts...).Mounts
}

// The two ways of reading must tell the same, whatever the names.
func TestBothWaysOfReadingAgree(t *testing.T) {
	n := namespace(t)
	need(t, "statmount", kernel.Probe().Statmount)
	dir := t.TempDir()
	names := []string{
		"plain", "with space", "new\nline", "tab\there", `back\slash`, `\040`, `\134040`, "hash#", "comma,equals=", "ümlaut-日本-\U0001F5C4",
		"\xff\xfe not UTF-8", "(deleted)", "-", " - tmpfs - ", strings.Repeat("long", 60), "trailing ",
	}
	attrs := []uintptr{
		0, unix.MS_NOSUID | unix.MS_NODEV, unix.MS_NOEXEC | unix.MS_NOATIME, unix.MS_STRICTATIME, unix.MS_NODIRATIME, unix.MS_RDONLY,
		0x100 /* nosymfollow */, unix.MS_SYNCHRONOUS, unix.MS_DIRSYNC | unix.MS_LAZYTIME,
	}
	inside(t, n, func() error {
		for i, name := range names {
			point := filepath.Join(dir, name)
			if err := os.MkdirAll(point, 0o700); err != nil {
				return fmt.Errorf("%q: %w", name, err)
			}
			source := name
			if i%2 == 1 {
				source = "tmpfs"
			}
			if err := unix.Mount(source, point, "tmpfs", attrs[i%len(attrs)], "size=1m,mode=711"); err != nil {
				return fmt.Errorf("%q: %w", name, err)
			}
		}
		// A bind of a directory with an odd name, all kinds of propagation, a
		// removed root, an empty source.
		odd := filepath.Join(dir, "plain", "root \\ of\nbind")
		for _, p := range []string{odd, dir + "/bind", dir + "/slave", dir + "/unbindable", dir + "/empty"} {
			if err := os.Mkdir(p, 0o700); err != nil {
				return err
			}
		}
		file := filepath.Join(dir, "plain", "file")
		for _, f := range []string{file, dir + "/on-file"} {
			if err := os.WriteFile(f, nil, 0o600); err != nil {
				return err
			}
		}
		if err := unix.Mount("", filepath.Join(dir, "plain"), "", unix.MS_SHARED, ""); err != nil {
			return err
		}
		for _, step := range []struct {
			source, point, fstype string
			flags                 uintptr
		}{
			{odd, dir + "/bind", "", unix.MS_BIND},
			{filepath.Join(dir, "plain"), dir + "/slave", "", unix.MS_BIND},
			{"", dir + "/slave", "", unix.MS_SLAVE},
			{"", dir + "/slave", "", unix.MS_SHARED},
			{"x", dir + "/unbindable", "tmpfs", 0},
			{"", dir + "/unbindable", "", unix.MS_UNBINDABLE},
			{file, dir + "/on-file", "", unix.MS_BIND},
			{"", dir + "/empty", "tmpfs", 0},
		} {
			if err := unix.Mount(step.source, step.point, step.fstype, step.flags, ""); err != nil {
				return fmt.Errorf("%+v: %w", step, err)
			}
		}
		return os.Remove(file)
	})
	unique, info := tableOf(t, n), tableOf(t, limited(n, older()))
	if !unique.Unique || info.Unique {
		t.Fatal("the two tables were read in the same way")
	}
	have := asSmall(unique)
	want := info.Mounts
	for i := range want { // a parent outside the table has no small id here
		if _, ok := info.ByID(want[i].ParentID); !ok {
			want[i].ParentID = 0
		}
	}
	if diff := cmp.Diff(want, have); diff != "" {
		t.Errorf("mountinfo (-) statmount (+):\n%s", diff)
	}
	for _, name := range names {
		if m, ok := unique.Top(filepath.Join(dir, name)); !ok || m.FSType != "tmpfs" {
			t.Errorf("%q: %v, %v", name, m, ok)
		}
	}
	if m, _ := unique.Top(dir + "/on-file"); m.Root != "/file" || !m.RootDeleted {
		t.Errorf("root of a bind whose file was removed: %q, deleted %v", m.Root, m.RootDeleted)
	}
	if m, _ := unique.Top(dir + "/slave"); m.Propagation != Shared|SlaveOf || m.Master == 0 || m.PeerGroup == 0 {
		t.Errorf("slave and shared: %+v", m)
	}
}

func TestTenThousandMounts(t *testing.T) {
	n := namespace(t)
	dir := t.TempDir()
	fill(t, n, dir, 10_000)
	for _, f := range []kernel.Features{kernel.Probe(), older()} {
		table := tableOf(t, limited(n, f))
		if got := len(table.Below(dir + "/pods")); got != 10_001 {
			t.Errorf("unique %v: %d mounts below, want 10001", table.Unique, got)
		}
		ids, err := limited(n, f).IDs(t.Context(), nil)
		must(t, err)
		if len(ids) != table.Len() {
			t.Errorf("%d ids, %d mounts", len(ids), table.Len())
		}
		for i, m := range table.Mounts {
			if ids[i] != m.ID {
				t.Fatalf("id %d is %d, in the table %d", i, ids[i], m.ID)
			}
		}
		if changes := Diff(table, tableOf(t, limited(n, f))); !changes.Empty() {
			t.Errorf("reading twice differs:\n%s", changes)
		}
	}
}

// A table read while mounts come and go has all that stay.
func TestReadingWhileMountsComeAndGo(t *testing.T) {
	n := namespace(t)
	dir := t.TempDir()
	fill(t, n, dir, 200)
	inside(t, n, func() error { return os.Mkdir(dir+"/restless", 0o700) })
	stop, stopped := make(chan struct{}), make(chan error)
	go func() {
		stopped <- n.Do(context.Background(), func() error {
			for {
				select {
				case <-stop:
					return nil
				default:
				}
				if err := mountTmpfs(dir+"/restless", ""); err != nil {
					return err
				}
				if err := unix.Unmount(dir+"/restless", unix.MNT_DETACH); err != nil {
					return err
				}
			}
		})
	}()
	for range 100 {
		table := tableOf(t, n)
		if got := len(table.Below(dir + "/pods")); got != 201 {
			t.Fatalf("%d of 201 mounts that stay", got)
		}
		if got := len(table.At(dir + "/restless")); got > 1 {
			t.Fatalf("%d mounts where at most one is at a time", got)
		}
	}
	close(stop)
	must(t, <-stopped)
}

func TestLookupLeavesOutWhatIsGone(t *testing.T) {
	n := namespace(t)
	dir := t.TempDir()
	inside(t, n, func() error { return mountTmpfs(dir, "") })
	m, _ := tableOf(t, n).Top(dir)
	inside(t, n, func() error { return unix.Unmount(dir, 0) })
	root, _ := tableOf(t, n).Top("/")
	got, err := n.Lookup(t.Context(), m.ID, root.ID)
	must(t, err)
	if diff := cmp.Diff([]Mount{root}, got); diff != "" {
		t.Error(diff)
	}
}

func TestRemountAndPropagationAreChanges(t *testing.T) {
	eachKernel(t, func(t *testing.T, f kernel.Features) {
		made := namespace(t)
		n := limited(made, f)
		dir := t.TempDir()
		inside(t, n, func() error { return mountTmpfs(dir, "size=1m") })
		before := tableOf(t, n)
		inside(t, n, func() error {
			if err := unix.Mount("", dir, "", unix.MS_SHARED, ""); err != nil {
				return err
			}
			if err := unix.Mount("", dir, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY|unix.MS_NOSUID, ""); err != nil {
				return err
			}
			return unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_RDONLY, "size=2m")
		})
		changes := Diff(before, tableOf(t, n))
		if len(changes.Changed) != 1 || len(changes.Added)+len(changes.Removed) != 0 {
			t.Fatalf("want one changed, have:\n%s", changes)
		}
		var fields []string
		for _, f := range changes.Changed[0].Fields {
			fields = append(fields, f.Name)
		}
		want := []string{"sb_options", "sb_readonly", "attr", "propagation", "peer_group"}
		if diff := cmp.Diff(want, fields); diff != "" {
			t.Errorf("%s\n%s", diff, changes)
		}
	})
}

func TestAChrootedProcessSeesItsWholeNamespace(t *testing.T) {
	n := namespace(t)
	dir := t.TempDir()
	inside(t, n, func() error {
		for _, d := range []string{"/jail", "/jail/in", "/out"} {
			if err := mountTmpfs(dir+d, ""); err != nil {
				return err
			}
		}
		// The child needs /proc to open its namespace.
		if err := os.Mkdir(dir+"/jail/proc", 0o700); err != nil {
			return err
		}
		return unix.Mount("proc", dir+"/jail/proc", "proc", 0, "")
	})
	want := tableOf(t, n)
	var out []byte
	inside(t, n, func() (err error) {
		c := child(t, "chroot", dir+"/jail")
		c.Stderr = os.Stderr
		out, err = c.Output()
		return err
	})
	var seen struct {
		Table *Table
		IDs   []uint64
		New   []Mount
	}
	must(t, json.Unmarshal(out, &seen))
	if diff := cmp.Diff(want.Mounts, seen.Table.Mounts); diff != "" {
		t.Errorf("whole (-) seen by the chrooted (+):\n%s", diff)
	}
	news := want.Len()
	if !want.Unique {
		news = 0 // small ids do not tell what is new
	}
	if len(seen.IDs) != want.Len() || len(seen.New) != news {
		t.Errorf("%d ids and %d since 0, want %d and %d", len(seen.IDs), len(seen.New), want.Len(), news)
	}
}

func FuzzParseMountinfo(f *testing.F) {
	f.Add("36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue\n")
	f.Add("36 35 98:0 /a\\040b /mnt\\0122//deleted ro shared:2 master:1 propagate_from:3 - fuse.x none ro,sync,lazytime,size=1k\n")
	f.Add("1 1 0:1 / / - - - - -\n")
	f.Fuzz(func(t *testing.T, text string) {
		table, err := parseMountinfo(strings.NewReader(text))
		if err != nil {
			return
		}
		for i := range table.Mounts {
			m := table.Mounts[i]
			if strings.ContainsRune(m.String(), '\n') {
				t.Errorf("a line of two: %q", m)
			}
			table.At(m.Point)
		}
		if changes := Diff(table, table); !changes.Empty() {
			t.Errorf("differs from itself:\n%s", changes)
		}
	})
}
