package perform

import (
	"errors"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
)

// open is openat(2), close-on-exec, repeated when a signal interrupts it.
func open(dirfd int, path string, flags int) (int, error) {
	for {
		fd, err := unix.Openat(dirfd, path, flags|unix.O_CLOEXEC, 0)
		if err == nil {
			return fd, nil
		}
		if err != unix.EINTR {
			return -1, &os.PathError{Op: "openat", Path: path, Err: err}
		}
	}
}

// resolveCached is RESOLVE_CACHED, which asks no filesystem (Linux 5.12).
const resolveCached = 0x20

// openBelow opens path below a directory, following no link at all.
func (x *performance) openBelow(dir int, path string) (int, error) {
	return x.openHow(dir, path, unix.OpenHow{
		Flags:   unix.O_PATH | unix.O_NOFOLLOW,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS,
	})
}

// openHow is openat2(2), or a walk without it, that does not hang in a
// filesystem whose server does not answer, be it the consumer's own. What the
// kernel knows already is opened at once; else a child asks. Without a child
// it may hang.
func (x *performance) openHow(dir int, path string, how unix.OpenHow) (int, error) {
	if !x.f.Openat2 {
		return walk(dir, path)
	}
	if !childAvailable.Load() {
		return kernel.Openat2(dir, path, how)
	}
	known := how
	known.Resolve |= resolveCached
	fd, err := openat2Once(dir, path, known)
	if err != unix.EAGAIN && err != unix.EINVAL { // EINVAL before Linux 5.12
		if err != nil {
			err = &os.PathError{Op: "openat2", Path: path, Err: err}
		}
		return fd, err
	}
	if dir == unix.AT_FDCWD {
		// The child, and each step, need a descriptor of the root.
		if dir, err = open(dir, "/", unix.O_PATH|unix.O_DIRECTORY); err != nil {
			return -1, err
		}
		defer unix.Close(dir)
		how.Resolve |= unix.RESOLVE_IN_ROOT
	}
	if how.Resolve&unix.RESOLVE_NO_SYMLINKS == 0 {
		return x.askChild(dir, path, how)
	}
	return x.openStepwise(dir, path, how)
}

// openStepwise opens a path without links, one component at a time, so that a
// child is needed only where a server has to be asked.
func (x *performance) openStepwise(dir int, path string, how unix.OpenHow) (int, error) {
	at := dir
	defer func() { closeWalk(at, dir) }()
	rest := strings.TrimLeft(path, "/")
	for {
		name, after, more := strings.Cut(rest, "/")
		after = strings.TrimLeft(after, "/")
		step := unix.OpenHow{Flags: how.Flags, Resolve: how.Resolve&^unix.RESOLVE_IN_ROOT | unix.RESOLVE_BENEATH}
		if more && after != "" {
			step.Flags = unix.O_PATH // of a link this is ELOOP
		}
		known := step
		known.Resolve |= resolveCached
		fd, err := openat2Once(at, name, known)
		if err == unix.EAGAIN || err == unix.EINVAL {
			if x.isRemote(at) {
				step.Flags = how.Flags
				return x.askChild(at, rest, step)
			}
			fd, err = kernel.Openat2(at, name, step)
		}
		if err != nil || after == "" {
			return fd, err
		}
		closeWalk(at, dir)
		at, rest = fd, after
	}
}

func (x *performance) askChild(dir int, path string, how unix.OpenHow) (int, error) {
	fd, _, err := inChild(x.ctx, &childTask{Open: path, Flags: how.Flags, Resolve: how.Resolve}, dir, x.o.Timeout)
	return fd, err
}

// isRemote says that an open directory is on a filesystem that asks a server.
func (x *performance) isRemote(dir int) bool {
	facts, err := kernel.FactsOf(dir, "", x.f.UniqueIDs)
	if err != nil {
		return true
	}
	v := x.view()
	defer v.close()
	m, err := v.lookup(x.ctx, facts.MountID)
	if errors.Is(err, unix.ENOENT) {
		return x.firstIsRemote() // not attached yet: it is the first spec's
	}
	return err != nil || remoteTypes[m.FSType]
}

// firstIsRemote says that the first spec's filesystem asks a server.
func (x *performance) firstIsRemote() bool {
	switch k := x.specs[0].Kind.(type) {
	case *mountspec.Filesystem:
		return remoteTypes[k.Type] || k.Served
	case *mountspec.Bind:
		u := &x.units[0]
		if u.source >= 0 {
			return x.isRemote(u.source)
		}
		return x.isRemote(u.base)
	}
	return false
}

func openat2Once(dir int, path string, how unix.OpenHow) (int, error) {
	how.Flags |= unix.O_CLOEXEC
	for {
		fd, err := unix.Openat2(dir, path, &how)
		if err != unix.EINTR {
			return fd, err
		}
	}
}

// walk opens path below dirfd for a kernel without openat2(2): one component
// at a time, none of which may be a link, so that there is no way out.
func walk(dirfd int, path string) (int, error) {
	at := dirfd
	for name := range strings.SplitSeq(path, "/") {
		switch name {
		case "", ".":
			continue
		case "..":
			closeWalk(at, dirfd)
			return -1, &os.PathError{Op: "walk", Path: path, Err: unix.EXDEV}
		}
		next, err := open(at, name, unix.O_PATH|unix.O_NOFOLLOW)
		closeWalk(at, dirfd)
		if err != nil {
			return -1, err
		}
		// With O_PATH and O_NOFOLLOW a link is opened itself.
		var st unix.Statx_t
		err = unix.Statx(next, "", unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC, unix.STATX_TYPE, &st)
		if err != nil || st.Mode&unix.S_IFMT == unix.S_IFLNK {
			_ = unix.Close(next)
			if err == nil {
				err = unix.ELOOP
			}
			return -1, &os.PathError{Op: "walk", Path: path, Err: err}
		}
		at = next
	}
	if at == dirfd {
		return open(dirfd, ".", unix.O_PATH|unix.O_DIRECTORY)
	}
	return at, nil
}

func closeWalk(at, dirfd int) {
	if at != dirfd {
		_ = unix.Close(at)
	}
}
