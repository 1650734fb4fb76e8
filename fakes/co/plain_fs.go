package co

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
)

// filesystem makes an instance of a filesystem, attached nowhere.
func (p *Plain) filesystem(f *mountspec.Filesystem) (fd int, err error) {
	c, err := kernel.OpenFS(f.Type)
	if err != nil {
		return -1, err
	}
	defer func() { _ = c.Close() }() // what it made is in the descriptor of the mount
	source := f.Source
	if f.Device != nil {
		device, err := p.open(f.Device, f.SuperblockReadonly)
		if err != nil {
			return -1, &StateError{"filesystem.device", err}
		}
		defer device.Close()
		// Looked up once: the kernel opens what was checked.
		source = fmt.Sprintf("/proc/self/fd/%d", device.Fd())
	}
	if source != "" {
		if err := c.SetString("source", source); err != nil {
			return -1, err
		}
	}
	if err := configure(c, f); err != nil {
		return -1, err
	}
	if err := p.create(p, c, f); err != nil {
		return -1, err
	}
	return c.Mount(0)
}

// configure sets the superblock parameters in their order.
func configure(c *kernel.FSContext, f *mountspec.Filesystem) error {
	if f.SuperblockReadonly {
		if err := c.SetFlag("ro"); err != nil {
			return err
		}
	}
	for _, q := range f.Parameters {
		var err error
		switch {
		case !q.Secret.IsZero():
			err = c.SetSecret(q.Key, q.Secret.Reveal())
		case q.Text != "":
			err = c.SetString(q.Key, q.Text)
		default:
			err = c.SetFlag(q.Key)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// createExclusive makes superblocks. The kernel gives a second mount of one
// device the superblock of the first and ignores its parameters: the first is
// therefore made exclusively, and a later one only with the same parameters.
func createExclusive() func(*Plain, *kernel.FSContext, *mountspec.Filesystem) error {
	var mu sync.Mutex
	made := make(map[mountspec.BlockDevice]mountspec.Filesystem)
	return func(_ *Plain, c *kernel.FSContext, f *mountspec.Filesystem) error {
		if f.Device == nil {
			return c.Create()
		}
		mu.Lock()
		defer mu.Unlock()
		err := c.CreateExclusive()
		if err == nil {
			made[*f.Device] = *f
			return nil
		}
		if first, ours := made[*f.Device]; errors.Is(err, unix.EBUSY) && ours && alike(first, *f) {
			return c.Create()
		}
		return err
	}
}

// alike reports whether two filesystems have one superblock's parameters.
func alike(a, b mountspec.Filesystem) bool {
	return a.Type == b.Type && a.SuperblockReadonly == b.SuperblockReadonly && slices.Equal(a.Parameters, b.Parameters)
}

// openDevice opens the device with the numbers of d and sees that it is the
// one that had them when the plugin looked.
func openDevice(d *mountspec.BlockDevice, readonly bool) (*os.File, error) {
	sys := fmt.Sprintf("/sys/dev/block/%d:%d/", d.Major, d.Minor)
	name, err := deviceName(sys + "uevent")
	if err != nil {
		return nil, err
	}
	flags := os.O_RDWR
	if readonly {
		flags = os.O_RDONLY
	}
	f, err := os.OpenFile("/dev/"+name, flags, 0)
	if err != nil {
		return nil, err
	}
	if err := sameDevice(f, sys, d); err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("%s: %w", f.Name(), err)
	}
	return f, nil
}

func sameDevice(f *os.File, sys string, d *mountspec.BlockDevice) error {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFBLK || st.Rdev != unix.Mkdev(d.Major, d.Minor) {
		return fmt.Errorf("is not block device %d:%d", d.Major, d.Minor)
	}
	if d.Diskseq == 0 {
		return nil
	}
	text, err := os.ReadFile(sys + "diskseq")
	if err != nil {
		return err
	}
	if now := strings.TrimSpace(string(text)); now != strconv.FormatUint(d.Diskseq, 10) {
		return fmt.Errorf("is another device by now: its diskseq is %s, not %d", now, d.Diskseq)
	}
	return nil
}

func deviceName(uevent string) (string, error) {
	f, err := os.Open(uevent)
	if err != nil {
		return "", err
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if name, found := strings.CutPrefix(lines.Text(), "DEVNAME="); found {
			return name, nil
		}
	}
	return "", errors.New(uevent + ": has no DEVNAME")
}
