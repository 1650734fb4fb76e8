package perform

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
)

// trash takes several mounts away at once. For each use a tmpfs with a place
// for every mount is attached on a directory of the executor's own. The mounts
// are moved there by descriptor, each to a place of its own, so that none has
// another on it and each can be asked whether it is idle. Out of reach as they
// are, idle they stay, and one call detaches them all. If one is busy, all are
// moved back.
type trash struct {
	// mu is held for a use: there is one directory.
	mu   sync.Mutex
	path string // of the directory the clones are attached on
	lock int    // the directory above it, open and locked
	ns   uint64 // the namespace it is in
	// clean is true if nothing can be attached on it.
	clean bool
	// template is the detached tmpfs that each use attaches a clone of.
	template int
}

const (
	trashSource = "csi-prepare-trash"
	trashName   = "mounts" // in the directory the caller gave
	trashPlaces = mountspec.MaxSpecs
)

// errNoTrash says that the mounts have to be taken away one after another.
var errNoTrash = errors.New("not in the trash")

func newTrash(dir string, e *Executor) (*trash, error) {
	if !e.probe().UniqueIDs || !e.probe().DetachedTrees {
		return nil, nil // one after another, as on every older kernel
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	t := &trash{path: filepath.Join(dir, trashName), lock: -1, template: -1}
	if err := t.open(e, dir); err != nil {
		closeFD(&t.template)
		closeFD(&t.lock)
		return nil, err
	}
	return t, nil
}

func (t *trash) open(e *Executor, dir string) (err error) {
	if t.lock, err = open(unix.AT_FDCWD, dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW); err != nil {
		return err
	}
	if err := unix.Flock(t.lock, unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return fmt.Errorf("%s is another executor's: %w", dir, err)
	}
	if err := unix.Mkdirat(t.lock, trashName, 0o700); err != nil && err != unix.EEXIST {
		return err
	}
	if t.ns, err = nsID(nil); err != nil {
		return err
	}
	if t.template, err = trashTemplate(); err != nil {
		return err
	}
	if err := t.sweep(e); err != nil && !errors.Is(err, unix.EBUSY) {
		return err
	}
	return nil
}

// trashTemplate makes the detached tmpfs: directories d0… and files f0…, since
// a file can only be moved onto a file.
func trashTemplate() (int, error) {
	fs, err := kernel.OpenFS("tmpfs")
	if err != nil {
		return -1, err
	}
	defer func() { _ = fs.Close() }()
	for _, p := range [][2]string{{"source", trashSource}, {"mode", "700"}} {
		if err := fs.SetString(p[0], p[1]); err != nil {
			return -1, err
		}
	}
	if err := fs.Create(); err != nil {
		return -1, err
	}
	fd, err := fs.Mount(unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOEXEC)
	if err != nil {
		return -1, err
	}
	for i := range trashPlaces {
		err = errors.Join(
			unix.Mkdirat(fd, trashPlace(i, false), 0o700),
			unix.Mknodat(fd, trashPlace(i, true), unix.S_IFREG|0o600, 0))
		if err != nil {
			_ = unix.Close(fd)
			return -1, err
		}
	}
	err = kernel.MountSetattr(fd, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY, Propagation: unix.MS_PRIVATE}, false)
	return fd, err
}

func trashPlace(i int, file bool) string {
	if file {
		return "f" + strconv.Itoa(i)
	}
	return "d" + strconv.Itoa(i)
}

func (t *trash) close(e *Executor) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	var err error
	if t.template >= 0 {
		if err = t.sweep(e); err == nil {
			err = unix.Unlinkat(t.lock, trashName, unix.AT_REMOVEDIR)
		}
		closeFD(&t.template)
	}
	closeFD(&t.lock)
	return err
}

// sweep takes away what a killed predecessor has left attached: an empty tmpfs,
// once the undo of its receipts has taken what was in it.
func (t *trash) sweep(e *Executor) error {
	m, err := t.top()
	if err != nil {
		return err
	}
	if m.ID == 0 {
		t.clean = true
		return nil
	}
	if m.FSType != "tmpfs" || m.Source != trashSource {
		return fmt.Errorf("%s has a mount on it that is not the executor's: %d", t.path, m.ID)
	}
	v := &view{f: e.probe()}
	defer v.close()
	take := taking{e: e, ctx: context.Background(), v: v, index: -1}
	err = take.take(m.ID, nil)
	t.clean = err == nil
	return err
}

// top returns the mount on the trash's directory, the zero value if none is.
func (t *trash) top() (kernel.MountStat, error) {
	facts, err := kernel.FactsOf(t.lock, trashName, true)
	if err != nil {
		return kernel.MountStat{}, err
	}
	own, err := kernel.FactsOf(t.lock, "", true)
	if err != nil || facts.MountID == own.MountID {
		return kernel.MountStat{}, err
	}
	return kernel.StatMount(0, facts.MountID, kernel.StatBasic|kernel.StatFSType|kernel.StatSource|kernel.StatPoint)
}
