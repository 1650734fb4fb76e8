package loopback

import (
	"errors"
	"strconv"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// found is where a walk came upon an inode number.
type found struct {
	place
	dir bool
}

// walk is when a walk began.
type walk struct {
	at      time.Time
	changes uint64
}

// freshness is how old the outcome of a walk may be and still say that
// something is not there, if this process has changed nothing since.
const freshness = time.Second

func (f *FS) fresh() bool {
	return time.Since(f.walked.at) < freshness && f.changes.Load() == f.walked.changes
}

// find makes a node of an id that the kernel has from an earlier process.
// The first call walks the directory, which takes about a second for a million
// files; others wait for it.
func (f *FS) find(id uint64) (*node, fuse.Status) {
	f.walking.Lock()
	defer f.walking.Unlock()
	for {
		f.mu.Lock()
		n := f.nodes[id]
		f.mu.Unlock()
		if n != nil {
			return n, fuse.OK
		}
		if f.index != nil {
			n, s := f.materialize(id)
			if s.Ok() || f.fresh() {
				return n, s
			}
		}
		began := walk{time.Now(), f.changes.Load()}
		if err := f.walk(); err != nil {
			return nil, status(err)
		}
		f.walked = began
		if n, s := f.materialize(id); !s.Ok() {
			return n, s
		}
	}
}

// materialize makes a node of what the walk found, and of the directories
// above it. The caller holds f.walking.
func (f *FS) materialize(id uint64) (*node, fuse.Status) {
	f.mu.Lock()
	n := f.nodes[id]
	f.mu.Unlock()
	if n != nil {
		return n, fuse.OK
	}
	at, ok := f.index[id]
	if !ok {
		return nil, fuse.Status(unix.ESTALE)
	}
	var parent *dir
	if at.parent == orphanage {
		f.mu.Lock()
		parent = f.orphans
		parent.refs++
		f.mu.Unlock()
	} else {
		p, s := f.materialize(at.parent)
		if !s.Ok() {
			return nil, s
		}
		f.mu.Lock()
		if parent = p.dir; parent == nil || parent.refs == 0 {
			f.mu.Unlock()
			return nil, fuse.Status(unix.ESTALE)
		}
		parent.refs++
		f.mu.Unlock()
	}
	defer f.done(parent)

	fd, err := openat(parent.fd, at.name, unix.O_PATH, 0)
	if err != nil {
		return nil, fuse.Status(unix.ESTALE)
	}
	if s := f.is(fd, id); !s.Ok() {
		_ = unix.Close(fd)
		return nil, s
	}
	n = &node{id: id}
	if at.dir {
		n.dir = &dir{fd: fd, refs: 1}
	} else {
		_ = unix.Close(fd)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if now := f.nodes[id]; now != nil { // a lookup came in between
		if n.dir != nil {
			f.drop(n.dir)
		}
		return now, fuse.OK
	}
	f.nodes[id] = n
	if !at.dir {
		f.settle(n, at.place)
	}
	return n, fuse.OK
}

// walk indexes everything below the root, and the orphans.
func (f *FS) walk() error {
	index := make(map[uint64]found)
	f.mu.Lock()
	root, orphans := f.nodes[fuse.FUSE_ROOT_ID], f.orphans
	f.mu.Unlock()
	if root == nil || orphans == nil {
		return unix.ENODEV // unmounted
	}
	if err := f.walkInto(index, root.dir.fd, fuse.FUSE_ROOT_ID); err != nil {
		return err
	}
	if err := f.walkInto(index, orphans.fd, orphanage); err != nil {
		return err
	}
	f.index = index
	return nil
}

func (f *FS) walkInto(index map[uint64]found, dirfd int, id uint64) error {
	fd, err := openat(dirfd, ".", unix.O_RDONLY|unix.O_DIRECTORY, 0)
	switch {
	case errors.Is(err, unix.EACCES) || errors.Is(err, unix.ENOENT):
		return nil // nothing in there can be served
	case err != nil:
		return err
	}
	defer unix.Close(fd)
	var below []fuse.DirEntry
	err = entries(fd, make([]byte, 64<<10), func(e fuse.DirEntry) bool {
		if e.Name == "." || e.Name == ".." {
			return true
		}
		isDir := e.Mode&unix.S_IFMT == unix.S_IFDIR
		if _, known := index[e.Ino]; !known || !isDir {
			index[e.Ino] = found{place{id, e.Name}, isDir}
		}
		if isDir {
			below = append(below, e)
		}
		return true
	})
	if err != nil {
		return err
	}
	for _, e := range below {
		sub, err := openat(fd, e.Name, unix.O_PATH|unix.O_DIRECTORY, 0)
		if err != nil {
			continue // removed or replaced meanwhile
		}
		err = nil
		if f.is(sub, e.Ino).Ok() { // no mount, and the same directory still
			err = f.walkInto(index, sub, e.Ino)
		}
		_ = unix.Close(sub)
		if err != nil {
			return err
		}
	}
	return nil
}

func orphanOf(id uint64) place { return place{orphanage, strconv.FormatUint(id, 16)} }

func (f *FS) removeOrphan(id uint64) {
	d, s := f.directory(orphanage)
	if !s.Ok() {
		return
	}
	defer f.done(d)
	_ = unix.Unlinkat(d.fd, orphanOf(id).name, 0)
}

// removeOrphans empties the directory of orphans, which holds no directories.
func (f *FS) removeOrphans() error {
	d, s := f.directory(orphanage)
	if !s.Ok() {
		return unix.Errno(s)
	}
	defer f.done(d)
	fd, err := openat(d.fd, ".", unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	var failed error
	err = entries(fd, make([]byte, 16<<10), func(e fuse.DirEntry) bool {
		if e.Mode&unix.S_IFMT == unix.S_IFDIR {
			return true
		}
		if err := unix.Unlinkat(fd, e.Name, 0); err != nil && !errors.Is(err, unix.ENOENT) {
			failed = err
		}
		return failed == nil
	})
	return errors.Join(err, failed)
}
