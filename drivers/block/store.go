package block

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
)

// store is the directory with the files that volumes and snapshots are, one
// each, in two directories of mode 0700.
type store struct {
	path string
	dir  *os.File
	// in holds the two directories by kind.
	in map[kind]*os.File
}

type kind string

const (
	volumeFiles   kind = "volumes"
	snapshotFiles kind = "snapshots"
)

// openStore opens the directory and makes the two in it.
func openStore(path string) (*store, error) {
	dir, err := os.OpenFile(path, unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, fmt.Errorf("directory of the volumes: %w", err)
	}
	s := &store{path: path, dir: dir, in: map[kind]*os.File{}}
	for _, k := range []kind{volumeFiles, snapshotFiles} {
		if err := s.openKind(k); err != nil {
			return nil, errors.Join(fmt.Errorf("directory of the volumes %s: %s: %w", path, k, err), s.close())
		}
	}
	return s, nil
}

func (s *store) openKind(k kind) error {
	switch err := unix.Mkdirat(int(s.dir.Fd()), string(k), 0o700); {
	case errors.Is(err, unix.EEXIST):
	case err != nil:
		return err
	default:
		if err := s.dir.Sync(); err != nil {
			return err
		}
	}
	fd, err := beneath(s.dir, string(k), unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	s.in[k] = os.NewFile(uintptr(fd), string(k))
	return nil
}

func (s *store) close() error {
	err := s.dir.Close()
	for _, d := range s.in {
		err = errors.Join(err, d.Close())
	}
	return err
}

// beneath resolves a name that is the driver's own: no link, no mount.
func beneath(dir *os.File, name string, flags int) (int, error) {
	return kernel.Openat2(int(dir.Fd()), name, unix.OpenHow{
		Flags:   uint64(flags | unix.O_NOFOLLOW | unix.O_NONBLOCK),
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_XDEV,
	})
}

// foreignError tells of something at the place of a file of the driver's.
type foreignError struct {
	path, what string
}

func (e *foreignError) Error() string {
	return fmt.Sprintf("%s: %s; move it away, it is not the driver's, and put back the file that was there", e.path, e.what)
}

// open opens the file of a volume or snapshot. What has its name and not its
// inode is a *foreignError, nothing at all is ENOENT.
func (s *store) open(k kind, id string, inode uint64, flags int) (*os.File, error) {
	path := s.path + "/" + string(k) + "/" + id
	fd, err := beneath(s.in[k], id, flags)
	switch {
	case errors.Is(err, unix.ELOOP):
		return nil, &foreignError{path, "is a symbolic link"}
	case errors.Is(err, unix.EXDEV):
		return nil, &foreignError{path, "something is mounted there"}
	case errors.Is(err, unix.EISDIR), errors.Is(err, unix.ENXIO):
		return nil, &foreignError{path, "is not a regular file"}
	case err != nil:
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	f := os.NewFile(uintptr(fd), path)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	switch {
	case st.Mode&unix.S_IFMT != unix.S_IFREG:
		return nil, errors.Join(&foreignError{path, "is not a regular file"}, f.Close())
	case st.Ino != inode:
		return nil, errors.Join(&foreignError{path, fmt.Sprintf("is another file, inode %d instead of %d", st.Ino, inode)}, f.Close())
	}
	return f, nil
}

// temporary makes a file that has no name, and is gone if this process ends.
func (s *store) temporary(k kind) (*os.File, uint64, error) {
	fd, err := unix.Openat(int(s.in[k].Fd()), ".", unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, 0, fmt.Errorf("make a file in %s/%s: %w", s.path, k, err)
	}
	f := os.NewFile(uintptr(fd), "new file in "+string(k))
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, 0, errors.Join(err, f.Close())
	}
	return f, st.Ino, nil
}

// name gives a temporary file, which is complete and flushed, its name.
func (s *store) name(k kind, f *os.File, id string) error {
	before("name the file")
	from := fmt.Sprintf("/proc/self/fd/%d", f.Fd())
	err := unix.Linkat(unix.AT_FDCWD, from, int(s.in[k].Fd()), id, unix.AT_SYMLINK_FOLLOW)
	if errors.Is(err, unix.EEXIST) {
		return &foreignError{s.path + "/" + string(k) + "/" + id, "was there before the driver made a file"}
	}
	if err == nil {
		err = s.in[k].Sync()
	}
	if err != nil {
		return fmt.Errorf("name a file in %s/%s: %w", s.path, k, err)
	}
	return nil
}

// remove removes the file of a volume or snapshot. It is no error if there is
// none; another file is left alone.
func (s *store) remove(k kind, id string, inode uint64) error {
	f, err := s.open(k, id, inode, unix.O_RDONLY)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	before("remove the file")
	err = unix.Unlinkat(int(s.in[k].Fd()), id, 0)
	if err == nil {
		err = s.in[k].Sync()
	}
	if err != nil {
		return fmt.Errorf("remove %s: %w", f.Name(), err)
	}
	return nil
}

// space of the filesystem of the directory, in bytes.
func (s *store) space() (available, total int64, err error) {
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(s.dir.Fd()), &st); err != nil {
		return 0, 0, fmt.Errorf("space of %s: %w", s.path, err)
	}
	return int64(st.Bavail) * st.Bsize, int64(st.Blocks) * st.Bsize, nil
}
