package loopback

import (
	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// OpenDir implements fuse.RawFileSystem.
func (f *FS) OpenDir(_ <-chan struct{}, in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	d, s := f.directory(in.NodeId)
	if !s.Ok() {
		return s
	}
	defer f.done(d)
	fd, err := openat(d.fd, ".", unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return status(err)
	}
	out.Fh = f.handles.add(fd, in.NodeId, unix.O_RDONLY)
	return fuse.OK
}

// ReadDir implements fuse.RawFileSystem. Offsets are those of the filesystem
// below, which mean the same to whoever opens the directory.
func (f *FS) ReadDir(_ <-chan struct{}, in *fuse.ReadIn, out *fuse.DirEntryList) fuse.Status {
	return f.readDir(in, out.AddDirEntry)
}

// ReadDirPlus implements fuse.RawFileSystem.
func (f *FS) ReadDirPlus(_ <-chan struct{}, in *fuse.ReadIn, out *fuse.DirEntryList) fuse.Status {
	f.tree.RLock()
	defer f.tree.RUnlock()
	d, s := f.directory(in.NodeId)
	if !s.Ok() {
		return s
	}
	defer f.done(d)
	return f.readDir(in, func(e fuse.DirEntry) bool {
		o := out.AddDirLookupEntry(e)
		if o == nil {
			return false
		}
		if e.Name == "." || e.Name == ".." {
			return true
		}
		// An entry without a node is one the kernel looks up by itself.
		if s := f.enterNow(in.NodeId, d.fd, e.Name, o); !s.Ok() {
			*o = fuse.EntryOut{}
			return true
		}
		out.FixMode(o.Mode)
		return true
	})
}

func (f *FS) readDir(in *fuse.ReadIn, add func(fuse.DirEntry) bool) fuse.Status {
	h := f.handles.get(in.Fh)
	if h == nil {
		var s fuse.Status
		if h, s = f.directoryHandle(in.NodeId, in.Fh); !s.Ok() {
			return s
		}
	}
	h.reading.Lock()
	defer h.reading.Unlock()
	return status(h.do(func(fd int) error {
		if _, err := unix.Seek(fd, int64(in.Offset), unix.SEEK_SET); err != nil {
			return err
		}
		return entries(fd, make([]byte, min(max(int(in.Size), 1<<10), 64<<10)), add)
	}))
}

// directoryHandle opens again what an earlier process had open.
func (f *FS) directoryHandle(id, fh uint64) (*handle, fuse.Status) {
	if fh>>generationShift == f.handles.generation {
		return nil, fuse.EBADF
	}
	var out fuse.OpenOut
	in := fuse.OpenIn{}
	in.NodeId = id
	if s := f.OpenDir(nil, &in, &out); !s.Ok() {
		return nil, s
	}
	opened := f.handles.remove(out.Fh)
	h, mine := f.handles.adopt(fh, opened)
	if !mine {
		_ = opened.file.Close()
	}
	return h, fuse.OK
}

// ReleaseDir implements fuse.RawFileSystem.
func (f *FS) ReleaseDir(in *fuse.ReleaseIn) {
	if h := f.handles.remove(in.Fh); h != nil {
		_ = h.file.Close()
	}
}

// FsyncDir implements fuse.RawFileSystem.
func (f *FS) FsyncDir(_ <-chan struct{}, in *fuse.FsyncIn) fuse.Status {
	h := f.handles.get(in.Fh)
	if h == nil {
		var s fuse.Status
		if h, s = f.directoryHandle(in.NodeId, in.Fh); !s.Ok() {
			return s
		}
	}
	return sync1(h, in.FsyncFlags)
}

// entries calls add with what getdents(2) returns from the descriptor's offset
// on, until add says that it has no room.
func entries(fd int, buf []byte, add func(fuse.DirEntry) bool) error {
	for {
		var n int
		err := ignoringEINTR(func() (err error) { n, err = unix.Getdents(fd, buf); return err })
		if err != nil || n == 0 {
			return err
		}
		for rest := buf[:n]; len(rest) > 0; {
			var e fuse.DirEntry
			rest = rest[e.Parse(rest):]
			if !add(e) {
				return nil
			}
		}
	}
}
