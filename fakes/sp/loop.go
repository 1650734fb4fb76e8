package sp

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// device is what a mount spec says of a block device.
type device struct {
	major, minor uint32
	diskseq      uint64
	path         string
}

// attach makes a loop device of a file, under a mark that finds it again. One
// that is there already is returned.
func attach(file, mark string, readonly bool) (device, error) {
	if d, found, err := attached(mark); found || err != nil {
		return d, err
	}
	mode, flags := os.O_RDWR, uint32(0)
	if readonly {
		mode, flags = os.O_RDONLY, unix.LO_FLAGS_READ_ONLY
	}
	backing, err := os.OpenFile(file, mode, 0)
	if err != nil {
		return device{}, err
	}
	defer backing.Close()
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return device{}, err
	}
	defer control.Close()
	config := unix.LoopConfig{Fd: uint32(backing.Fd()), Size: 512, Info: unix.LoopInfo64{Flags: flags | unix.LO_FLAGS_DIRECT_IO}}
	copy(config.Info.File_name[:], mark)
	for range 64 { // another process may take the free one first
		n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return device{}, os.NewSyscallError("LOOP_CTL_GET_FREE", err)
		}
		loop, err := os.OpenFile("/dev/loop"+strconv.Itoa(n), mode, 0)
		if err != nil {
			return device{}, err
		}
		err = unix.IoctlLoopConfigure(int(loop.Fd()), &config)
		if err == nil {
			d, err := describe(loop.Name())
			return d, errors.Join(err, loop.Close())
		}
		_ = loop.Close()
		if !errors.Is(err, unix.EBUSY) {
			return device{}, os.NewSyscallError("LOOP_CONFIGURE", err)
		}
	}
	return device{}, errors.New("attaching a loop device: others took each free one first")
}

// attached finds the loop device with a mark.
func attached(mark string) (d device, found bool, err error) {
	dirs, err := filepath.Glob("/sys/block/loop*/loop")
	if err != nil {
		return device{}, false, err
	}
	for _, dir := range dirs {
		loop, err := os.Open("/dev/" + filepath.Base(filepath.Dir(dir)))
		if err != nil {
			continue // detached, or removed, a moment ago
		}
		info, err := unix.IoctlLoopGetStatus64(int(loop.Fd()))
		if err == nil {
			name, _, _ := bytes.Cut(info.File_name[:], []byte{0})
			found = string(name) == mark
		}
		if found {
			d, err = describe(loop.Name())
		}
		_ = loop.Close()
		if found {
			return d, true, err
		}
	}
	return device{}, false, nil
}

// detach ends the loop device with a mark; that there is none is no error.
func detach(mark string) error {
	for end := time.Now().Add(5 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		d, found, err := attached(mark)
		if err != nil || !found {
			return err
		}
		if time.Now().After(end) {
			return fmt.Errorf("detaching %s: %w", d.path, unix.EBUSY)
		}
		loop, err := os.Open(d.path)
		if err != nil {
			return err
		}
		_, err = unix.IoctlRetInt(int(loop.Fd()), unix.LOOP_CLR_FD)
		_ = loop.Close()
		if err != nil && !errors.Is(err, unix.ENXIO) {
			return os.NewSyscallError("LOOP_CLR_FD", err)
		}
	}
}

// describe reads what a device is, by now.
func describe(path string) (device, error) {
	d := device{path: path}
	dir := filepath.Join("/sys/block", filepath.Base(path))
	number, err := os.ReadFile(filepath.Join(dir, "dev"))
	if err != nil {
		return d, err
	}
	if _, err := fmt.Sscanf(string(number), "%d:%d", &d.major, &d.minor); err != nil {
		return d, fmt.Errorf("%s: %q: %w", dir, number, err)
	}
	text, err := os.ReadFile(filepath.Join(dir, "diskseq"))
	if err != nil {
		return d, err
	}
	d.diskseq, err = strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64)
	return d, err
}
