package hostpath

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/csi-prepare/csi-prepare/drivers/tree"
)

func plant(t *testing.T, dir string, paths ...string) {
	t.Helper()
	for _, p := range paths {
		full := filepath.Join(dir, p)
		if strings.HasSuffix(p, "/") {
			if err := os.MkdirAll(full, 0o700); err != nil {
				t.Fatal(err)
			}
			continue
		}
		if err := os.MkdirAll(filepath.Dir(full), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(full, []byte(p), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

func openParent(t *testing.T, dir string) int {
	t.Helper()
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	return fd
}

func TestRemoveTree(t *testing.T) {
	dir := t.TempDir()
	parent := openParent(t, dir)
	plant(t, dir, "outside/kept", "v/a", "v/b/c/d", "v/b/e/", "v/.hidden/f", "v/names with\nnewlines/\x01")
	for link, to := range map[string]string{
		"v/link": "../outside", "v/b/absolute": filepath.Join(dir, "outside"), "v/loop": "loop", "v/b/up": "../..", "v/dangling": "nowhere",
	} {
		if err := os.Symlink(to, filepath.Join(dir, link)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Link(filepath.Join(dir, "outside/kept"), filepath.Join(dir, "v/hard")); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mkfifo(filepath.Join(dir, "v/fifo"), 0o600); err != nil {
		t.Fatal(err)
	}
	for i := range 3000 {
		plant(t, dir, fmt.Sprintf("v/wide/%d", i))
	}
	for range 2 { // a repeat is fine
		if err := tree.Remove(t.Context(), parent, "v"); err != nil {
			t.Fatal(err)
		}
	}
	if exists(filepath.Join(dir, "v")) {
		t.Error("something is left")
	}
	if text, err := os.ReadFile(filepath.Join(dir, "outside/kept")); string(text) != "outside/kept" {
		t.Errorf("a file outside: %q, %v", text, err)
	}
}

// A consumer may nest directories deeper than any path or descriptor table
// reaches.
func TestRemoveDeepTree(t *testing.T) {
	dir := t.TempDir()
	parent := openParent(t, dir)
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	for range 2500 {
		if err := unix.Mkdirat(fd, "v", 0o700); err != nil {
			t.Fatal(err)
		}
		next, err := unix.Openat(fd, "v", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		unix.Close(fd)
		fd = next
	}
	unix.Close(fd)
	if err := tree.Remove(t.Context(), parent, "v"); err != nil {
		t.Fatal(err)
	}
	if exists(filepath.Join(dir, "v")) {
		t.Error("something is left")
	}
}

func TestRemoveTreeRefusesLinks(t *testing.T) {
	dir := t.TempDir()
	parent := openParent(t, dir)
	plant(t, dir, "outside/kept")
	if err := os.Symlink("outside", filepath.Join(dir, "v")); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"v", "../" + filepath.Base(dir), "/", ".."} {
		if err := tree.Remove(t.Context(), parent, name); err == nil {
			t.Errorf("%q was removed", name)
		}
	}
	if !exists(filepath.Join(dir, "outside/kept")) {
		t.Error("a file outside is gone")
	}
}

func TestCancelledRemovalCanBeRepeated(t *testing.T) {
	dir := t.TempDir()
	parent := openParent(t, dir)
	plant(t, dir, "v/a/b", "v/c/d")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := tree.Remove(ctx, parent, "v"); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	if err := tree.Remove(t.Context(), parent, "v"); err != nil {
		t.Error(err)
	}
}

// Nothing is removed from a volume with a mount in it, and nothing through
// the mount, whatever is mounted and wherever.
func TestDeleteRefusesMounts(t *testing.T) {
	if !inOwnNamespace(t) {
		return
	}
	s := newSite(t)
	s.start()
	foreign := t.TempDir()
	plant(t, foreign, "dir/kept", "file")
	for _, tt := range []struct{ name, source, target string }{
		{"on the volume itself", "dir", ""},
		{"on a directory", "dir", "a/b"},
		{"on a file", "file", "f"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			id := s.create(tt.name).GetVolumeId()
			plant(t, s.path(id), "a/b/", "a/data", "f")
			target := filepath.Join(s.path(id), tt.target)
			if err := unix.Mount(filepath.Join(foreign, tt.source), target, "", unix.MS_BIND, ""); err != nil {
				t.Fatal(err)
			}
			s.code("delete", s.delete(id), codes.FailedPrecondition, "mounted")
			if text, err := os.ReadFile(filepath.Join(foreign, "dir/kept")); string(text) != "dir/kept" {
				t.Errorf("data behind the mount: %q, %v", text, err)
			}

			// Past the look at the mount table, the removal itself stops.
			volumes := openParent(t, filepath.Dir(s.path(id)))
			if err := tree.Remove(t.Context(), volumes, id); err == nil {
				t.Error("removed in spite of the mount")
			}
			if !exists(filepath.Join(foreign, "dir/kept")) || !exists(filepath.Join(foreign, "file")) {
				t.Error("data behind the mount is gone")
			}
			if err := unix.Unmount(target, 0); err != nil {
				t.Fatal(err)
			}
			s.code("delete after unmount", s.delete(id), codes.OK)
			if exists(s.path(id)) {
				t.Error("its directory is left")
			}
		})
	}
}
