package perform

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
)

// filesystem makes one call on a filesystem's context.
func (x *performance) filesystem(u *unit, spec *mountspec.Spec, s *mountspec.Step) (err error) {
	if k, ok := spec.Kind.(*mountspec.Filesystem); ok {
		child, err := makesInChild(k)
		if err != nil {
			return err
		}
		if child && s.Call == mountspec.Fsmount {
			return x.fsmountInChild(u, k, s)
		}
		if child {
			return nil // all in one go, there
		}
	}
	switch s.Call {
	case mountspec.Fsopen:
		if u.fs != nil {
			_ = u.fs.Close()
		}
		u.fs, err = kernel.OpenFS(s.Key)
	case mountspec.SetString:
		switch {
		case s.Key == "source" && u.device >= 0:
			// By way of the descriptor, so that what was compared is used.
			err = u.fs.SetString("source", "/proc/self/fd/"+strconv.Itoa(u.device))
		case s.Secret.IsZero():
			err = u.fs.SetString(s.Key, s.Text)
		default:
			err = u.fs.SetSecret(s.Key, s.Secret.Reveal())
		}
	case mountspec.SetFlag:
		err = u.fs.SetFlag(s.Key)
	case mountspec.Create:
		err = u.fs.Create()
	case mountspec.CreateExclusive:
		return x.createExclusive(u)
	case mountspec.Fsmount:
		return x.fsmount(u, spec, s)
	}
	return err
}

// createExclusive makes a superblock, or finds that the device has one: then
// the context is made again to get that one.
func (x *performance) createExclusive(u *unit) error {
	if u.reuse {
		return u.fs.Create()
	}
	err := u.fs.CreateExclusive()
	if errors.Is(err, unix.EBUSY) {
		u.reuse = true
		return errAgain
	}
	return err
}

func (x *performance) fsmount(u *unit, spec *mountspec.Spec, s *mountspec.Step) (err error) {
	fd, err := u.fs.Mount(int(s.Set))
	if err != nil {
		return err
	}
	if _, ok := spec.Kind.(*mountspec.BlockDevice); ok {
		u.node = fd // the filesystem the node is made in
	} else {
		u.mount = fd
	}
	_ = u.fs.Close()
	u.fs = nil
	if !u.reuse {
		return nil
	}
	return x.checkParameters(u, spec.Kind.(*mountspec.Filesystem))
}

func (x *performance) fsmountInChild(u *unit, k *mountspec.Filesystem, s *mountspec.Step) error {
	if err := x.makeInChild(u, s, k.Type); err != nil {
		return err
	}
	if !u.reuse {
		return nil
	}
	return x.checkParameters(u, k)
}

// checkParameters sees that a superblock that was there before is as if it had
// been made with the parameters the spec has. The kernel hands out the old
// superblock and ignores, in silence, whatever the new mount asks for.
//
// Filesystems show the parameters that are not their defaults, so what is
// shown and what the spec has must be the same, but for what a filesystem
// always shows. A secret must not be compared in the open: it cannot be proven.
func (x *performance) checkParameters(u *unit, k *mountspec.Filesystem) error {
	options, readonly, err := x.effective(u.mount)
	if err != nil {
		return err
	}
	if readonly != k.SuperblockReadonly {
		return fmt.Errorf("%w: its superblock is read-only: %t", ErrParameters, readonly)
	}
	wanted := map[string]bool{}
	for _, p := range k.Parameters {
		word := p.Key
		if p.Text != "" {
			word += "=" + p.Text
		}
		if !p.Secret.IsZero() {
			return fmt.Errorf("%w: whether %q is the same cannot be told", ErrParameters, p.Key)
		}
		wanted[word] = true
	}
	for word := range strings.SplitSeq(options, ",") {
		key, _, _ := strings.Cut(word, "=")
		if word != "" && !wanted[word] && !slices.Contains(alwaysShown[k.Type], key) {
			return fmt.Errorf("%w: it has %q, which the spec has not", ErrParameters, key)
		}
		delete(wanted, word)
	}
	for word := range wanted {
		key, _, _ := strings.Cut(word, "=")
		return fmt.Errorf("%w: %q is not what it was mounted with", ErrParameters, key)
	}
	return nil
}

// alwaysShown are parameters a filesystem shows although nobody gave them.
var alwaysShown = map[string][]string{
	"xfs":   {"attr2", "inode64", "logbufs", "logbsize", "noquota", "sunit", "swidth"},
	"btrfs": {"ssd", "discard", "space_cache", "subvolid", "subvol"},
	"erofs": {"user_xattr", "acl", "cache_strategy"},
}

// effective reads the options of the superblock of a detached mount, which no
// table shows: a clone of it is attached for a moment in a mount namespace of
// its own.
func (x *performance) effective(mount int) (options string, readonly bool, err error) {
	stat, err := statDetached(x.ctx, mount, x.f)
	return stat.Options, stat.SBFlags&unix.MS_RDONLY != 0, err
}
