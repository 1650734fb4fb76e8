package sanity

import (
	"os"
	"path/filepath"

	"github.com/csi-prepare/csi-prepare/reference/mountns"
	"github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

const allAtOnce = "all at once"

// attributeCases are the attributes one by one, and all at once.
var attributeCases = []struct {
	name string
	set  *attributes
	bits uint64
}{
	{"readonly", &attributes{Readonly: true}, mountns.AttrReadonly},
	{"nosuid", &attributes{Nosuid: true}, mountns.AttrNosuid},
	{"nodev", &attributes{Nodev: true}, mountns.AttrNodev},
	{"noexec", &attributes{Noexec: true}, mountns.AttrNoexec},
	{"nosymfollow", &attributes{Nosymfollow: true}, mountns.AttrNosymfollow},
	{"noatime", &attributes{Atime: preparev1alpha1.MountAttributes_NOATIME}, mountns.AttrNoatime},
	{"strictatime", &attributes{Atime: preparev1alpha1.MountAttributes_STRICTATIME}, mountns.AttrStrictatime},
	{"nodiratime", &attributes{Nodiratime: true}, mountns.AttrNodiratime},
	{
		allAtOnce, &attributes{
			Readonly: true, Nosuid: true, Nodev: true, Noexec: true, Nosymfollow: true, Nodiratime: true,
			Atime: preparev1alpha1.MountAttributes_NOATIME,
		},
		mountns.AttrReadonly | mountns.AttrNosuid | mountns.AttrNodev | mountns.AttrNoexec | mountns.AttrNosymfollow | mountns.AttrNodiratime | mountns.AttrNoatime,
	},
}

func attributeSpecs(s *section) {
	for _, kind := range []struct {
		name string
		of   func(*attributes) *mountSpec
	}{
		{"bind", func(a *attributes) *mountSpec { return bind("", "", a) }},
		{"filesystem", func(a *attributes) *mountSpec { return tmpfsOf("", a) }},
	} {
		s.spec("each attribute of a "+kind.name+" is in force", Covers(requirement.AttributesLowerBound, requirement.AttributesFullSet), func(t *trial) {
			g := t.rig()
			for _, c := range attributeCases {
				r := g.performance(kind.of(c.set))
				receipts := g.performed(r)
				m := g.only(requirement.AttributesLowerBound, g.target)
				rule := requirement.AttributesLowerBound
				if c.name == allAtOnce {
					rule = requirement.AttributesFullSet
				}
				g.want(rule, m.Attr&c.bits == c.bits, c.name+" in force", "the mount has %s", m.Attributes())
				g.need(requirement.UndoIdempotent, g.undoCall(r, receipts), "OK to undo")
			}
		})
	}
	s.spec("a read-only bind refuses every change", Covers(requirement.AttributesLowerBound), func(t *trial) {
		g := t.rig()
		g.performed(g.performance(bind("", "", &attributes{Readonly: true})))
		path := filepath.Join(g.target, "file")
		same, found := holds(path, g.text)
		g.want(requirement.PerformVerified, same, "the volume's file at the target", "%s", found)
		if what, err := writable(path); what != "" {
			g.kernel = errnoName(err)
			g.fail(requirement.AttributesLowerBound, "EROFS for "+what, errnoName(err))
		}
		g.want(requirement.AttributesLowerBound, canWrite(filepath.Join(g.volume, "file")), "the source as writable as before", "it is read-only too")
	})
	s.spec("a read-only bind was never writable", Covers(requirement.AttributesBeforeVisible), func(t *trial) {
		g := t.rig()
		path := filepath.Join(g.target, "file") // only in the volume
		for range 3 {
			r := g.performance(bind("", "", &attributes{Readonly: true}))
			var receipts []string
			open := g.watch(func() bool { return canWrite(path) }, func() { receipts = g.performed(r) })
			g.want(requirement.AttributesBeforeVisible, !open, "EROFS from the first moment the mount is seen", "a file of it was opened for writing while it was performed")
			g.need(requirement.UndoIdempotent, g.undoCall(r, receipts), "OK to undo")
		}
	})
	s.spec("nosuid and nodev are added", Covers(requirement.AttributesNosuidNodev), func(t *trial) {
		g := t.rig()
		for _, spec := range []*mountSpec{bind("", "", nil), tmpfsOf("", nil)} {
			r := g.performance(spec)
			receipts := g.performed(r)
			m := g.only(requirement.AttributesNosuidNodev, g.target)
			const both = mountns.AttrNosuid | mountns.AttrNodev
			g.want(requirement.AttributesNosuidNodev, m.Attr&both == both, "nosuid and nodev", "the mount has %s", m.Attributes())
			g.need(requirement.UndoIdempotent, g.undoCall(r, receipts), "OK to undo")
		}
	})
	s.spec("recursive attributes reach every mount of the tree", Covers(requirement.AttributesRecursive), func(t *trial) {
		g := t.rig()
		g.mountBeyond(filepath.Join(g.volume, "dir"))
		spec := bind("", "", &attributes{Readonly: true, Noexec: true, Recursive: true})
		spec.GetBind().Recursive = true
		if _, err := g.perform(g.performance(spec)); err != nil {
			g.alive(err)
			g.wantNothing(requirement.AttributesRecursive, "after a failure")
			return
		}
		below := g.table().Below(g.target)
		g.want(requirement.AttributesRecursive, len(below) == 2, "the volume and the mount in it", "%s", count(len(below), "mount"))
		for _, m := range below {
			const both = mountns.AttrReadonly | mountns.AttrNoexec
			g.want(requirement.AttributesRecursive, m.Attr&both == both, "readonly and noexec on every mount of the tree", "%s has %s", m, m.Attributes())
		}
	})
	s.spec("what is performed is private", Covers(requirement.AttributesPrivate), func(t *trial) {
		g := t.rig()
		for _, spec := range []*mountSpec{bind("", "", nil), tmpfsOf("", nil)} {
			r := g.performance(spec)
			receipts := g.performed(r)
			m := g.only(requirement.AttributesPrivate, g.target)
			g.want(requirement.AttributesPrivate, m.Propagation == mountns.Private, "propagation private", "%s", m.Propagation)
			g.need(requirement.UndoIdempotent, g.undoCall(r, receipts), "OK to undo")
		}
	})
}

func bindSpecs(s *section) {
	s.spec("a source is not reached through a link", Covers(requirement.BindResolveBeneath), func(t *trial) {
		g := t.rig()
		outside := t.mkdir("outside")
		t.write(filepath.Join(outside, "file"), "not in the grant")
		t.cleanup(func() error { return os.Remove(filepath.Join(outside, "file")) })
		for name, to := range map[string]string{
			"absolute": outside, "climbing": "../../" + filepath.Base(outside), "inside": "dir",
		} {
			t.sysfail("making a link", os.Symlink(to, filepath.Join(g.volume, name)))
			g.wantRefused(requirement.BindResolveBeneath, "a source that is a link ("+name+")", g.performance(bind("", name, nil)))
		}
		t.sysfail("making a link", os.Symlink(g.grant, filepath.Join(g.volume, "way")))
		g.wantRefused(requirement.BindResolveBeneath, "a source beyond a link", g.performance(bind("", "way/volume/dir", nil)))
	})
	s.spec("a source that changes meanwhile is bound as it was resolved, or not at all", Covers(requirement.BindByDescriptor, requirement.BindResolveBeneath), swapSpec)
	s.spec("a source of the wrong type is refused", Covers(requirement.BindTypeMatches), func(t *trial) {
		g := t.rig()
		g.wantRefused(requirement.BindTypeMatches, "a file where a directory was announced", g.performance(bind("", "file", nil)))
		g.wantRefused(requirement.BindTypeMatches, "a directory where a file was announced", g.performance(fileBind("", "dir")))
		place := filepath.Join(g.root, "place")
		t.write(place, "")
		r := g.performance(fileBind("", "dir"))
		r.Target.Path = place
		g.wantRefused(requirement.BindTypeMatches, "a directory where a file was announced, onto a file", r)
		g.want(requirement.BindTypeMatches, len(g.table().At(place)) == 0, "no mount at the place", "one is there")
		r = g.performance(fileBind("", "file"))
		r.Target.Path = place
		g.performed(r)
		same, found := holds(place, g.text)
		g.want(requirement.BindTypeMatches, same, "the file of the volume at the place", "%s", found)
	})
	s.spec("a source without its mount is refused", Covers(requirement.BindMountFSType), func(t *trial) {
		g := t.rig()
		spec := bind("", "dir", nil)
		spec.GetBind().MountFsType = "tmpfs"
		g.wantRefused(requirement.BindMountFSType, "a directory where no mount is, though mount_fs_type says so", g.performance(spec))
		g.mountBeyond(filepath.Join(g.volume, "dir"))
		other := bind("", "dir", nil)
		other.GetBind().MountFsType = "ext4"
		g.wantRefused(requirement.BindMountFSType, "a mount of another type than mount_fs_type", g.performance(other))
		receipts, err := g.perform(g.performance(spec))
		g.want(requirement.BindMountFSType, err == nil, "OK to a source that is mounted with that type", "%s", answered(err))
		g.want(requirement.BindMountFSType, len(receipts) == 1, "a receipt", "%s", count(len(receipts), "receipt"))
		g.want(requirement.BindMountFSType, g.only(requirement.BindMountFSType, g.target).FSType == "tmpfs", "a tmpfs at the target", "another type")
	})
}

// swapSpec has a directory of the source change places with a link out of the
// grant all the time. What is bound may be the volume or nothing.
func swapSpec(t *trial) {
	g := t.rig()
	outside := t.mkdir("outside")
	t.cleanup(func() error { return os.RemoveAll(outside) })
	for _, dir := range []string{outside, filepath.Join(g.volume, "dir")} {
		t.sysfail("making a directory", os.MkdirAll(filepath.Join(dir, "deep"), 0o755))
	}
	t.write(filepath.Join(outside, "deep", "secret"), "not in the grant")
	way, link := filepath.Join(g.volume, "dir"), filepath.Join(g.volume, "link")
	t.sysfail("making a link", os.Symlink(outside, link))
	stop := make(chan struct{})
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case <-stop:
				return
			default:
				_ = exchange(way, link)
			}
		}
	}()
	defer func() { close(stop); <-done }()
	for range 50 {
		r := g.performance(bind("", "dir/deep", nil))
		receipts, err := g.perform(r)
		if err != nil {
			g.alive(err)
			continue
		}
		g.want(requirement.BindByDescriptor, !exists(filepath.Join(g.target, "secret")), "the directory in the grant, or nothing", "a directory outside the grant is bound")
		g.need(requirement.UndoIdempotent, g.undoCall(r, receipts), "OK to undo")
	}
}
