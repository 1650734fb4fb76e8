package sanity

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/csi-prepare/csi-prepare/reference/mountspec"
	"github.com/csi-prepare/csi-prepare/reference/mountspec/wire"
	"github.com/csi-prepare/csi-prepare/reference/perform"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// consumer is a place where a volume is performed: a directory on a tmpfs
// that exists in the namespace of the spec alone, so that nothing but what
// the CO performs can ever be there.
type consumer struct {
	target   string
	volume   string // the id of what was performed last
	receipts []perform.Receipt
}

const sentinel = "what lies below"

// consumer makes a place, with a sentinel in the directory to be covered, or
// in the file that is where a device is to appear.
func (t *trial) consumer() *consumer {
	root := t.tmpfs()
	c := &consumer{target: filepath.Join(root, "target")}
	if t.config.Block {
		t.write(c.target, sentinel)
		return c
	}
	t.sysfail("making the target", os.Mkdir(c.target, 0o755))
	t.write(filepath.Join(c.target, "sentinel"), sentinel)
	return c
}

// tmpfs mounts a tmpfs on a directory of the spec's own, in its namespace
// alone.
func (t *trial) tmpfs() string {
	root := t.mkdir("consumer")
	t.sysfail("mounting a tmpfs for a consumer", unix.Mount("consumer", root, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "size=16m,mode=755"))
	t.cleanup(func() error { return unix.Unmount(root, 0) })
	return root
}

// file is the spec's own file in the volume, the same for every consumer.
func (c *consumer) file(t *trial) string {
	return filepath.Join(c.target, "csi-prepare-"+filepath.Base(t.dir))
}

// sentinel is the file that lies below the mount point.
func (c *consumer) sentinel(t *trial) string {
	if t.config.Block {
		return c.target
	}
	return filepath.Join(c.target, "sentinel")
}

// perform performs the answer to a request at c, and has it undone when the
// spec ends.
func (t *trial) perform(c *consumer, r *prepareRequest, answer *prepareResponse) {
	for _, v := range violations(r, answer) {
		end(couldNotRun("the mount specs break %s, so nothing of them is performed: %s", v.Requirement, v.Detail))
	}
	specs, _ := wire.FromProto(answer.GetMountSpecs())
	t.performable(specs)
	done, err := perform.Perform(t.ctx, perform.Target{Path: c.target}, specs, perform.Options{
		Request: wire.RequestFromProto(r), Staging: r.GetStagingTargetPath(), Prepare: r.GetPreparePath(), Grants: t.config.Grants,
		Timeout: t.config.Timeout, Masters: t.handlesOf(r, specs),
	})
	if err != nil {
		t.kernel = err.Error()
		if errors.Is(err, perform.ErrSource) && !t.features[RequiresPropagation] && slices.ContainsFunc(specs, bindsOwnMount) {
			t.fail(requirement.CapabilitiesPropagation, "requires_propagation from a plugin whose source is a mount of its own", "it is not reported, and no such mount has reached the CO")
		}
		if errors.Is(err, perform.ErrWritable) {
			t.unsupported("the device takes writes: whether a consumer may is up to its device cgroup, and the suite gives it none")
		}
		t.fail(requirement.PrepareVolumeData, "mount specs that can be performed", "performing them fails, of "+specText(answer, -1))
	}
	c.receipts, c.volume = done.Receipts, r.GetVolumeId()
	t.cleanup(func() error { return t.undoAt(c) })
}

// bindsOwnMount reports whether a source is a mount that the plugin made, as
// it says by naming the type.
func bindsOwnMount(s mountspec.Spec) bool {
	b, ok := s.Kind.(*mountspec.Bind)
	return ok && b.MountFSType != "" && b.Source.Base != mountspec.BaseGranted
}

// undoAt undoes what was performed at c, if it was not undone yet.
func (t *trial) undoAt(c *consumer) error {
	receipts := c.receipts
	if receipts == nil {
		return nil
	}
	if err := perform.Undo(context.WithoutCancel(t.ctx), t.ns, receipts); err != nil {
		return err
	}
	c.receipts = nil
	return nil
}

// withVolume prepares a volume, performs the answer, runs f, undoes and
// unprepares: the whole life of one preparation.
func (t *trial) withVolume(v *volume, readonly bool, f func(*consumer)) {
	r := t.request(v)
	r.Readonly = readonly
	answer := t.prepared(r)
	c := t.consumer()
	t.perform(c, r, answer)
	f(c)
	t.sysfail("undoing what was performed", t.undoAt(c))
	t.unprepared(r)
}

// backend returns the directory behind the first mount spec, as the plugin's
// side sees it, where the suite knows it.
func (t *trial) backend(r *prepareRequest, answer *prepareResponse) (dir string, known bool) {
	if len(answer.GetMountSpecs()) == 0 {
		return "", false
	}
	if fs := answer.GetMountSpecs()[0].GetFilesystem(); fs != nil {
		return t.config.exported(fs.GetOpaque())
	}
	source := answer.GetMountSpecs()[0].GetBind().GetSource()
	if source == nil {
		return "", false
	}
	base := t.base(r, source.GetBase().String(), source.GetGrant())
	return filepath.Join(base, source.GetRelative()), base != ""
}

func (t *trial) base(r *prepareRequest, base, grant string) string {
	switch base {
	case "STAGING":
		return r.GetStagingTargetPath()
	case "PREPARE":
		return r.GetPreparePath()
	case "GRANTED":
		return t.config.Grants[grant]
	default:
		return ""
	}
}

// linkBelow returns the first symbolic link on the way from base to what
// relative names, "" if there is none.
func linkBelow(base, relative string) string {
	at := base
	for name := range strings.SplitSeq(relative, "/") {
		at = filepath.Join(at, name)
		if info, err := os.Lstat(at); err == nil && info.Mode()&os.ModeSymlink != 0 {
			return at
		}
	}
	return ""
}

// writable tries everything that changes a filesystem, and returns the first
// thing that a read-only mount did not refuse as one does. There is a file at
// path, which the caller wrote before.
func writable(path string) (what string, err error) {
	dir := filepath.Dir(path)
	fresh := filepath.Join(dir, "fresh-"+filepath.Base(path))
	for _, try := range []struct {
		what string
		call func() error
	}{
		{"writing to a file", func() error {
			f, err := os.OpenFile(path, os.O_WRONLY, 0)
			if err == nil {
				_ = f.Close()
			}
			return err
		}},
		{"truncating a file", func() error { return unix.Truncate(path, 0) }},
		{"creating a file", func() error {
			f, err := os.OpenFile(fresh, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
			if err == nil {
				_ = f.Close()
			}
			return err
		}},
		{"removing a file", func() error { return unix.Unlink(path) }},
		{"changing the mode of a file", func() error { return unix.Chmod(path, 0o640) }},
		{"making a directory", func() error { return unix.Mkdir(fresh+".d", 0o700) }},
		{"changing the times of a file", func() error { return unix.Utimes(path, []unix.Timeval{{Sec: 1}, {Sec: 1}}) }},
		{"making a special file", func() error { return unix.Mknod(fresh+".fifo", unix.S_IFIFO|0o600, 0) }},
	} {
		if err := try.call(); !errors.Is(err, unix.EROFS) {
			return try.what, err
		}
	}
	return "", nil
}

// clone copies a request.
func clone(r *prepareRequest) *prepareRequest { return proto.Clone(r).(*prepareRequest) }
