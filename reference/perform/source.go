package perform

import (
	"errors"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
)

// openBase opens the directory a PathRef starts from, once.
func (x *performance) openBase(u *unit, spec *mountspec.Spec) (err error) {
	ref := &spec.Kind.(*mountspec.Bind).Source
	path := ""
	switch ref.Base {
	case mountspec.BaseStaging:
		path = x.o.Staging
	case mountspec.BasePrepare:
		path = x.o.Prepare
	case mountspec.BaseGranted:
		path = x.o.Grants[ref.Grant]
	}
	if !strings.HasPrefix(path, "/") {
		return fmt.Errorf("%w: base %s %s is %q here, want an absolute path", ErrSource, ref.Base, ref.Grant, path)
	}
	u.base, err = open(unix.AT_FDCWD, path, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW)
	return err
}

// openSource resolves the rest beneath the base; it is the only resolution.
func (x *performance) openSource(u *unit, s *mountspec.Step) (err error) {
	base := x.units[s.Base].base
	u.source, err = x.openBelow(base, s.Text)
	if errors.Is(err, unix.EXDEV) || errors.Is(err, unix.ELOOP) {
		err = fmt.Errorf("%w: %w", ErrSourceLink, err)
	}
	return err
}

// sourceFD is the descriptor a bind is made from.
func (x *performance) sourceFD(u *unit, s *mountspec.Step) int {
	if s.Text == "" {
		return x.units[s.Base].base
	}
	return u.source
}

// checkSource sees that the source is covered by a mount of the type the spec
// names, attached at the base or below it: where that mount is missing, the
// source is a directory of somebody else's filesystem.
func (x *performance) checkSource(u *unit, s *mountspec.Step) error {
	source, err := kernel.FactsOf(x.sourceFD(u, s), "", x.f.UniqueIDs)
	if err != nil {
		return err
	}
	base := source
	if s.Text != "" {
		if base, err = kernel.FactsOf(x.units[s.Base].base, "", x.f.UniqueIDs); err != nil {
			return err
		}
	}
	if source.MountID == base.MountID && !base.MountRoot {
		return fmt.Errorf("%w: no mount at or below its base covers it, want a mount of type %q", ErrSourceMount, s.Key)
	}
	v := view{f: x.f}
	defer v.close()
	m, err := v.lookup(x.ctx, source.MountID, statType)
	if err != nil {
		return err
	}
	if got := typeName(&m); got != s.Key {
		return fmt.Errorf("%w: the mount that covers it has type %q, want %q", ErrSourceMount, got, s.Key)
	}
	return nil
}

func (x *performance) clone(u *unit, s *mountspec.Step) (err error) {
	if u.mount, err = x.e.clone(x, s, x.sourceFD(u, s)); err != nil || !s.Recursive {
		return err
	}
	return x.markTree(u, x.sourceFD(u, s))
}

// markTree notes which ids a clone of a tree has; from is a file that can be
// cloned: before Linux 6.15 one of an attached mount.
func (x *performance) markTree(u *unit, from int) error {
	// Ids are counted: one taken now is greater than those of the tree.
	end, err := kernel.OpenTree(from, "", unix.OPEN_TREE_CLONE)
	if err != nil {
		return err
	}
	defer unix.Close(end)
	facts, err := kernel.FactsOf(end, "", x.f.UniqueIDs)
	u.treeEnd = facts.MountID
	return err
}

// checkSourceType holds the root of a bind against is_file.
func checkSourceType(b *mountspec.Bind, mode uint32) error {
	kind := mode & unix.S_IFMT
	if b.IsFile && kind != unix.S_IFREG && kind != unix.S_IFSOCK {
		return fmt.Errorf("%w: it is a %s, want a regular file or a socket", ErrSourceType, fileType(mode))
	}
	if !b.IsFile && kind != unix.S_IFDIR {
		return fmt.Errorf("%w: it is a %s, want a directory", ErrSourceType, fileType(mode))
	}
	return nil
}

func fileType(mode uint32) string {
	switch mode & unix.S_IFMT {
	case unix.S_IFREG:
		return "regular file"
	case unix.S_IFDIR:
		return "directory"
	case unix.S_IFLNK:
		return "symbolic link"
	case unix.S_IFSOCK:
		return "socket"
	case unix.S_IFIFO:
		return "FIFO"
	case unix.S_IFBLK:
		return "block device"
	case unix.S_IFCHR:
		return "character device"
	}
	return "file of unknown type"
}

// typeName is the type as mountinfo has it.
func typeName(m *kernel.MountStat) string {
	if m.Subtype == "" {
		return m.FSType
	}
	return m.FSType + "." + m.Subtype
}
