package directory

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/drivers/tree"
)

// OpenVolume opens the directory of a volume.
func (d *Controller[T]) OpenVolume(e Entry[T], flags uint64) (int, error) {
	volumes, err := d.openAll(e.Value.Home, VolumesDir, false)
	if err != nil {
		return -1, err
	}
	defer unix.Close(volumes)
	fd, err := tree.Open(volumes, e.Key.Volume, flags)
	if err != nil {
		return -1, fmt.Errorf("home %s: open the directory of the volume: %w", e.Value.Home, err)
	}
	return fd, nil
}

// openAll opens the directory of all volumes, or of all snapshots, of a home,
// and makes it if asked to.
func (d *Controller[T]) openAll(home, sub string, create bool) (int, error) {
	dir, err := d.config.Driver.Open(home)
	if err != nil {
		return -1, err
	}
	defer unix.Close(dir)
	if create {
		switch err := unix.Mkdirat(dir, sub, d.config.Mode); {
		case errors.Is(err, unix.EEXIST):
		case err != nil:
			return -1, fmt.Errorf("home %s: make %s: %w", home, sub, err)
		default:
			err := unix.Fchmodat(dir, sub, d.config.Mode, 0) // whatever the umask
			if err == nil {
				err = syncDir(dir, ".")
			}
			if err != nil {
				return -1, fmt.Errorf("home %s: %w", home, err)
			}
		}
	}
	fd, err := tree.Open(dir, sub, unix.O_RDONLY)
	if err != nil {
		return -1, fmt.Errorf("home %s: open %s: %w", home, sub, err)
	}
	return fd, nil
}

// layOut makes the directory of a volume and what it is divided into, as far
// as that is missing, and opens the one for the data.
func (d *Controller[T]) layOut(volumes int, id string) (data int, err error) {
	if err := makeDir(volumes, id); err != nil {
		return -1, err
	}
	fd, err := tree.Open(volumes, id, unix.O_RDONLY)
	if err != nil {
		return -1, openFailed(err)
	}
	l := d.config.Layout
	if l.Data == "" {
		return fd, nil
	}
	defer unix.Close(fd)
	for _, name := range append([]string{l.Data}, l.Beside...) {
		if err := makeDir(fd, name); err != nil {
			return -1, err
		}
	}
	data, err = tree.Open(fd, l.Data, unix.O_RDONLY)
	if err != nil {
		return -1, openFailed(err)
	}
	return data, nil
}

// syncAll makes durable what layOut made.
func (d *Controller[T]) syncAll(volumes int, id string) error {
	if err := syncDir(volumes, id); err != nil {
		return err
	}
	return unix.Fsync(volumes)
}

func makeDir(dir int, name string) error {
	if err := unix.Mkdirat(dir, name, 0o700); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("make a directory of the volume: %w", err)
	}
	return nil
}

// openFailed puts into words why a directory of a volume cannot be opened.
func openFailed(err error) error {
	if errors.Is(err, unix.EXDEV) {
		return &tree.MountError{Point: "the directory itself"}
	}
	return fmt.Errorf("open the directory of the volume: %w", err)
}

// syncDir makes durable what a directory holds, found from a descriptor that
// may be O_PATH.
func syncDir(dir int, name string) error {
	fd, err := tree.Open(dir, name, unix.O_RDONLY)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return unix.Fsync(fd)
}
