package sanity

import (
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/spec/requirement"
	"github.com/csi-prepare/csi-prepare/spec/testingv1alpha1"
)

func performSpecs(s *section) {
	s.spec("a consumer sees what was performed, both ways", Covers(requirement.PerformVerified), func(t *trial) {
		g := t.rig()
		g.performed(g.performance(bind("", "", nil)))
		same, found := holds(filepath.Join(g.target, "file"), g.text)
		g.want(requirement.PerformVerified, same, "the file written at the backend", "%s", found)
		text := t.nonce()
		g.write(filepath.Join(g.target, "fresh"), text)
		same, found = holds(filepath.Join(g.volume, "fresh"), text)
		g.want(requirement.PerformVerified, same, "what the consumer wrote, at the backend", "%s", found)
		g.want(requirement.PerformVerified, !exists(filepath.Join(g.target, "sentinel")), "the volume at the target", "what lay there before is still visible")
		g.only(requirement.PerformVerified, g.target)
	})
	s.spec("a list is performed in its order", Covers(requirement.PerformInOrder), func(t *trial) {
		g := t.rig()
		g.performed(g.performance(bind("", "", nil), bind("other", "dir", nil), tmpfsOf("other/inner", nil), fileBind("file", "file")))
		table := g.table()
		root := g.only(requirement.PerformInOrder, g.target)
		outer := g.only(requirement.PerformInOrder, filepath.Join(g.target, "other"))
		inner := g.only(requirement.PerformInOrder, filepath.Join(g.target, "other/inner"))
		g.only(requirement.PerformInOrder, filepath.Join(g.target, "file"))
		g.want(requirement.PerformInOrder, outer.ParentID == root.ID, "the second mount on the first", "%s is attached to mount %d", outer, outer.ParentID)
		g.want(requirement.PerformInOrder, inner.ParentID == outer.ID, "the third mount on the second", "%s is attached to mount %d", inner, inner.ParentID)
		g.want(requirement.PerformInOrder, len(table.Below(g.target)) == 4, "four mounts", "%s", count(len(table.Below(g.target)), "mount"))
	})
	s.spec("of a list that fails nothing is left", Covers(requirement.PerformAllOrNothing), func(t *trial) {
		g := t.rig()
		for what, last := range map[string]*mountSpec{
			"a target that is not in the volume": bind("missing", "other", nil),
			"a source that is not in the grant":  bind("other", "missing", nil),
			"a target that is a file":            bind("file", "other", nil),
		} {
			g.wantRefused(requirement.PerformAllOrNothing, what, g.performance(bind("", "", nil), tmpfsOf("dir", nil), last))
		}
	})
	s.spec("the target is found in the root of the consumer", Covers(requirement.PerformTargetInRoot), inRootSpec)
	s.spec("no link in the volume leads a mount elsewhere", Covers(requirement.PerformNoSymlink), func(t *trial) {
		g := t.rig()
		elsewhere := filepath.Join(g.root, "elsewhere")
		t.sysfail("making a directory", os.Mkdir(elsewhere, 0o755))
		for name, to := range map[string]string{
			"absolute": elsewhere, "climbing": "../elsewhere", "inside": "dir", "magic": "/proc/self/root" + elsewhere,
		} {
			t.sysfail("making a link", os.Symlink(to, filepath.Join(g.volume, name)))
			g.wantRefused(requirement.PerformNoSymlink, "a target that is a link ("+name+")", g.performance(bind("", "", nil), bind(name, "other", nil)))
			g.want(requirement.PerformNoSymlink, len(g.table().At(elsewhere)) == 0, "no mount where the link leads", "one is there")
		}
		t.sysfail("making a link", os.Symlink("dir", filepath.Join(g.volume, "way")))
		g.wantRefused(requirement.PerformNoSymlink, "a target beyond a link", g.performance(bind("", "", nil), bind("way/inner", "other", nil)))
	})
	s.spec("nothing is performed on the kernel's own filesystems", Covers(requirement.PerformProtectedTarget), func(t *trial) {
		g := t.rig()
		tried := 0
		for _, fs := range []struct{ kind, place string }{{"proc", "sys"}, {"sysfs", "kernel"}, {"devpts", ""}, {"cgroup2", ""}} {
			dir := filepath.Join(g.root, fs.kind)
			t.sysfail("making a directory", os.Mkdir(dir, 0o755))
			if unix.Mount(fs.kind, dir, fs.kind, 0, "") != nil {
				continue // this machine lacks it
			}
			tried++
			t.cleanup(func() error { return unix.Unmount(dir, 0) })
			r := g.performance(bind("", "", nil))
			r.Target.Path = filepath.Join(dir, fs.place)
			_, err := g.perform(r)
			g.alive(err)
			g.want(requirement.PerformProtectedTarget, err != nil, "an error to a target on "+fs.kind, "OK")
			want := 0
			if fs.place == "" {
				want = 1 // its own
			}
			g.want(requirement.PerformProtectedTarget, len(g.table().At(r.Target.Path)) == want, "no mount there", "there is one")
		}
		if tried == 0 {
			end(couldNotRun("no procfs, sysfs, devpts or cgroup filesystem can be mounted here"))
		}
	})
	s.spec("a directory is attached to a directory, a file to a file", Covers(requirement.PerformTargetType), func(t *trial) {
		g := t.rig()
		file, fifo := filepath.Join(g.root, "file"), filepath.Join(g.root, "fifo")
		t.write(file, sentinel)
		t.sysfail("making a pipe", unix.Mkfifo(fifo, 0o600))
		for _, c := range []struct {
			what, at string
			spec     *mountSpec
		}{
			{"a directory for a file", file, bind("", "", nil)},
			{"a directory for a pipe", fifo, bind("", "", nil)},
			{"a file for a directory", g.target, fileBind("", "file")},
			{"a file for a pipe", fifo, fileBind("", "file")},
		} {
			r := g.performance(c.spec)
			r.Target.Path = c.at
			_, err := g.perform(r)
			g.alive(err)
			g.want(requirement.PerformTargetType, err != nil, "an error to "+c.what, "OK")
			g.want(requirement.PerformTargetType, len(g.table().At(c.at)) == 0, "no mount after "+c.what, "there is one")
		}
	})
	s.spec("nothing is made in the volume to mount on", Covers(requirement.PerformNoVolumeDirs), func(t *trial) {
		g := t.rig()
		before := names(g.volume)
		for _, spec := range []*mountSpec{bind("missing", "other", nil), bind("dir/missing", "other", nil), fileBind("missing", "file")} {
			_, err := g.perform(g.performance(bind("", "", nil), spec))
			g.alive(err)
			now := names(g.volume)
			g.want(requirement.PerformNoVolumeDirs, slices.Equal(before, now) && !exists(filepath.Join(g.volume, "dir/missing")),
				"the volume as it was: "+strings.Join(before, " "), "%s", strings.Join(now, " "))
			g.want(requirement.PerformNoVolumeDirs, err != nil, "an error to a target that is not in the volume", "OK")
		}
	})
	s.spec("a repeat performs nothing again", Covers(requirement.PerformOnce), func(t *trial) {
		g := t.rig()
		r := g.performance(bind("", "", nil), bind("dir", "other", nil))
		g.performed(r)
		ids := g.idsBelow()
		for range 3 {
			_, err := g.perform(r)
			g.alive(err)
			g.want(requirement.PerformOnce, slices.Equal(ids, g.idsBelow()), "the mounts of the first performance, and no more", "%s", count(len(g.idsBelow()), "mount"))
			g.want(requirement.PerformOnce, err == nil, "OK to a repeat", "%s", answered(err))
		}
	})
	s.spec("a receipt has the unique id of the mount", Covers(requirement.PerformReceipt), func(t *trial) {
		g := t.rig()
		receipts := g.performed(g.performance(bind("", "", nil), bind("dir", "other", nil)))
		g.want(requirement.PerformReceipt, len(receipts) == 2, "a receipt for each mount spec", "%s", count(len(receipts), "receipt"))
		for i, place := range []string{g.target, filepath.Join(g.target, "dir")} {
			m := g.only(requirement.PerformReceipt, place)
			g.want(requirement.PerformReceipt, strings.Contains(receipts[i], strconv.FormatUint(m.ID, 10)), "the id "+strconv.FormatUint(m.ID, 10)+" in the receipt", "%s", clip(receipts[i]))
		}
	})
}

// inRootSpec gives the consumer a root of its own with links that lead out of
// it when they are followed from outside.
func inRootSpec(t *trial) {
	g := t.rig()
	root := filepath.Join(g.root, "rootfs")
	outside := filepath.Join(g.root, "outside")
	for _, dir := range []string{root, root + "/place", outside, outside + "/place", filepath.Join(root, outside, "place")} {
		t.sysfail("making a directory", os.MkdirAll(dir, 0o755))
	}
	for name, to := range map[string]string{"absolute": outside, "climbing": "../../../../../../../.." + outside} {
		t.sysfail("making a link", os.Symlink(to, filepath.Join(root, name)))
	}
	perform := func(path string) ([]string, *performRequest, error) {
		r := g.performance(bind("", "", nil))
		r.Target = &testingv1alpha1.Target{Namespace: r.GetTarget().GetNamespace(), Root: root, Path: path}
		receipts, err := g.perform(r)
		g.alive(err)
		return receipts, r, err
	}
	receipts, r, err := perform("/place")
	g.want(requirement.PerformTargetInRoot, err == nil, "OK to a plain target in a root", "%s", answered(err))
	g.only(requirement.PerformTargetInRoot, root+"/place")
	g.need(requirement.UndoIdempotent, g.undoCall(r, receipts), "OK to undo")
	for _, path := range []string{"/absolute/place", "/climbing/place", "/../outside/place", "/place/../../outside/place"} {
		receipts, r, err := perform(path)
		for _, m := range g.table().Below(g.root) {
			within := strings.HasPrefix(m.Point, root+"/")
			g.want(requirement.PerformTargetInRoot, within || m.Point == g.root, "no mount outside the root "+root, "a mount at %s for the target %s", m.Point, path)
		}
		if err == nil {
			g.need(requirement.UndoIdempotent, g.undoCall(r, receipts), "OK to undo")
		}
	}
}
