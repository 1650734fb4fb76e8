package loopback

import (
	"bytes"
	"fmt"
	"strings"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// GetAttr implements fuse.RawFileSystem.
func (f *FS) GetAttr(_ <-chan struct{}, in *fuse.GetAttrIn, out *fuse.AttrOut) fuse.Status {
	f.tree.RLock()
	defer f.tree.RUnlock()
	return f.getAttr(in.NodeId, out)
}

func (f *FS) getAttr(id uint64, out *fuse.AttrOut) fuse.Status {
	return f.at(id, func(dirfd int, name string) fuse.Status {
		st, err := stat(dirfd, name)
		if err != nil {
			return status(err)
		}
		if name != "" && (st.Ino != id || device(st) != f.dev) {
			return fuse.Status(unix.ESTALE)
		}
		f.attributes(&out.Attr, st)
		if name == orphanOf(id).name && dirfd == f.orphans.fd {
			out.Nlink-- // the name it has there is ours
		}
		out.SetTimeout(Timeout)
		return fuse.OK
	})
}

// SetAttr implements fuse.RawFileSystem.
func (f *FS) SetAttr(_ <-chan struct{}, in *fuse.SetAttrIn, out *fuse.AttrOut) fuse.Status {
	f.tree.RLock()
	defer f.tree.RUnlock()
	if uid, ok := in.GetUID(); ok && uid != f.options.UID {
		return fuse.EPERM
	}
	if gid, ok := in.GetGID(); ok && gid != f.options.GID {
		return fuse.EPERM
	}
	s := f.pin(in.NodeId, func(fd int) fuse.Status {
		if mode, ok := in.GetMode(); ok {
			// chmod of a link's descriptor is EOPNOTSUPP, as it should be.
			if err := unix.Chmod(link(fd), mode); err != nil {
				return status(err)
			}
		}
		if size, ok := in.GetSize(); ok {
			if err := ignoringEINTR(func() error { return f.truncate(in, fd, int64(size)) }); err != nil {
				return status(err)
			}
		}
		return setTimes(fd, in)
	})
	if !s.Ok() {
		return s
	}
	return f.getAttr(in.NodeId, out)
}

// link names an open file whatever it was opened for.
func link(fd int) string { return fmt.Sprintf("/proc/self/fd/%d", fd) }

// truncate goes through the handle if there is one: its file may be of a mode
// that does not allow to open it again.
func (f *FS) truncate(in *fuse.SetAttrIn, fd int, size int64) error {
	if fh, ok := in.GetFh(); ok {
		if h := f.handles.get(fh); h != nil && writable(fh) {
			return h.do(func(fd int) error { return unix.Ftruncate(fd, size) })
		}
	}
	return unix.Truncate(link(fd), size)
}

func setTimes(fd int, in *fuse.SetAttrIn) fuse.Status {
	atime, hasAtime := in.GetATime()
	mtime, hasMtime := in.GetMTime()
	if !hasAtime && !hasMtime {
		return fuse.OK
	}
	spec := func(t time.Time, has, now bool) unix.Timespec {
		switch {
		case !has:
			return unix.Timespec{Nsec: unix.UTIME_OMIT}
		case now:
			return unix.Timespec{Nsec: unix.UTIME_NOW}
		}
		return unix.Timespec{Sec: t.Unix(), Nsec: int64(t.Nanosecond())}
	}
	ts := []unix.Timespec{
		spec(atime, hasAtime, in.Valid&fuse.FATTR_ATIME_NOW != 0),
		spec(mtime, hasMtime, in.Valid&fuse.FATTR_MTIME_NOW != 0),
	}
	return status(unix.UtimesNanoAt(fd, "", ts, unix.AT_EMPTY_PATH))
}

// StatFs implements fuse.RawFileSystem.
func (f *FS) StatFs(_ <-chan struct{}, _ *fuse.InHeader, out *fuse.StatfsOut) fuse.Status {
	d, s := f.directory(fuse.FUSE_ROOT_ID)
	if !s.Ok() {
		return s
	}
	defer f.done(d)
	var st unix.Statfs_t
	if err := ignoringEINTR(func() error { return unix.Fstatfs(d.fd, &st) }); err != nil {
		return status(err)
	}
	*out = fuse.StatfsOut{
		Blocks: st.Blocks, Bfree: st.Bfree, Bavail: st.Bavail, Files: st.Files, Ffree: st.Ffree,
		Bsize: uint32(st.Bsize), NameLen: uint32(st.Namelen), Frsize: uint32(st.Frsize),
	}
	return fuse.OK
}

// userAttribute says whether a consumer may have an extended attribute of the
// name. The others need privilege, or mean something to the node.
func userAttribute(name string) bool { return strings.HasPrefix(name, "user.") }

func (f *FS) withXattr(id uint64, name string, use func(path string) error) fuse.Status {
	if !userAttribute(name) {
		return fuse.Status(unix.EOPNOTSUPP)
	}
	f.tree.RLock()
	defer f.tree.RUnlock()
	return f.pin(id, func(fd int) fuse.Status { return status(use(link(fd))) })
}

// GetXAttr implements fuse.RawFileSystem.
func (f *FS) GetXAttr(_ <-chan struct{}, h *fuse.InHeader, name string, dest []byte) (size uint32, s fuse.Status) {
	s = f.withXattr(h.NodeId, name, func(path string) error {
		n, err := unix.Getxattr(path, name, dest)
		size = uint32(max(n, 0))
		return err
	})
	return size, s
}

// ListXAttr implements fuse.RawFileSystem.
func (f *FS) ListXAttr(_ <-chan struct{}, h *fuse.InHeader, dest []byte) (size uint32, s fuse.Status) {
	f.tree.RLock()
	defer f.tree.RUnlock()
	s = f.pin(h.NodeId, func(fd int) fuse.Status {
		all := make([]byte, 64<<10) // XATTR_LIST_MAX
		n, err := unix.Listxattr(link(fd), all)
		if err != nil {
			return status(err)
		}
		var names []byte
		for name := range bytes.SplitAfterSeq(all[:n], []byte{0}) {
			if userAttribute(string(name)) {
				names = append(names, name...)
			}
		}
		size = uint32(len(names))
		switch {
		case len(dest) == 0:
		case len(names) > len(dest):
			return fuse.ERANGE
		default:
			copy(dest, names)
		}
		return fuse.OK
	})
	return size, s
}

// SetXAttr implements fuse.RawFileSystem.
func (f *FS) SetXAttr(_ <-chan struct{}, in *fuse.SetXAttrIn, name string, data []byte) fuse.Status {
	return f.withXattr(in.NodeId, name, func(path string) error {
		return unix.Setxattr(path, name, data, int(in.Flags))
	})
}

// RemoveXAttr implements fuse.RawFileSystem.
func (f *FS) RemoveXAttr(_ <-chan struct{}, h *fuse.InHeader, name string) fuse.Status {
	return f.withXattr(h.NodeId, name, func(path string) error { return unix.Removexattr(path, name) })
}
