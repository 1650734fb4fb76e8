package mountspec

import "strings"

// Features is what the kernel that will perform a plan offers. A plan made
// for fewer features uses the older calls, and is refused where only the
// newer ones can keep a rule.
type Features struct {
	// MountAPI is fsopen(2) to move_mount(2) with open_tree(2) and
	// mount_setattr(2) (Linux 5.12). Without it mount(2) is used, and what
	// is made is visible before it is narrowed.
	MountAPI bool
	// DetachedTrees is the ability to attach to, and to clone from, a mount
	// that is in no namespace (Linux 6.15). Without it a list of specs is
	// attached one after another.
	DetachedTrees bool
	// ExclusiveCreate is FSCONFIG_CMD_CREATE_EXCL (Linux 6.6), which fails
	// where a superblock with other parameters would be returned instead of
	// a new one.
	ExclusiveCreate bool
	// UniqueIDs is the mount id that is never used again, with statmount(2)
	// and listmount(2) (Linux 6.8). Without it mountinfo is read.
	UniqueIDs bool
	// Openat2 is openat2(2) (Linux 5.6). Without it paths are walked one
	// component at a time, and no link is followed at all.
	Openat2 bool
}

// Policy is the operator's part in a plan. The zero value is the safe one.
type Policy struct {
	// AllowSuid and AllowDev drop the nosuid and the nodev that are
	// otherwise forced on every mount, nodev not on a block device.
	AllowSuid, AllowDev bool
	// Noexec is forced on every mount.
	Noexec bool
	// FollowLinks allows symbolic links, resolved within the consumer's
	// root, in the path of the place the CO has chosen there: images have
	// them. They are never followed in a spec's own target nor in a PathRef,
	// and magic links nowhere.
	FollowLinks bool
	// CreateTarget makes the missing last components of that place.
	CreateTarget bool
	// IDMap is true if every mount is to be mapped by the user namespace the
	// CO gives when it performs.
	IDMap bool
	// LSMContext, if set, is the value of the context parameter of each
	// Filesystem with LSMContextSupported. Mounts of other specs keep the
	// labels they have.
	LSMContext string
}

// Attr is a set of mount attributes, with the values of MOUNT_ATTR_* of
// linux/mount.h.
type Attr uint64

// The attributes of mount_setattr(2).
const (
	AttrReadonly    Attr = 0x1
	AttrNosuid      Attr = 0x2
	AttrNodev       Attr = 0x4
	AttrNoexec      Attr = 0x8
	AttrNoatime     Attr = 0x10
	AttrStrictatime Attr = 0x20
	AttrAtimeMask   Attr = 0x70
	AttrNodiratime  Attr = 0x80
	AttrIDMap       Attr = 0x100000
	AttrNosymfollow Attr = 0x200000
)

var attrNames = []struct {
	attr Attr
	name string
}{
	{AttrReadonly, "RDONLY"},
	{AttrNosuid, "NOSUID"},
	{AttrNodev, "NODEV"},
	{AttrNoexec, "NOEXEC"},
	{AttrNoatime, "NOATIME"},
	{AttrStrictatime, "STRICTATIME"},
	{AttrNodiratime, "NODIRATIME"},
	{AttrIDMap, "IDMAP"},
	{AttrNosymfollow, "NOSYMFOLLOW"},
}

// String returns the attributes as in C, "0" for none.
func (a Attr) String() string {
	var words []string
	for _, n := range attrNames {
		if a&n.attr != 0 {
			words = append(words, "MOUNT_ATTR_"+n.name)
		}
	}
	if words == nil {
		return "0"
	}
	return strings.Join(words, "|")
}

// Effective returns the attributes p makes of a spec's: those it asks for and
// those the policy forces. The second set holds the bits to clear first,
// which is the access time mode where the spec names one.
func (p Policy) Effective(s Spec) (set, clear Attr) {
	a := s.Attributes
	_, block := s.Kind.(*BlockDevice)
	for _, bit := range [...]struct {
		on   bool
		attr Attr
	}{
		{a.Readonly, AttrReadonly},
		{a.Nosuid || !p.AllowSuid, AttrNosuid},
		{!block && (a.Nodev || !p.AllowDev), AttrNodev},
		{a.Noexec || p.Noexec, AttrNoexec},
		{a.Nosymfollow, AttrNosymfollow},
		{a.Nodiratime, AttrNodiratime},
		{p.IDMap, AttrIDMap},
	} {
		if bit.on {
			set |= bit.attr
		}
	}
	switch a.Atime {
	case AtimeUnspecified:
		return set, 0
	case Noatime:
		set |= AttrNoatime
	case Strictatime:
		set |= AttrStrictatime
	}
	return set, AttrAtimeMask
}
