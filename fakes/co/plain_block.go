package co

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
)

// device makes the node of a block device, attached nowhere, in a filesystem
// of its own.
func (p *Plain) device(s mountspec.Spec) (fd int, err error) {
	k := s.Kind.(*mountspec.BlockDevice)
	f, err := p.open(k, s.Attributes.Readonly)
	if err != nil {
		return -1, &StateError{"block_device", err}
	}
	defer f.Close()
	if s.Attributes.Readonly {
		if err := p.refusesWrites(f); err != nil {
			return -1, &StateError{"block_device", err}
		}
	}
	return p.node(k)
}

// refusesWrites sees that the device itself takes no write: a mount of its node
// cannot make it.
func refusesWrites(f *os.File) error {
	readonly, err := unix.IoctlGetUint32(int(f.Fd()), unix.BLKROGET)
	if err == nil && readonly == 0 {
		err = errors.New("takes writes, and is to be read-only")
	}
	if err != nil {
		return fmt.Errorf("%s: %w", f.Name(), err)
	}
	return nil
}

// node makes a node for root alone.
func node(d *mountspec.BlockDevice) (int, error) {
	return nodeOf(unix.S_IFBLK|0o600, d)
}

func nodeOf(mode uint32, d *mountspec.BlockDevice) (int, error) {
	c, err := kernel.OpenFS("tmpfs")
	if err != nil {
		return -1, err
	}
	defer func() { _ = c.Close() }() // what it made is in the descriptor of the mount
	if err := c.Create(); err != nil {
		return -1, err
	}
	dir, err := c.Mount(0)
	if err != nil {
		return -1, err
	}
	defer unix.Close(dir)
	if err := unix.Mknodat(dir, "node", mode, int(unix.Mkdev(d.Major, d.Minor))); err != nil {
		return -1, &os.PathError{Op: "mknod", Path: fmt.Sprintf("%d:%d", d.Major, d.Minor), Err: err}
	}
	return kernel.OpenTree(dir, "node", unix.OPEN_TREE_CLONE)
}
