package mountspec

import (
	"fmt"
	"strings"
)

// Call names the system call, or the pair of them, that a step makes.
type Call uint8

// The calls of a plan. Descriptors are named by what they are and by the
// index of the spec: base0, source0, device0, fs0, mount0, target0.
const (
	// OpenBase opens the directory a PathRef starts from.
	OpenBase Call = iota + 1
	// OpenSource resolves a PathRef's relative part beneath its base.
	OpenSource
	// CheckSource compares the source's mount with mount_fs_type.
	CheckSource
	// OpenDevice opens a block device and compares its number and diskseq.
	OpenDevice
	// OpenDeviceExclusive does so with O_EXCL, to see that nothing has it.
	OpenDeviceExclusive
	// CheckReadonly asks the open device whether it refuses writes.
	CheckReadonly
	// Fsopen begins a filesystem of type Key.
	Fsopen
	// SetString gives the superblock the parameter Key with a value.
	SetString
	// SetFlag gives the superblock the parameter Key.
	SetFlag
	// Create makes the superblock, or finds the one there is.
	Create
	// CreateExclusive makes the superblock or fails.
	CreateExclusive
	// Fsmount makes a detached mount of the superblock.
	Fsmount
	// Clone makes a detached mount of the source.
	Clone
	// CloneMaster makes a detached mount of one the CO holds under a handle id.
	CloneMaster
	// Mknod makes a device node in a detached filesystem, or where the
	// kernel refuses that finds the node of the host.
	Mknod
	// CloneNode makes a detached mount of that node alone.
	CloneNode
	// Setattr narrows a detached mount and makes it private.
	Setattr
	// Identify reads the type and the unique id of a detached mount.
	Identify
	// OpenTarget resolves the place in the consumer, within its root.
	OpenTarget
	// CreateTarget makes what is missing of it.
	CreateTarget
	// CheckTarget reads what the target is and what it is on.
	CheckTarget
	// OpenInner resolves a spec's own target beneath what spec 0 attached.
	OpenInner
	// CheckInner reads what that is.
	CheckInner
	// Attach moves a detached mount to its target, and makes it private
	// again where a shared parent has made it shared.
	Attach
	// Verify reads the mount by id and compares it with the spec.
	Verify
	// MountBind makes a bind mount of the source.
	MountBind
	// MountNew makes a mount of a new filesystem.
	MountNew
	// OpenMounted opens the root of what mount(2) made.
	OpenMounted
	// Remount gives a mount made by mount(2) its full set of attributes.
	Remount
	// MountPrivate makes it private.
	MountPrivate
)

var callNames = [...]string{
	OpenBase: "open base", OpenSource: "open source", CheckSource: "check source",
	OpenDevice: "open device", OpenDeviceExclusive: "open device exclusively",
	CheckReadonly: "check read-only",
	Fsopen:        "fsopen", SetString: "fsconfig", SetFlag: "fsconfig",
	Create: "create superblock", CreateExclusive: "create superblock",
	Fsmount: "fsmount", Clone: "open_tree", CloneMaster: "open_tree", Mknod: "mknod", CloneNode: "open_tree",
	Setattr: "mount_setattr", Identify: "statx mount",
	OpenTarget: "open target", CreateTarget: "create target", CheckTarget: "check target",
	OpenInner: "open target", CheckInner: "check target",
	Attach: "move_mount", Verify: "verify",
	MountBind: "mount bind", MountNew: "mount", OpenMounted: "open mount",
	Remount: "remount", MountPrivate: "mount private",
}

// String returns a short name, as errors have it.
func (c Call) String() string {
	if int(c) < len(callNames) && callNames[c] != "" {
		return callNames[c]
	}
	return fmt.Sprintf("call %d", uint8(c))
}

// String prints the plan, one step a line, as strace(1) would: with secrets
// masked, and without what only the moment of performing knows (descriptor
// numbers, ids, and the consumer's place, which is written <target>).
func (p Plan) String() string {
	var b strings.Builder
	for i, s := range p.Steps {
		fmt.Fprintf(&b, "%3d  %s\n", i+1, s)
	}
	return b.String()
}

// String prints the step in one line, secrets masked.
func (s Step) String() string {
	const (
		path    = "O_PATH|O_NOFOLLOW|O_CLOEXEC"
		beneath = "RESOLVE_BENEATH|RESOLVE_NO_SYMLINKS|RESOLVE_NO_MAGICLINKS"
	)
	f := func(format string, args ...any) string { return fmt.Sprintf(format, args...) }
	n := s.Spec
	rec := ""
	if s.Recursive {
		rec = "|AT_RECURSIVE"
	}
	switch s.Call {
	case OpenBase:
		return f("openat(AT_FDCWD, <%s>, O_PATH|O_DIRECTORY|O_CLOEXEC) = base%d", s.Text, n)
	case OpenSource:
		return f("openat2(base%d, %q, {%s, %s}) = source%d", s.Base, s.Text, path, beneath, n)
	case CheckSource:
		return f("statx(%s); statmount(its mount): type %q, attached at or below base%d", s.source(), s.Key, s.Base)
	case OpenDevice:
		return f("open(<device %s>, O_RDONLY|O_CLOEXEC) = device%d; ioctl(device%d, BLKGETDISKSEQ)", s.Text, n, n)
	case OpenDeviceExclusive:
		return f("open(<device %s>, O_RDONLY|O_EXCL|O_CLOEXEC) = device%d; ioctl(device%d, BLKGETDISKSEQ); close(device%d)", s.Text, n, n, n)
	case CheckReadonly:
		return f("ioctl(device%d, BLKROGET): it refuses writes", n)
	case Fsopen:
		return f("fsopen(%q, FSOPEN_CLOEXEC) = fs%d", s.Key, n)
	case SetString:
		return f("fsconfig(fs%d, FSCONFIG_SET_STRING, %q, %q, 0)", n, s.Key, s.Text+s.Secret.String())
	case SetFlag:
		return f("fsconfig(fs%d, FSCONFIG_SET_FLAG, %q, NULL, 0)", n, s.Key)
	case Create:
		return f("fsconfig(fs%d, FSCONFIG_CMD_CREATE, NULL, NULL, 0)", n)
	case CreateExclusive:
		return f("fsconfig(fs%d, FSCONFIG_CMD_CREATE_EXCL, NULL, NULL, 0), if EBUSY again with CREATE and compare the parameters", n)
	case Fsmount:
		return f("fsmount(fs%d, FSMOUNT_CLOEXEC, %s) = mount%d", n, s.Set, n)
	case Clone:
		return f("open_tree(%s, \"\", AT_EMPTY_PATH%s|OPEN_TREE_CLONE|OPEN_TREE_CLOEXEC) = mount%d", s.source(), rec, n)
	case CloneMaster:
		return f("open_tree(<handle %q>, \"\", AT_EMPTY_PATH%s|OPEN_TREE_CLONE|OPEN_TREE_CLOEXEC) = mount%d", s.Text, rec, n)
	case Mknod:
		return f("mknodat(mount%d, \"node\", S_IFBLK, makedev(%s)); fchownat; fchmodat, if EPERM the node of the host instead", n, s.Text)
	case CloneNode:
		return f("open_tree(mount%d, \"node\", OPEN_TREE_CLONE|OPEN_TREE_CLOEXEC) = mount%d", n, n)
	case Setattr:
		return f("mount_setattr(mount%d, \"\", AT_EMPTY_PATH%s, {set %s, clear %s, MS_PRIVATE})", n, rec, s.Set, clearWord(s.Clear))
	case Identify:
		return f("statx(mount%d, \"\", AT_EMPTY_PATH|AT_STATX_DONT_SYNC, STATX_TYPE|STATX_MNT_ID_UNIQUE)", n)
	case OpenTarget:
		return f("openat2(root, <target>, {%s, RESOLVE_IN_ROOT|RESOLVE_NO_SYMLINKS|RESOLVE_NO_MAGICLINKS}) = target0", path)
	case CreateTarget:
		return "mkdirat or mknodat for each missing component, if any, and openat of it"
	case CheckTarget:
		return "statx(target0); statmount(mount of target0)"
	case OpenInner:
		return f("openat2(mount0, %q, {%s, %s}) = target%d", s.Text, path, beneath, n)
	case CheckInner:
		return f("statx(target%d)", n)
	case Attach:
		private := ""
		if n == 0 {
			private = ", if the parent is shared mount_setattr(mount0, MS_PRIVATE)"
		}
		return f("move_mount(mount%d, \"\", target%d, \"\", MOVE_MOUNT_F_EMPTY_PATH|MOVE_MOUNT_T_EMPTY_PATH)%s", n, n, private)
	case Verify:
		return f("statmount(mount%d): %s, private, at target%d", n, s.Set, n)
	case MountBind:
		if s.Recursive {
			rec = "|MS_REC"
		}
		return f("mount(%s, target%d, NULL, MS_BIND%s, NULL)", s.source(), n, rec)
	case MountNew:
		return f("mount(%q, target%d, %q, %s, %q)", s.Text, n, s.Key, s.Set.mountFlags(), joinMasked(s.Parameters))
	case OpenMounted:
		return f("openat2(<target>/%s) = mount%d", s.Text, n)
	case Remount:
		return f("mount(NULL, mount%d, NULL, MS_REMOUNT|MS_BIND|%s, NULL)", n, s.Set.mountFlags())
	case MountPrivate:
		if s.Recursive {
			rec = "|MS_REC"
		}
		return f("mount(NULL, mount%d, NULL, MS_PRIVATE%s, NULL)", n, rec)
	}
	return s.Call.String()
}

// source names the descriptor a bind is made from.
func (s Step) source() string {
	if s.Text == "" {
		return fmt.Sprintf("base%d", s.Base)
	}
	return fmt.Sprintf("source%d", s.Spec)
}

func clearWord(a Attr) string {
	if a == AttrAtimeMask {
		return "MOUNT_ATTR__ATIME"
	}
	return a.String()
}

// mountFlags prints attributes under the names mount(2) has for them.
func (a Attr) mountFlags() string {
	return strings.ReplaceAll(a.String(), "MOUNT_ATTR_", "MS_")
}

func joinMasked(parameters []Parameter) string {
	var words []string
	for _, q := range parameters {
		switch {
		case q.Text != "":
			words = append(words, q.Key+"="+q.Text)
		case !q.Secret.IsZero():
			words = append(words, q.Key+"="+q.Secret.String())
		default:
			words = append(words, q.Key)
		}
	}
	return strings.Join(words, ",")
}
