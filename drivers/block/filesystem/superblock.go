package filesystem

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
)

// Usage of a filesystem, in bytes and inodes.
type Usage struct {
	Total, Free, Available int64
	Files, FilesFree       int64
	// Size of the device that the filesystem takes up.
	Size int64
}

// ErrSuperblock says that there is no superblock of the type.
var ErrSuperblock = errors.New("no superblock of this type")

// ReadUsage reads the superblock of a filesystem that is not mounted; of one
// that is, the figures are old.
func ReadUsage(dev io.ReaderAt, t Type) (Usage, error) {
	place := map[Type]struct{ offset, size int64 }{Ext4: {1024, 1024}, XFS: {0, 512}, Btrfs: {64 << 10, 4096}}[t]
	sb := make([]byte, place.size)
	if _, err := dev.ReadAt(sb, place.offset); err != nil {
		return Usage{}, fmt.Errorf("read the %s superblock: %w", t, err)
	}
	u, ok := map[Type]func([]byte) (Usage, bool){Ext4: ext4Usage, XFS: xfsUsage, Btrfs: btrfsUsage}[t](sb)
	if !ok || !u.sound() {
		return Usage{}, fmt.Errorf("%s: %w", t, ErrSuperblock)
	}
	return u, nil
}

// sound tells whether the figures can be true: the superblock may be anybody's.
func (u Usage) sound() bool {
	return u.Available >= 0 && u.Available <= u.Free && u.Free <= u.Total && u.FilesFree >= 0 && u.FilesFree <= u.Files &&
		u.Size > 0 && u.Size < maxSize
}

// maxSize is more than any device has, and lets no figure overflow.
const maxSize = 1 << 60

// ext4Usage reads struct ext4_super_block (fs/ext4/ext4.h).
func ext4Usage(sb []byte) (Usage, bool) {
	le := binary.LittleEndian
	shift := le.Uint32(sb[0x18:])
	if le.Uint16(sb[0x38:]) != 0xef53 || shift > 6 {
		return Usage{}, false
	}
	block := int64(1024) << shift
	blocks, reserved, free := int64(le.Uint32(sb[4:])), int64(le.Uint32(sb[8:])), int64(le.Uint32(sb[12:]))
	if le.Uint32(sb[0x60:])&0x80 != 0 { // 64-bit block numbers
		blocks |= int64(le.Uint32(sb[0x150:])) << 32
		reserved |= int64(le.Uint32(sb[0x154:])) << 32
		free |= int64(le.Uint32(sb[0x158:])) << 32
	}
	if blocks >= maxSize/block || free > blocks {
		return Usage{}, false
	}
	return Usage{
		Total: blocks * block, Free: free * block, Available: max(0, free-reserved) * block,
		Files: int64(le.Uint32(sb)), FilesFree: int64(le.Uint32(sb[16:])),
		Size: blocks * block,
	}, true
}

// ext4Clean tells whether an ext4 was unmounted, and no error seen in it.
func ext4Clean(dev io.ReaderAt) (bool, error) {
	sb := make([]byte, 1024)
	if _, err := dev.ReadAt(sb, 1024); err != nil {
		return false, fmt.Errorf("read the ext4 superblock: %w", err)
	}
	const valid, failed, replay = 1, 2, 4
	le := binary.LittleEndian
	return le.Uint16(sb[0x3a:])&(valid|failed) == valid && le.Uint32(sb[0x60:])&replay == 0, nil
}

// xfsUsage reads struct xfs_dsb (fs/xfs/libxfs/xfs_format.h).
func xfsUsage(sb []byte) (Usage, bool) {
	be := binary.BigEndian
	if string(sb[:4]) != "XFSB" {
		return Usage{}, false
	}
	block, blocks, unused := int64(be.Uint32(sb[4:])), int64(be.Uint64(sb[8:])), int64(be.Uint64(sb[144:]))
	if block < 512 || block > 64<<10 || blocks < 0 || blocks >= maxSize/block || unused < 0 || unused > blocks {
		return Usage{}, false
	}
	size, free := blocks*block, unused*block
	return Usage{
		Total: size, Free: free, Available: free,
		Files: int64(be.Uint64(sb[128:])), FilesFree: int64(be.Uint64(sb[136:])),
		Size: size,
	}, true
}

// btrfsUsage reads struct btrfs_super_block (uapi/linux/btrfs_tree.h).
func btrfsUsage(sb []byte) (Usage, bool) {
	le := binary.LittleEndian
	if string(sb[0x40:0x48]) != "_BHRfS_M" {
		return Usage{}, false
	}
	total, used := int64(le.Uint64(sb[0x70:])), int64(le.Uint64(sb[0x78:]))
	if used < 0 {
		return Usage{}, false
	}
	return Usage{Total: total, Free: total - used, Available: total - used, Size: total}, true
}

// NeedsGrowth tells whether a filesystem that is not mounted leaves room of
// the device unused.
func NeedsGrowth(dev *os.File, t Type) (bool, error) {
	u, err := ReadUsage(dev, t)
	if err != nil {
		return false, err
	}
	size, err := dev.Seek(0, io.SeekEnd)
	if err != nil {
		return false, err
	}
	// mkfs leaves a remainder of less than a block or a stripe.
	return size-u.Size >= 1<<20, nil
}
