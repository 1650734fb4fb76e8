package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

func makeData(dir string) error { return os.Mkdir(filepath.Join(dir, "data"), 0o700) }

func sizedGrants(dir string) map[string]string {
	grants := map[string]string{}
	for i := range smallSizes + largeSizes {
		name := fmt.Sprintf("sized-%d", i)
		grants[name] = filepath.Join(dir, "grant", name)
	}
	return grants
}

// makeSizedGrants mounts a filesystem for each volume that can have a size.
func makeSizedGrants(dir string) error {
	if err := makeData(dir); err != nil {
		return err
	}
	if err := os.Mkdir(filepath.Join(dir, "grant"), 0o700); err != nil {
		return err
	}
	for i := range smallSizes + largeSizes {
		path := filepath.Join(dir, "grant", fmt.Sprintf("sized-%d", i))
		size := 8
		if i >= smallSizes {
			size = 16
		}
		if err := os.Mkdir(path, 0o700); err != nil {
			return err
		}
		if err := unix.Mount("sized", path, "tmpfs", 0, fmt.Sprintf("size=%dm", size)); err != nil {
			return fmt.Errorf("a filesystem for a volume: %w", err)
		}
	}
	return nil
}

// makeRoot gives this process, and what it starts, a root directory with an
// empty /data: that is where swarm stages and publishes, since a plugin of
// Docker's has a root directory of its own. All else is as on the machine. The
// mount namespace is this process's own.
func makeRoot() error {
	work, err := os.Getwd()
	if err != nil {
		return err
	}
	root, err := os.MkdirTemp("", "compat-root-")
	if err != nil {
		return err
	}
	if err := unix.Mount("root", root, "tmpfs", 0, "mode=0755"); err != nil {
		return errors.Join(fmt.Errorf("tmpfs: %w", err), os.Remove(root))
	}
	entries, err := os.ReadDir("/")
	if err != nil {
		return err
	}
	for _, e := range entries {
		from, at := filepath.Join("/", e.Name()), filepath.Join(root, e.Name())
		switch {
		case e.Name() == "data":
		case e.Type()&os.ModeSymlink != 0:
			to, err := os.Readlink(from)
			if err == nil {
				err = os.Symlink(to, at)
			}
			if err != nil {
				return err
			}
		case e.IsDir():
			if err := os.Mkdir(at, 0o755); err != nil {
				return err
			}
			if err := unix.Mount(from, at, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
				return fmt.Errorf("%s in the root directory: %w", from, err)
			}
		}
	}
	for _, dir := range []string{"data", "data/published", "data/staged"} {
		if err := os.Mkdir(filepath.Join(root, dir), 0o755); err != nil {
			return err
		}
	}
	// The old root is stacked on the new one, and taken off.
	if err := unix.Chdir(root); err != nil {
		return err
	}
	if err := unix.PivotRoot(".", "."); err != nil {
		return fmt.Errorf("pivot_root: %w", err)
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("take the old root off: %w", err)
	}
	// What the recursive bind of /tmp has of the tmpfs, and its directory.
	return errors.Join(os.Chdir(work), unix.Unmount(root, unix.MNT_DETACH), os.Remove(root))
}

// noNFS says why the NFS driver cannot be tried.
func noNFS() string {
	text, err := os.ReadFile("/proc/filesystems")
	if err == nil && bytes.Contains(text, []byte("\tnfs4\n")) {
		return "an NFS server for it is in the guest of make vm alone"
	}
	return "this kernel has no NFS client; make vm tests the driver in a guest that has"
}

// capSysResource is CAP_SYS_RESOURCE of capabilities(7).
const capSysResource = 24

// mayHave says that a process of this one's may have a capability.
func mayHave(capability int) bool {
	n, err := unix.PrctlRetInt(unix.PR_CAPBSET_READ, uintptr(capability), 0, 0, 0)
	return err == nil && n == 1
}
