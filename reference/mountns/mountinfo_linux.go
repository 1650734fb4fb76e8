package mountns

import (
	"context"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// mountinfo reads the table from /proc, from a thread inside the namespace.
func (n *Namespace) mountinfo(ctx context.Context) (*Table, error) {
	var t *Table
	err := n.visit(ctx, func(th *thread) error {
		f, err := th.openMountinfo()
		if err != nil {
			return err
		}
		defer f.Close()
		t, err = parseMountinfo(f)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("mountns: table of %s: %w", n, err)
	}
	t.Namespace = n.id
	return t, nil
}

// openMountinfo opens the table of the namespace the thread is in, through the
// /proc it began with: the namespace may have none. The open file goes on
// showing that namespace when the thread leaves.
func (t *thread) openMountinfo() (*os.File, error) {
	fd, err := unix.Openat(t.self, "mountinfo", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: "/proc/thread-self/mountinfo", Err: err}
	}
	return os.NewFile(uintptr(fd), "mountinfo"), nil
}

func parseMountinfo(r io.Reader) (*Table, error) {
	infos, err := mountinfo.GetMountsFromReader(r, nil)
	if err != nil {
		return nil, err
	}
	t := &Table{Mounts: make([]Mount, len(infos))}
	for i, info := range infos {
		t.Mounts[i] = mountOfInfo(info)
	}
	slices.SortFunc(t.Mounts, func(a, b Mount) int { return compareIDs(a.ID, b.ID) })
	return t, nil
}

func mountOfInfo(i *mountinfo.Info) Mount {
	m := Mount{
		ID: uint64(i.ID), ParentID: uint64(i.Parent), SmallID: uint32(i.ID),
		Major: uint32(i.Major), Minor: uint32(i.Minor),
		Source: i.Source, Propagation: Private,
	}
	m.Root, m.RootDeleted = strings.CutSuffix(i.Root, deletedSuffix)
	m.Point, m.PointDeleted = strings.CutSuffix(i.Mountpoint, deletedSuffix)
	m.FSType, m.Subtype, _ = strings.Cut(i.FSType, ".")
	m.Attr = parseAttr(i.Options)
	m.setSuper(i.VFSOptions)
	for field := range strings.FieldsSeq(i.Optional) {
		m.setOptional(field)
	}
	return m
}

func parseAttr(options string) uint64 {
	attr := uint64(AttrStrictatime)
	for word := range strings.SplitSeq(options, ",") {
		switch word {
		case "ro":
			attr |= AttrReadonly
		case "relatime":
			attr &^= AttrAtimeMask
		case "noatime":
			attr = attr&^AttrAtimeMask | AttrNoatime
		default:
			for _, a := range attrNames {
				if a.name == word {
					attr |= a.bit
				}
			}
		}
	}
	return attr
}

// superWords are the words the kernel itself puts before a filesystem's own.
var superWords = map[string]uint32{
	"sync": unix.MS_SYNCHRONOUS, "dirsync": unix.MS_DIRSYNC, "lazytime": unix.MS_LAZYTIME, "mand": 0,
}

func (m *Mount) setSuper(options string) {
	word, rest, _ := strings.Cut(options, ",")
	m.SBReadonly = word == "ro"
	for rest != "" {
		word, after, _ := strings.Cut(rest, ",")
		flag, known := superWords[word]
		if !known {
			break
		}
		m.SBFlags |= flag
		rest = after
	}
	m.SBOptions = rest
}

func (m *Mount) setOptional(field string) {
	name, value, _ := strings.Cut(field, ":")
	group, _ := strconv.ParseUint(value, 10, 64)
	var add Propagation
	switch name {
	case "shared":
		add, m.PeerGroup = Shared, group
	case "master":
		add, m.Master = SlaveOf, group
	case "unbindable":
		add = Unbindable
	default:
		return
	}
	m.Propagation = m.Propagation&^Private | add
}
