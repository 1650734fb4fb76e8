package co

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/csi-prepare/csi-prepare/reference/fusemount"
	"github.com/csi-prepare/csi-prepare/reference/mountns"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
	"github.com/csi-prepare/csi-prepare/reference/perform"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// What Up can be refused for, besides what the plugin or the kernel refuse.
var (
	// ErrConflict is a preparation that is performed with other arguments.
	ErrConflict = errors.New("performed already with other arguments; take it down first, or choose another prepare id")
	// ErrNotEquivalent is an answer to a repeat that would be another
	// performance than the one the consumer has.
	ErrNotEquivalent = fmt.Errorf("the answer to the repeat is not equivalent to what is performed [%s]", requirement.IdempotencyEquivalent)
)

// act is one operation on one preparation, which it holds.
type act struct {
	*CO
	lock *os.File
	r    *Record
	s    Settings
	// hidden are the texts no error may show.
	hidden []string
	// controls are of the FUSE connections that are being left.
	controls []*fusemount.Control
}

// Up makes a volume visible to a consumer: it stages, prepares and performs,
// and returns when all is done and verified. If something fails, or ctx ends,
// all of it is taken back; what could not be is in the error, stays in the
// ledger, and is taken back by Down, Recover or the next Up.
//
// If the consumer has the volume already, Up is a repeat: it prepares again,
// with new secrets and contexts, compares the answer with what is performed,
// and leaves the consumer as it is, also if that fails. Other arguments are
// ErrConflict.
//
// Errors are a *CallError for what the plugin refused (status.Code of it), a
// *perform.InvalidError for an answer that breaks rules, a *StepError for what
// the kernel refused, a *PendingError, a *DamagedError, a *NoServiceError, or
// wrap ErrConflict, ErrNotEquivalent or ErrProtected.
func (c *CO) Up(ctx context.Context, u Use) (*Record, error) {
	r, err := c.up(ctx, &u)
	if err != nil {
		return nil, fmt.Errorf("volume %s: %w", u.VolumeID, masked(err, u.hidden(nil)))
	}
	return r, nil
}

func (c *CO) up(ctx context.Context, u *Use) (*Record, error) {
	if err := u.check(); err != nil {
		return nil, err
	}
	p, err := c.plugin(u.Endpoint)
	if err != nil {
		return nil, err
	}
	s := c.policy.For("")
	var f *facts
	err = s.call(ctx, "discovery", func(ctx context.Context) (err error) {
		f, err = p.discover(ctx)
		return err
	})
	if err != nil {
		return nil, err
	}
	s = c.policy.For(f.name)
	if err := s.CheckTarget(u.Target.Path, u.Capability.GetBlock() != nil); err != nil {
		return nil, faultOf(err).err()
	}
	namespace, err := u.namespaceID()
	if err != nil {
		return nil, err
	}
	k := Key{f.name, u.VolumeID, u.PrepareID}
	leave, err := c.volumes.enter(ctx, k.volume())
	if err != nil {
		return nil, err
	}
	defer leave()
	was, err := c.ledger.get(k)
	if err != nil {
		return nil, err
	}
	lock, err := c.hold(ctx, k)
	if err != nil {
		return nil, err
	}
	defer lock.Close()

	a := &act{CO: c, lock: lock, r: was, s: s, hidden: u.hidden(f.refreshable)}
	digest := u.digestWith(f.refreshable, namespace)
	if was != nil {
		whole, err := c.whole(ctx, was)
		switch {
		case err != nil:
			return nil, err
		case whole && was.RequestDigest != digest:
			return nil, ErrConflict
		case whole:
			return a.refresh(ctx, u, p)
		}
		if err := a.takeBack(ctx); err != nil {
			return nil, masked(err, a.hidden)
		}
	}
	now := time.Now().UTC().Truncate(time.Millisecond)
	a.r = &Record{
		BootID: c.boot, Driver: f.name, Endpoint: u.Endpoint, VolumeID: u.VolumeID, PrepareID: u.PrepareID,
		PreparePath: c.preparePath(k), Readonly: u.Readonly, Ephemeral: u.Ephemeral,
		Target: u.Target.Path, TargetNamespace: namespace, RequestDigest: digest, Created: now,
		Asked: askedOf(u.Capability),
	}
	switch {
	case u.CallerStages:
		a.r.StagingPath, a.r.CallerStages = u.StagingPath, true
	case f.stages && !u.Ephemeral:
		a.r.StagingPath = c.stagingPath(k)
	}
	err = a.bringUp(ctx, u, p)
	if err == nil {
		return a.r, nil
	}
	err = masked(err, a.hidden)
	a.r.Error = err.Error()
	c.log.Warn("not performed", "preparation", k.String(), "phase", string(a.r.Phase), "error", err)
	if isPending(err) {
		// Its step may still act: nothing else does until it has ended.
		return nil, errors.Join(err, c.ledger.put(a.r))
	}
	// The caller may have gone; what was begun is taken back all the same.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Duration(s.CallDeadline))
	defer cancel()
	if back := a.takeBack(ctx); back != nil {
		err = errors.Join(err, fmt.Errorf("taking it back: %w", masked(back, a.hidden)))
	}
	return nil, err
}

// set makes the record durable with a phase, before its act. A call of a phase
// has an outcome that is not known until the next write.
func (a *act) set(phase Phase, uncertain bool) error {
	a.r.Phase, a.r.Uncertain = phase, uncertain
	a.before("write " + string(phase))
	if err := a.ledger.put(a.r); err != nil {
		return err
	}
	a.before("wrote " + string(phase))
	a.log.Debug("ledger", "preparation", a.r.Key().String(), "phase", string(phase))
	return nil
}

func (a *act) bringUp(ctx context.Context, u *Use, p *plugin) error {
	if a.r.staged() {
		if err := a.stage(ctx, u, p); err != nil {
			return err
		}
	}
	if err := a.set(Preparing, true); err != nil {
		return err
	}
	if err := a.makePreparePath(ctx, p); err != nil {
		return err
	}
	x, err := a.prepare(ctx, u, p, false)
	if err != nil {
		return err
	}
	defer x.close()
	a.r.SpecDigests, a.r.Specs = digestsOf(x.specs), withoutSecrets(x.message.GetMountSpecs())
	if err := a.set(Performing, false); err != nil {
		return err
	}
	if err := a.perform(ctx, u, x); err != nil {
		return err
	}
	a.r.Error = ""
	if err := a.set(Performed, false); err != nil {
		return err
	}
	a.log.Info("performed", "preparation", a.r.Key().String(), "target", a.r.Target, "mount_ids", mountIDs(a.r.Receipts))
	return nil
}

func (a *act) stage(ctx context.Context, u *Use, p *plugin) error {
	if err := a.set(Staging, true); err != nil {
		return err
	}
	if err := a.mkdir(a.r.StagingPath, p); err != nil && !errors.Is(err, os.ErrExist) {
		return fmt.Errorf("make the staging path: %w", err)
	}
	request := u.stage(a.r)
	err := a.s.call(ctx, "NodeStageVolume", func(ctx context.Context) error {
		_, err := p.node.NodeStageVolume(ctx, request)
		return err
	})
	a.before("called NodeStageVolume")
	return err
}

// mkdir makes a directory that is the plugin's and nobody else's.
func (a *act) mkdir(path string, p *plugin) error {
	if err := os.Mkdir(path, 0o700); err != nil {
		return err
	}
	if o := a.s.ownerOf(p); o.uid != os.Geteuid() || o.gid != os.Getegid() {
		return os.Lchown(path, o.uid, o.gid)
	}
	return nil
}

// makePreparePath makes the directory that is the plugin's for this
// preparation. One that is there already is of a preparation whose record was
// lost: the path is the same, so the plugin can take that back first.
func (a *act) makePreparePath(ctx context.Context, p *plugin) error {
	err := a.mkdir(a.r.PreparePath, p)
	if errors.Is(err, os.ErrExist) {
		if err = a.unprepare(ctx, p); err == nil {
			err = removeDir(ctx, a.r.PreparePath)
		}
		if err == nil {
			err = a.mkdir(a.r.PreparePath, p)
		}
	}
	if err != nil {
		return fmt.Errorf("make the prepare path: %w", err)
	}
	a.before("made prepare path")
	return nil
}

func (a *act) perform(ctx context.Context, u *Use, x *accepted) error {
	text, err := proto.Marshal(x.message)
	if err != nil {
		return err
	}
	t := task{
		job: job{
			Act: actPerform, Response: text, Request: x.request,
			Staging: a.r.StagingPath, Prepare: a.r.PreparePath,
			Path: u.Target.Path, Settings: a.s, Dir: a.dir, Known: a.ledger.mountsOf(a.r.Key()),
		},
		namespace: namespaceFile(u.Target.Namespace), root: u.Target.Root, handles: x.handles,
		journal: func(m message) error {
			a.r.Receipts, a.r.Devices = m.Receipts, m.Devices
			return a.set(Performing, true)
		},
		// A server that does not answer keeps even a killed child. Nobody
		// but this performance has a mount of it.
		unblock: func() {
			for _, g := range x.handles {
				if g.handle.FUSE && !g.handle.Shared {
					_ = fusemount.Abort(ctx, g.handle.Mount)
				}
			}
		},
	}
	done, err := a.step(ctx, a.r.Key(), a.lock, t)
	a.before("performed")
	if err != nil {
		return err
	}
	a.r.Receipts = done.Receipts
	return nil
}

// refresh repeats NodePrepareVolume for a consumer that has the volume.
func (a *act) refresh(ctx context.Context, u *Use, p *plugin) (*Record, error) {
	if err := a.set(Performed, true); err != nil {
		return nil, err
	}
	x, err := a.prepare(ctx, u, p, true)
	uncertain := err != nil && !final(err)
	if err == nil {
		if slices.Equal(digestsOf(x.specs), a.r.SpecDigests) {
			err = a.follow(ctx, x)
		} else {
			err = ErrNotEquivalent
		}
		x.close()
	}
	err = masked(err, a.hidden)
	a.r.Error = ""
	if err != nil {
		a.r.Error = err.Error()
	}
	phase := Performed
	if isPending(err) && a.r.Phase == Performing {
		phase = Performing // of a replacement that may still go on
	}
	if err := errors.Join(err, a.set(phase, uncertain)); err != nil {
		return nil, err
	}
	return a.r, nil
}

// whole says that everything a record's receipts are of is attached.
func (c *CO) whole(ctx context.Context, r *Record) (bool, error) {
	if r.BootID != c.boot || r.Phase != Performed {
		return false, nil
	}
	ns, err := namespaceOf(ctx, r.Receipts[0].MntnsID)
	if errors.Is(err, errGone) {
		return false, nil
	}
	if err == nil && ns == nil {
		ns, err = mountns.Own()
	}
	if err != nil {
		return false, err
	}
	defer ns.Close()
	ids, err := ns.IDs(ctx, nil)
	return attached(r, ids), err
}

// attached says that all mounts of a record are among ids, which ascend.
func attached(r *Record, ids []uint64) bool {
	for _, receipt := range r.Receipts {
		if _, found := slices.BinarySearch(ids, receipt.MountID); !found {
			return false
		}
	}
	return true
}

func digestsOf(specs []mountspec.Spec) []string {
	digests := make([]string, len(specs))
	for i := range specs {
		digests[i] = specs[i].Digest()
	}
	return digests
}

func mountIDs(receipts []perform.Receipt) []uint64 {
	ids := make([]uint64, len(receipts))
	for i := range receipts {
		ids[i] = receipts[i].MountID
	}
	return ids
}

func namespaceFile(ns *mountns.Namespace) *os.File {
	if ns == nil {
		return nil
	}
	return ns.File()
}
