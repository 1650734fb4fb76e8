package co

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/mountspec"
)

// Device is a block device with a filesystem that this CO performs, and that
// nobody had in use before.
type Device struct {
	Major uint32 `json:"major"`
	Minor uint32 `json:"minor"`
	// Diskseq is 0 where it was not known.
	Diskseq uint64 `json:"diskseq,omitempty"`
}

// String is "major:minor".
func (d Device) String() string { return fmt.Sprintf("%d:%d", d.Major, d.Minor) }

// DeviceBusyError is a device that is in use although no mount is left of what
// was performed from it. A mount in no table can be the reason: one that was
// detached while busy, or that a descriptor holds. It is unix.EBUSY to errors.Is.
type DeviceBusyError struct {
	Device Device
	// Mounts of the device in the mount namespaces of the machine.
	Mounts []FoundMount
}

// Error says what is known of who uses it.
func (e *DeviceBusyError) Error() string {
	if len(e.Mounts) == 0 {
		return fmt.Sprintf("device %s is still in use, and no mount namespace has a mount of it: one was detached while busy, or a descriptor holds one; the volume stays where it is until that has ended", e.Device)
	}
	var where []string
	for _, m := range e.Mounts {
		where = append(where, fmt.Sprintf("%s in mount namespace %d", m.Mount, m.Namespace))
	}
	return fmt.Sprintf("device %s is still in use: %s; the volume stays where it is until that has ended", e.Device, strings.Join(where, "; "))
}

// Is makes it the EBUSY it stands for.
func (e *DeviceBusyError) Is(target error) bool { return target == unix.EBUSY }

// unused returns the devices of specs that nobody has in use yet.
func unused(specs []mountspec.Spec) (free []Device) {
	for i := range specs {
		f, ok := specs[i].Kind.(*mountspec.Filesystem)
		if !ok || f.Device == nil {
			continue
		}
		d := Device{f.Device.Major, f.Device.Minor, f.Device.Diskseq}
		if busy, err := d.busy(); err == nil && !busy {
			free = append(free, d)
		}
	}
	return free
}

// busy asks the kernel, which gives an exclusive open to one holder at a time
// (open(2), O_EXCL). A device that is gone, or that is another one by now, is
// not in use.
func (d Device) busy() (bool, error) {
	dir := "/sys/dev/block/" + d.String()
	if d.Diskseq != 0 {
		text, err := os.ReadFile(dir + "/diskseq")
		if errors.Is(err, os.ErrNotExist) {
			return false, nil
		}
		if err != nil {
			return false, err
		}
		if now, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64); err != nil || now != d.Diskseq {
			return false, err
		}
	}
	name, err := d.name(dir)
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	fd, err := unix.Open("/dev/"+name, unix.O_RDONLY|unix.O_EXCL|unix.O_NONBLOCK|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	switch {
	case errors.Is(err, unix.EBUSY):
		return true, nil
	case errors.Is(err, unix.ENXIO), errors.Is(err, unix.ENODEV), errors.Is(err, unix.ENOMEDIUM):
		return false, nil
	case err != nil:
		return false, &os.PathError{Op: "open", Path: "/dev/" + name, Err: err}
	}
	defer unix.Close(fd)
	var stat unix.Stat_t
	if err := unix.Fstat(fd, &stat); err != nil {
		return false, os.NewSyscallError("fstat", err)
	}
	if stat.Mode&unix.S_IFMT != unix.S_IFBLK || stat.Rdev != unix.Mkdev(d.Major, d.Minor) {
		return false, fmt.Errorf("/dev/%s is not device %s", name, d)
	}
	return false, nil
}

// name is the kernel's name of the device, as sysfs has it.
func (d Device) name(dir string) (string, error) {
	f, err := os.Open(dir + "/uevent")
	if err != nil {
		return "", err
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		if name, found := strings.CutPrefix(lines.Text(), "DEVNAME="); found {
			return name, nil
		}
	}
	return "", errors.Join(lines.Err(), fmt.Errorf("%s/uevent: no DEVNAME", dir))
}
