package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// Ground is where everything is measured: a mount namespace of this process
// alone, with a tmpfs that holds sources, targets and filler mounts.
type Ground struct {
	dir     string
	source  string // on a tmpfs of its own, so that it has no child mounts
	fillers int
}

// newGround makes the calling thread's mount namespace a private copy. The
// caller holds the main thread locked: the namespace is the process's own.
func newGround() (*Ground, error) {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return nil, fmt.Errorf("unshare: %w (benchmarks of mounts need root)", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return nil, fmt.Errorf("make / private: %w", err)
	}
	dir, err := os.MkdirTemp("", "csi-prepare-bench-")
	if err != nil {
		return nil, err
	}
	g := &Ground{dir: dir, source: filepath.Join(dir, "source")}
	if err := unix.Mount("ground", dir, "tmpfs", 0, "size=64m"); err != nil {
		return nil, fmt.Errorf("tmpfs at %s: %w", dir, err)
	}
	if err := os.Mkdir(g.source, 0o755); err != nil {
		return nil, err
	}
	if err := unix.Mount("source", g.source, "tmpfs", 0, "size=16m"); err != nil {
		return nil, fmt.Errorf("tmpfs at %s: %w", g.source, err)
	}
	for _, sub := range []string{"data", "data/a", "data/b"} {
		if err := os.Mkdir(filepath.Join(g.source, sub), 0o755); err != nil {
			return nil, err
		}
	}
	return g, nil
}

// Close leaves nothing: the mounts end with the process, the directory that
// the first tmpfs covers is empty.
func (g *Ground) Close() error {
	if err := unix.Unmount(g.dir, unix.MNT_DETACH); err != nil {
		return fmt.Errorf("detach the ground: %w", err)
	}
	return os.Remove(g.dir)
}

// Dir makes a directory below the ground and returns its path.
func (g *Ground) Dir(elem ...string) string {
	path := filepath.Join(append([]string{g.dir}, elem...)...)
	if err := os.MkdirAll(path, 0o755); err != nil {
		panic(err) // the ground is a fresh tmpfs of our own
	}
	return path
}

// Fill brings the number of filler mounts up to n: binds of one directory at
// paths as long as those of a kubelet.
func (g *Ground) Fill(n int) error {
	if n <= g.fillers {
		return nil
	}
	from := g.Dir("filler", "source")
	for ; g.fillers < n; g.fillers++ {
		uid := fmt.Sprintf("%08x-1c5e-4f6b-9d42-%012x", g.fillers, g.fillers)
		at := g.Dir("filler", "pods", uid, "volumes", "kubernetes.io~csi", "pvc-"+uid, "mount")
		if err := unix.Mount(from, at, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("filler %d: %w", g.fillers, err)
		}
	}
	return nil
}

// mountCount is how many mounts the namespace has, by the slow and certain
// way: it is asked between cases only.
func mountCount() (int, error) {
	table, err := os.ReadFile("/proc/thread-self/mountinfo")
	if err != nil {
		return 0, err
	}
	return strings.Count(string(table), "\n"), nil
}
