package perform

import (
	"context"
	"errors"
	"path"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
	"github.com/csi-prepare/csi-prepare/reference/mountns"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
)

// performance is one run of Perform: the plan and what its steps have opened.
type performance struct {
	e      *Executor
	ctx    context.Context
	target Target
	specs  []mountspec.Spec
	o      *Options
	plan   mountspec.Plan
	f      mountspec.Features
	units  []unit
	done   *Performed

	// there is the target's namespace while the thread is in it.
	there *mountns.Namespace
	// parent is the mount the target is on, shared whether it passes on
	// what is attached to it.
	parent kernel.MountStat
	shared bool
	// missing are the last components of the target that have to be made
	// below the target descriptor; made are those that were.
	missing  []string
	made     []made
	creating bool // the making has begun
	// attached is true once something is visible.
	attached bool
}

// unit holds the descriptors of one mount spec, -1 where there is none.
type unit struct {
	base, source, device, node, mount, target int

	fs       *kernel.FSContext
	reuse    bool // the superblock was there before
	hostNode bool // node is the host's own of the device
	remote   bool // its filesystem asks a server
	id       uint64
	parentID uint64 // the mount this one is attached to
	treeEnd  uint64
}

var closedUnit = unit{base: -1, source: -1, device: -1, node: -1, mount: -1, target: -1}

// run makes everything where the caller is, and attaches it where the target
// is. The journal is written in between, where the caller is again.
func (x *performance) run() (err error) {
	defer x.close()
	ns := x.target.Namespace
	if ns != nil && !x.f.MountAPI {
		return &mountspec.UnsupportedError{
			Index: 0, Kind: x.specs[0].Kind.Name(),
			Reason: "mount(2) cannot bring a mount into another namespace",
		}
	}
	there := 0
	for x.plan.Steps[there].Call != mountspec.OpenTarget {
		there++
	}
	if err := x.steps(0, there); err != nil {
		return err
	}
	rest := func(first int) error {
		x.there = ns
		err := x.steps(first, len(x.plan.Steps))
		if err != nil {
			err = x.rollback(err)
		}
		return err
	}
	switch {
	case ns == nil:
		if err := x.steps(there, there+1); err != nil {
			return err
		}
		if err := x.journal(); err != nil {
			return err
		}
		return rest(there + 1)
	case x.o.Journal == nil:
		return ns.Do(x.ctx, func() error { return rest(there) })
	}
	x.there = ns
	if err := ns.Do(x.ctx, func() error { return x.steps(there, there+1) }); err != nil {
		return err
	}
	x.there = nil
	if err := x.journal(); err != nil {
		return err
	}
	return ns.Do(x.ctx, func() error { return rest(there + 1) })
}

func (x *performance) steps(first, end int) error {
	for i := first; i < end; i++ {
		s := &x.plan.Steps[i]
		err := x.ctx.Err()
		if err == nil && x.e.before != nil {
			err = x.e.before(s.Call.String())
		}
		if err == nil {
			err = x.step(s)
		}
		if errors.Is(err, errAgain) {
			i = x.fsopen(i) - 1
			continue
		}
		if err != nil {
			return &Error{s.Spec, s.Call.String(), err}
		}
	}
	return nil
}

// errAgain asks for the filesystem's context to be made anew, since one that
// failed is of no further use.
var errAgain = errors.New("again")

func (x *performance) fsopen(i int) int {
	for x.plan.Steps[i].Call != mountspec.Fsopen {
		i--
	}
	return i
}

// step makes the system call of one step.
func (x *performance) step(s *mountspec.Step) error {
	u := &x.units[s.Spec]
	spec := &x.specs[s.Spec]
	switch s.Call {
	case mountspec.OpenBase:
		return x.openBase(u, spec)
	case mountspec.OpenSource:
		return x.openSource(u, s)
	case mountspec.CheckSource:
		return x.checkSource(u, s)
	case mountspec.Clone:
		return x.clone(u, s)
	case mountspec.CloneMaster:
		return x.cloneMaster(u, s)
	case mountspec.OpenDevice, mountspec.OpenDeviceExclusive:
		return x.openDevice(u, spec, s.Call == mountspec.OpenDeviceExclusive)
	case mountspec.CheckReadonly:
		return checkReadonly(u, spec)
	case mountspec.Fsopen, mountspec.SetString, mountspec.SetFlag,
		mountspec.Create, mountspec.CreateExclusive, mountspec.Fsmount:
		return x.filesystem(u, spec, s)
	case mountspec.Mknod:
		return x.mknod(u, spec)
	case mountspec.CloneNode:
		return x.cloneNode(u)
	case mountspec.Setattr:
		return x.setattr(u, s)
	case mountspec.Identify:
		return x.identify(u, spec)
	case mountspec.OpenTarget:
		return x.openTarget()
	case mountspec.CreateTarget:
		return x.createTarget()
	case mountspec.CheckTarget:
		return x.checkTarget()
	case mountspec.OpenInner:
		return x.openInner(u, s)
	case mountspec.CheckInner:
		return x.checkInner(u, spec)
	case mountspec.Attach:
		return x.attach(u, s)
	case mountspec.Verify:
		return x.verify(u, s)
	}
	return x.legacy(u, spec, s)
}

func (x *performance) setattr(u *unit, s *mountspec.Step) error {
	attr := unix.MountAttr{Attr_set: uint64(s.Set), Attr_clr: uint64(s.Clear), Propagation: unix.MS_PRIVATE}
	if x.o.IDMap != nil {
		conn, err := x.o.IDMap.SyscallConn()
		if err != nil {
			return err
		}
		var inner error
		err = conn.Control(func(fd uintptr) {
			attr.Userns_fd = uint64(fd)
			inner = kernel.MountSetattr(u.mount, &attr, s.Recursive)
		})
		return errors.Join(err, inner)
	}
	return kernel.MountSetattr(u.mount, &attr, s.Recursive)
}

// identify reads the id of a mount that is attached nowhere yet, and holds its
// root against what the spec says it is.
func (x *performance) identify(u *unit, spec *mountspec.Spec) error {
	facts, err := kernel.FactsOf(u.mount, "", x.f.UniqueIDs)
	if err != nil {
		return err
	}
	u.id = facts.MountID
	if b, ok := spec.Kind.(*mountspec.Bind); ok {
		return checkSourceType(b, facts.Mode)
	}
	return nil
}

func (x *performance) attach(u *unit, s *mountspec.Step) error {
	if err := kernel.MoveMount(u.mount, u.target, 0); err != nil {
		return err
	}
	if s.Spec > 0 && x.plan.Detached {
		return nil
	}
	x.attached = true
	if s.Spec > 0 || !x.shared {
		return nil
	}
	// The kernel makes shared what is attached to a shared parent.
	return kernel.MountSetattr(u.mount, &unix.MountAttr{Propagation: unix.MS_PRIVATE}, s.Recursive)
}

// rollback undoes a performance of which something may be visible, and
// returns the error to report.
func (x *performance) rollback(cause error) error {
	for i := range x.units {
		x.units[i].closeMount()
		if i > 0 {
			closeFD(&x.units[i].target) // it is on the first mount
		}
	}
	if x.attached {
		if err := x.fillAll(path.Clean(x.target.Path)); err != nil {
			return errors.Join(cause, err)
		}
		v := x.view()
		defer v.close()
		if err := x.e.undoMounts(x.ctx, v, x.done.Receipts); err != nil {
			return errors.Join(cause, &LeftError{x.done.Receipts, err})
		}
	}
	for i := len(x.made) - 1; i >= 0; i-- {
		m := &x.made[i]
		if err := removeIn(m.dir, m.name, m.inode, m.file); err != nil {
			return errors.Join(cause, &Error{0, "remove what was created", err})
		}
	}
	return cause
}

// close closes whatever the performance holds open: of what is not attached,
// nothing is left. Descriptors opened one after another are most often
// neighbours, and then one call closes many.
func (x *performance) close() {
	var room [32]int
	fds := room[:0]
	for i := range x.units {
		u := &x.units[i]
		if u.fs != nil {
			_ = u.fs.Close()
			u.fs = nil
		}
		for _, fd := range [...]*int{&u.base, &u.source, &u.device, &u.node, &u.mount, &u.target} {
			if *fd >= 0 {
				fds = append(fds, *fd)
				*fd = -1
			}
		}
	}
	for _, m := range x.made {
		fds = append(fds, m.dir)
	}
	closeAll(fds)
}

// closeAll closes descriptors, with one call for each row of neighbours.
func closeAll(fds []int) {
	slices.Sort(fds)
	for len(fds) > 0 {
		n := 1
		for n < len(fds) && fds[n] == fds[0]+n {
			n++
		}
		if n == 1 || unix.CloseRange(uint(fds[0]), uint(fds[n-1]), 0) != nil {
			for _, fd := range fds[:n] {
				_ = unix.Close(fd)
			}
		}
		fds = fds[n:]
	}
}

// closeMount closes what keeps a mount of the performance busy.
func (u *unit) closeMount() {
	closeFD(&u.mount)
	closeFD(&u.node)
	if u.fs != nil {
		_ = u.fs.Close()
		u.fs = nil
	}
}

func closeFD(fd *int) {
	if *fd >= 0 {
		_ = unix.Close(*fd)
		*fd = -1
	}
}
