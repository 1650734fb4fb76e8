package perform

import (
	"context"
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
	fd, err := openKnown(dir, path, how)
	if !isUnknown(err) {
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
	return openStepwise(dir, path, how, x.isRemote, x.askChild)
}

func (x *performance) askChild(dir int, path string, how unix.OpenHow) (int, error) {
	fd, _, err := inChild(x.ctx, &childTask{Open: path, Flags: how.Flags, Resolve: how.Resolve}, dir, x.o.Timeout)
	return fd, err
}

// openStepwise opens a path without links, one component at a time, so that
// only where remote says that a server has to be asked, ask does the rest.
func openStepwise(dir int, path string, how unix.OpenHow, remote func(dir int) bool,
	ask func(dir int, path string, how unix.OpenHow) (int, error),
) (int, error) {
	at := dir
	defer func() { closeWalk(at, dir) }()
	rest := strings.TrimLeft(path, "/")
	for {
		name, after, _ := strings.Cut(rest, "/")
		after = strings.TrimLeft(after, "/")
		step := unix.OpenHow{Flags: how.Flags, Resolve: how.Resolve&^unix.RESOLVE_IN_ROOT | unix.RESOLVE_BENEATH}
		if after != "" {
			step.Flags = unix.O_PATH // of a link this is ELOOP
		}
		fd, err := openKnown(at, name, step)
		if isUnknown(err) {
			if remote(at) {
				step.Flags = how.Flags
				return ask(at, rest, step)
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

// isRemote says that an open directory is on a filesystem that asks a server.
func (x *performance) isRemote(dir int) bool {
	v := x.view()
	defer v.close()
	remote, err := v.isRemote(x.ctx, dir)
	if errors.Is(err, unix.ENOENT) {
		return x.firstIsRemote() // not attached yet: it is the first spec's
	}
	return remote || err != nil
}

func (v *view) isRemote(ctx context.Context, dir int) (bool, error) {
	facts, err := kernel.FactsOf(dir, "", v.f.UniqueIDs)
	if err != nil {
		return true, err
	}
	m, err := v.lookup(ctx, facts.MountID, statType)
	return remoteTypes[m.FSType], err
}

// firstIsRemote says that the first spec's filesystem asks a server.
func (x *performance) firstIsRemote() bool {
	switch k := x.specs[0].Kind.(type) {
	case *mountspec.Filesystem:
		return remoteTypes[k.Type] || k.Served
	case *mountspec.FUSE:
		return true
	case *mountspec.Handle:
		return remoteTypes[k.FSType] || k.Served
	case *mountspec.Bind:
		from := x.units[0].source
		if from < 0 {
			from = x.units[0].base
		}
		// Where that cannot be told, it is taken for one that does.
		v := view{f: x.f}
		defer v.close()
		remote, err := v.isRemote(x.ctx, from)
		return remote || err != nil
	}
	return false
}

// openKnown is openat2(2) of what the kernel knows, by the plain errno. A rename
// anywhere on the machine makes it give up as well as something unknown does,
// so it is tried more than once.
func openKnown(dir int, path string, how unix.OpenHow) (int, error) {
	how.Flags |= unix.O_CLOEXEC
	how.Resolve |= resolveCached
	for attempt := 0; ; {
		fd, err := unix.Openat2(dir, path, &how)
		switch {
		case err == unix.EINTR:
		case err == unix.EAGAIN && attempt < knownAttempts:
			attempt++
		default:
			return fd, err
		}
	}
}

const knownAttempts = 8

// isUnknown says that openKnown could not tell: EINVAL is that of a kernel
// before Linux 5.12, which does not know the flag.
func isUnknown(err error) bool {
	return errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINVAL)
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

// openDir opens a directory of the namespace by a path that has no link in it,
// however long the path is. Unless the view is patient it asks no server; where
// one would have to be asked the error is errMayHang.
func (v *view) openDir(ctx context.Context, path string) (int, error) {
	at := unix.AT_FDCWD
	for {
		part, rest := path, ""
		if len(path) > maxPath {
			cut := strings.LastIndexByte(path[:maxPath], '/')
			part, rest = path[:cut], path[cut+1:]
		}
		next, err := v.openPlain(ctx, at, part)
		if at != unix.AT_FDCWD {
			_ = unix.Close(at)
		}
		if err != nil || rest == "" {
			return next, err
		}
		at, path = next, rest
	}
}

// maxPath is less than the kernel takes at once.
const maxPath = 4000

func (v *view) openPlain(ctx context.Context, at int, path string) (int, error) {
	how := unix.OpenHow{
		Flags:   unix.O_PATH | unix.O_DIRECTORY | unix.O_NOFOLLOW,
		Resolve: unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS,
	}
	if !v.f.Openat2 {
		return walk(at, path)
	}
	if v.patient {
		return kernel.Openat2(at, path, how)
	}
	fd, err := openKnown(at, path, how)
	if !isUnknown(err) {
		return fd, err
	}
	if at == unix.AT_FDCWD {
		root, err := open(at, "/", unix.O_PATH|unix.O_DIRECTORY)
		if err != nil {
			return -1, err
		}
		defer unix.Close(root)
		at = root
	}
	if strings.Trim(path, "/") == "" {
		return kernel.Openat2(at, ".", how)
	}
	return openStepwise(at, path, how, func(dir int) bool {
		remote, err := v.isRemote(ctx, dir)
		return remote || err != nil
	}, func(int, string, unix.OpenHow) (int, error) { return -1, errMayHang })
}
