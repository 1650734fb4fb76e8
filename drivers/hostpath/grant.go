package hostpath

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// Grant is a directory the operator gives to the driver and, by the same
// name, to the CO. The driver keeps to "volumes" below it.
type Grant struct {
	// Name has 1 to 63 bytes of [a-z0-9-].
	Name string
	// Dir is absolute, in its shortest form, with no symbolic link at its
	// end.
	Dir string
	// Sized says that the directory is the root of a filesystem nobody
	// else puts files on. It holds one volume at a time, whose size is the
	// filesystem's: that is how a size is kept here.
	Sized bool
}

// ParseGrant reads NAME=DIR.
func ParseGrant(text string, sized bool) (Grant, error) {
	name, dir, ok := strings.Cut(text, "=")
	if !ok {
		return Grant{}, fmt.Errorf("grant %q: write it as NAME=DIR, for example data=/srv/volumes", text)
	}
	g := Grant{Name: name, Dir: dir, Sized: sized}
	return g, g.check()
}

func (g Grant) check() error {
	if n := len(g.Name); n < 1 || n > 63 || strings.Trim(g.Name, "abcdefghijklmnopqrstuvwxyz0123456789-") != "" {
		return fmt.Errorf("grant %q: the name needs 1 to 63 bytes of [a-z0-9-]", g.Name)
	}
	if !filepath.IsAbs(g.Dir) || filepath.Clean(g.Dir) != g.Dir {
		return fmt.Errorf("grant %s: directory %q needs to be absolute, with no '.', '..', double or trailing slash", g.Name, g.Dir)
	}
	return nil
}

// checkGrants refuses a set the driver could not keep apart, or that is not
// there.
func checkGrants(grants []Grant) error {
	if len(grants) == 0 {
		return errors.New("grant: at least one is required; for example --grant data=/srv/volumes")
	}
	for i, g := range grants {
		if err := g.check(); err != nil {
			return err
		}
		for _, other := range grants[:i] {
			if other.Name == g.Name {
				return fmt.Errorf("grant %s: is given twice; give each a name of its own", g.Name)
			}
			if within(g.Dir, other.Dir) || within(other.Dir, g.Dir) {
				return fmt.Errorf("grants %s and %s: one directory lies in the other; give each a directory of its own", other.Name, g.Name)
			}
		}
		if _, err := g.size(); err != nil {
			return err
		}
	}
	return nil
}

func within(path, dir string) bool {
	return path == dir || strings.HasPrefix(path, strings.TrimSuffix(dir, "/")+"/")
}

// open returns a descriptor of the granted directory, good for openat2 alone.
func (g Grant) open() (int, error) {
	fd, err := unix.Open(g.Dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("grant %s: %w", g.Name, &fs.PathError{Op: "open directory", Path: g.Dir, Err: err})
	}
	return fd, nil
}

// space is what statfs(2) says of a filesystem, in bytes and files.
type space struct {
	id                     unix.Fsid
	total, free, available int64 // available: to others than root
	files, filesFree       int64
}

func spaceOf(fd int) (space, error) {
	var s unix.Statfs_t
	if err := unix.Fstatfs(fd, &s); err != nil {
		return space{}, fmt.Errorf("statfs: %w", err)
	}
	unit := int64(s.Frsize) //nolint:unconvert // its type depends on the architecture
	if unit == 0 {
		unit = int64(s.Bsize) //nolint:unconvert // as above
	}
	return space{
		id:    s.Fsid,
		total: int64(s.Blocks) * unit, free: int64(s.Bfree) * unit, available: int64(s.Bavail) * unit,
		files: int64(s.Files), filesFree: int64(s.Ffree),
	}, nil
}

// size returns the space of the grant's filesystem, and makes sure that a
// sized grant has one of its own.
func (g Grant) size() (space, error) {
	fd, err := g.open()
	if err != nil {
		return space{}, err
	}
	defer unix.Close(fd)
	if g.Sized {
		if err := wholeFilesystem(fd); err != nil {
			return space{}, fmt.Errorf("sized grant %s: %s: %w", g.Name, g.Dir, err)
		}
	}
	return spaceOf(fd)
}

var errNotWhole = errors.New("is not the root of a mounted filesystem; mount one there, or grant it without a size")

// wholeFilesystem wants a directory at which the root of a filesystem is
// mounted: a bind of a directory further down, or a subvolume, shares its
// space with others.
func wholeFilesystem(fd int) error {
	var x unix.Statx_t
	if err := unix.Statx(fd, "", unix.AT_EMPTY_PATH, unix.STATX_MNT_ID, &x); err != nil {
		return fmt.Errorf("statx: %w", err)
	}
	if x.Attributes_mask&unix.STATX_ATTR_MOUNT_ROOT == 0 || x.Attributes&unix.STATX_ATTR_MOUNT_ROOT == 0 {
		return errNotWhole
	}
	found, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) {
		match := uint64(m.ID) == x.Mnt_id
		return !match, match
	})
	if err != nil {
		return fmt.Errorf("read the mount table: %w", err)
	}
	if len(found) != 1 || found[0].Root != "/" {
		return errNotWhole
	}
	return nil
}
