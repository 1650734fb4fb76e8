package perform

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
)

// checkPath refuses a place in the consumer that could not be meant, or could
// be the consumer's root.
func checkPath(path string) error {
	if !strings.HasPrefix(path, "/") || strings.IndexByte(path, 0) >= 0 {
		return fmt.Errorf("%w: path %q has to be absolute and without a NUL byte", ErrTarget, path)
	}
	below := false
	for name := range strings.SplitSeq(path, "/") {
		switch name {
		case "", ".":
		case "..":
			return fmt.Errorf("%w: path %q has a '..' component", ErrTarget, path)
		default:
			below = true
		}
	}
	if !below {
		return fmt.Errorf("%w: path %q is the consumer's root itself", ErrTarget, path)
	}
	return nil
}

// openTarget resolves the place in the consumer within its root: to the place
// itself, or to the deepest directory there is of it.
func (x *performance) openTarget() (err error) {
	u := &x.units[0]
	u.target, err = x.openInRoot(x.target.Path, unix.O_PATH|unix.O_NOFOLLOW)
	if errors.Is(err, unix.ENOENT) && x.o.Policy.CreateTarget {
		err = x.openExisting(u)
	}
	if err != nil {
		return err
	}
	facts, err := kernel.FactsOf(u.target, "", x.f.UniqueIDs)
	u.parentID = facts.MountID
	if err == nil && x.missing == nil {
		err = checkTargetType(&x.specs[0], facts.Mode)
	}
	if err == nil && x.o.Journal != nil {
		err = x.checkTarget()
	}
	return err
}

// openExisting opens the deepest directory on the way to the target, and
// remembers what is missing below it.
func (x *performance) openExisting(u *unit) (err error) {
	var names []string
	for name := range strings.SplitSeq(x.target.Path, "/") {
		if name != "" && name != "." {
			names = append(names, name)
		}
	}
	for n := len(names) - 1; n >= 0; n-- {
		u.target, err = x.openInRoot("/"+strings.Join(names[:n], "/"), unix.O_PATH|unix.O_DIRECTORY)
		if !errors.Is(err, unix.ENOENT) {
			x.missing = names[n:]
			return err
		}
	}
	return err
}

// openInRoot opens a path of the consumer. Where its root is that of the
// namespace, the thread's own root does the same as RESOLVE_IN_ROOT.
func (x *performance) openInRoot(path string, flags int) (int, error) {
	how := unix.OpenHow{Flags: uint64(flags), Resolve: unix.RESOLVE_NO_MAGICLINKS}
	if !x.o.Policy.FollowLinks {
		how.Resolve |= unix.RESOLVE_NO_SYMLINKS
	}
	if x.target.Root == nil {
		return x.openHow(unix.AT_FDCWD, path, how)
	}
	how.Resolve |= unix.RESOLVE_IN_ROOT
	conn, err := x.target.Root.SyscallConn()
	if err != nil {
		return -1, err
	}
	fd := -1
	var inner error
	err = conn.Control(func(root uintptr) { fd, inner = x.openHow(int(root), path, how) })
	if err == nil {
		err = inner
	}
	return fd, err
}

// checkTarget sees that the target is not on a filesystem of the kernel's own,
// and whether its mount passes on what is attached.
func (x *performance) checkTarget() error {
	u := &x.units[0]
	if x.parent.ID == u.parentID {
		return nil
	}
	v := x.view()
	defer v.close()
	var err error
	if x.parent, err = v.lookup(x.ctx, u.parentID, statPlace); err != nil {
		return err
	}
	if kernelFilesystems[x.parent.FSType] {
		return fmt.Errorf("%w: %s", ErrTargetKernel, x.parent.FSType)
	}
	x.shared = x.parent.Propagation&unix.MS_SHARED != 0
	switch {
	case !x.shared:
		return nil
	case x.plan.Detached && len(x.specs) > 1:
		return errShared
	case anyTree(x.specs):
		return fmt.Errorf("%w: it is on a shared mount, and what comes with a recursive bind would stay in its peers", ErrTarget)
	}
	return nil
}

// errShared asks to attach the specs one after another. A shared parent gives
// each of its peers a copy of what is attached. The copy of a single mount goes
// when the mount does; those of mounts below a private one would stay.
var errShared = errors.New("the target is on a shared mount")

func anyTree(specs []mountspec.Spec) bool {
	return slices.ContainsFunc(specs, func(s mountspec.Spec) bool {
		b, ok := s.Kind.(*mountspec.Bind)
		return ok && b.Recursive
	})
}

// kernelFilesystems are those whose files are the kernel's: to attach there
// would hide or fake what processes believe of the system.
var kernelFilesystems = map[string]bool{
	"proc": true, "sysfs": true, "cgroup": true, "cgroup2": true, "cpuset": true, "devpts": true,
	"securityfs": true, "selinuxfs": true, "smackfs": true, "debugfs": true, "tracefs": true,
	"bpf": true, "configfs": true, "pstore": true, "efivarfs": true, "nsfs": true, "mqueue": true,
	"binfmt_misc": true, "fusectl": true, "autofs": true, "resctrl": true,
}

// isFile says whether a spec attaches a file rather than a directory.
func isFile(s *mountspec.Spec) bool {
	switch k := s.Kind.(type) {
	case *mountspec.Bind:
		return k.IsFile
	case *mountspec.BlockDevice:
		return true
	}
	return false
}

func checkTargetType(s *mountspec.Spec, mode uint32) error {
	want, name := uint32(unix.S_IFDIR), "directory"
	if isFile(s) {
		want, name = unix.S_IFREG, "regular file"
	}
	if mode&unix.S_IFMT != want {
		return fmt.Errorf("%w: it is a %s, want a %s", ErrTargetType, fileType(mode), name)
	}
	return nil
}

// openInner resolves a spec's own target beneath what the first attached.
func (x *performance) openInner(u *unit, s *mountspec.Step) (err error) {
	u.target, err = x.openBelow(x.units[0].mount, s.Text)
	return err
}

func (x *performance) checkInner(u *unit, spec *mountspec.Spec) error {
	facts, err := kernel.FactsOf(u.target, "", x.f.UniqueIDs)
	if err != nil {
		return err
	}
	u.parentID = facts.MountID
	return checkTargetType(spec, facts.Mode)
}
