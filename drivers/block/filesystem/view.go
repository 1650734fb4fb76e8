package filesystem

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/drivers/block/device"
	"github.com/csi-prepare/csi-prepare/reference/kernel"
)

// Mounted tells whether the device that has the number is mounted with a
// filesystem of the type, in whatever mount namespace. It asks sysfs: to open
// the device in order to see would keep a CO from mounting it meanwhile.
func Mounted(number device.Number, t Type) (bool, error) {
	name, err := device.Name(number)
	if err != nil {
		return false, err
	}
	pattern := filepath.Join("/sys/fs", string(t), name)
	if t == Btrfs {
		pattern = filepath.Join("/sys/fs/btrfs/*/devices", name)
	}
	found, err := filepath.Glob(pattern)
	return len(found) > 0, err
}

// View is a mount that is attached nowhere, of the superblock that the CO has
// mounted, or of one of its own.
type View struct {
	dir *os.File
	t   Type
	dev *os.File
}

// Detach mounts the filesystem on a device, attached nowhere, with the
// attributes of mount_setattr(2), and returns the root of that mount: the mount
// ends when the last descriptor of it does. parameters, "key" or "key=value",
// are those of the other mounts of the device: the kernel ignores different
// ones.
func Detach(dev *os.File, t Type, attributes int, parameters ...string) (*os.File, error) {
	c, err := kernel.OpenFS(string(t))
	if err != nil {
		return nil, err
	}
	defer func() { _ = c.Close() }()
	if err := c.SetString("source", fmt.Sprintf("/proc/self/fd/%d", dev.Fd())); err != nil {
		return nil, err
	}
	for _, p := range parameters {
		key, value, isText := strings.Cut(p, "=")
		if isText {
			err = c.SetString(key, value)
		} else {
			err = c.SetFlag(key)
		}
		if err != nil {
			return nil, err
		}
	}
	if err := c.Create(); err != nil {
		return nil, err
	}
	mount, err := c.Mount(attributes)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(mount), "detached "+string(t)), nil
}

// Open mounts the filesystem on a device. parameters are those of its other
// mounts. Close it soon: while it is the only one, others cannot mount the
// device exclusively.
func Open(dev *os.File, t Type, parameters ...string) (*View, error) {
	mount, err := Detach(dev, t, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOEXEC|unix.MOUNT_ATTR_NOATIME, parameters...)
	if err != nil {
		return nil, err
	}
	defer mount.Close()
	dir, err := unix.Openat(int(mount.Fd()), ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open the root of the %s: %w", t, err)
	}
	return &View{os.NewFile(uintptr(dir), "root of the "+string(t)), t, dev}, nil
}

// Close ends the mount.
func (v *View) Close() error { return v.dir.Close() }

// Usage asks the filesystem.
func (v *View) Usage() (Usage, error) {
	var s unix.Statfs_t
	if err := unix.Fstatfs(int(v.dir.Fd()), &s); err != nil {
		return Usage{}, fmt.Errorf("statfs: %w", err)
	}
	block := s.Frsize
	if block == 0 {
		block = s.Bsize
	}
	return Usage{
		Total: int64(s.Blocks) * block, Free: int64(s.Bfree) * block, Available: int64(s.Bavail) * block,
		Files: int64(s.Files), FilesFree: int64(s.Ffree),
	}, nil
}

// Sync writes to the device what the filesystem holds back (syncfs(2)).
func (v *View) Sync() error {
	if err := unix.Syncfs(int(v.dir.Fd())); err != nil {
		return fmt.Errorf("syncfs: %w", err)
	}
	return nil
}

// Requests of ioctl(2) that golang.org/x/sys lacks.
const (
	ext4Resize  = 0x40086610 // EXT4_IOC_RESIZE_FS, the number of blocks
	xfsGrow     = 0x4010586e // XFS_IOC_FSGROWFSDATA
	xfsGeometry = 0x80705864 // XFS_IOC_FSGEOMETRY_V1
	btrfsResize = 0x50009403 // BTRFS_IOC_RESIZE
)

// xfsGrowData is struct xfs_growfs_data.
type xfsGrowData struct {
	blocks  uint64
	inodes  uint32 // imaxpct
	padding uint32
}

// xfsGeometryV1 is struct xfs_fsop_geom_v1.
type xfsGeometryV1 struct {
	block  uint32
	_      [6]uint32
	inodes uint32 // imaxpct
	blocks uint64
	_      [72]byte
}

// btrfsVolume is struct btrfs_ioctl_vol_args.
type btrfsVolume struct {
	_    int64
	name [4088]byte
}

// Grow lets the filesystem on a device take all of it, also while it is in use.
// It is no error if there is nothing to take. parameters are those of its
// other mounts.
//
// The kernel does it, journaled. It lets ext4 grow only for CAP_SYS_RESOURCE:
// without that resize2fs does it, and not while the filesystem is mounted.
func Grow(ctx context.Context, dev *os.File, number device.Number, t Type, parameters ...string) error {
	v, err := Open(dev, t, parameters...)
	if err != nil {
		return err
	}
	if err = errors.Join(v.grow(), v.Close()); t != Ext4 || !errors.Is(err, unix.EPERM) {
		return err
	}
	mounted, failed := Mounted(number, t)
	if failed != nil {
		return failed
	}
	if mounted {
		return ErrPrivilege
	}
	if err := check(ctx, dev, "-f", "-p"); err != nil {
		return err
	}
	_, err = run(ctx, dev, "resize2fs", onDescriptor)
	return err
}

// ErrPrivilege says that a mounted ext4 cannot grow.
var ErrPrivilege = errors.New("ext4 grows while it is mounted only for a process with CAP_SYS_RESOURCE, which this one lacks; it grows when the volume is staged again")

func (v *View) grow() error {
	size, err := device.Size(v.dev)
	if err != nil {
		return err
	}
	switch v.t {
	case Ext4:
		var s unix.Statfs_t
		if err := unix.Fstatfs(int(v.dir.Fd()), &s); err != nil {
			return fmt.Errorf("statfs: %w", err)
		}
		blocks := uint64(size / s.Bsize)
		return v.request(ext4Resize, unsafe.Pointer(&blocks))
	case XFS:
		var g xfsGeometryV1
		if err := v.request(xfsGeometry, unsafe.Pointer(&g)); err != nil {
			return err
		}
		d := xfsGrowData{blocks: uint64(size) / uint64(g.block), inodes: g.inodes}
		if d.blocks <= g.blocks {
			return nil
		}
		return v.request(xfsGrow, unsafe.Pointer(&d))
	case Btrfs:
		var args btrfsVolume
		copy(args.name[:], "max")
		return v.request(btrfsResize, unsafe.Pointer(&args))
	}
	return errors.ErrUnsupported
}

func (v *View) request(request uint, arg unsafe.Pointer) error {
	r, _, errno := unix.Syscall(unix.SYS_IOCTL, v.dir.Fd(), uintptr(request), uintptr(arg))
	switch {
	case errno != 0:
		return fmt.Errorf("grow the %s: %w", v.t, errno)
	case r != 0: // of btrfs, another long operation runs
		return fmt.Errorf("grow the %s: %w", v.t, unix.EBUSY)
	}
	return nil
}
