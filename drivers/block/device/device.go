// Package device opens block devices by their number, tells one from another,
// and attaches files as loop devices.
//
// No path in /dev is ever used: links there are stale at times, names are
// given anew, and a container's /dev may be empty. Nodes are made where nobody
// else gets to them, what they open is compared with what it should be, and
// only then is anything done.
//
// It needs Linux 5.8 (LOOP_CONFIGURE), /proc, /sys, CAP_SYS_ADMIN and
// CAP_MKNOD.
package device

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
)

// Number is the number of a block device. It is given to another device as
// soon as this one is gone.
type Number struct {
	Major uint32 `json:"major"`
	Minor uint32 `json:"minor"`
}

// String is the number as in /sys/dev/block, such as "7:3".
func (n Number) String() string { return fmt.Sprintf("%d:%d", n.Major, n.Minor) }

func numberOf(rdev uint64) Number { return Number{unix.Major(rdev), unix.Minor(rdev)} }

// parseNumber reads the form of sysfs.
func parseNumber(text string) (Number, error) {
	var n Number
	if _, err := fmt.Sscanf(strings.TrimSpace(text), "%d:%d", &n.Major, &n.Minor); err != nil {
		return n, fmt.Errorf("device number %q: %w", text, err)
	}
	return n, nil
}

// Nodes is a directory of device nodes in a filesystem that is attached
// nowhere: no process but this one sees it, and it ends with the process. It
// may be used by several goroutines at once.
type Nodes struct {
	dir *os.File

	mu   sync.Mutex
	made map[string]bool
}

// NewNodes makes an empty one.
func NewNodes() (*Nodes, error) {
	c, err := kernel.OpenFS("tmpfs")
	if err != nil {
		return nil, err
	}
	defer func() { _ = c.Close() }()
	err = errors.Join(c.SetString("source", "csi-prepare"), c.SetString("mode", "0700"))
	if err == nil {
		err = c.Create()
	}
	if err != nil {
		return nil, err
	}
	dir, err := c.Mount(unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NOEXEC)
	if err != nil {
		return nil, err
	}
	return &Nodes{dir: os.NewFile(uintptr(dir), "device nodes"), made: map[string]bool{}}, nil
}

// Close gives the directory up. Devices opened from it stay open.
func (n *Nodes) Close() error { return n.dir.Close() }

// Open opens a block device. flags are open(2)'s. Which device has the number
// now is for the caller to check, on the descriptor.
func (n *Nodes) Open(number Number, flags int) (*os.File, error) {
	return n.open(unix.S_IFBLK, "b"+number.String(), number, flags)
}

func (n *Nodes) open(kind uint32, name string, number Number, flags int) (*os.File, error) {
	if err := n.make(kind, name, number); err != nil {
		return nil, err
	}
	for {
		fd, err := unix.Openat(int(n.dir.Fd()), name, flags|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
		switch {
		case err == nil:
			return os.NewFile(uintptr(fd), "device "+number.String()), nil
		case !errors.Is(err, unix.EINTR):
			return nil, &os.PathError{Op: "open", Path: "device " + number.String(), Err: err}
		}
	}
}

func (n *Nodes) make(kind uint32, name string, number Number) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.made[name] {
		return nil
	}
	dev := int(unix.Mkdev(number.Major, number.Minor))
	if err := unix.Mknodat(int(n.dir.Fd()), name, kind|0o600, dev); err != nil {
		return &os.PathError{Op: "mknod", Path: "device " + number.String(), Err: err}
	}
	n.made[name] = true
	return nil
}

// Named runs fn on a thread with a mount namespace of its own, in which the
// node of a device has the path that fn gets, at the directory at, which
// exists. Processes that fn starts see it too; nobody else does. For programs
// that resolve the path they are given, and so cannot take a descriptor.
func (n *Nodes) Named(number Number, at string, fn func(path string) error) error {
	name := "b" + number.String()
	if err := n.make(unix.S_IFBLK, name, number); err != nil {
		return err
	}
	result := make(chan error, 1)
	kernel.StartThread(func() {
		err := errors.New("the thread ended early")
		defer func() { result <- err }()
		if err = n.attach(at); err == nil {
			err = fn(filepath.Join(at, name))
		}
	})
	return <-result
}

// attach shows the nodes at a directory, in a new mount namespace of the
// calling thread. Mounts that end elsewhere end in it, too.
func (n *Nodes) attach(at string) error {
	if err := unix.Unshare(unix.CLONE_NEWNS | unix.CLONE_FS); err != nil {
		return fmt.Errorf("unshare: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		return fmt.Errorf("make the mounts of a new namespace slaves: %w", err)
	}
	clone, err := kernel.OpenTree(int(n.dir.Fd()), "", unix.OPEN_TREE_CLONE)
	if err != nil {
		return err
	}
	defer unix.Close(clone)
	return kernel.MoveMountAt(clone, "", unix.AT_FDCWD, at, 0)
}

// sysBlock is the directory of a block device in sysfs.
func sysBlock(n Number) string { return "/sys/dev/block/" + n.String() }

// Name is the kernel's name of the device that has the number now, such as
// "loop3".
func Name(n Number) (string, error) {
	link, err := os.Readlink(sysBlock(n))
	if err != nil {
		return "", fmt.Errorf("device %s: %w", n, err)
	}
	return filepath.Base(link), nil
}

// Diskseq is the sequence number of the device that has the number now. The
// kernel gives each once in a boot: it differs where number and name are the
// same and the device is not. 0 where the kernel has none (before 5.15).
func Diskseq(n Number) (uint64, error) {
	text, err := os.ReadFile(filepath.Join(sysBlock(n), "diskseq"))
	if errors.Is(err, fs.ErrNotExist) {
		if _, err := os.Lstat(sysBlock(n)); err != nil {
			return 0, fmt.Errorf("device %s: %w", n, err)
		}
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	return strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64)
}

// Size is the size of an open block device in bytes.
func Size(f *os.File) (int64, error) {
	// The size in bytes where an unsigned long has 64 bits.
	size, err := unix.IoctlGetInt(int(f.Fd()), unix.BLKGETSIZE64)
	if err != nil {
		return 0, fmt.Errorf("size of %s: %w", f.Name(), err)
	}
	return int64(size), nil
}

// BusyError tells of a device that somebody uses.
type BusyError struct {
	Number Number
	// Use is what is known of it.
	Use string
}

// Error names the device and its use.
func (e *BusyError) Error() string {
	name, err := Name(e.Number)
	if err != nil {
		name = "device"
	}
	return fmt.Sprintf("%s (%s) is in use: %s", name, e.Number, e.Use)
}

// Claim opens a device for this process alone: while it is open the device
// cannot be mounted, in whatever mount namespace, and where it is mounted,
// swapped to or part of another device Claim fails with a *BusyError. A
// process that merely has the device open does not count.
func (n *Nodes) Claim(number Number, flags int) (*os.File, error) {
	f, err := n.Open(number, flags|unix.O_EXCL)
	if errors.Is(err, unix.EBUSY) {
		return nil, &BusyError{number, "it is mounted, perhaps in another mount namespace, or claimed by another program"}
	}
	return f, err
}
