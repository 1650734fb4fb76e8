package mountns

import (
	"fmt"
	"strconv"
	"strings"
)

// Mount is one line of a mount table.
type Mount struct {
	// ID is the unique id of the mount: counted over the machine since boot,
	// never given again, kept through moving. In a table that is not
	// [Table.Unique] it is the small id of mountinfo, which the kernel gives
	// again at once.
	ID uint64 `json:"id"`
	// ParentID is the mount this one is attached to, in the same numbering.
	// The topmost has a parent that is in no table, or is its own.
	ParentID uint64 `json:"parent_id"`
	// SmallID is the id that /proc/PID/mountinfo and /proc/PID/fdinfo show.
	// It belongs to this mount for as long as the mount exists, attached or not.
	SmallID uint32 `json:"small_id"`

	// Major and Minor are the device of the superblock, as stat(2) shows it.
	Major uint32 `json:"major"`
	Minor uint32 `json:"minor"`
	// Root is the directory or file of the filesystem that the mount shows.
	Root string `json:"root"`
	// RootDeleted says that Root has been removed from the filesystem.
	RootDeleted bool `json:"root_deleted,omitempty"`
	// Point is where the mount is attached, from the root of the reader.
	Point string `json:"point"`
	// PointDeleted says that the place it is attached to has been removed.
	PointDeleted bool `json:"point_deleted,omitempty"`

	// FSType is the type without subtype: fuse, where mountinfo has fuse.x.
	FSType string `json:"fstype"`
	// Subtype is the x.
	Subtype string `json:"subtype,omitempty"`
	// Source is the text the mounter gave.
	Source string `json:"source,omitempty"`
	// SBOptions is what the filesystem shows of its parameters, with commas,
	// escaped as mountinfo escapes (a space in a value is \040).
	SBOptions string `json:"sb_options,omitempty"`
	// SBReadonly says that the superblock is read-only, for every mount of it.
	SBReadonly bool `json:"sb_readonly,omitempty"`
	// SBFlags holds MS_SYNCHRONOUS, MS_DIRSYNC and MS_LAZYTIME where they are
	// set on the superblock.
	SBFlags uint32 `json:"sb_flags,omitempty"`

	// Attr holds the mount's own MOUNT_ATTR_ bits.
	Attr uint64 `json:"attr"`
	// Propagation says what the mount shares; PeerGroup with whom (0: nobody),
	// Master from whom it receives (0: nobody).
	Propagation Propagation `json:"propagation"`
	PeerGroup   uint64      `json:"peer_group,omitempty"`
	Master      uint64      `json:"master,omitempty"`
}

// Type returns the type as mountinfo has it, with the subtype.
func (m *Mount) Type() string {
	if m.Subtype == "" {
		return m.FSType
	}
	return m.FSType + "." + m.Subtype
}

// String is "<id> <type> on <point> (<propagation>)", the point quoted where it
// has characters that would break the line.
func (m Mount) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d %s on %s", m.ID, m.Type(), readable(m.Point))
	if m.PointDeleted {
		b.WriteString(" (deleted)")
	}
	fmt.Fprintf(&b, " (%s)", m.Propagation)
	return b.String()
}

// readable quotes text that is not plain enough for a line.
func readable(text string) string {
	quoted := strconv.Quote(text)
	if text == "" || strings.ContainsAny(text, " ") || quoted[1:len(quoted)-1] != text {
		return quoted
	}
	return text
}

// Propagation is a set of the bits the kernel uses (MS_SHARED and so on). A
// mount can be shared and a slave at once.
type Propagation uint32

// The propagation types; see mount_namespaces(7).
const (
	Unbindable Propagation = 1 << 17
	Private    Propagation = 1 << 18
	SlaveOf    Propagation = 1 << 19
	Shared     Propagation = 1 << 20
)

var propagationNames = []struct {
	bit  Propagation
	name string
}{{Shared, "shared"}, {SlaveOf, "slave"}, {Unbindable, "unbindable"}, {Private, "private"}}

// String is private, shared, slave, unbindable, or "shared,slave".
func (p Propagation) String() string {
	var names []string
	for _, k := range propagationNames {
		if p&k.bit != 0 {
			names = append(names, k.name)
			p &^= k.bit
		}
	}
	if p != 0 || len(names) == 0 {
		names = append(names, fmt.Sprintf("%#x", uint32(p)))
	}
	return strings.Join(names, ",")
}

// MarshalText is [Propagation.String].
func (p Propagation) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

// UnmarshalText reads what MarshalText writes.
func (p *Propagation) UnmarshalText(text []byte) error {
	var v Propagation
	for name := range strings.SplitSeq(string(text), ",") {
		known := false
		for _, k := range propagationNames {
			if k.name == name {
				v |= k.bit
				known = true
			}
		}
		if !known {
			return fmt.Errorf("mountns: propagation %q: want shared, slave, unbindable or private, joined by commas", text)
		}
	}
	*p = v
	return nil
}

// The MOUNT_ATTR_ bits of [Mount.Attr], as mount_setattr(2) has them.
const (
	AttrReadonly    = 0x1
	AttrNosuid      = 0x2
	AttrNodev       = 0x4
	AttrNoexec      = 0x8
	AttrAtimeMask   = 0x70 // of it: 0 relatime
	AttrNoatime     = 0x10
	AttrStrictatime = 0x20
	AttrNodiratime  = 0x80
	AttrIDMap       = 0x100000
	AttrNosymfollow = 0x200000
)

var attrNames = []struct {
	bit  uint64
	name string
}{
	{AttrNosuid, "nosuid"},
	{AttrNodev, "nodev"},
	{AttrNoexec, "noexec"},
	{AttrNoatime, "noatime"},
	{AttrStrictatime, "strictatime"},
	{AttrNodiratime, "nodiratime"},
	{AttrIDMap, "idmapped"},
	{AttrNosymfollow, "nosymfollow"},
}

// Attributes returns Attr as words: "ro,nosuid,nodev,relatime".
func (m *Mount) Attributes() string { return attrString(m.Attr) }

func attrString(attr uint64) string {
	words := []string{"rw"}
	if attr&AttrReadonly != 0 {
		words[0] = "ro"
	}
	rest := attr &^ (AttrReadonly | AttrAtimeMask)
	for _, a := range attrNames {
		if attr&a.bit != 0 {
			words = append(words, a.name)
			rest &^= a.bit
		}
	}
	if attr&AttrAtimeMask == 0 {
		words = append(words, "relatime")
	}
	if rest != 0 {
		words = append(words, fmt.Sprintf("%#x", rest))
	}
	return strings.Join(words, ",")
}
