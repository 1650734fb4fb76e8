package filesystem

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/drivers/block/device"
)

// Make makes a filesystem on a device that was proven blank. Each mkfs looks
// for signatures once more, and is not told to ignore any. at is an existing
// directory for mkfs.btrfs, which resolves the path it is given.
func Make(ctx context.Context, nodes *device.Nodes, number device.Number, t Type, at string) error {
	dev, err := nodes.Open(number, unix.O_RDWR)
	if err != nil {
		return err
	}
	defer dev.Close()
	switch t {
	case Ext4:
		// No blocks are kept for root: the volume is one consumer's.
		_, err = run(ctx, dev, "mkfs.ext4", "-q", "-m", "0", onDescriptor)
	case XFS:
		_, err = run(ctx, dev, "mkfs.xfs", "-q", onDescriptor)
	case Btrfs:
		err = nodes.Named(number, at, func(path string) error {
			_, err := run(ctx, dev, "mkfs.btrfs", "-q", path)
			return err
		})
	default:
		return fmt.Errorf("filesystem type %q: is none of %v", t, Types)
	}
	if err != nil {
		return err
	}
	return dev.Sync()
}

// Exit codes of fsck(8), as a set.
const (
	fsckCorrected = 1
	fsckReboot    = 2
)

// Check repairs what a crash may have left and can be repaired without loss;
// a clean filesystem is not written to. xfs and btrfs check themselves when
// they are mounted and have nothing to do here. The device is not mounted.
func Check(ctx context.Context, dev *os.File, t Type) error {
	if t != Ext4 {
		return nil
	}
	// e2fsck writes to the superblock of a clean filesystem, too.
	if clean, err := ext4Clean(dev); clean || err != nil {
		return err
	}
	return check(ctx, dev, "-p")
}

func check(ctx context.Context, dev *os.File, flags ...string) error {
	_, err := run(ctx, dev, "e2fsck", append(flags, onDescriptor)...)
	var failed *ToolError
	if errors.As(err, &failed) && failed.Code > 0 && failed.Code&^(fsckCorrected|fsckReboot) == 0 {
		return nil
	}
	return err
}

// Erase writes zeros over a device; a file behind it loses its data blocks.
func Erase(ctx context.Context, dev *os.File) error {
	size, err := device.Size(dev)
	if err != nil {
		return err
	}
	const chunk = 256 << 20
	for at := int64(0); at < size; at += chunk {
		if err := ctx.Err(); err != nil {
			return err
		}
		// FALLOC_FL_PUNCH_HOLE on a device: zeros, freed where it can be.
		length := min(chunk, size-at)
		if err := unix.Fallocate(int(dev.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, at, length); err == nil {
			continue
		}
		if err := unix.Fallocate(int(dev.Fd()), unix.FALLOC_FL_ZERO_RANGE|unix.FALLOC_FL_KEEP_SIZE, at, length); err != nil {
			return fmt.Errorf("erase %s at byte %d: %w", dev.Name(), at, err)
		}
	}
	return dev.Sync()
}
