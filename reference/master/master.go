// Package master is the mounts a CO keeps for the sake of their clones: one
// clone is attached for each consumer, the master for none.
//
// There are two: the FUSE mount the CO made for a Plugin that serves it (Made),
// and the mount a Plugin sent as a handle (Receive). The latter is foreign. A
// descriptor of it tells too little: statmount(2) knows no detached mount, and
// asking the filesystem for its type may wait for its server for ever. So it is
// attached where nobody else is, a mount namespace with nothing in it, looked
// at there, and cloned there, as only the namespace that has it can.
package master

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
	"github.com/csi-prepare/csi-prepare/reference/mountns"
)

// Mount is a mount to clone.
type Mount struct {
	file *os.File // borrowed
	ns   *mountns.Namespace
	id   uint64
}

// Made is the master of a mount this process made with fsmount(2), which may
// be cloned from any mount namespace (Linux 6.15). The file stays the
// caller's, and has to stay open.
func Made(file *os.File) *Mount { return &Mount{file: file} }

// Expected is what a received mount has to be.
type Expected struct {
	// FSType is its type as the Plugin declared it, with or without the
	// subtype.
	FSType string
	// Allowed refuses a type by an error; nil allows what is declared.
	Allowed func(fsType string) error
	// Submounts allows mounts below it.
	Submounts bool
}

// RefusedError says why a received mount is not used.
type RefusedError struct{ Reason string }

// Error implements error.
func (e *RefusedError) Error() string { return "master: the mount received is refused: " + e.Reason }

func refused(format string, args ...any) error {
	return &RefusedError{Reason: fmt.Sprintf(format, args...)}
}

// Receive makes a master of a detached mount that came as a handle, once it is
// seen to be what was declared. The file stays the caller's and may be closed;
// the mount is moved into a namespace of the master's, error or not. No server
// is asked anything. Linux 6.8.
func Receive(ctx context.Context, file *os.File, want Expected) (*Mount, error) {
	m := &Mount{}
	err := withFD(file, func(fd int) error { return m.receive(ctx, fd, want) })
	if err != nil {
		return nil, errors.Join(err, m.Close())
	}
	return m, nil
}

func (m *Mount) receive(ctx context.Context, fd int, want Expected) (err error) {
	facts, err := kernel.FactsOf(fd, "", true)
	if err != nil {
		return fmt.Errorf("master: %w", err)
	}
	switch {
	case !facts.MountRoot:
		return refused("it is no root of a mount")
	case facts.Mode&unix.S_IFMT != unix.S_IFDIR:
		return refused("it is not of a directory")
	}
	m.id = facts.MountID
	if _, err := kernel.StatMount(0, m.id, kernel.StatBasic); !errors.Is(err, unix.ENOENT) {
		if err == nil {
			err = refused("it is attached in the CO's own mount namespace")
		}
		return err
	}
	if m.ns, err = empty(ctx); err != nil {
		return fmt.Errorf("master: make a mount namespace: %w", err)
	}
	err = m.ns.Do(ctx, func() error {
		root, err := unix.Open("/", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			return &os.PathError{Op: "open", Path: "/", Err: err}
		}
		defer unix.Close(root)
		// Never of the group of what it is a clone of.
		attr := unix.MountAttr{Propagation: unix.MS_PRIVATE}
		if err := kernel.MountSetattr(fd, &attr, true); err != nil {
			return err
		}
		return kernel.MoveMount(fd, root, 0)
	})
	switch {
	case errors.Is(err, unix.EINVAL):
		return refused("it is attached in a mount namespace: %v", err)
	case err != nil:
		return fmt.Errorf("master: attach it in private: %w", err)
	}
	// What it is cloned from is a descriptor of the master's own.
	copied, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("master: %w", os.NewSyscallError("fcntl", err))
	}
	m.file = os.NewFile(uintptr(copied), "master")
	return m.check(ctx, facts, want)
}

// check looks at the mount where it is attached.
func (m *Mount) check(ctx context.Context, facts kernel.Facts, want Expected) error {
	found, err := m.ns.Lookup(ctx, m.id)
	if err != nil {
		return fmt.Errorf("master: %w", err)
	}
	if len(found) != 1 {
		return refused("it is not to be found where it was attached")
	}
	got := found[0]
	if want.FSType != got.FSType && want.FSType != got.Type() {
		return refused("its type is %s, declared was %s", got.Type(), want.FSType)
	}
	if want.Allowed != nil {
		if err := want.Allowed(got.FSType); err != nil {
			return refused("%v", err)
		}
	}
	node, err := kernel.FactsOf(unix.AT_FDCWD, "/", true)
	if err != nil {
		return fmt.Errorf("master: %w", err)
	}
	if node.DevMajor == facts.DevMajor && node.DevMinor == facts.DevMinor {
		return refused("it is of the filesystem that is the CO's root")
	}
	below, err := kernel.ListMounts(nil, m.ns.ID(), m.id, 0)
	if err != nil {
		return fmt.Errorf("master: %w", err)
	}
	if len(below) > 0 && !want.Submounts {
		return refused("%d mounts are below it", len(below))
	}
	return nil
}

// empty makes a mount namespace with nothing in it but the root, so that it
// keeps nobody's filesystem in use.
func empty(ctx context.Context) (*mountns.Namespace, error) {
	ns, err := mountns.New(ctx)
	if err != nil {
		return nil, err
	}
	for {
		done, err := strip(ctx, ns)
		if err != nil {
			return nil, errors.Join(err, ns.Close())
		}
		if done {
			return ns, nil
		}
	}
}

// strip takes away what is attached to the root of a namespace that nobody is
// in, from the top: what is below goes with it, and no path leads through a
// mount whose server may hang.
func strip(ctx context.Context, ns *mountns.Namespace) (done bool, err error) {
	table, err := ns.Table(ctx)
	if err != nil {
		return false, err
	}
	var root uint64
	for _, m := range table.At("/") {
		root = m.ID // the last is on top
	}
	var points []string
	for _, m := range table.Mounts {
		if m.ParentID == root && m.ID != root {
			points = append(points, m.Point)
		}
	}
	if len(points) == 0 {
		return true, nil
	}
	return false, ns.Do(ctx, func() error {
		for _, p := range points {
			if err := kernel.Unmount(p, unix.MNT_DETACH); err != nil {
				return err
			}
		}
		return nil
	})
}

// Clone returns a detached clone, with the mounts below it if recursive, for
// the caller to narrow, attach and close.
func (m *Mount) Clone(ctx context.Context, recursive bool) (fd int, err error) {
	flags := uint(unix.OPEN_TREE_CLONE)
	if recursive {
		flags |= unix.AT_RECURSIVE
	}
	clone := func() error {
		return withFD(m.file, func(master int) (err error) {
			fd, err = kernel.OpenTree(master, "", flags)
			return err
		})
	}
	if m.ns == nil {
		err = clone()
	} else {
		err = m.ns.Do(ctx, clone)
	}
	if err != nil {
		return -1, fmt.Errorf("master: clone: %w", err)
	}
	return fd, nil
}

// File is the master itself, for fusemount.Prove and Abort; it stays the
// master's.
func (m *Mount) File() *os.File { return m.file }

// Files are what another process needs to clone the mount: its descriptor, and
// that of the namespace it can be cloned in, nil for any. Both stay the
// master's. The other process makes a master of them with Inherited.
func (m *Mount) Files() (mount, namespace *os.File) {
	if m.ns == nil {
		return m.file, nil
	}
	return m.file, m.ns.File()
}

// Inherited is the master behind the Files of another process, which are its
// own from now on, error or not.
func Inherited(mount, namespace *os.File) (*Mount, error) {
	if namespace == nil {
		return Made(mount), nil
	}
	ns, err := mountns.FromFile(namespace)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("master: %w", err), mount.Close())
	}
	return &Mount{file: mount, ns: ns}, nil
}

// Close lets go of a received mount; of one that was Made there is nothing to
// let go. Clones live on.
func (m *Mount) Close() error {
	if m.ns == nil {
		return nil
	}
	var err error
	if m.file != nil {
		err = m.file.Close()
	}
	return errors.Join(err, m.ns.Close())
}

func withFD(f *os.File, use func(fd int) error) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	cerr := raw.Control(func(fd uintptr) { err = use(int(fd)) })
	return errors.Join(cerr, err)
}
