package sanity

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

func undoSpecs(s *section) {
	s.spec("a list is undone from its end", Covers(requirement.UndoReverseOrder), func(t *trial) {
		g := t.rig()
		r := g.performance(bind("", "", nil), bind("other", "dir", nil), tmpfsOf("other/inner", nil))
		receipts := g.performed(r)
		g.wantCode(requirement.UndoReverseOrder, g.undoCall(r, receipts), codes.OK)
		g.wantNothing(requirement.UndoReverseOrder, "after undo")
	})
	s.spec("undo again is OK", Covers(requirement.UndoIdempotent), func(t *trial) {
		g := t.rig()
		r := g.performance(bind("", "", nil))
		receipts := g.performed(r)
		for range 3 {
			g.wantCode(requirement.UndoIdempotent, g.undoCall(r, receipts), codes.OK)
			g.wantNothing(requirement.UndoIdempotent, "after undo")
		}
	})
	s.spec("what somebody mounted on top is kept", Covers(requirement.UndoBystanderKept, requirement.UndoRechecked), func(t *trial) {
		g := t.rig()
		r := g.performance(bind("", "", nil))
		receipts := g.performed(r)
		ours := g.idsBelow()
		theirs := g.bystander(g.target)
		err := g.undoCall(r, receipts)
		g.alive(err)
		g.want(requirement.UndoRechecked, err != nil || !g.stillThere(ours), "the mount gone, since undo is OK", "it is still there")
		g.want(requirement.UndoBystanderKept, g.stillThere([]uint64{theirs}), "the mount of the bystander kept (undo: "+answered(err)+")", "it is gone")
	})
	s.spec("undo knows its mounts by id, not by path", Covers(requirement.UndoByID, requirement.UndoBystanderKept), func(t *trial) {
		g := t.rig()
		r := g.performance(bind("", "", nil))
		receipts := g.performed(r)
		t.sysfail("unmounting what was performed", unix.Unmount(g.target, 0))
		theirs := g.bystander(g.target)
		err := g.undoCall(r, receipts)
		g.alive(err)
		g.want(requirement.UndoByID, g.stillThere([]uint64{theirs}), "the mount somebody else made at the same place kept (undo: "+answered(err)+")", "it is gone")
		g.want(requirement.UndoByID, err == nil, "OK, since the mount of the receipt is gone", "%s", answered(err))
		// The same at a place that was made for it, which cannot be removed
		// while somebody else's mount is on it.
		r = g.performance(bind("", "", nil))
		r.Target.Path = filepath.Join(g.root, "made")
		if receipts, err = g.perform(r); err != nil {
			g.alive(err)
			return // an executor need not create targets
		}
		t.sysfail("unmounting what was performed", unix.Unmount(r.Target.Path, 0))
		theirs = g.bystander(r.Target.Path)
		err = g.undoCall(r, receipts)
		g.alive(err)
		g.want(requirement.UndoByID, g.stillThere([]uint64{theirs}), "the mount somebody else made at a place that was created kept (undo: "+answered(err)+")", "it is gone")
	})
	s.spec("a busy mount is reported and kept", Covers(requirement.UndoBusyReported, requirement.UndoRechecked), busySpec)
	s.spec("exactly what was created for the target is removed", Covers(requirement.UndoCreatedRemoved), createdSpec)
	s.spec("nothing is removed recursively", Covers(requirement.UndoNoRecursiveRemove), func(t *trial) {
		g := t.rig()
		r := g.performance(bind("", "", nil))
		g.need(requirement.UndoIdempotent, g.undoCall(r, g.performed(r)), "OK to undo")
		g.want(requirement.UndoNoRecursiveRemove, exists(filepath.Join(g.target, "sentinel")), "what lay below the mount point", "it is gone")
		made := filepath.Join(g.root, "made", "target")
		r = g.performance(bind("", "", nil))
		r.Target.Path = made
		receipts, err := g.perform(r)
		if err != nil {
			return // an executor need not create targets
		}
		other := filepath.Join(g.root, "made", "other")
		t.write(other, sentinel)
		err = g.undoCall(r, receipts)
		g.alive(err)
		same, found := holds(other, sentinel)
		g.want(requirement.UndoNoRecursiveRemove, same, "a file that somebody put beside the target", "%s (undo: %s)", found, answered(err))
		same, found = holds(filepath.Join(g.volume, "file"), g.text)
		g.want(requirement.UndoNoRecursiveRemove, same, "the data of the volume", "%s (undo: %s)", found, answered(err))
	})
	s.spec("undo does not look into the mount", Covers(requirement.UndoNoPathAccess), lookSpec)
}

// bystander mounts a tmpfs, as anybody in the consumer may, and returns its
// id.
func (g *rig) bystander(place string) uint64 {
	g.sysfail("mounting as a bystander", unix.Mount("bystander", place, "tmpfs", 0, "size=64k"))
	top, ok := g.table().Top(place)
	if !ok {
		end(couldNotRun("the mount of the bystander is not in the table"))
	}
	g.cleanup(func() error {
		if _, there := g.table().ByID(top.ID); !there {
			return nil
		}
		return unix.Unmount(place, 0)
	})
	return top.ID
}

// busySpec holds a file open in a mount and has it undone.
func busySpec(t *trial) {
	g := t.rig()
	r := g.performance(bind("", "", nil))
	receipts := g.performed(r)
	ours := g.idsBelow()
	file, err := os.OpenFile(filepath.Join(g.target, "file"), os.O_RDWR, 0)
	t.sysfail("opening a file of the volume", err)
	closeFile := func() { _ = file.Close() }
	t.cleanup(func() error { closeFile(); return nil })
	err = g.undoCall(r, receipts)
	g.alive(err)
	if err == nil {
		g.want(requirement.UndoRechecked, !g.stillThere(ours), "the mount gone, since undo is OK", "it is still there")
		g.fail(requirement.UndoBusyReported, "FAILED_PRECONDITION while a file of the mount is open", "OK, and the mount is gone from the table while the file can be written")
	}
	g.want(requirement.UndoBusyReported, g.stillThere(ours), "the busy mount kept (undo: "+answered(err)+")", "it is gone from the table")
	g.wantBusy(requirement.UndoBusyReported, err)
	_, err = file.WriteString("written while busy")
	t.sysfail("writing to the open file", err)
	closeFile()
	g.wantCode(requirement.UndoBusyReported, g.undoCall(r, receipts), codes.OK)
	g.wantNothing(requirement.UndoBusyReported, "after undo of what is not busy any more")
}

// createdSpec performs onto places that are there, and onto one that has to
// be made.
func createdSpec(t *trial) {
	g := t.rig()
	t.sysfail("making a directory", os.Mkdir(filepath.Join(g.root, "empty"), 0o755))
	before := tree(g.root)
	place := func(path string) {
		r := g.performance(bind("", "", nil))
		r.Target.Path = filepath.Join(g.root, path)
		receipts, err := g.perform(r)
		if status.Code(err) == codes.FailedPrecondition && !exists(r.Target.Path) {
			return // an executor need not create targets
		}
		g.need(requirement.PerformVerified, err, "OK")
		g.wantCode(requirement.UndoCreatedRemoved, g.undoCall(r, receipts), codes.OK)
		now := tree(g.root)
		g.want(requirement.UndoCreatedRemoved, slices.Equal(before, now), "the consumer's root as it was: "+strings.Join(before, " "), "%s", strings.Join(now, " "))
	}
	place("target")
	place("empty")
	place("fresh")
	place("deep/er/target")
	t.sysfail("making a directory", os.Mkdir(filepath.Join(g.root, "half"), 0o755))
	before = tree(g.root)
	place("half/made")
}

// tree lists what is below a directory on its own filesystem.
func tree(root string) []string {
	var found []string
	_ = filepath.WalkDir(root, func(path string, _ os.DirEntry, err error) error {
		if err == nil && path != root {
			found = append(found, strings.TrimPrefix(path, root+"/"))
		}
		return nil
	})
	return found
}

// lookSpec has the kernel tell who opens or reads the root of the volume
// while it is undone.
func lookSpec(t *trial) {
	g := t.rig()
	r := g.performance(bind("", "", &attributes{Atime: preparev1alpha1.MountAttributes_STRICTATIME}))
	receipts := g.performed(r)
	notify, err := unix.InotifyInit1(unix.IN_NONBLOCK | unix.IN_CLOEXEC)
	t.sysfail("inotify_init1", err)
	t.cleanup(func() error { return unix.Close(notify) })
	_, err = unix.InotifyAddWatch(notify, g.volume, unix.IN_OPEN|unix.IN_ACCESS)
	t.sysfail("inotify_add_watch", err)
	g.wantCode(requirement.UndoNoPathAccess, g.undoCall(r, receipts), codes.OK)
	buffer := make([]byte, 64*(unix.SizeofInotifyEvent+unix.NAME_MAX+1))
	n, err := unix.Read(notify, buffer)
	if err != nil || n < unix.SizeofInotifyEvent {
		return // no event
	}
	event := (*unix.InotifyEvent)(unsafe.Pointer(&buffer[0]))
	what := "was read"
	if event.Mask&unix.IN_OPEN != 0 {
		what = "was opened"
	}
	g.fail(requirement.UndoNoPathAccess, "no access to what is mounted before it is unmounted", "the volume's directory "+what)
}

func auditSpecs(s *section) {
	s.spec("the tables of all namespaces are as before", Covers(requirement.AuditTableRestored), func(t *trial) {
		g := t.rig()
		before := g.table()
		for range 2 {
			r := g.performance(bind("", "", nil), tmpfsOf("dir", nil), fileBind("file", "file"))
			receipts := g.performed(r)
			g.need(requirement.UndoIdempotent, g.undoCall(r, receipts), "OK to undo")
			changed := func() string {
				now := difference(before, g.table())
				others, err := g.changes(g.ctx, g.ns)
				g.sysfail("reading the mount tables", err)
				return strings.TrimSpace(now + "\n" + others)
			}
			// A namespace that was made on the way ends a little later.
			if !g.poll(time.Second, func() bool { return changed() == "" }) {
				g.fail(requirement.AuditTableRestored, "every mount table as before", "changed: "+changed())
			}
		}
	})
	s.spec("the table is as before after a failure", Covers(requirement.AuditTableRestored), func(t *trial) {
		g := t.rig()
		before := g.table()
		_, err := g.perform(g.performance(bind("", "", nil), tmpfsOf("dir", nil), bind("missing", "other", nil)))
		g.alive(err)
		g.want(requirement.AuditTableRestored, err != nil, "an error to a target that is not in the volume", "OK")
		now := difference(before, g.table())
		g.want(requirement.AuditTableRestored, now == "", "the mount table as before", "changed: %s", now)
	})
}
