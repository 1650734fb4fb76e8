package kernel

import (
	"bytes"
	"encoding/binary"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// What to ask [StatMount] for, and what it says it has delivered.
const (
	StatSuperblock    = 0x1    // device, magic, flags of the superblock
	StatBasic         = 0x2    // ids, attributes, propagation, peer group
	StatPropagateFrom = 0x4    // nearest dominating peer group
	StatRoot          = 0x8    // directory of the filesystem that is its root
	StatPoint         = 0x10   // where it is attached
	StatFSType        = 0x20   //
	StatNamespace     = 0x40   // id of its mount namespace
	StatOptions       = 0x80   // options of the superblock
	StatSubtype       = 0x100  // the x of fuse.x
	StatSource        = 0x200  //
	StatSupported     = 0x1000 // which of all these the kernel knows

	// StatAll is everything a mount table shows.
	StatAll = StatSuperblock | StatBasic | StatPropagateFrom | StatRoot | StatPoint |
		StatFSType | StatNamespace | StatOptions | StatSubtype | StatSource
)

// MountStat is what statmount(2) tells about one mount. Fields whose bit is not
// in Mask are zero.
type MountStat struct {
	// Mask holds the Stat bits that were delivered.
	Mask uint64

	// DevMajor and DevMinor name the superblock's device, as stat(2) does.
	DevMajor, DevMinor uint32
	// SBMagic is the filesystem's magic number, as statfs(2) has it.
	SBMagic uint64
	// SBFlags holds those of MS_RDONLY, MS_SYNCHRONOUS, MS_DIRSYNC and
	// MS_LAZYTIME that the superblock has.
	SBFlags uint32

	// ID and ParentID are unique ids. The root of a namespace is its own
	// parent, or has one that is in no list.
	ID, ParentID uint64
	// OldID and OldParentID are the small ids of /proc/PID/mountinfo, reused
	// as soon as a mount is gone.
	OldID, OldParentID uint32
	// Attr holds MOUNT_ATTR_ bits.
	Attr uint64
	// Propagation holds MS_SHARED, MS_SLAVE, MS_UNBINDABLE, or MS_PRIVATE
	// alone.
	Propagation uint64
	// PeerGroup and Master are peer group ids, 0 for none.
	PeerGroup, Master uint64
	// PropagateFrom is the closest peer group under the caller's root from
	// which a slave receives, 0 for none.
	PropagateFrom uint64
	// NS is the id of the mount namespace the mount is in.
	NS uint64

	// Root and Point are as the kernel writes them, unescaped. A removed
	// directory ends in "//deleted".
	Root, Point string
	// FSType has no subtype in it; Subtype is "" for most filesystems.
	FSType, Subtype string
	// Source is what the mounter said, unescaped.
	Source string
	// Options is what the filesystem shows of its parameters, comma-separated
	// and escaped as in mountinfo; the words of SBFlags are not in it.
	Options string

	// Supported is the mask of what the kernel can be asked for.
	Supported uint64
}

const (
	statmountFixed = 512
	// maxStatmount bounds the buffer; options and paths are far shorter.
	maxStatmount = 4 << 20
)

var statmountBuffers = sync.Pool{New: func() any {
	b := make([]byte, 4096)
	return &b
}}

// StatMount reads the parts of a mount that mask names. ns is the id of the
// mount namespace it is in, 0 for the calling thread's own. It asks no server
// and takes the same time on a mount whose server hangs.
//
// An id that is gone, detached, or in another namespace is ENOENT.
// statmount(2); Linux 6.8, other namespaces 6.11, options, subtype and source 6.13.
func StatMount(ns, id, mask uint64) (MountStat, error) {
	pooled := statmountBuffers.Get().(*[]byte)
	defer statmountBuffers.Put(pooled)
	req := mountIDRequest{size: unix.MNT_ID_REQ_SIZE_VER1, mount: id, param: mask, ns: ns}
	for {
		buf := *pooled
		_, _, errno := unix.Syscall6(unix.SYS_STATMOUNT, uintptr(unsafe.Pointer(&req)),
			uintptr(unsafe.Pointer(unsafe.SliceData(buf))), uintptr(len(buf)), 0, 0, 0)
		switch {
		case errno == 0:
			return parseMountStat(buf), nil
		case errno == unix.EOVERFLOW && len(buf) < maxStatmount:
			*pooled = make([]byte, 4*len(buf))
		case errno != unix.EINTR:
			return MountStat{}, callError("statmount", errno)
		}
	}
}

// parseMountStat reads struct statmount. All its strings share one allocation.
func parseMountStat(b []byte) MountStat {
	u32 := func(at int) uint32 { return binary.NativeEndian.Uint32(b[at:]) }
	u64 := func(at int) uint64 { return binary.NativeEndian.Uint64(b[at:]) }
	size := min(max(int(u32(0)), statmountFixed), len(b))
	text := string(b[statmountFixed:size])
	s := MountStat{Mask: u64(8)}
	str := func(bit uint64, at int) string {
		offset := int(u32(at))
		if s.Mask&bit == 0 || offset >= len(text) {
			return ""
		}
		end := bytes.IndexByte(b[statmountFixed+offset:size], 0)
		if end < 0 {
			return text[offset:]
		}
		return text[offset : offset+end]
	}
	s.DevMajor, s.DevMinor, s.SBMagic, s.SBFlags = u32(16), u32(20), u64(24), u32(32)
	s.ID, s.ParentID, s.OldID, s.OldParentID = u64(40), u64(48), u32(56), u32(60)
	s.Attr, s.Propagation, s.PeerGroup, s.Master = u64(64), u64(72), u64(80), u64(88)
	s.PropagateFrom, s.NS, s.Supported = u64(96), u64(112), u64(144)
	s.Options, s.FSType = str(StatOptions, 4), str(StatFSType, 36)
	s.Root, s.Point = str(StatRoot, 104), str(StatPoint, 108)
	s.Subtype, s.Source = str(StatSubtype, 120), str(StatSource, 124)
	return s
}
