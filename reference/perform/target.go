package perform

import (
	"errors"
	"fmt"
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
	root := x.target.Root
	if root == nil {
		if !x.f.Openat2 {
			return walk(unix.AT_FDCWD, path)
		}
		return kernel.Openat2(unix.AT_FDCWD, path, how)
	}
	conn, err := root.SyscallConn()
	if err != nil {
		return -1, err
	}
	fd := -1
	var inner error
	err = conn.Control(func(rootFD uintptr) {
		if !x.f.Openat2 {
			fd, inner = walk(int(rootFD), path)
			return
		}
		how.Resolve |= unix.RESOLVE_IN_ROOT
		fd, inner = kernel.Openat2(int(rootFD), path, how)
	})
	if err == nil {
		err = inner
	}
	return fd, err
}

// checkTarget sees that the target is not on a filesystem of the kernel's own,
// and whether its mount passes on what is attached.
func (x *performance) checkTarget() error {
	u := &x.units[0]
	if !x.f.UniqueIDs {
		x.shared = true // not known, and making a mount private twice is harmless
		var st unix.Statfs_t
		if err := unix.Fstatfs(u.target, &st); err != nil {
			return err
		}
		x.parent.SBMagic = uint64(st.Type)
	} else if x.parent.ID != u.parentID {
		var err error
		x.parent, err = kernel.StatMount(0, u.parentID, kernel.StatSuperblock|kernel.StatBasic|kernel.StatNamespace)
		if err != nil {
			return err
		}
		x.shared = x.parent.Propagation&unix.MS_SHARED != 0
	}
	if name, ok := kernelFilesystems[x.parent.SBMagic]; ok {
		return fmt.Errorf("%w: it is on %s", ErrTarget, name)
	}
	return nil
}

// kernelFilesystems are those whose files are the kernel's: to attach there
// would hide or fake what processes believe of the system.
var kernelFilesystems = map[uint64]string{
	unix.PROC_SUPER_MAGIC:     "procfs",
	unix.SYSFS_MAGIC:          "sysfs",
	unix.CGROUP_SUPER_MAGIC:   "a cgroup hierarchy",
	unix.CGROUP2_SUPER_MAGIC:  "a cgroup hierarchy",
	unix.DEVPTS_SUPER_MAGIC:   "devpts",
	unix.SECURITYFS_MAGIC:     "securityfs",
	unix.SELINUX_MAGIC:        "selinuxfs",
	unix.SMACK_MAGIC:          "smackfs",
	unix.DEBUGFS_MAGIC:        "debugfs",
	unix.TRACEFS_MAGIC:        "tracefs",
	unix.BPF_FS_MAGIC:         "bpf",
	unix.PSTOREFS_MAGIC:       "pstore",
	unix.EFIVARFS_MAGIC:       "efivarfs",
	unix.NSFS_MAGIC:           "nsfs",
	unix.BINFMTFS_MAGIC:       "binfmt_misc",
	unix.RDTGROUP_SUPER_MAGIC: "resctrl",
	configfsMagic:             "configfs",
	fusectlMagic:              "fusectl",
	mqueueMagic:               "mqueue",
}

// Not in linux/magic.h.
const (
	configfsMagic = 0x62656570
	fusectlMagic  = 0x65735543
	mqueueMagic   = 0x19800202
)

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
		return fmt.Errorf("%w: it is a %s, want a %s", ErrTarget, fileType(mode), name)
	}
	return nil
}

// openInner resolves a spec's own target beneath what the first attached.
func (x *performance) openInner(u *unit, s *mountspec.Step) (err error) {
	u.target, err = x.openBelow(x.units[0].mount, s.Text)
	return err
}

// openBelow opens path below a directory, following no link at all.
func (x *performance) openBelow(dir int, path string) (int, error) {
	if x.f.Openat2 {
		return kernel.OpenBeneath(dir, path, unix.O_PATH|unix.O_NOFOLLOW)
	}
	return walk(dir, path)
}

func (x *performance) checkInner(u *unit, spec *mountspec.Spec) error {
	facts, err := kernel.FactsOf(u.target, "", x.f.UniqueIDs)
	if err != nil {
		return err
	}
	u.parentID = facts.MountID
	return checkTargetType(spec, facts.Mode)
}
