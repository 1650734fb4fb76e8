package mountns

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
)

// Namespace is a mount namespace held open. It lives at least until Close, with
// or without a process in it. Its methods may be called from several goroutines
// at once, but not after Close.
type Namespace struct {
	file     *os.File
	fd       int
	id       uint64
	inode    uint64
	features kernel.Features
}

// ErrNotNamespace says that a file is something else than a mount namespace.
var ErrNotNamespace = errors.New("mountns: not a mount namespace")

// Own opens the mount namespace of the calling thread. That is the process's
// own unless the goroutine is locked to a thread that has been put elsewhere.
func Own() (*Namespace, error) { return own(kernel.Probe()) }

func own(f kernel.Features) (*Namespace, error) {
	fd, err := openOwn()
	if err != nil {
		return nil, err
	}
	return adopt(fd, ownLink, f)
}

// OwnID is the ID of [Own], for a fraction of its price.
func OwnID() (uint64, error) {
	fd, err := openOwn()
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	return idOf(fd, kernel.Probe())
}

func openOwn() (int, error) {
	// The thread must stay the same until its link is open.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	fd, err := unix.Open(ownLink, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, &fs.PathError{Op: "open mount namespace", Path: ownLink, Err: err}
	}
	return fd, nil
}

// idOf is what [Namespace.ID] says of the namespace open at fd.
func idOf(fd int, f kernel.Features) (uint64, error) {
	if f.ListmountByNS {
		return kernel.NSID(fd)
	}
	return inodeOf(fd)
}

func inodeOf(fd int) (uint64, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return 0, os.NewSyscallError("fstat", err)
	}
	return st.Ino, nil
}

// ownLink is the calling thread's namespace. /proc/self would be that of the
// leader of the process.
const ownLink = "/proc/thread-self/ns/mnt"

// OpenPath opens the mount namespace at path: a link in /proc or a file that a
// namespace is bound to. A path that is something else is [ErrNotNamespace].
func OpenPath(path string) (*Namespace, error) { return openPath(path, kernel.Probe()) }

func openPath(path string, f kernel.Features) (*Namespace, error) {
	// Not followed by an open for reading before it is known to be a
	// namespace: opening a FIFO or a device can block or act.
	var st unix.Statfs_t
	handle, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err == nil {
		err = unix.Fstatfs(handle, &st)
		_ = unix.Close(handle)
	}
	if err != nil {
		return nil, &fs.PathError{Op: "open mount namespace", Path: path, Err: err}
	}
	if st.Type != unix.NSFS_MAGIC {
		return nil, fmt.Errorf("%w: %s", ErrNotNamespace, path)
	}
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open mount namespace", Path: path, Err: err}
	}
	return adopt(fd, path, f)
}

// OfProcess opens the mount namespace of the process behind pidfd
// (pidfd_open(2), SO_PEERPIDFD, or (*os.Process).WithHandle). A process number
// alone would not do: it may have come to mean another process. A process that
// has ended is ESRCH. pidfd stays the caller's.
func OfProcess(pidfd int) (*Namespace, error) { return ofProcess(pidfd, kernel.Probe()) }

func ofProcess(pidfd int, f kernel.Features) (*Namespace, error) {
	if f.PidfdNS {
		fd, err := kernel.PidfdMountNS(pidfd)
		if err != nil {
			return nil, fmt.Errorf("mountns: namespace of the process: %w", err)
		}
		return adopt(fd, "pidfd", f)
	}
	pid, err := pidOf(pidfd)
	if err != nil {
		return nil, err
	}
	n, err := openPath("/proc/"+strconv.Itoa(pid)+"/ns/mnt", f)
	// Only if the process is alive now was the number its own just before.
	if alive := unix.PidfdSendSignal(pidfd, 0, nil, 0); alive != nil {
		if n != nil {
			_ = n.Close()
		}
		return nil, fmt.Errorf("mountns: namespace of process %d: %w", pid, alive)
	}
	return n, err
}

// pidOf reads the process number behind a pidfd from this thread's fdinfo.
func pidOf(pidfd int) (int, error) {
	info, err := os.ReadFile("/proc/thread-self/fdinfo/" + strconv.Itoa(pidfd))
	if err != nil {
		return 0, fmt.Errorf("mountns: descriptor %d: %w", pidfd, err)
	}
	for line := range strings.Lines(string(info)) {
		if value, found := strings.CutPrefix(line, "Pid:"); found {
			pid, err := strconv.Atoi(strings.TrimSpace(value))
			if err != nil || pid <= 0 { // -1 ended, 0 not visible from here
				return 0, fmt.Errorf("mountns: process of descriptor %d: %w", pidfd, unix.ESRCH)
			}
			return pid, nil
		}
	}
	return 0, fmt.Errorf("mountns: descriptor %d is not a pidfd: %w", pidfd, unix.EBADF)
}

// OfPID is [OfProcess] for a caller that knows its process cannot have been
// replaced: its own child that it has not waited for.
func OfPID(pid int) (*Namespace, error) {
	pidfd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return nil, fmt.Errorf("mountns: process %d: %w", pid, err)
	}
	defer unix.Close(pidfd)
	return OfProcess(pidfd)
}

// FromFile makes a Namespace of an open file, which becomes the namespace's and
// must not be used or closed by the caller any more, error or not.
func FromFile(file *os.File) (*Namespace, error) {
	fd, err := unix.FcntlInt(file.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	name := file.Name()
	_ = file.Close()
	if err != nil {
		return nil, os.NewSyscallError("fcntl", err)
	}
	return adopt(fd, name, kernel.Probe())
}

// adopt takes fd over.
func adopt(fd int, name string, f kernel.Features) (*Namespace, error) {
	kind, err := unix.IoctlRetInt(fd, unix.NS_GET_NSTYPE)
	if err != nil || kind != unix.CLONE_NEWNS {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("%w: %s", ErrNotNamespace, name)
	}
	n := &Namespace{fd: fd, features: f}
	if n.inode, err = inodeOf(fd); err == nil {
		n.id, err = idOf(fd, f)
	}
	if err != nil {
		_ = unix.Close(fd)
		return nil, err
	}
	n.file = os.NewFile(uintptr(fd), "mnt:["+strconv.FormatUint(n.inode, 10)+"]")
	return n, nil
}

// ID is the namespace's id, which no other namespace has until the next boot. It
// does not tell which of two was made first.
// A kernel without such ids (before 6.11) gives [Namespace.Inode] instead,
// which may be used again when the namespace is gone.
func (n *Namespace) ID() uint64 { return n.id }

// Inode is the number in the namespace's name, mnt:[4026531832].
func (n *Namespace) Inode() uint64 { return n.inode }

// File returns the open file that holds the namespace, for setns(2), for a
// child's ExtraFiles, or for reopening it at /proc/self/fd/N. It stays the
// namespace's: do not close it, and do not call its Fd method, which would
// change its mode; use [Namespace.FD].
func (n *Namespace) File() *os.File { return n.file }

// FD returns the descriptor of File, valid until Close.
func (n *Namespace) FD() int { return n.fd }

// String returns the namespace's name as /proc shows it.
func (n *Namespace) String() string { return n.file.Name() }

// Close lets go of the namespace. If nothing else holds it, the kernel takes it
// and its mounts apart soon after, not before Close returns.
func (n *Namespace) Close() error { return n.file.Close() }

// Propagation mode of a copy.
type copyMode uintptr

// NewOption changes what [New] makes.
type NewOption func(*copyMode)

// Slave makes the copy receive what is mounted later in the original, below
// mounts that are shared there; nothing goes the other way. Without it the copy
// is private: no mount event passes in either direction.
func Slave() NewOption { return func(m *copyMode) { *m = unix.MS_SLAVE } }

// New makes a copy of the calling thread's mount namespace, every mount of it
// recursively private unless an option says otherwise. No process is in it and
// no file is bound to it: it lives until Close, or for as long as somebody else
// has opened or entered it. Copying costs time in proportion to the number of
// mounts (about a millisecond per thousand).
func New(ctx context.Context, options ...NewOption) (*Namespace, error) {
	origin, err := Own()
	if err != nil {
		return nil, err
	}
	defer func() { _ = origin.Close() }()
	return origin.Copy(ctx, options...)
}

// Copy is [New] for any namespace.
func (n *Namespace) Copy(ctx context.Context, options ...NewOption) (*Namespace, error) {
	mode := copyMode(unix.MS_PRIVATE)
	for _, o := range options {
		o(&mode)
	}
	var made *Namespace
	err := n.visit(ctx, func(t *thread) error {
		if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
			return os.NewSyscallError("unshare", err)
		}
		if err := unix.Mount("", "/", "", unix.MS_REC|uintptr(mode), ""); err != nil {
			return &fs.PathError{Op: "mount", Path: "/", Err: err}
		}
		fd, err := t.openNamespace()
		if err != nil {
			return err
		}
		made, err = adopt(fd, "copy", n.features)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("mountns: copy %s: %w", n, err)
	}
	return made, nil
}
