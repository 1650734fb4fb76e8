package kernel

import (
	"encoding/binary"
	"fmt"

	"golang.org/x/sys/unix"
)

// MountEvent is one report of fanotify(7) on a watched mount namespace.
type MountEvent struct {
	// Mount is the unique id. The namespace is not told.
	Mount uint64
	// Attached and Detached are both set for a mount that was moved.
	Attached, Detached bool
	// Overflow says that the queue was full and events are lost; Mount is 0.
	Overflow bool
}

const mountEventMask = unix.FAN_MNT_ATTACH | unix.FAN_MNT_DETACH

// OpenMountEvents makes a fanotify group for mount events, non-blocking. Its
// queue holds /proc/sys/fs/fanotify/max_queued_events events, 16384 by default;
// unlimited lifts that at the price of unbounded kernel memory. Linux 6.15.
func OpenMountEvents(unlimited bool) (int, error) {
	flags := uint(unix.FAN_CLOEXEC | unix.FAN_NONBLOCK | unix.FAN_REPORT_MNT)
	if unlimited {
		flags |= unix.FAN_UNLIMITED_QUEUE
	}
	for {
		fd, err := unix.FanotifyInit(flags, unix.O_RDONLY|unix.O_CLOEXEC)
		if err == nil {
			return fd, nil
		}
		if err != unix.EINTR {
			return -1, callError("fanotify_init", errnoOf(err))
		}
	}
}

// WatchMounts adds the mount namespace open at ns to the group. The group does
// not keep the namespace alive.
func WatchMounts(group, ns int) error { return markMounts(group, ns, unix.FAN_MARK_ADD) }

// UnwatchMounts removes it.
func UnwatchMounts(group, ns int) error { return markMounts(group, ns, unix.FAN_MARK_REMOVE) }

func markMounts(group, ns int, action uint) error {
	for {
		err := unix.FanotifyMark(group, action|unix.FAN_MARK_MNTNS, mountEventMask, ns, "")
		if err != unix.EINTR {
			return callError("fanotify_mark", errnoOf(err))
		}
	}
}

// Sizes and places in struct fanotify_event_metadata, the info records that
// follow it, and the record of a mount.
const (
	eventFixed     = 24
	infoFixed      = 4
	mountInfoSize  = 16
	eventMetaBytes = 6
)

// ParseMountEvents appends to dst the events in buf, which is what one read of
// the group returned.
func ParseMountEvents(dst []MountEvent, buf []byte) ([]MountEvent, error) {
	for len(buf) > 0 {
		if len(buf) < eventFixed {
			return dst, fmt.Errorf("kernel: fanotify event of %d bytes, want at least %d", len(buf), eventFixed)
		}
		size := int(binary.NativeEndian.Uint32(buf))
		fixed := int(binary.NativeEndian.Uint16(buf[eventMetaBytes:]))
		if version := buf[4]; version != unix.FANOTIFY_METADATA_VERSION {
			return dst, fmt.Errorf("kernel: fanotify event of version %d, want %d", version, unix.FANOTIFY_METADATA_VERSION)
		}
		if fixed < eventFixed || size < fixed || size > len(buf) {
			return dst, fmt.Errorf("kernel: fanotify event says %d of %d bytes in a buffer of %d", fixed, size, len(buf))
		}
		mask := binary.NativeEndian.Uint64(buf[8:])
		e := MountEvent{
			Attached: mask&unix.FAN_MNT_ATTACH != 0,
			Detached: mask&unix.FAN_MNT_DETACH != 0,
			Overflow: mask&unix.FAN_Q_OVERFLOW != 0,
		}
		var err error
		if e.Mount, err = mountOfEvent(buf[fixed:size]); err != nil {
			return dst, err
		}
		dst = append(dst, e)
		buf = buf[size:]
	}
	return dst, nil
}

// mountOfEvent finds the record of the mount among those of an event.
func mountOfEvent(records []byte) (uint64, error) {
	for len(records) > 0 {
		if len(records) < infoFixed {
			return 0, fmt.Errorf("kernel: fanotify record of %d bytes, want at least %d", len(records), infoFixed)
		}
		size := int(binary.NativeEndian.Uint16(records[2:]))
		if size < infoFixed || size > len(records) {
			return 0, fmt.Errorf("kernel: fanotify record says %d bytes of %d", size, len(records))
		}
		if records[0] == unix.FAN_EVENT_INFO_TYPE_MNT && size >= mountInfoSize {
			return binary.NativeEndian.Uint64(records[8:]), nil
		}
		records = records[size:]
	}
	return 0, nil
}
