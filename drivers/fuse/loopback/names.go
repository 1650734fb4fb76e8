package loopback

import (
	"errors"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// in calls act with the directory of a node, and with the tree held for
// reading. What it notes it notes for the directory.
func (f *FS) in(parent uint64, act func(dirfd int) fuse.Status) fuse.Status {
	f.tree.RLock()
	defer f.tree.RUnlock()
	d, s := f.directory(parent)
	if !s.Ok() {
		return s
	}
	defer f.done(d)
	return act(d.fd)
}

// enterNow looks at a name and enters what is there.
func (f *FS) enterNow(parent uint64, dirfd int, name string, out *fuse.EntryOut) fuse.Status {
	st, err := stat(dirfd, name)
	if err != nil {
		return status(err)
	}
	return f.enter(place{parent, name}, dirfd, st, out)
}

// Lookup implements fuse.RawFileSystem.
func (f *FS) Lookup(_ <-chan struct{}, h *fuse.InHeader, name string, out *fuse.EntryOut) fuse.Status {
	return f.in(h.NodeId, func(dirfd int) fuse.Status { return f.enterNow(h.NodeId, dirfd, name, out) })
}

// Mknod implements fuse.RawFileSystem, for all but device nodes.
func (f *FS) Mknod(_ <-chan struct{}, in *fuse.MknodIn, name string, out *fuse.EntryOut) fuse.Status {
	if t := in.Mode & unix.S_IFMT; t == unix.S_IFBLK || t == unix.S_IFCHR {
		return fuse.EPERM
	}
	return f.in(in.NodeId, func(dirfd int) fuse.Status {
		if err := unix.Mknodat(dirfd, name, in.Mode, 0); err != nil {
			return status(err)
		}
		return f.enterNow(in.NodeId, dirfd, name, out)
	})
}

// Mkdir implements fuse.RawFileSystem.
func (f *FS) Mkdir(_ <-chan struct{}, in *fuse.MkdirIn, name string, out *fuse.EntryOut) fuse.Status {
	return f.in(in.NodeId, func(dirfd int) fuse.Status {
		if err := unix.Mkdirat(dirfd, name, in.Mode); err != nil {
			return status(err)
		}
		return f.enterNow(in.NodeId, dirfd, name, out)
	})
}

// Symlink implements fuse.RawFileSystem.
func (f *FS) Symlink(_ <-chan struct{}, h *fuse.InHeader, to, name string, out *fuse.EntryOut) fuse.Status {
	return f.in(h.NodeId, func(dirfd int) fuse.Status {
		if err := unix.Symlinkat(to, dirfd, name); err != nil {
			return status(err)
		}
		return f.enterNow(h.NodeId, dirfd, name, out)
	})
}

// Link implements fuse.RawFileSystem.
func (f *FS) Link(_ <-chan struct{}, in *fuse.LinkIn, name string, out *fuse.EntryOut) fuse.Status {
	return f.in(in.NodeId, func(dirfd int) fuse.Status {
		s := f.at(in.Oldnodeid, func(olddirfd int, oldname string) fuse.Status {
			if oldname == "" {
				return fuse.EPERM // a directory
			}
			st, err := stat(olddirfd, oldname)
			if err != nil {
				return status(err)
			}
			if st.Ino != in.Oldnodeid {
				return fuse.Status(unix.ESTALE)
			}
			return status(unix.Linkat(olddirfd, oldname, dirfd, name, 0))
		})
		if !s.Ok() {
			return s
		}
		return f.enterNow(in.NodeId, dirfd, name, out)
	})
}

// Readlink implements fuse.RawFileSystem.
func (f *FS) Readlink(_ <-chan struct{}, h *fuse.InHeader) (target []byte, s fuse.Status) {
	f.tree.RLock()
	defer f.tree.RUnlock()
	s = f.pin(h.NodeId, func(fd int) fuse.Status {
		buf := make([]byte, unix.PathMax)
		n, err := unix.Readlinkat(fd, "", buf)
		target = buf[:max(n, 0)]
		return status(err)
	})
	return target, s
}

// changing calls act with the tree held for writing, and with the directory of
// each node.
func (f *FS) changing(act func(fds ...int) fuse.Status, parents ...uint64) fuse.Status {
	f.tree.Lock()
	defer f.tree.Unlock()
	defer f.changes.Add(1)
	var fds []int
	for _, p := range parents {
		d, s := f.directory(p)
		if !s.Ok() {
			return s
		}
		defer f.done(d)
		fds = append(fds, d.fd)
	}
	return act(fds...)
}

// Rmdir implements fuse.RawFileSystem.
func (f *FS) Rmdir(_ <-chan struct{}, h *fuse.InHeader, name string) fuse.Status {
	return f.changing(func(fds ...int) fuse.Status {
		return status(unix.Unlinkat(fds[0], name, unix.AT_REMOVEDIR))
	}, h.NodeId)
}

// Unlink implements fuse.RawFileSystem.
func (f *FS) Unlink(_ <-chan struct{}, h *fuse.InHeader, name string) fuse.Status {
	return f.changing(func(fds ...int) fuse.Status {
		p := place{h.NodeId, name}
		id, err := f.needed(fds[0], name)
		switch {
		case err != nil:
			return status(err)
		case id != 0:
			err = unix.Renameat(fds[0], name, fds[1], orphanOf(id).name)
		default:
			err = unix.Unlinkat(fds[0], name, 0)
		}
		if err != nil {
			return status(err)
		}
		f.mu.Lock()
		defer f.mu.Unlock()
		f.vacate(p)
		if n := f.nodes[id]; n != nil {
			f.settle(n, orphanOf(id))
		}
		return fuse.OK
	}, h.NodeId, orphanage)
}

// needed returns the id of the file at a name if that is its last name and a
// successor of this process may yet be asked for its contents; else 0.
func (f *FS) needed(dirfd int, name string) (uint64, error) {
	st, err := stat(dirfd, name)
	if err != nil {
		return 0, err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG || st.Nlink > 1 {
		return 0, nil
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	n := f.nodes[st.Ino]
	if f.options.Generation == 0 && (n == nil || n.opens == 0) {
		return 0, nil
	}
	return st.Ino, nil
}

// Rename implements fuse.RawFileSystem, with the flags of renameat2(2).
func (f *FS) Rename(_ <-chan struct{}, in *fuse.RenameIn, oldName, newName string) fuse.Status {
	return f.changing(func(fds ...int) fuse.Status {
		from, to := place{in.NodeId, oldName}, place{in.Newdir, newName}
		var replaced uint64
		if in.Flags&(unix.RENAME_NOREPLACE|unix.RENAME_EXCHANGE) == 0 {
			id, err := f.needed(fds[1], newName)
			if err != nil && !errors.Is(err, unix.ENOENT) {
				return status(err)
			}
			if id != 0 && !f.same(fds[0], oldName, id) {
				err := unix.Linkat(fds[1], newName, fds[2], orphanOf(id).name, 0)
				if err != nil && !errors.Is(err, unix.EEXIST) {
					return status(err)
				}
				replaced = id
			}
		}
		err := unix.Renameat2(fds[0], oldName, fds[1], newName, uint(in.Flags))
		if err != nil {
			if replaced != 0 {
				_ = unix.Unlinkat(fds[2], orphanOf(replaced).name, 0)
			}
			return status(err)
		}
		f.mu.Lock()
		defer f.mu.Unlock()
		moved, other := f.vacate(from), f.vacate(to)
		if moved != nil {
			f.settle(moved, to)
		}
		if other != nil && in.Flags&unix.RENAME_EXCHANGE != 0 {
			f.settle(other, from)
		}
		if n := f.nodes[replaced]; n != nil {
			f.settle(n, orphanOf(replaced))
		}
		return fuse.OK
	}, in.NodeId, in.Newdir, orphanage)
}

// same says whether a name is of the file with that inode number.
func (f *FS) same(dirfd int, name string, id uint64) bool {
	st, err := stat(dirfd, name)
	return err == nil && st.Ino == id
}
