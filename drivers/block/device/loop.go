package device

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// Loop is a loop device, as a record keeps it: made before the device is
// attached, completed after.
type Loop struct {
	// Mark is random, and kept by the kernel with the device (lo_file_name):
	// it tells the device from one that somebody else attached to the same
	// file, and finds it where a process died before it had the number.
	Mark     string  `json:"mark"`
	Readonly bool    `json:"readonly,omitempty"`
	Backing  Backing `json:"backing"`
	// Number and Diskseq are those of the device. Diskseq is 0 until
	// Attach has returned.
	Number  Number `json:"number"`
	Diskseq uint64 `json:"diskseq,omitempty"`
}

// Backing is the identity of what a loop device is attached to.
type Backing struct {
	// Device and Inode of a file, as in stat(2).
	Device uint64 `json:"device,omitempty"`
	Inode  uint64 `json:"inode,omitempty"`
	// Rdev of a block device, which then is all there is.
	Rdev uint64 `json:"rdev,omitempty"`
}

// BackingOf an open file or block device.
func BackingOf(f *os.File) (Backing, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return Backing{}, fmt.Errorf("stat %s: %w", f.Name(), err)
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		return Backing{Device: st.Dev, Inode: st.Ino}, nil
	case unix.S_IFBLK:
		return Backing{Rdev: st.Rdev}, nil
	}
	return Backing{}, fmt.Errorf("%s: is neither a regular file nor a block device", f.Name())
}

func (b Backing) is(info *unix.LoopInfo64) bool {
	if b.Rdev != 0 {
		return info.Rdevice == b.Rdev
	}
	return info.Device == b.Device && info.Inode == b.Inode
}

// markPrefix begins the mark of every device of an owner.
func markPrefix(owner string) string { return "csi-prepare:" + owner + ":" }

// NewLoop is the loop device that a file is going to be attached as. owner, 16
// bytes at most, tells the devices of one driver from those of another.
func NewLoop(owner string, backing *os.File, readonly bool) (Loop, error) {
	b, err := BackingOf(backing)
	if err != nil {
		return Loop{}, err
	}
	random := make([]byte, 16)
	rand.Read(random)
	return Loop{Mark: markPrefix(owner) + hex.EncodeToString(random), Readonly: readonly, Backing: b}, nil
}

// is tells whether a loop device is this one.
func (l Loop) is(info *unix.LoopInfo64) bool {
	return markOf(info) == l.Mark && l.Backing.is(info)
}

func markOf(info *unix.LoopInfo64) string {
	name, _, _ := bytes.Cut(info.File_name[:], []byte{0})
	return string(name)
}

// sector is the logical block size of every loop device, in bytes. Left to
// itself the kernel takes that which direct I/O on the file needs, which is
// another one for a copy with shared blocks than for the file it was made of:
// and a filesystem cannot be mounted where it is larger than when it was made.
const sector = 512

// attempts bounds how often another program may take the free device first.
const attempts = 64

// Attach makes l a device, with direct I/O where the file can do that at the
// size of a sector. It is not detached when this process ends. The kernel's
// limit of loop devices is ENOSPC.
func (n *Nodes) Attach(ctx context.Context, l Loop, backing *os.File) (Loop, error) {
	for range attempts {
		if err := ctx.Err(); err != nil {
			return l, err
		}
		number, err := n.free()
		if err != nil {
			return l, err
		}
		err = n.configure(&l, number, backing)
		if !errors.Is(err, unix.EBUSY) {
			return l, err
		}
	}
	return l, fmt.Errorf("attach a loop device: others took each free one first: %w", unix.EBUSY)
}

// free finds a loop device that is not attached, and makes one if there is
// none.
func (n *Nodes) free() (Number, error) {
	text, err := os.ReadFile("/sys/class/misc/loop-control/dev")
	if err != nil {
		return Number{}, fmt.Errorf("find the loop driver, is the module loaded? %w", err)
	}
	number, err := parseNumber(string(text))
	if err != nil {
		return Number{}, err
	}
	control, err := n.open(unix.S_IFCHR, "loop-control", number, unix.O_RDWR)
	if err != nil {
		return Number{}, err
	}
	defer control.Close()
	index, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
	if err != nil {
		return Number{}, fmt.Errorf("get a free loop device: %w", err)
	}
	text, err = os.ReadFile(fmt.Sprintf("/sys/block/loop%d/dev", index))
	if err != nil {
		return Number{}, err
	}
	return parseNumber(string(text))
}

func (n *Nodes) configure(l *Loop, number Number, backing *os.File) error {
	flags := unix.O_RDWR
	c := unix.LoopConfig{Fd: uint32(backing.Fd()), Size: sector}
	c.Info.Flags = unix.LO_FLAGS_DIRECT_IO
	copy(c.Info.File_name[:], l.Mark)
	if l.Readonly {
		// No ioctl(2) on the device takes this from it again, as BLKROSET
		// with 0 would take away what BLKROSET set.
		c.Info.Flags |= unix.LO_FLAGS_READ_ONLY
		flags = unix.O_RDONLY
	}
	f, err := n.Open(number, flags)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := unix.IoctlLoopConfigure(int(f.Fd()), &c); err != nil {
		return fmt.Errorf("attach %s: %w", number, err)
	}
	if !l.Readonly {
		// What BLKROSET has set outlives the device and holds for the next
		// one of the number.
		if err := unix.IoctlSetPointerInt(int(f.Fd()), unix.BLKROSET, 0); err != nil {
			return fmt.Errorf("make %s writable: %w", number, err)
		}
	}
	// While it is open the device is attached to nothing else.
	l.Number = number
	l.Diskseq, err = Diskseq(number)
	return err
}

// openIf opens the device that has the number if it is l.
func (n *Nodes) openIf(l Loop, number Number, flags int) (*os.File, *unix.LoopInfo64, error) {
	f, err := n.Open(number, flags)
	if errors.Is(err, unix.ENXIO) || errors.Is(err, unix.ENODEV) {
		return nil, nil, nil // being detached, or removed
	}
	if err != nil {
		return nil, nil, err
	}
	info, err := unix.IoctlLoopGetStatus64(int(f.Fd()))
	switch {
	case err == nil && l.is(info):
		return f, info, nil
	case err == nil, errors.Is(err, unix.ENXIO), errors.Is(err, unix.ENOTTY), errors.Is(err, unix.EINVAL):
		_ = f.Close() // not attached, attached to something else, or no loop device
		return nil, nil, nil
	}
	_ = f.Close()
	return nil, nil, fmt.Errorf("status of %s: %w", number, err)
}

// Attached tells whether l is still the device that Attach made.
func (n *Nodes) Attached(l Loop) (bool, error) {
	f, err := n.OpenLoop(l, unix.O_RDONLY)
	if f == nil {
		return false, err
	}
	return true, f.Close()
}

// OpenLoop opens a loop device that Attach returned; nil if it is gone,
// whatever has its number.
func (n *Nodes) OpenLoop(l Loop, flags int) (*os.File, error) {
	if l.Mark == "" || l.Number == (Number{}) {
		return nil, nil
	}
	f, _, err := n.openIf(l, l.Number, flags)
	if f == nil || err != nil {
		return nil, err
	}
	now, err := Diskseq(l.Number)
	if err != nil || l.Diskseq != 0 && now != l.Diskseq {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

// loops are the numbers of the loop devices that are attached.
func loops() ([]Number, error) {
	// The directory loop is there while the device is attached.
	found, err := filepath.Glob("/sys/block/loop*/loop")
	if err != nil {
		return nil, err
	}
	var all []Number
	for _, dir := range found {
		text, err := os.ReadFile(filepath.Join(filepath.Dir(dir), "dev"))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		number, err := parseNumber(string(text))
		if err != nil {
			return nil, err
		}
		all = append(all, number)
	}
	return all, nil
}

// Find looks for l among all loop devices, by its mark, and returns it with
// its number: for one whose Attach may have been cut off.
func (n *Nodes) Find(l Loop) (Loop, bool, error) {
	if l.Mark == "" {
		return l, false, nil
	}
	all, err := loops()
	if err != nil {
		return l, false, err
	}
	for _, number := range all {
		f, _, err := n.openIf(l, number, unix.O_RDONLY)
		if err != nil {
			return l, false, err
		}
		if f == nil {
			continue
		}
		l.Number = number
		l.Diskseq, err = Diskseq(number)
		_ = f.Close()
		return l, err == nil, err
	}
	return l, false, nil
}

// each calls see with every loop device that is attached.
func (n *Nodes) each(see func(Number, *unix.LoopInfo64) error) error {
	all, err := loops()
	if err != nil {
		return err
	}
	for _, number := range all {
		f, err := n.Open(number, unix.O_RDONLY)
		if errors.Is(err, unix.ENXIO) || errors.Is(err, unix.ENODEV) {
			continue
		}
		if err != nil {
			return err
		}
		info, err := unix.IoctlLoopGetStatus64(int(f.Fd()))
		if err == nil {
			err = see(number, info)
		} else if errors.Is(err, unix.ENXIO) {
			err = nil // detached meanwhile
		}
		_ = f.Close()
		if err != nil {
			return err
		}
	}
	return nil
}

// Others returns the loop devices that are attached to a file and are none of
// mine, by their marks: two devices over one file do not see each other's
// writes.
func (n *Nodes) Others(b Backing, mine map[string]bool) (others []Number, err error) {
	err = n.each(func(number Number, info *unix.LoopInfo64) error {
		if b.is(info) && !mine[markOf(info)] {
			others = append(others, number)
		}
		return nil
	})
	return others, err
}

// Owned returns the loop devices with a mark of an owner.
func (n *Nodes) Owned(owner string) (owned []Loop, err error) {
	err = n.each(func(number Number, info *unix.LoopInfo64) error {
		if !strings.HasPrefix(markOf(info), markPrefix(owner)) {
			return nil
		}
		seq, err := Diskseq(number)
		owned = append(owned, Loop{
			Mark: markOf(info), Readonly: info.Flags&unix.LO_FLAGS_READ_ONLY != 0,
			Backing: Backing{Device: info.Device, Inode: info.Inode, Rdev: info.Rdevice},
			Number:  number, Diskseq: seq,
		})
		return err
	})
	return owned, err
}

// Resize lets the device take the size its file has by now (LOOP_SET_CAPACITY).
func (n *Nodes) Resize(l Loop) error {
	f, err := n.OpenLoop(l, unix.O_RDONLY)
	if err != nil {
		return err
	}
	if f == nil {
		return fmt.Errorf("resize %s: %w", l.Number, ErrGone)
	}
	defer f.Close()
	if _, err := unix.IoctlRetInt(int(f.Fd()), unix.LOOP_SET_CAPACITY); err != nil {
		return fmt.Errorf("resize %s: %w", l.Number, err)
	}
	return nil
}
