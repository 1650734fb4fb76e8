// Package loopback serves a directory as a FUSE filesystem that a later
// process can go on serving where this one died.
//
// What makes that possible is that nothing a kernel holds names state of this
// process. The id of a node is the inode number of the file behind it: a
// successor that is asked about one it has never seen finds it by walking the
// directory once. A file handle holds the mode the file was opened with: a
// successor opens it again. The offset of a directory is that of the
// filesystem below. A file that is removed while it may be open moves to a
// directory of orphans first, so that a successor finds that too.
//
// # Differences from POSIX
//
// The process serving needs no privilege, so
//   - every file belongs to one owner, that of the options. To change it is
//     EPERM, to anything else; device nodes cannot be made.
//   - the permission bits of the owner bind the superuser of a consumer too.
//     Whether any other user may do a thing is decided by the consumer's
//     kernel (default_permissions), by the bits and that owner.
//   - extended attributes are those of the user namespace ("user.").
//   - locks are kept by the consumer's kernel, for one mount.
//   - mounts below the directory are not crossed (EXDEV).
//
// A call that was being served when the process died is served again by its
// successor: at least once, not exactly once. Reads, writes at an offset and
// truncations may be repeated without harm, and appends are such writes,
// because the kernel chooses their offset. A create with O_EXCL, a mkdir,
// link, symlink, rename, unlink or rmdir that had been done already is
// answered EEXIST or ENOENT the second time.
//
// The filesystem below has to have inode numbers that stay and birth times:
// ext4, XFS, Btrfs and tmpfs do.
package loopback

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// Timeout is how long the kernel may believe an answer about a name or about
// attributes. Other mounts of the same directory see a change by then.
const Timeout = time.Second

// Options of a filesystem.
type Options struct {
	// UID and GID own every file, in the kernel the consumer runs on.
	UID, GID uint32
	// Generation is 0 for the first process that serves a mount, and one
	// more for each that resumes.
	Generation uint16
}

// FS serves one directory. Every method may run any number of times at once.
type FS struct {
	fuse.RawFileSystem
	options Options
	dev     uint64
	rootIno uint64
	orphans *dir

	// tree is held for reading while a name is being used, and for writing
	// while a name that others may be using changes its meaning.
	tree sync.RWMutex

	mu    sync.Mutex
	nodes map[uint64]*node
	names map[place]uint64 // what the nodes' places are places of

	handles handles

	// changes counts what was done with tree held for writing.
	changes atomic.Uint64

	walking sync.Mutex
	index   map[uint64]found
	walked  walk
}

// New serves the directory at path. Orphans is a directory of the same
// filesystem outside of it, for this filesystem alone; what an earlier mount
// left there is removed unless the options say that a mount is resumed.
func New(path, orphans string, o Options) (*FS, error) {
	f := &FS{
		RawFileSystem: fuse.NewDefaultRawFileSystem(),
		options:       o,
		nodes:         make(map[uint64]*node),
		names:         make(map[place]uint64),
	}
	f.handles.init(o.Generation)
	root, st, err := openRoot(path)
	if err != nil {
		return nil, fmt.Errorf("loopback: %w", err)
	}
	f.dev, f.rootIno = device(st), st.Ino
	var ost *unix.Statx_t
	if f.orphans, ost, err = openRoot(orphans); err != nil {
		root.close()
		return nil, fmt.Errorf("loopback: orphans: %w", err)
	}
	if device(ost) != f.dev {
		root.close()
		f.orphans.close()
		return nil, fmt.Errorf("loopback: orphans: %s is not on the filesystem of %s", orphans, path)
	}
	f.nodes[fuse.FUSE_ROOT_ID] = &node{id: fuse.FUSE_ROOT_ID, dir: root}
	if o.Generation == 0 {
		if err := f.removeOrphans(); err != nil {
			f.OnUnmount()
			return nil, fmt.Errorf("loopback: orphans: %w", err)
		}
	}
	return f, nil
}

func openRoot(path string) (*dir, *unix.Statx_t, error) {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	st, err := stat(fd, "")
	if err != nil {
		_ = unix.Close(fd)
		return nil, nil, &os.PathError{Op: "statx", Path: path, Err: err}
	}
	return &dir{fd: fd, refs: 1}, st, nil
}

// String implements fuse.RawFileSystem.
func (f *FS) String() string { return "loopback" }

// OnUnmount implements fuse.RawFileSystem: nobody is going to resume.
func (f *FS) OnUnmount() {
	_ = f.removeOrphans()
	f.Close()
}

// Close closes everything and leaves the orphans for a successor.
func (f *FS) Close() {
	f.handles.closeAll()
	f.mu.Lock()
	defer f.mu.Unlock()
	for id, n := range f.nodes {
		if n.dir != nil {
			f.drop(n.dir)
		}
		delete(f.nodes, id)
	}
	if f.orphans != nil {
		f.drop(f.orphans)
		f.orphans = nil
	}
}

// stat asks for attributes and the birth time; name "" is dirfd itself.
func stat(dirfd int, name string) (*unix.Statx_t, error) {
	flags := unix.AT_SYMLINK_NOFOLLOW | unix.AT_NO_AUTOMOUNT
	if name == "" {
		flags |= unix.AT_EMPTY_PATH
	}
	st := new(unix.Statx_t)
	err := ignoringEINTR(func() error {
		return unix.Statx(dirfd, name, flags, unix.STATX_BASIC_STATS|unix.STATX_BTIME, st)
	})
	return st, err
}

func device(st *unix.Statx_t) uint64 { return unix.Mkdev(st.Dev_major, st.Dev_minor) }

// ignoringEINTR repeats a call that a signal interrupted. Go uses signals for
// preemption, and a network filesystem below may return EINTR for them.
func ignoringEINTR(call func() error) error {
	for {
		if err := call(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// status is err as the kernel wants it.
func status(err error) fuse.Status {
	if err == nil {
		return fuse.OK
	}
	var errno syscall.Errno
	if errors.As(err, &errno) {
		return fuse.Status(errno)
	}
	return fuse.ToStatus(err)
}

// attributes fills out from what the filesystem below says, but for the owner.
func (f *FS) attributes(out *fuse.Attr, st *unix.Statx_t) {
	*out = fuse.Attr{
		Ino: st.Ino, Size: st.Size, Blocks: st.Blocks,
		Atime: uint64(st.Atime.Sec), Atimensec: st.Atime.Nsec,
		Mtime: uint64(st.Mtime.Sec), Mtimensec: st.Mtime.Nsec,
		Ctime: uint64(st.Ctime.Sec), Ctimensec: st.Ctime.Nsec,
		Mode: uint32(st.Mode), Nlink: st.Nlink,
		Rdev:    uint32(unix.Mkdev(st.Rdev_major, st.Rdev_minor)),
		Blksize: st.Blksize,
		Owner:   fuse.Owner{Uid: f.options.UID, Gid: f.options.GID},
	}
}
