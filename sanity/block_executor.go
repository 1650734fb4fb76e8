package sanity

import (
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// deviceSpecs are about the node of a block device: which device it is of,
// whose it is, and that it goes again.
func deviceSpecs(s *section) {
	s.spec("a block device is a node of that device", Covers(requirement.PerformVerified), func(t *trial) {
		g := t.rig()
		d := t.loopDevice(0)
		r := g.device(d, false)
		receipts := g.performed(r)
		g.nodeOf(r, d)
		text := t.nonce()
		t.sysfail("writing to the device from its own side", writeAt(d.path, stretchStart, stretchOf(text)))
		got, err := readStretch(r.GetTarget().GetPath())
		g.want(requirement.PerformVerified, err == nil && string(got) == string(stretchOf(text)), "what the device holds, read through the node", "%q, %s", clip(string(got)), errnoName(err))
		err = writeAt(r.GetTarget().GetPath(), stretchStart, stretchOf("through the node"))
		g.want(requirement.PerformVerified, err == nil, "a node that can be written to", "%s", errnoName(err))
		g.need(requirement.UndoIdempotent, g.undoCall(r, receipts), "OK to undo")
		same, found := holds(r.GetTarget().GetPath(), sentinel)
		g.want(requirement.UndoCreatedRemoved, same, "the file that lay at the target as it was", "%s", found)
	})
	s.spec("a device that is not the one the plugin saw is refused", Covers(requirement.BlockDiskseqChecked), func(t *trial) {
		g := t.rig()
		d := t.loopDevice(0)
		for what, change := range map[string]func(*preparev1alpha1.BlockDevice){
			"a device whose diskseq has changed": func(b *preparev1alpha1.BlockDevice) { b.Diskseq += 1 << 40 },
			"a number that no device has":        func(b *preparev1alpha1.BlockDevice) { b.Minor = 1 << 19 },
		} {
			r := g.device(d, false)
			change(r.GetMountSpecs()[0].GetBlockDevice())
			_, err := g.perform(r)
			g.alive(err)
			g.want(requirement.BlockDiskseqChecked, err != nil, "an error to "+what, "OK")
			same, found := holds(r.GetTarget().GetPath(), sentinel)
			g.want(requirement.BlockDiskseqChecked, same, "nothing performed", "the file at the target: %s", found)
		}
	})
	s.spec("owner and mode of a node are none of the plugin's", Covers(requirement.BlockOwnerMode), func(t *trial) {
		g := t.rig()
		d := t.loopDevice(0)
		const stranger = 65531
		hint := filepath.Join(g.grant, "node")
		t.sysfail("making a node", unix.Mknod(hint, unix.S_IFBLK|0o666, int(unix.Mkdev(d.major, d.minor))))
		t.sysfail("giving a node away", unix.Chown(hint, stranger, stranger))
		t.sysfail("opening a node to all", unix.Chmod(hint, 0o666))
		r := g.device(d, false)
		r.GetMountSpecs()[0].GetBlockDevice().DevicePath = hint
		g.performed(r)
		st := g.nodeOf(r, d)
		g.want(requirement.BlockOwnerMode, st.Uid != stranger && st.Gid != stranger, "an owner the CO has chosen", "%d and %d, as of the node at device_path", st.Uid, st.Gid)
	})
	s.spec("a read-only device takes no write", Covers(requirement.BlockReadonlyDevice), func(t *trial) {
		g := t.rig()
		for what, flags := range map[string]uint32{"a device that refuses writes": unix.LO_FLAGS_READ_ONLY, "a device that takes writes": 0} {
			d := t.loopDevice(flags)
			r := g.device(d, true)
			receipts, err := g.perform(r)
			g.alive(err)
			if err != nil {
				continue // what it cannot keep read-only it does not perform
			}
			got := overwriteStretch(r.GetTarget().GetPath())
			g.want(requirement.BlockReadonlyDevice, got != nil, "an error to a write through the node of "+what, "it took a write")
			g.need(requirement.UndoIdempotent, g.undoCall(r, receipts), "OK to undo")
		}
	})
	s.spec("undo takes away a node and no other", Covers(requirement.UndoCreatedRemoved, requirement.UndoBystanderKept), func(t *trial) {
		g := t.rig()
		d := t.loopDevice(0)
		r := g.device(d, false)
		r.Target.Path = filepath.Join(g.root, "made")
		receipts, err := g.perform(r)
		if err != nil {
			g.alive(err)
			return // an executor need not create targets
		}
		g.need(requirement.UndoIdempotent, g.undoCall(r, receipts), "OK to undo")
		g.want(requirement.UndoCreatedRemoved, !exists(r.Target.Path), "nothing where the node was", "something is left there")
		r.Id = g.name("perform")
		receipts = g.performed(r)
		t.sysfail("unmounting what was performed", ignoreUnmounted(unix.Unmount(r.Target.Path, 0)))
		t.sysfail("removing what was created", ignoreMissing(os.Remove(r.Target.Path)))
		t.sysfail("making a node", unix.Mknod(r.Target.Path, unix.S_IFBLK|0o600, int(unix.Mkdev(d.major, d.minor))))
		err = g.undoCall(r, receipts)
		g.alive(err)
		g.want(requirement.UndoBystanderKept, exists(r.Target.Path), "the node that somebody else has made there", "it is gone (undo: %s)", answered(err))
		t.sysfail("removing the node of the suite", os.Remove(r.Target.Path))
	})
}

// loopDevice is a loop device that the spec has for itself.
type loopDevice struct {
	path         string
	major, minor uint32
}

// loopDevice attaches an empty file, until the spec ends.
func (t *trial) loopDevice(flags uint32) loopDevice {
	image := filepath.Join(t.mkdir("image"), "image")
	t.write(image, "")
	t.cleanup(func() error { return os.Remove(image) })
	t.sysfail("making an image", os.Truncate(image, 1<<20))
	path, major, minor := t.attachLoop(image, flags)
	return loopDevice{path, major, minor}
}

// device is a request to perform a device at a file of the consumer's.
func (g *rig) device(d loopDevice, readonly bool) *performRequest {
	target := filepath.Join(g.root, g.name("device"))
	g.write(target, sentinel)
	r := g.performance(&mountSpec{
		Attributes: &attributes{Readonly: readonly},
		Kind: &preparev1alpha1.MountSpec_BlockDevice{BlockDevice: &preparev1alpha1.BlockDevice{
			Major: d.major, Minor: d.minor, Diskseq: deviceSeq(filepath.Base(d.path)),
		}},
	})
	r.Target.Path = target
	r.Request.Block, r.Request.Readonly = true, readonly
	r.Request.Performer.Kinds = append(r.Request.Performer.Kinds, preparev1alpha1.MountKind_MOUNT_KIND_BLOCK_DEVICE)
	return r
}

// nodeOf wants the node of a device at the target, and returns it.
func (g *rig) nodeOf(r *performRequest, d loopDevice) unix.Stat_t {
	var st unix.Stat_t
	err := unix.Lstat(r.GetTarget().GetPath(), &st)
	g.want(requirement.PerformVerified, err == nil && st.Mode&unix.S_IFMT == unix.S_IFBLK, "the node of a block device at the target", "a file of mode %o, %s", st.Mode, errnoName(err))
	g.want(requirement.PerformVerified, st.Rdev == unix.Mkdev(d.major, d.minor), "a node of the device in the mount spec", "one of %d:%d", unix.Major(st.Rdev), unix.Minor(st.Rdev))
	return st
}

// ignoreUnmounted lets the place be one where nothing is mounted.
func ignoreUnmounted(err error) error {
	if err == unix.EINVAL { //nolint:errorlint // of the system call itself
		return nil
	}
	return err
}
