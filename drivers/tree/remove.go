// Package tree opens and removes directories that are a driver's own but whose
// contents are anybody's: by descriptors, through no link and no mount.
package tree

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// MountError tells of a mount in a directory that was to be removed.
type MountError struct{ Point string }

func (e *MountError) Error() string {
	return fmt.Sprintf("something is mounted at %q, in the directory of the volume; unmount it first, nothing is removed through a mount", e.Point)
}

// CheckNoMount looks in the mount table of this process for a mount at or
// below a directory.
func CheckNoMount(fd int) error {
	path, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
	if err != nil {
		return fmt.Errorf("name the directory: %w", err)
	}
	found, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) {
		below := within(m.Mountpoint, path)
		return !below, below
	})
	if err != nil {
		return fmt.Errorf("read the mount table: %w", err)
	}
	if len(found) > 0 {
		return &MountError{found[0].Mountpoint}
	}
	return nil
}

func within(path, dir string) bool {
	return path == dir || strings.HasPrefix(path, strings.TrimSuffix(dir, "/")+"/")
}

// Open opens a directory below another one whose name is the driver's own: no
// link, no mount. The flags are added to those that say so.
func Open(dir int, name string, flags uint64) (int, error) {
	for {
		fd, err := unix.Openat2(dir, name, &unix.OpenHow{
			Flags:   flags | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC,
			Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_XDEV,
		})
		if errors.Is(err, unix.EINTR) || errors.Is(err, unix.EAGAIN) {
			continue
		}
		return fd, err
	}
}

// level identifies a directory on the way down.
type level struct {
	name     string // in the directory above
	dev, ino uint64
}

// Remove removes a directory and all in it, from descriptors alone: no
// link is followed and no mount is entered. It holds one descriptor however
// deep the tree is, goes back up by "..", and makes sure that it comes out
// where it went in: a tree that is moved meanwhile is an error, never the way
// to another one. A directory that is not there is no error. After an error
// it may be called again.
func Remove(ctx context.Context, parent int, name string) error {
	fd, err := Open(parent, name, unix.O_RDONLY)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open the directory of the volume: %w", err)
	}
	err = removeContents(ctx, fd)
	if err != nil {
		return err
	}
	if err := unix.Unlinkat(parent, name, unix.AT_REMOVEDIR); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("remove the directory of the volume: %w", err)
	}
	return unix.Fsync(parent)
}

// removeContents takes over fd.
func removeContents(ctx context.Context, fd int) error {
	dir := os.NewFile(uintptr(fd), "volume")
	defer func() { _ = dir.Close() }()
	self, err := identify(dir, "")
	if err != nil {
		return err
	}
	way := []level{self}
	for {
		down, err := removeFiles(ctx, dir)
		switch {
		case err != nil:
			return fmt.Errorf("remove from %s: %w", where(way), err)
		case down != "":
			next, err := Open(int(dir.Fd()), down, unix.O_RDONLY)
			if err != nil {
				return fmt.Errorf("open a directory in %s: %w", where(way), err)
			}
			_ = dir.Close()
			dir = os.NewFile(uintptr(next), down)
			l, err := identify(dir, down)
			if err != nil {
				return err
			}
			way = append(way, l)
		case len(way) == 1:
			return nil
		default:
			gone := way[len(way)-1]
			way = way[:len(way)-1]
			up, err := unix.Openat(int(dir.Fd()), "..", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
			if err != nil {
				return fmt.Errorf("go back to %s: %w", where(way), err)
			}
			_ = dir.Close()
			dir = os.NewFile(uintptr(up), "..")
			l, err := identify(dir, way[len(way)-1].name)
			if err != nil {
				return err
			}
			if l != way[len(way)-1] {
				return fmt.Errorf("the tree was moved while %s was being removed", where(way))
			}
			if err := unix.Unlinkat(int(dir.Fd()), gone.name, unix.AT_REMOVEDIR); err != nil && !errors.Is(err, unix.ENOENT) {
				return fmt.Errorf("remove a directory in %s: %w", where(way), err)
			}
		}
	}
}

// removeFiles removes what is no directory, and directories that are empty,
// until it meets one that is not: its name is the result.
func removeFiles(ctx context.Context, dir *os.File) (down string, err error) {
	if _, err := dir.Seek(0, io.SeekStart); err != nil {
		return "", err
	}
	for {
		// Names alone: the type of an entry is asked of the system call
		// that removes it, not of the directory, which may not know it.
		names, err := dir.Readdirnames(1024)
		if errors.Is(err, io.EOF) {
			return "", nil
		}
		if err != nil {
			return "", err
		}
		for _, name := range names {
			if err := ctx.Err(); err != nil {
				return "", err
			}
			err := unix.Unlinkat(int(dir.Fd()), name, 0)
			isDir := errors.Is(err, unix.EISDIR)
			if isDir {
				err = unix.Unlinkat(int(dir.Fd()), name, unix.AT_REMOVEDIR)
			}
			switch {
			case err == nil, errors.Is(err, unix.ENOENT):
			case isDir && (errors.Is(err, unix.ENOTEMPTY) || errors.Is(err, unix.EEXIST)):
				return name, nil
			default:
				return "", fmt.Errorf("unlink %q: %w", name, err)
			}
		}
	}
}

func identify(dir *os.File, name string) (level, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(dir.Fd()), &st); err != nil {
		return level{}, fmt.Errorf("stat: %w", err)
	}
	return level{name: name, dev: st.Dev, ino: st.Ino}, nil
}

// where names a directory of the tree, from its top.
func where(way []level) string {
	var b strings.Builder
	b.WriteString("volume")
	for i, l := range way[1:] {
		if i == 8 {
			b.WriteString("/…")
			break
		}
		b.WriteString("/" + l.name)
	}
	return fmt.Sprintf("%q", b.String())
}
