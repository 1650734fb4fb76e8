package loopback

import (
	"errors"
	"os"
	"sync"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// A handle number holds, from the top: the generation of the process that gave
// it (16 bits), a number of that process (40 bits), and the mode the file was
// opened with (8 bits). So no two processes give the same, and one that did
// not give it knows how to open the file again.
const (
	generationShift = 48
	sequenceShift   = 8
	sequenceMask    = 1<<40 - 1
)

func accessMode(fh uint64) int { return int(fh & unix.O_ACCMODE) }

func writable(fh uint64) bool { return accessMode(fh) != unix.O_RDONLY }

// handles are the open files and directories.
type handles struct {
	generation uint64
	mu         sync.Mutex
	last       uint64
	open       map[uint64]*handle
}

// handle is one open file or directory.
type handle struct {
	file *os.File
	node uint64
	// reading makes one READDIR of a handle wait for another: the offset is
	// that of the descriptor.
	reading sync.Mutex
}

func (hs *handles) init(generation uint16) {
	hs.generation = uint64(generation)
	hs.open = make(map[uint64]*handle)
}

func (hs *handles) add(fd int, node uint64, mode int) uint64 {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	for {
		hs.last = (hs.last + 1) & sequenceMask
		fh := hs.generation<<generationShift | hs.last<<sequenceShift | uint64(mode&unix.O_ACCMODE)
		if hs.open[fh] == nil {
			hs.open[fh] = &handle{file: os.NewFile(uintptr(fd), "file"), node: node}
			return fh
		}
	}
}

func (hs *handles) get(fh uint64) *handle {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	return hs.open[fh]
}

// adopt makes h the file of a handle that an earlier process gave, unless
// another call was faster.
func (hs *handles) adopt(fh uint64, h *handle) (*handle, bool) {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	if now := hs.open[fh]; now != nil {
		return now, false
	}
	hs.open[fh] = h
	return h, true
}

func (hs *handles) remove(fh uint64) *handle {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	h := hs.open[fh]
	delete(hs.open, fh)
	return h
}

func (hs *handles) closeAll() {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	for fh, h := range hs.open {
		_ = h.file.Close()
		delete(hs.open, fh)
	}
}

// do calls use with the descriptor, which stays open meanwhile.
func (h *handle) do(use func(fd int) error) error {
	raw, err := h.file.SyscallConn()
	if err != nil {
		return err
	}
	cerr := raw.Control(func(fd uintptr) { err = ignoringEINTR(func() error { return use(int(fd)) }) })
	return errors.Join(cerr, err)
}

// handle returns the file of a handle, opened again if an earlier process of
// this filesystem gave it.
func (f *FS) handle(id, fh uint64) (*handle, fuse.Status) {
	if h := f.handles.get(fh); h != nil {
		return h, fuse.OK
	}
	if fh>>generationShift == f.handles.generation {
		return nil, fuse.EBADF
	}
	f.tree.RLock()
	defer f.tree.RUnlock()
	fd, s := f.reopen(id, accessMode(fh))
	if !s.Ok() {
		return nil, s
	}
	h := &handle{file: os.NewFile(uintptr(fd), "file"), node: id}
	now, mine := f.handles.adopt(fh, h)
	if !mine {
		_ = h.file.Close()
		return now, fuse.OK
	}
	f.count(id, 1)
	return h, fuse.OK
}

// reopen opens a file that was open already, whatever its permissions have
// become since: they were checked then.
func (f *FS) reopen(id uint64, flags int) (fd int, s fuse.Status) {
	s = f.pin(id, func(pinned int) fuse.Status {
		var err error
		fd, err = unix.Open(link(pinned), flags|unix.O_CLOEXEC, 0)
		if err != unix.EACCES {
			return status(err)
		}
		var st unix.Stat_t
		if err := unix.Fstat(pinned, &st); err != nil {
			return status(err)
		}
		if err := unix.Chmod(link(pinned), st.Mode&0o7777|0o600); err != nil {
			return fuse.EACCES
		}
		fd, err = unix.Open(link(pinned), flags|unix.O_CLOEXEC, 0)
		if back := unix.Chmod(link(pinned), st.Mode&0o7777); err == nil && back != nil {
			_ = unix.Close(fd)
			err = back
		}
		return status(err)
	})
	return fd, s
}

// count notes that a node is open once more, or once less.
func (f *FS) count(id uint64, by int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if n := f.nodes[id]; n != nil {
		n.opens = max(0, n.opens+by)
	}
}

// openFlags are those of open(2) that are the server's business. The kernel
// chooses the offset of every write, so O_APPEND must not: a write that is
// served twice has to be the same write. O_DIRECT is between the application
// and its kernel.
func openFlags(flags uint32) int {
	const keep = unix.O_ACCMODE | unix.O_TRUNC | unix.O_SYNC | unix.O_DSYNC | unix.O_NOATIME
	return int(flags) & keep
}

// Create implements fuse.RawFileSystem.
func (f *FS) Create(_ <-chan struct{}, in *fuse.CreateIn, name string, out *fuse.CreateOut) fuse.Status {
	return f.in(in.NodeId, func(dirfd int) fuse.Status {
		flags := openFlags(in.Flags) | unix.O_CREAT | int(in.Flags)&unix.O_EXCL
		fd, err := openat(dirfd, name, flags, in.Mode&0o7777)
		if err != nil {
			return status(err)
		}
		st, err := stat(fd, "")
		if err != nil {
			_ = unix.Close(fd)
			return status(err)
		}
		if s := f.enter(place{in.NodeId, name}, dirfd, st, &out.EntryOut); !s.Ok() {
			_ = unix.Close(fd)
			return s
		}
		f.count(st.Ino, 1)
		out.Fh = f.handles.add(fd, st.Ino, flags)
		return fuse.OK
	})
}

// Open implements fuse.RawFileSystem.
func (f *FS) Open(_ <-chan struct{}, in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	f.tree.RLock()
	defer f.tree.RUnlock()
	flags := openFlags(in.Flags)
	return f.at(in.NodeId, func(dirfd int, name string) fuse.Status {
		if name == "" {
			return fuse.EISDIR
		}
		// Never to wait for the other end of a FIFO that took the place.
		fd, err := openat(dirfd, name, flags|unix.O_NONBLOCK, 0)
		if err != nil {
			return status(err)
		}
		if s := f.is(fd, in.NodeId); !s.Ok() {
			_ = unix.Close(fd)
			return s
		}
		if err := unix.SetNonblock(fd, false); err != nil {
			_ = unix.Close(fd)
			return status(err)
		}
		f.count(in.NodeId, 1)
		out.Fh = f.handles.add(fd, in.NodeId, flags)
		return fuse.OK
	})
}

// Read implements fuse.RawFileSystem.
func (f *FS) Read(_ <-chan struct{}, in *fuse.ReadIn, buf []byte) (fuse.ReadResult, fuse.Status) {
	h, s := f.handle(in.NodeId, in.Fh)
	if !s.Ok() {
		return nil, s
	}
	// The kernel releases a handle after it has the answers to its reads.
	return fuse.ReadResultFd(h.file.Fd(), int64(in.Offset), len(buf)), fuse.OK
}

// Write implements fuse.RawFileSystem.
func (f *FS) Write(_ <-chan struct{}, in *fuse.WriteIn, data []byte) (written uint32, s fuse.Status) {
	h, s := f.handle(in.NodeId, in.Fh)
	if !s.Ok() {
		return 0, s
	}
	err := h.do(func(fd int) error {
		n, err := unix.Pwrite(fd, data, int64(in.Offset))
		written = uint32(max(n, 0))
		return err
	})
	return written, status(err)
}

// Flush implements fuse.RawFileSystem: closing a copy makes the filesystem
// below tell of errors it has kept, as close(2) does.
func (f *FS) Flush(_ <-chan struct{}, in *fuse.FlushIn) fuse.Status {
	h := f.handles.get(in.Fh)
	if h == nil {
		return fuse.OK // an earlier process's, not used since
	}
	return status(h.do(func(fd int) error {
		c, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			return err
		}
		if err := unix.Close(c); err != unix.EINTR {
			return err
		}
		return nil
	}))
}

// Fsync implements fuse.RawFileSystem.
func (f *FS) Fsync(_ <-chan struct{}, in *fuse.FsyncIn) fuse.Status {
	h, s := f.handle(in.NodeId, in.Fh)
	if !s.Ok() {
		return s
	}
	return sync1(h, in.FsyncFlags)
}

// sync1 is fdatasync(2) with the lowest bit of flags set, else fsync(2).
func sync1(h *handle, flags uint32) fuse.Status {
	return status(h.do(func(fd int) error {
		if flags&1 != 0 {
			return unix.Fdatasync(fd)
		}
		return unix.Fsync(fd)
	}))
}

// Fallocate implements fuse.RawFileSystem.
func (f *FS) Fallocate(_ <-chan struct{}, in *fuse.FallocateIn) fuse.Status {
	h, s := f.handle(in.NodeId, in.Fh)
	if !s.Ok() {
		return s
	}
	return status(h.do(func(fd int) error {
		return unix.Fallocate(fd, in.Mode, int64(in.Offset), int64(in.Length))
	}))
}

// Lseek implements fuse.RawFileSystem, for SEEK_DATA and SEEK_HOLE.
func (f *FS) Lseek(_ <-chan struct{}, in *fuse.LseekIn, out *fuse.LseekOut) fuse.Status {
	h, s := f.handle(in.NodeId, in.Fh)
	if !s.Ok() {
		return s
	}
	return status(h.do(func(fd int) error {
		n, err := unix.Seek(fd, int64(in.Offset), int(in.Whence))
		out.Offset = uint64(n)
		return err
	}))
}

// CopyFileRange implements fuse.RawFileSystem.
func (f *FS) CopyFileRange(_ <-chan struct{}, in *fuse.CopyFileRangeIn) (copied uint32, s fuse.Status) {
	from, s := f.handle(in.NodeId, in.FhIn)
	if !s.Ok() {
		return 0, s
	}
	to, s := f.handle(in.NodeIdOut, in.FhOut)
	if !s.Ok() {
		return 0, s
	}
	err := from.do(func(r int) error {
		return to.do(func(w int) error {
			roff, woff := int64(in.OffIn), int64(in.OffOut)
			n, err := unix.CopyFileRange(r, &roff, w, &woff, int(min(in.Len, 1<<30)), int(in.Flags))
			copied = uint32(max(n, 0))
			return err
		})
	})
	return copied, status(err)
}

// Release implements fuse.RawFileSystem.
func (f *FS) Release(_ <-chan struct{}, in *fuse.ReleaseIn) {
	if h := f.handles.remove(in.Fh); h != nil {
		_ = h.file.Close()
		f.count(h.node, -1)
	}
}
