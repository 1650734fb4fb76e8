package loopback

import (
	"slices"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// dir is an open directory (O_PATH), closed when nobody uses it any more.
type dir struct {
	fd   int
	refs int // guarded by FS.mu
}

func (d *dir) close() { _ = unix.Close(d.fd) }

// place is a name in a directory that is a node.
type place struct {
	parent uint64
	name   string
}

// orphanage is the parent of orphans. It is no node: ids begin at 1.
const orphanage = 0

// node is a file the kernel has asked about. A directory is held open, so that
// it may be renamed; another file is known by its places, of which there are
// several if it has hard links. Guarded by FS.mu.
type node struct {
	id     uint64
	dir    *dir
	places []place
	// lookups and opens are those of this process. The kernel may know of
	// more.
	lookups uint64
	opens   int
}

// generation tells a file from an earlier one with the same inode number. It
// is derived from the file alone, so that every process comes to the same.
func generation(st *unix.Statx_t) uint64 {
	if st.Mask&unix.STATX_BTIME == 0 {
		return 0
	}
	return uint64(st.Btime.Sec)*1e9 + uint64(st.Btime.Nsec)
}

// drop ends one use of d. The caller holds f.mu.
func (f *FS) drop(d *dir) {
	if d.refs--; d.refs == 0 {
		d.close()
	}
}

func (f *FS) done(d *dir) {
	f.mu.Lock()
	f.drop(d)
	f.mu.Unlock()
}

// directory returns the open directory behind a node, to be given back with
// done.
func (f *FS) directory(id uint64) (*dir, fuse.Status) {
	if id == orphanage {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.orphans.refs++
		return f.orphans, fuse.OK
	}
	n, s := f.node(id)
	if !s.Ok() {
		return nil, s
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if n.dir == nil {
		return nil, fuse.ENOTDIR
	}
	if n.dir.refs == 0 { // forgotten meanwhile
		return nil, fuse.Status(unix.ESTALE)
	}
	n.dir.refs++
	return n.dir, fuse.OK
}

// node returns the node of an id, found by walking if need be.
func (f *FS) node(id uint64) (*node, fuse.Status) {
	f.mu.Lock()
	n := f.nodes[id]
	f.mu.Unlock()
	if n != nil {
		return n, fuse.OK
	}
	return f.find(id)
}

// at calls use with a directory and a name in it, for a node that is no
// directory; for a directory the name is empty. The tree has to be held.
// A name that does not lead to the node is ESTALE: the kernel looks it up
// again.
func (f *FS) at(id uint64, use func(dirfd int, name string) fuse.Status) fuse.Status {
	n, s := f.node(id)
	if !s.Ok() {
		return s
	}
	f.mu.Lock()
	if n.dir != nil && n.dir.refs > 0 {
		d := n.dir
		d.refs++
		f.mu.Unlock()
		defer f.done(d)
		return use(d.fd, "")
	}
	places := slices.Clone(n.places)
	f.mu.Unlock()
	s = fuse.Status(unix.ESTALE)
	for _, p := range places {
		d, ds := f.directory(p.parent)
		if !ds.Ok() {
			continue
		}
		s = use(d.fd, p.name)
		f.done(d)
		if s != fuse.Status(unix.ESTALE) && s != fuse.ENOENT {
			return s
		}
		f.mu.Lock()
		f.leave(n, p) // somebody else changed the directory
		f.mu.Unlock()
	}
	if s == fuse.ENOENT {
		s = fuse.Status(unix.ESTALE)
	}
	return s
}

// pin is at with an O_PATH descriptor of the node itself.
func (f *FS) pin(id uint64, use func(fd int) fuse.Status) fuse.Status {
	return f.at(id, func(dirfd int, name string) fuse.Status {
		if name == "" {
			return use(dirfd)
		}
		fd, err := openat(dirfd, name, unix.O_PATH, 0)
		if err != nil {
			return status(err)
		}
		defer unix.Close(fd)
		if s := f.is(fd, id); !s.Ok() {
			return s
		}
		return use(fd)
	})
}

// is says whether fd is open on the node.
func (f *FS) is(fd int, id uint64) fuse.Status {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return status(err)
	}
	if st.Ino != id || st.Dev != f.dev {
		return fuse.Status(unix.ESTALE)
	}
	return fuse.OK
}

// openat never follows a link at the end.
func openat(dirfd int, name string, flags int, mode uint32) (fd int, err error) {
	err = ignoringEINTR(func() error {
		fd, err = unix.Openat(dirfd, name, flags|unix.O_NOFOLLOW|unix.O_CLOEXEC, mode)
		return err
	})
	return fd, err
}

// enter notes that the kernel has learned that what is at p is the file of
// st, and fills out the answer. The tree has to be held.
func (f *FS) enter(p place, dirfd int, st *unix.Statx_t, out *fuse.EntryOut) fuse.Status {
	if device(st) != f.dev {
		return fuse.EXDEV
	}
	if st.Ino == fuse.FUSE_ROOT_ID || st.Ino == f.rootIno {
		return fuse.EIO
	}
	isDir := st.Mode&unix.S_IFMT == unix.S_IFDIR
	f.mu.Lock()
	n := f.nodes[st.Ino]
	if n == nil || isDir && n.dir == nil || !isDir && n.dir != nil {
		// Another file may have had the number: the generation tells.
		f.mu.Unlock()
		fresh := &node{id: st.Ino}
		if isDir {
			fd, err := openat(dirfd, p.name, unix.O_PATH|unix.O_DIRECTORY, 0)
			if err != nil {
				return status(err)
			}
			if s := f.is(fd, st.Ino); !s.Ok() {
				_ = unix.Close(fd)
				return s
			}
			fresh.dir = &dir{fd: fd, refs: 1}
		}
		f.mu.Lock()
		now := f.nodes[st.Ino]
		switch now {
		case n:
			if n != nil {
				f.remove(n)
			}
			f.nodes[st.Ino] = fresh
			n = fresh
		default: // another call was faster
			if fresh.dir != nil {
				f.drop(fresh.dir)
			}
			n = now
		}
		if n == nil {
			f.mu.Unlock()
			return fuse.Status(unix.ESTALE)
		}
	}
	n.lookups++
	if !isDir {
		f.settle(n, p)
	}
	f.mu.Unlock()

	out.NodeId, out.Generation = st.Ino, generation(st)
	f.attributes(&out.Attr, st)
	out.SetEntryTimeout(Timeout)
	out.SetAttrTimeout(Timeout)
	return fuse.OK
}

// settle makes p a place of n. The caller holds f.mu.
func (f *FS) settle(n *node, p place) {
	if id, known := f.names[p]; known {
		if id == n.id {
			return
		}
		if other := f.nodes[id]; other != nil {
			f.leave(other, p)
		}
	}
	f.names[p] = n.id
	n.places = append(n.places, p)
}

// leave makes p a place of n no more. The caller holds f.mu.
func (f *FS) leave(n *node, p place) {
	if f.names[p] == n.id {
		delete(f.names, p)
	}
	n.places = slices.DeleteFunc(n.places, func(q place) bool { return q == p })
}

// vacate forgets whatever was known to be at p. The caller holds f.mu.
func (f *FS) vacate(p place) *node {
	n := f.nodes[f.names[p]]
	delete(f.names, p)
	if n != nil {
		f.leave(n, p)
	}
	return n
}

// remove forgets a node. The caller holds f.mu.
func (f *FS) remove(n *node) {
	for _, p := range slices.Clone(n.places) {
		f.leave(n, p)
	}
	delete(f.nodes, n.id)
	if n.dir != nil {
		f.drop(n.dir)
	}
}

// Forget implements fuse.RawFileSystem. A node the kernel has from an earlier
// process may be forgotten too early, and is found again then. An orphan may
// not, and is not: it has no name by which it could be looked up once more, so
// the kernel forgets it once.
func (f *FS) Forget(id, count uint64) {
	f.mu.Lock()
	n := f.nodes[id]
	if n == nil || id == fuse.FUSE_ROOT_ID {
		f.mu.Unlock()
		if f.options.Generation > 0 {
			f.removeOrphan(id) // if it is one
		}
		return
	}
	n.lookups -= min(n.lookups, count)
	if n.lookups > 0 || n.opens > 0 {
		f.mu.Unlock()
		return
	}
	orphan := slices.Contains(n.places, orphanOf(id))
	f.remove(n)
	f.mu.Unlock()
	if orphan {
		f.removeOrphan(id)
	}
}
