package tree

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// MaxDepth is how many directories below each other Copy enters: it holds two
// descriptors for each.
const MaxDepth = 400

// Copy copies all that is in the directory from into the directory to, which
// is empty, with owners, modes, times, extended attributes, holes and hard
// links, and makes it durable; from itself gives its owner, mode and
// attributes to to. Where the filesystem can share blocks, files share them.
// Where it cannot, each file is read back from the copy and compared with what
// was read from the original.
//
// Nothing may change below from meanwhile. No link is followed. A mount below
// from is a *MountError.
func Copy(ctx context.Context, to, from int) error {
	c := copier{ctx: ctx, to: to, links: map[inode]string{}, buffer: make([]byte, 1<<20)}
	if err := c.directory(to, from, nil); err != nil {
		return err
	}
	return unix.Syncfs(to)
}

type inode struct{ dev, ino uint64 }

type copier struct {
	ctx context.Context //nolint:containedctx // of the one call it lives for
	// to is the root of the copy.
	to int
	// links has the first name, from the root, of each file that has
	// several.
	links  map[inode]string
	buffer []byte
}

// directory copies what is in from; way leads there from the root.
func (c *copier) directory(to, from int, way []string) error {
	if len(way) > MaxDepth {
		return fmt.Errorf("more than %d directories lie below each other; a tree this deep is not copied", MaxDepth)
	}
	fd, err := unix.Openat(from, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fail("open", way, err)
	}
	dir := os.NewFile(uintptr(fd), "directory")
	defer func() { _ = dir.Close() }()
	for {
		names, err := dir.Readdirnames(1024)
		for _, name := range names {
			if err := c.ctx.Err(); err != nil {
				return err
			}
			if err := c.entry(to, from, append(way, name)); err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return fail("list", way, err)
		}
	}
	var st unix.Stat_t
	if err := unix.Fstat(from, &st); err != nil {
		return fail("stat", way, err)
	}
	return c.finish(to, from, &st, way)
}

func (c *copier) entry(to, from int, way []string) error {
	name := way[len(way)-1]
	var st unix.Stat_t
	if err := unix.Fstatat(from, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return fail("stat", way, err)
	}
	kind := st.Mode & unix.S_IFMT
	if kind != unix.S_IFDIR && st.Nlink > 1 {
		id := inode{st.Dev, st.Ino}
		if first, known := c.links[id]; known {
			return c.link(first, to, way)
		}
		c.links[id] = strings.Join(way, "/")
	}
	switch kind {
	case unix.S_IFDIR:
		return c.below(to, from, way)
	case unix.S_IFREG:
		return c.file(to, from, &st, way)
	case unix.S_IFLNK:
		return c.symlink(to, from, &st, way)
	}
	// A fifo, a socket or a device: what it leads to is not the copy's.
	if err := unix.Mknodat(to, name, st.Mode, int(st.Rdev)); err != nil {
		return fail("make the node", way, err)
	}
	return c.attributes(to, name, &st, way)
}

func (c *copier) below(to, from int, way []string) error {
	name := way[len(way)-1]
	source, err := Open(from, name, unix.O_RDONLY)
	if errors.Is(err, unix.EXDEV) {
		return &MountError{Point: strings.Join(way, "/")}
	}
	if err != nil {
		return fail("open", way, err)
	}
	defer unix.Close(source)
	if err := unix.Mkdirat(to, name, 0o700); err != nil {
		return fail("make the directory", way, err)
	}
	made, err := Open(to, name, unix.O_RDONLY)
	if err != nil {
		return fail("open the copy", way, err)
	}
	defer unix.Close(made)
	return c.directory(made, source, way)
}

func (c *copier) link(first string, to int, way []string) error {
	at, name := c.to, first
	if i := strings.LastIndexByte(first, '/'); i >= 0 {
		fd, err := Open(c.to, first[:i], unix.O_PATH)
		if err != nil {
			return fail("find the first name of", way, err)
		}
		defer unix.Close(fd)
		at, name = fd, first[i+1:]
	}
	if err := unix.Linkat(at, name, to, way[len(way)-1], 0); err != nil {
		return fail("link", way, err)
	}
	return nil
}

func (c *copier) symlink(to, from int, st *unix.Stat_t, way []string) error {
	name := way[len(way)-1]
	buffer := make([]byte, unix.PathMax)
	n, err := unix.Readlinkat(from, name, buffer)
	if err != nil {
		return fail("read the link", way, err)
	}
	if err := unix.Symlinkat(string(buffer[:n]), to, name); err != nil {
		return fail("make the link", way, err)
	}
	return c.attributes(to, name, st, way)
}

// file copies a regular file.
func (c *copier) file(to, from int, st *unix.Stat_t, way []string) error {
	name := way[len(way)-1]
	in, err := c.open(from, name, unix.O_RDONLY|unix.O_NONBLOCK)
	if errors.Is(err, unix.EXDEV) {
		return &MountError{Point: strings.Join(way, "/")}
	}
	if err != nil {
		return fail("open", way, err)
	}
	defer func() { _ = in.Close() }()
	out, err := c.open(to, name, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL)
	if err != nil {
		return fail("make", way, err)
	}
	defer func() { _ = out.Close() }()
	err = unix.IoctlFileClone(int(out.Fd()), int(in.Fd()))
	switch {
	case errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.EXDEV), errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENOTTY):
		err = c.data(out, in, st.Size)
	}
	if err != nil {
		return fail("copy", way, err)
	}
	return c.finish(int(out.Fd()), int(in.Fd()), st, way)
}

func (c *copier) open(dir int, name string, flags uint64) (*os.File, error) {
	fd, err := unix.Openat2(dir, name, &unix.OpenHow{
		Flags: flags | unix.O_NOFOLLOW | unix.O_CLOEXEC, Mode: mode(flags),
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_XDEV,
	})
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), name), nil
}

func mode(flags uint64) uint64 {
	if flags&unix.O_CREAT != 0 {
		return 0o600
	}
	return 0
}

// data copies the extents of a file and compares what was written with what
// was read.
func (c *copier) data(out, in *os.File, size int64) error {
	if err := out.Truncate(size); err != nil {
		return err
	}
	read, err := c.each(in, in, size, func(data []byte, at int64) error {
		_, err := out.WriteAt(data, at)
		return err
	})
	if err != nil {
		return err
	}
	if err := out.Sync(); err != nil {
		return err
	}
	// What is read back is to come from the disk.
	if err := unix.Fadvise(int(out.Fd()), 0, 0, unix.FADV_DONTNEED); err != nil {
		return err
	}
	written, err := c.each(out, in, size, func([]byte, int64) error { return nil })
	if err != nil {
		return err
	}
	if string(read.Sum(nil)) != string(written.Sum(nil)) {
		return errors.New("the copy does not read back as it was written")
	}
	return nil
}

// each reads from what lies at the extents of in, in order.
func (c *copier) each(from, in *os.File, size int64, f func(data []byte, at int64) error) (hash.Hash, error) {
	sum := sha256.New()
	for end := int64(0); end < size; {
		at, err := unix.Seek(int(in.Fd()), end, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			break // a hole to the end
		}
		if err != nil {
			return nil, err
		}
		if end, err = unix.Seek(int(in.Fd()), at, unix.SEEK_HOLE); err != nil {
			return nil, err
		}
		for at < end {
			if err := c.ctx.Err(); err != nil {
				return nil, err
			}
			n, err := from.ReadAt(c.buffer[:min(int64(len(c.buffer)), end-at)], at)
			if n == 0 {
				return nil, fmt.Errorf("it ends at byte %d of %d: %w", at, size, err)
			}
			_, _ = sum.Write(c.buffer[:n]) // a hash never fails
			if err := f(c.buffer[:n], at); err != nil {
				return nil, err
			}
			at += int64(n)
		}
	}
	return sum, nil
}

// finish gives a copy, of which a descriptor is at hand, what belongs to its
// original beside the data: the owner before the mode, since a change of
// owner takes bits of the mode, and the times last.
func (c *copier) finish(to, from int, st *unix.Stat_t, way []string) error {
	if err := unix.Fchown(to, int(st.Uid), int(st.Gid)); err != nil {
		return fail("give the owner to", way, err)
	}
	if err := unix.Fchmod(to, st.Mode&0o7777); err != nil {
		return fail("give the mode to", way, err)
	}
	if err := extendedAttributes(to, from); err != nil {
		return fail("copy the extended attributes of", way, err)
	}
	times := []unix.Timespec{st.Atim, st.Mtim}
	if err := unix.UtimesNanoAt(to, "", times, unix.AT_EMPTY_PATH); err != nil {
		return fail("give the times to", way, err)
	}
	return nil
}

// attributes is finish for what cannot be opened.
func (c *copier) attributes(dir int, name string, st *unix.Stat_t, way []string) error {
	if err := unix.Fchownat(dir, name, int(st.Uid), int(st.Gid), unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return fail("give the owner to", way, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFLNK {
		if err := unix.Fchmodat(dir, name, st.Mode&0o7777, 0); err != nil {
			return fail("give the mode to", way, err)
		}
	}
	if err := unix.UtimesNanoAt(dir, name, []unix.Timespec{st.Atim, st.Mtim}, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return fail("give the times to", way, err)
	}
	return nil
}

func extendedAttributes(to, from int) error {
	size, err := unix.Flistxattr(from, nil)
	if errors.Is(err, unix.EOPNOTSUPP) || size == 0 && err == nil {
		return nil
	}
	if err != nil {
		return err
	}
	list := make([]byte, size)
	if size, err = unix.Flistxattr(from, list); err != nil {
		return err
	}
	for name := range strings.SplitSeq(strings.TrimRight(string(list[:size]), "\x00"), "\x00") {
		// Labels are those of the place, and the CO's to set.
		if name == "" || strings.HasPrefix(name, "security.selinux") || strings.HasPrefix(name, "security.SMACK") {
			continue
		}
		n, err := unix.Fgetxattr(from, name, nil)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		value := make([]byte, n)
		if n, err = unix.Fgetxattr(from, name, value); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		if err := unix.Fsetxattr(to, name, value[:n], 0); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return nil
}

// fail names what in the tree an act failed for.
func fail(act string, way []string, err error) error {
	name := strings.Join(way, "/")
	if len(name) > 200 {
		name = name[:200] + "…"
	}
	return fmt.Errorf("%s %q in the volume: %w", act, name, err)
}
