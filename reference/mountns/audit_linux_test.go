package mountns

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
)

func markOf(t testing.TB, n *Namespace) Watermark {
	t.Helper()
	w, err := n.Mark(t.Context())
	must(t, err)
	return w
}

func sinceOf(t testing.TB, n *Namespace, w Watermark) Increment {
	t.Helper()
	inc, err := n.Since(t.Context(), w)
	must(t, err)
	return inc
}

func idsOf(t testing.TB, n *Namespace) []uint64 {
	t.Helper()
	ids, err := n.IDs(t.Context(), nil)
	must(t, err)
	return ids
}

func TestSinceTellsWhatWasMounted(t *testing.T) {
	eachKernel(t, func(t *testing.T, f kernel.Features) {
		n := limited(namespace(t), f)
		dir := t.TempDir()
		inside(t, n, func() error { return mountTmpfs(dir+"/old", "") })
		w := markOf(t, n)
		if inc := sinceOf(t, n, w); len(inc.New) != 0 || inc.Unexplained != 0 {
			t.Errorf("nothing happened: %+v", inc)
		}
		inside(t, n, func() error { return errors.Join(mountTmpfs(dir+"/a", ""), mountTmpfs(dir+"/b", "")) })
		inc := sinceOf(t, n, w)
		if len(inc.New) != 2 || inc.New[0].Point != dir+"/a" || inc.New[1].Point != dir+"/b" || inc.Unexplained != 0 {
			t.Errorf("two mounts: %+v", inc)
		}
		if again := sinceOf(t, n, inc.Next); len(again.New) != 0 || again.Unexplained != 0 {
			t.Errorf("nothing more happened: %+v", again)
		}
		inside(t, n, func() error { return unix.Unmount(dir+"/old", 0) })
		gone := sinceOf(t, n, inc.Next)
		if len(gone.New) != 0 || gone.Unexplained != -1 {
			t.Errorf("one mount is gone: %+v", gone)
		}
		inside(t, n, func() error { return errors.Join(unix.Unmount(dir+"/a", 0), unix.Unmount(dir+"/b", 0)) })
		if inc := sinceOf(t, n, w); len(inc.New) != 0 || inc.Unexplained != -1 {
			t.Errorf("two came and went, one is gone: %+v", inc)
		}
	})
}

// detached is a tmpfs attached nowhere.
func detached() (int, error) {
	fs, err := kernel.OpenFS("tmpfs")
	if err != nil {
		return -1, err
	}
	defer fs.Close()
	if err := fs.Create(); err != nil {
		return -1, err
	}
	return fs.Mount(0)
}

// The blind spot of the watermark: made before, attached after. The count tells
// that something is there, the lists tell what, and the monitor saw it.
func TestMountMadeBeforeTheMarkAndAttachedAfter(t *testing.T) {
	need(t, "the new mount API and mount events", kernel.Probe().NewMountAPI && kernel.Probe().MountEvents)
	n := namespace(t)
	dir := t.TempDir()
	inside(t, n, func() error { return mountTmpfs(dir, "") })
	m := monitorOf(t, n)
	fd, err := detached()
	must(t, err)
	id, err := kernel.UniqueID(fd, "")
	must(t, err)
	// Something attached later, so that the watermark is above the clone.
	inside(t, n, func() error { return mountTmpfs(dir+"/later", "") })
	before, w := idsOf(t, n), markOf(t, n)
	inside(t, n, func() error {
		return errors.Join(os.Mkdir(dir+"/late", 0o700), kernel.MoveMountAt(fd, "", unix.AT_FDCWD, dir+"/late", 0))
	})
	must(t, unix.Close(fd))
	inc := sinceOf(t, n, w)
	if len(inc.New) != 0 {
		t.Errorf("New = %v; the documentation says it is not seen", inc.New)
	}
	if inc.Unexplained != 1 {
		t.Errorf("Unexplained = %d, want 1", inc.Unexplained)
	}
	if added, removed := DiffIDs(before, idsOf(t, n)); !cmp.Equal(added, []uint64{id}) || removed != nil {
		t.Errorf("lists: added %v removed %v, want %d added", added, removed, id)
	}
	if !slices.Contains(collect(t, m, 2), Event{Namespace: n.ID(), ID: id, Kind: Attached}) {
		t.Error("the monitor did not see it")
	}

	// If another one goes as well the account is even: only the lists tell.
	before = idsOf(t, n)
	fd, err = detached()
	must(t, err)
	inside(t, n, func() error { return mountTmpfs(dir+"/third", "") })
	w = markOf(t, n)
	inside(t, n, func() error {
		return errors.Join(unix.Unmount(dir+"/later", 0), kernel.MoveMountAt(fd, "", unix.AT_FDCWD, dir+"/later", 0))
	})
	must(t, unix.Close(fd))
	if inc := sinceOf(t, n, w); len(inc.New) != 0 || inc.Unexplained != 0 {
		t.Errorf("%+v; the documentation says this is even", inc)
	}
	if added, removed := DiffIDs(before, idsOf(t, n)); len(added) != 2 || len(removed) != 1 {
		t.Errorf("lists: added %v removed %v, want two and one", added, removed)
	}
}

// A mount detached lazily is in no list and alive: who holds it can be found.
func TestLazilyDetachedMountHasHolders(t *testing.T) {
	need(t, "unique ids", kernel.Probe().UniqueID)
	n := namespace(t)
	dir := t.TempDir()
	inside(t, n, func() error { return mountTmpfs(dir, "") })
	m, _ := tableOf(t, n).Top(dir)
	holders := func() []Holder {
		t.Helper()
		found, err := Holders(bounded(t), m.ID)
		must(t, err)
		return found
	}
	if found := holders(); len(found) != 0 {
		t.Fatalf("an idle mount is held by %v", found)
	}
	var file *os.File
	inside(t, n, func() (err error) {
		file, err = os.Create(dir + "/file")
		return err
	})
	defer file.Close()
	sleeper := exec.CommandContext(t.Context(), "sleep", "600")
	sleeper.Dir = dir
	inside(t, n, sleeper.Start)
	defer func() { _ = sleeper.Process.Kill(); _ = sleeper.Wait() }()
	inside(t, n, func() error { return unix.Unmount(dir, unix.MNT_DETACH) })
	if inc := tableOf(t, n).At(dir); len(inc) != 0 {
		t.Fatalf("still in the table: %v", inc)
	}
	want := []Holder{
		{PID: os.Getpid(), Command: "mountns.test", By: "fd", FD: int(file.Fd()), Path: "/file"},
		{PID: sleeper.Process.Pid, Command: "sleep", By: "cwd", FD: -1, Path: "/"},
	}
	got := holders()
	slices.SortFunc(want, func(a, b Holder) int { return a.PID - b.PID })
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if s := want[len(want)-1].String(); s != "pid "+strconv.Itoa(sleeper.Process.Pid)+" (sleep) cwd /" {
		t.Errorf("String() = %q", s)
	}
}

func TestHoldersSeesMappedFilesAndDetachedMounts(t *testing.T) {
	need(t, "unique ids and the new mount API", kernel.Probe().UniqueID && kernel.Probe().NewMountAPI)
	fd, err := detached()
	must(t, err)
	defer unix.Close(fd)
	id, err := kernel.UniqueID(fd, "")
	must(t, err)
	file, err := unix.Openat(fd, "mapped", unix.O_CREAT|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	must(t, err)
	must(t, unix.Ftruncate(file, 4096))
	mapped, err := unix.Mmap(file, 0, 4096, unix.PROT_READ, unix.MAP_SHARED)
	must(t, err)
	defer unix.Munmap(mapped)
	must(t, unix.Close(file))
	found, err := Holders(bounded(t), id)
	must(t, err)
	var by []string
	for _, h := range found {
		by = append(by, h.By)
	}
	slices.Sort(by)
	if diff := cmp.Diff([]string{"fd", "map"}, by); diff != "" {
		t.Errorf("%s\n%v", diff, found)
	}
}

// allByInode are the namespaces All finds.
func allByInode(t *testing.T, f kernel.Features) map[uint64]bool {
	t.Helper()
	found, err := all(bounded(t), f)
	must(t, err)
	defer CloseAll(found)
	inodes := map[uint64]bool{}
	for _, n := range found {
		if inodes[n.Inode()] {
			t.Errorf("%s twice", n)
		}
		inodes[n.Inode()] = true
	}
	return inodes
}

func TestAllFindsNamespacesWithoutAProcess(t *testing.T) {
	eachKernel(t, func(t *testing.T, f kernel.Features) {
		made := namespaces(t, 4)
		holder, byFD := made[0], made[1]
		inner := made[2] // bound in byFD, which nobody is in
		bound := made[3]
		dir := t.TempDir()
		bind := func(in, what *Namespace, name string) {
			t.Helper()
			must(t, os.WriteFile(dir+name, nil, 0o600))
			inside(t, in, func() error {
				return unix.Mount("/proc/self/fd/"+strconv.Itoa(what.FD()), dir+name, "", unix.MS_BIND, "")
			})
		}
		bind(holder, bound, "/bound")
		bind(byFD, inner, "/inner one")
		want := []uint64{byFD.Inode(), bound.Inode(), inner.Inode()}
		must(t, bound.Close()) // now held by the bind alone
		must(t, inner.Close())
		found := allByInode(t, f)
		for i, inode := range want {
			if !found[inode] {
				t.Errorf("missed the one held by %s", []string{"a descriptor", "a bind", "a bind in one held by a descriptor"}[i])
			}
		}
		own, err := Own()
		must(t, err)
		defer own.Close()
		if !found[own.Inode()] {
			t.Error("missed its own")
		}
	})
}

func TestAllHonoursItsContext(t *testing.T) {
	needRoot(t)
	eachKernel(t, func(t *testing.T, f kernel.Features) {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if found, err := all(ctx, f); !errors.Is(err, context.Canceled) {
			t.Errorf("%d namespaces, %v; want context.Canceled", len(found), err)
		}
	})
}

// changeIn finds the change of one namespace among those of the machine, where
// other programs mount too.
func changeIn(c SnapshotChanges, id uint64) NamespaceChange {
	for _, change := range c.Changed {
		if change.ID == id {
			return change
		}
	}
	return NamespaceChange{ID: id}
}

func TestSnapshotsCompareTheWholeMachine(t *testing.T) {
	eachKernel(t, func(t *testing.T, f kernel.Features) {
		take := func() *Snapshot {
			s, err := takeSnapshot(bounded(t), f)
			must(t, err)
			return s
		}
		n := limited(namespace(t), f)
		id := n.ID()
		if !f.ListmountByNS {
			id = n.Inode()
		}
		dir := t.TempDir()
		before := take()
		inside(t, n, func() error { return mountTmpfs(dir, "") })
		later, err := n.Copy(t.Context())
		must(t, err)
		defer later.Close()
		laterID := later.ID()
		m, _ := tableOf(t, n).Top(dir)
		after := take()
		c := before.Diff(after)
		if diff := cmp.Diff(NamespaceChange{ID: id, Added: []uint64{m.ID}}, changeIn(c, id)); diff != "" {
			t.Error(diff)
		}
		// Without ids of their own a new namespace can have the number of one
		// that went meanwhile.
		if f.ListmountByNS && !slices.Contains(c.Appeared, laterID) || f.ListmountByNS && len(changeIn(c, laterID).Added) != tableOf(t, later).Len() {
			t.Errorf("the new namespace %d is not told with its mounts: %+v", laterID, c)
		}
		back := after.Diff(before)
		if f.ListmountByNS && !slices.Contains(back.Vanished, laterID) || !cmp.Equal(changeIn(back, id).Removed, []uint64{m.ID}) {
			t.Errorf("backwards: %+v", back)
		}
		if same := after.Diff(after); !same.Empty() {
			t.Errorf("differs from itself: %+v", same)
		}
	})
}

func TestMachineWatermark(t *testing.T) {
	eachKernel(t, func(t *testing.T, f kernel.Features) {
		n := limited(namespace(t), f)
		id := n.ID()
		if !machineIncremental(f) && !f.ListmountByNS {
			id = n.Inode()
		}
		of := func(inc MachineIncrement, id uint64) NamespaceIncrement {
			for _, in := range inc.Namespaces {
				if in.ID == id {
					return in
				}
			}
			return NamespaceIncrement{ID: id}
		}
		dir := t.TempDir()
		inside(t, n, func() error { return mountTmpfs(dir+"/old", "") })
		w, err := markMachine(bounded(t), f)
		must(t, err)
		since := func() MachineIncrement {
			inc, err := w.since(bounded(t), f)
			must(t, err)
			w = inc.Next
			return inc
		}
		if got := of(since(), id); len(got.New) != 0 || got.Unexplained != 0 {
			t.Errorf("nothing happened: %+v", got)
		}
		inside(t, n, func() error { return mountTmpfs(dir+"/a", "") })
		m, _ := tableOf(t, n).Top(dir + "/a")
		if diff := cmp.Diff(NamespaceIncrement{ID: id, New: []uint64{m.ID}}, of(since(), id)); diff != "" {
			t.Error(diff)
		}
		inside(t, n, func() error { return unix.Unmount(dir+"/old", 0) })
		if got := of(since(), id); len(got.New) != 0 || got.Unexplained != -1 {
			t.Errorf("one is gone: %+v", got)
		}
		if !f.ListmountByNS {
			return // a new namespace can have the number of one that went
		}
		later, err := n.Copy(t.Context())
		must(t, err)
		laterID := later.ID()
		if got := of(since(), laterID); !got.Appeared || len(got.New) != tableOf(t, later).Len() {
			t.Errorf("a new namespace: %+v", got)
		}
		must(t, later.Close())
		for !slices.Contains(since().Vanished, laterID) { // in the kernel's own time
			must(t, t.Context().Err())
		}
	})
}

func TestDescribe(t *testing.T) {
	need(t, "listmount by namespace", kernel.Probe().ListmountByNS)
	n := namespace(t)
	dir := t.TempDir()
	inside(t, n, func() error { return mountTmpfs(dir, "") })
	want, _ := tableOf(t, n).Top(dir)
	got, err := Describe(t.Context(), n.ID(), want.ID, want.ID+1<<40)
	must(t, err)
	if diff := cmp.Diff([]Mount{want}, got); diff != "" {
		t.Error(diff)
	}
}
