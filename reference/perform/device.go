package perform

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
)

// openDevice opens the device and compares number and diskseq on the
// descriptor, which from then on keeps the number from being given again.
func (x *performance) openDevice(u *unit, spec *mountspec.Spec, exclusive bool) error {
	d := deviceOf(spec)
	name, err := deviceName(d)
	if err != nil {
		return err
	}
	flags := unix.O_RDONLY | unix.O_NONBLOCK
	if exclusive {
		flags |= unix.O_EXCL
	}
	fd, err := open(unix.AT_FDCWD, "/dev/"+name, flags)
	if errors.Is(err, unix.EBUSY) {
		return fmt.Errorf("%w: it is in use: %w", ErrParameters, err)
	}
	if err != nil {
		return err
	}
	u.device = fd
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFBLK || unix.Major(st.Rdev) != d.Major || unix.Minor(st.Rdev) != d.Minor {
		return fmt.Errorf("%w: /dev/%s is not block device %d:%d", ErrDevice, name, d.Major, d.Minor)
	}
	if err := checkDiskseq(fd, d); err != nil {
		return err
	}
	if exclusive {
		closeFD(&u.device) // it would keep the filesystem from taking the device
	}
	return nil
}

func deviceOf(spec *mountspec.Spec) *mountspec.BlockDevice {
	if k, ok := spec.Kind.(*mountspec.Filesystem); ok {
		return k.Device
	}
	return spec.Kind.(*mountspec.BlockDevice)
}

// deviceName returns the name the kernel has for the device, in /dev.
func deviceName(d *mountspec.BlockDevice) (string, error) {
	path := fmt.Sprintf("/sys/dev/block/%d:%d/uevent", d.Major, d.Minor)
	text, err := os.ReadFile(path)
	if err != nil {
		return "", fmt.Errorf("%w: %d:%d is not in sysfs: %w", ErrDevice, d.Major, d.Minor, err)
	}
	for line := range strings.SplitSeq(string(text), "\n") {
		if name, ok := strings.CutPrefix(line, "DEVNAME="); ok {
			return name, nil
		}
	}
	return "", fmt.Errorf("%w: %d:%d has no name in %s", ErrDevice, d.Major, d.Minor, path)
}

func checkDiskseq(fd int, d *mountspec.BlockDevice) error {
	if d.Diskseq == 0 {
		return nil // the plugin does not know it
	}
	seq, err := kernel.Diskseq(fd)
	if err != nil {
		return err
	}
	if seq != d.Diskseq {
		return fmt.Errorf("%w: %d:%d has diskseq %d, want %d: the number is another device's by now", ErrDevice, d.Major, d.Minor, seq, d.Diskseq)
	}
	return nil
}

// checkReadonly sees that the device itself refuses writes: neither a mount
// attribute nor the mode of a node would make it.
func checkReadonly(u *unit, spec *mountspec.Spec) error {
	refuses, err := unix.IoctlGetUint32(u.device, unix.BLKROGET)
	if err != nil {
		return fmt.Errorf("BLKROGET: %w", err)
	}
	if refuses == 0 {
		d := deviceOf(spec)
		return fmt.Errorf("%w: %d:%d is to be read-only, and no mount makes it so; let the plugin answer with one that refuses them", ErrWritable, d.Major, d.Minor)
	}
	return nil
}

// mknod makes the device node in a filesystem that nobody else sees. Outside
// the initial user namespace the kernel lets nobody make one: there the node is
// the host's.
func (x *performance) mknod(u *unit, spec *mountspec.Spec) error {
	d := spec.Kind.(*mountspec.BlockDevice)
	mode := uint32(x.o.NodeMode.Perm())
	if mode == 0 {
		mode = 0o600
	}
	err := unix.Mknodat(u.node, "node", unix.S_IFBLK|mode, int(unix.Mkdev(d.Major, d.Minor)))
	if errors.Is(err, unix.EPERM) {
		return x.hostNode(u, d)
	}
	if err != nil {
		return err
	}
	if err := unix.Fchownat(u.node, "node", x.o.NodeUID, x.o.NodeGID, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return err
	}
	return unix.Fchmodat(u.node, "node", mode, 0) // mknod applies the umask
}

// hostNode takes the node that the host has of the device. Its owner and mode
// are the host's: where the CO asks for others, they cannot be had.
func (x *performance) hostNode(u *unit, d *mountspec.BlockDevice) error {
	name, err := deviceName(d)
	if err != nil {
		return err
	}
	fd, err := open(unix.AT_FDCWD, "/dev/"+name, unix.O_PATH|unix.O_NOFOLLOW)
	if err != nil {
		return err
	}
	closeFD(&u.node)
	u.node, u.hostNode = fd, true
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFBLK || st.Rdev != unix.Mkdev(d.Major, d.Minor) {
		return fmt.Errorf("%w: /dev/%s is not block device %d:%d", ErrDevice, name, d.Major, d.Minor)
	}
	mode := uint32(x.o.NodeMode.Perm())
	asked := x.o.NodeUID != 0 || x.o.NodeGID != 0 || mode != 0
	if asked && (int(st.Uid) != x.o.NodeUID || int(st.Gid) != x.o.NodeGID || st.Mode&0o777 != mode) {
		return fmt.Errorf("make a node for %d:%d with mode %o, owner %d and group %d: %w; the host's is mode %o of %d and %d",
			d.Major, d.Minor, mode, x.o.NodeUID, x.o.NodeGID, unix.EPERM, st.Mode&0o777, st.Uid, st.Gid)
	}
	return nil
}

func (x *performance) cloneNode(u *unit) (err error) {
	name := "node"
	if u.hostNode {
		name = ""
	}
	u.mount, err = kernel.OpenTree(u.node, name, unix.OPEN_TREE_CLONE|unix.AT_SYMLINK_NOFOLLOW)
	return err
}
