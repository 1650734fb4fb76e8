package main

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"

	"github.com/csi-prepare/csi-prepare/reference/co"
	"github.com/csi-prepare/csi-prepare/reference/mountns"
	"golang.org/x/sys/unix"
)

// subject is what may be busy: mounts, a path in one, or a device.
type subject struct {
	// What says what it was taken for.
	What string `json:"what"`
	// Mounts are the ones that are to be unmounted.
	Mounts []placed `json:"mounts"`
	// Inside is the directory or file in the mount that is meant, "" for all.
	Inside string `json:"inside,omitempty"`
	// Device is the block device that is to be free, nil if none is meant.
	Device *device `json:"device,omitempty"`
}

// subjectOf finds out what an argument means: a device number, a path, or the
// id of a volume or of a preparation.
func subjectOf(arg string, here *space, m *machine, records []co.Record, all []published, k *asker) (*subject, error) {
	if d, ok := parseDevice(arg); ok {
		return deviceSubject(d, m), nil
	}
	if filepath.IsAbs(arg) {
		return pathSubject(filepath.Clean(arg), here, m, k)
	}
	s := &subject{What: "volume " + arg}
	for i := range records {
		r := &records[i]
		if r.VolumeID != arg && r.PrepareID != arg {
			continue
		}
		for _, receipt := range r.Receipts {
			if space := m.space(receipt.MntnsID); space != nil {
				if mount, found := space.Table.ByID(receipt.MountID); found {
					s.Mounts = append(s.Mounts, placed{space.ID, mount})
				}
			}
			if n := receipt.Node; n != nil {
				s.Device = &device{n.Major, n.Minor}
			}
		}
		if r.StagingPath != "" {
			s.add(m, r.StagingPath)
		}
	}
	for _, p := range of(all, arg) {
		s.add(m, p.Path)
	}
	if len(s.Mounts) == 0 && s.Device == nil {
		return nil, fmt.Errorf("%s: no path, no device, and no volume that the ledger or the kubelet has mounted here", arg)
	}
	return s, nil
}

// add adds what is mounted at a path in the own namespace.
func (s *subject) add(m *machine, path string) {
	for _, mount := range m.own().Table.At(path) {
		s.Mounts = append(s.Mounts, placed{m.own().ID, mount})
	}
}

func pathSubject(path string, here *space, m *machine, k *asker) (*subject, error) {
	s := &subject{What: "mount at " + path}
	for _, mount := range here.Table.At(path) {
		s.Mounts = append(s.Mounts, placed{here.ID, mount})
	}
	if len(s.Mounts) > 0 {
		// A device node that is a mount is the device.
		if here.ID == m.own().ID && s.Mounts[len(s.Mounts)-1].Mount.Root != "/" {
			if a, err := k.ask("lstat", path); err == nil && a.Mode&unix.S_IFMT == unix.S_IFBLK {
				s.Device = &device{a.Major, a.Minor}
			}
		}
		return s, nil
	}
	if here.ID == m.own().ID {
		a, err := k.ask("lstat", path)
		var silent *SilentError
		switch {
		case errors.As(err, &silent):
			// It is explained as a path in its mount.
		case err != nil:
			return nil, err
		case a.Mode&unix.S_IFMT == unix.S_IFBLK:
			return deviceSubject(device{a.Major, a.Minor}, m), nil
		}
	}
	mount, found := covering(here.Table, path)
	if !found {
		return nil, fmt.Errorf("%s: in no mount of the table", path)
	}
	s.What, s.Inside = "path in "+mount.String(), path
	s.Mounts = []placed{{here.ID, mount}}
	return s, nil
}

func deviceSubject(d device, m *machine) *subject {
	return &subject{What: "device " + d.String(), Device: &d, Mounts: m.where(func(t *mountns.Table) []mountns.Mount {
		var on []mountns.Mount
		for _, mount := range t.Mounts {
			if mount.Major == d.Major && mount.Minor == d.Minor {
				on = append(on, mount)
			}
		}
		return on
	})}
}

// has says that a mount is one of the subject's.
func (s *subject) has(id uint64) bool {
	for _, p := range s.Mounts {
		if p.Mount.ID == id {
			return true
		}
	}
	return false
}

// copies are other mounts of what the subject's mounts show, wherever they are:
// they keep the filesystem in use, although not the mounts.
func (s *subject) copies(m *machine) []placed {
	if s.Inside != "" {
		return nil
	}
	return m.where(func(t *mountns.Table) (found []mountns.Mount) {
		for _, mount := range t.Mounts {
			if !s.has(mount.ID) && s.shows(&mount) {
				found = append(found, mount)
			}
		}
		return found
	})
}

// shows says that a mount shows a part of what one of the subject's shows.
func (s *subject) shows(mount *mountns.Mount) bool {
	for _, p := range s.Mounts {
		if p.Mount.Major == mount.Major && p.Mount.Minor == mount.Minor && below(mount.Root, p.Mount.Root) {
			return true
		}
	}
	return false
}

// whole says that the subject has all of the filesystem with a device number,
// so that whatever is on it counts.
func (s *subject) whole(d device) bool {
	for _, p := range s.Mounts {
		if p.Mount.Root == "/" && d == (device{p.Mount.Major, p.Mount.Minor}) {
			return s.Inside == ""
		}
	}
	return false
}

// contains says that a path as the own namespace has it is in the subject.
func (s *subject) contains(own uint64, path string) bool {
	if s.Inside != "" {
		return below(path, s.Inside)
	}
	for _, p := range s.Mounts {
		if p.Namespace == own && below(path, p.Mount.Point) {
			return true
		}
	}
	return false
}

// points are where the subject's mounts are, for a person.
func (s *subject) points() string {
	var points []string
	for _, p := range s.Mounts {
		points = append(points, p.Mount.Point)
	}
	return strings.Join(points, ", ")
}
