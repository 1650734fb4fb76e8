package co

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/mountns"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
)

// ErrNodeDevice is a block device that the node itself uses.
var ErrNodeDevice = errors.New("a device of the node's own")

// notOfNode refuses specs with a device that the node uses for anything but the
// volume: one that is mounted or swapped to, is below or above one that is, is
// on the disk of the root, or is part of a map. dir is the CO's own, where a
// plugin may have mounted the device; known are the mounts the CO made of the
// volume.
func notOfNode(ctx context.Context, specs []mountspec.Spec, dir string, known []uint64) error {
	var devices []sysDevice
	for i := range specs {
		switch k := specs[i].Kind.(type) {
		case *mountspec.Filesystem:
			if k.Device != nil {
				devices = append(devices, deviceOf(k.Device.Major, k.Device.Minor))
			}
		case *mountspec.BlockDevice:
			devices = append(devices, deviceOf(k.Major, k.Minor))
		}
	}
	if len(devices) == 0 {
		return nil
	}
	used, root, err := usedByNode(ctx, dir, known)
	if err != nil {
		return err
	}
	for _, d := range devices {
		if err := d.check(used, root); err != nil {
			return err
		}
	}
	return nil
}

// sysDevice is a block device as sysfs knows it: "major:minor".
type sysDevice string

func deviceOf(major, minor uint32) sysDevice { return sysDevice(fmt.Sprintf("%d:%d", major, minor)) }

func (d sysDevice) check(used map[sysDevice]string, root sysDevice) error {
	if how, found := used[d]; found {
		return fmt.Errorf("%w: %s is %s", ErrNodeDevice, d, how)
	}
	for n, how := range used {
		if slices.Contains(n.below(), d) {
			return fmt.Errorf("%w: %s is below %s, which is %s", ErrNodeDevice, d, n, how)
		}
		if slices.Contains(d.below(), n) {
			return fmt.Errorf("%w: %s is on %s, which is %s", ErrNodeDevice, d, n, how)
		}
	}
	if root != "" && d.disk() == root.disk() {
		return fmt.Errorf("%w: %s is on the disk of the root", ErrNodeDevice, d)
	}
	if holders, err := os.ReadDir(d.sysfs() + "/holders"); err == nil && len(holders) > 0 {
		return fmt.Errorf("%w: %s is part of %s", ErrNodeDevice, d, holders[0].Name())
	}
	return nil
}

func (d sysDevice) sysfs() string { return "/sys/dev/block/" + string(d) }

// below are the devices that d is on: the disk of a partition, the parts of a
// map, and theirs.
func (d sysDevice) below() []sysDevice {
	var below []sysDevice
	add := func(o sysDevice) {
		if o != "" && o != d && !slices.Contains(below, o) {
			below = append(append(below, o), o.below()...)
		}
	}
	add(d.disk())
	slaves, _ := filepath.Glob(d.sysfs() + "/slaves/*/dev")
	for _, s := range slaves {
		add(sysDevice(readWord(s)))
	}
	return below
}

// disk is the whole disk of a partition, or d.
func (d sysDevice) disk() sysDevice {
	place, err := filepath.EvalSymlinks(d.sysfs())
	if err != nil {
		return d
	}
	if _, err := os.Stat(place + "/partition"); err != nil {
		return d
	}
	if o := readWord(filepath.Dir(place) + "/dev"); o != "" {
		return sysDevice(o)
	}
	return d
}

func readWord(file string) string {
	text, _ := os.ReadFile(file)
	return strings.TrimSpace(string(text))
}

// usedByNode lists the devices that are mounted in this mount namespace or
// swapped to, each with how, and the one of the root.
func usedByNode(ctx context.Context, dir string, known []uint64) (used map[sysDevice]string, root sysDevice, err error) {
	ns, err := mountns.Own()
	if err != nil {
		return nil, "", err
	}
	defer ns.Close()
	table, err := ns.Table(ctx)
	if err != nil {
		return nil, "", err
	}
	used = map[sysDevice]string{}
	for _, m := range table.Mounts {
		if slices.Contains(known, m.ID) || strings.HasPrefix(m.Point, dir+"/") {
			continue
		}
		d := deviceOf(m.Major, m.Minor)
		if m.Major == 0 { // btrfs and the like have numbers of their own
			if d = nodeAt(m.Source); d == "" {
				continue
			}
		}
		used[d] = "mounted on " + m.Point
		if m.Point == "/" {
			root = d
		}
	}
	swaps, err := os.Open("/proc/swaps")
	if errors.Is(err, os.ErrNotExist) {
		return used, root, nil
	}
	if err != nil {
		return nil, "", err
	}
	defer swaps.Close()
	for lines := bufio.NewScanner(swaps); lines.Scan(); {
		name, _, _ := strings.Cut(lines.Text(), " ")
		if d := nodeAt(name); d != "" {
			used[d] = "swapped to"
		}
	}
	return used, root, nil
}

// nodeAt is the device that a node in /dev is of, empty if it is none.
func nodeAt(path string) sysDevice {
	var st unix.Stat_t
	if !strings.HasPrefix(path, "/dev/") || unix.Stat(path, &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFBLK {
		return ""
	}
	return deviceOf(unix.Major(st.Rdev), unix.Minor(st.Rdev))
}
