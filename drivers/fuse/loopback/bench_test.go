package loopback

import (
	"context"
	"fmt"
	"io"
	"log"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	gofuse "github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/fusemount"
	"github.com/csi-prepare/csi-prepare/reference/handoff"
	"github.com/csi-prepare/csi-prepare/reference/kernel"
	"github.com/csi-prepare/csi-prepare/reference/mountns"
)

// classic serves with a go-fuse server, as a plugin does that mounts by itself:
// what resumable serving is measured against.
func classic(arguments []string) error {
	unix.Umask(0)
	fs, err := New(arguments[0], arguments[1], Options{})
	if err != nil {
		return err
	}
	s, err := gofuse.NewServer(fs, "/dev/fd/3", &gofuse.MountOptions{
		MaxWrite: 128 << 10, IDMappedMount: true, Logger: log.New(io.Discard, "", 0),
	})
	if err != nil {
		return err
	}
	if _, err := os.NewFile(5, "ready").Write([]byte{1}); err != nil {
		return err
	}
	s.Serve()
	return nil
}

// BenchmarkServing runs the same work on both kinds of server, and on the
// directory itself. The page cache of the mount is dropped where it would
// answer instead of the server.
func BenchmarkServing(b *testing.B) {
	if os.Geteuid() != 0 {
		b.Skip("making FUSE mounts needs root")
	}
	for _, role := range []string{"plain", "classic", "serve"} {
		base := b.TempDir()
		data, orphans, point := filepath.Join(base, "data"), filepath.Join(base, "orphans"), filepath.Join(base, "point")
		for _, d := range []string{data, orphans, point} {
			if err := os.Mkdir(d, 0o755); err != nil {
				b.Fatal(err)
			}
		}
		ns, err := mountns.New(b.Context())
		if err != nil {
			b.Fatal(err)
		}
		if role == "plain" {
			point = data
		} else {
			attachServed(b, ns, role, data, orphans, point)
		}
		for name, work := range map[string]func(*testing.B, string) error{
			"read4k": read4k, "write128k": write128k, "stat": statFiles, "create": create,
		} {
			b.Run(name+"/"+role, func(b *testing.B) {
				if err := ns.Do(b.Context(), func() error { return work(b, point) }); err != nil {
					b.Fatal(err)
				}
			})
		}
		ns.Close()
	}
}

func attachServed(b *testing.B, ns *mountns.Namespace, role, data, orphans, point string) {
	device, mount, err := fusemount.Policy{}.Mount(b.Context(), handoff.Key{}, handoff.FUSERequest{RootMode: unix.S_IFDIR | 0o755})
	if err != nil {
		b.Fatal(err)
	}
	defer device.Close()
	recorded, err := os.CreateTemp(b.TempDir(), "init")
	if err != nil {
		b.Fatal(err)
	}
	defer recorded.Close()
	r, w, err := os.Pipe()
	if err != nil {
		b.Fatal(err)
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%s %s %s 0", roleVariable, role, data, orphans))
	cmd.ExtraFiles = []*os.File{device, recorded, w}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	w.Close()
	if _, err := io.ReadFull(r, make([]byte, 1)); err != nil {
		b.Fatal(err)
	}
	r.Close()
	b.Cleanup(func() {
		_ = fusemount.Abort(context.Background(), mount)
		mount.Close()
		_ = cmd.Wait()
	})
	if err := ns.Do(b.Context(), func() error {
		clone, err := kernel.OpenTree(int(mount.Fd()), "", unix.OPEN_TREE_CLONE)
		if err != nil {
			return err
		}
		defer unix.Close(clone)
		return kernel.MoveMountAt(clone, "", unix.AT_FDCWD, point, 0)
	}); err != nil {
		b.Fatal(err)
	}
}

const benchSize = 16 << 20

func benchFile(point string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(point, "f"), os.O_RDWR|os.O_CREATE, 0o644)
	if err == nil {
		_, err = f.WriteAt(make([]byte, benchSize), 0)
	}
	return f, err
}

func read4k(b *testing.B, point string) error {
	f, err := benchFile(point)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_RANDOM); err != nil {
		return err
	}
	buf := make([]byte, 4096)
	b.SetBytes(int64(len(buf)))
	for b.Loop() {
		off := rand.Int64N(benchSize/4096) * 4096
		if err := unix.Fadvise(int(f.Fd()), off, 4096, unix.FADV_DONTNEED); err != nil {
			return err
		}
		if _, err := f.ReadAt(buf, off); err != nil {
			return err
		}
	}
	return nil
}

func write128k(b *testing.B, point string) error {
	f, err := benchFile(point)
	if err != nil {
		return err
	}
	defer f.Close()
	buf := make([]byte, 128<<10)
	b.SetBytes(int64(len(buf)))
	var off int64
	for b.Loop() {
		if _, err := f.WriteAt(buf, off); err != nil {
			return err
		}
		off = (off + int64(len(buf))) % benchSize
	}
	return nil
}

func statFiles(b *testing.B, point string) error {
	f, err := benchFile(point)
	if err != nil {
		return err
	}
	f.Close()
	var st unix.Statx_t
	for b.Loop() {
		err := unix.Statx(unix.AT_FDCWD, f.Name(), unix.AT_STATX_FORCE_SYNC, unix.STATX_BASIC_STATS, &st)
		if err != nil {
			return err
		}
	}
	return nil
}

func create(b *testing.B, point string) error {
	for i := 0; b.Loop(); i++ {
		name := filepath.Join(point, fmt.Sprintf("new-%d", i))
		f, err := os.Create(name)
		if err != nil {
			return err
		}
		f.Close()
		if err := os.Remove(name); err != nil {
			return err
		}
	}
	return nil
}
