package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	gofuse "github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/drivers/fuse/attach"
	"github.com/csi-prepare/csi-prepare/drivers/fuse/loopback"
	"github.com/csi-prepare/csi-prepare/reference/fusemount"
	"github.com/csi-prepare/csi-prepare/reference/handoff"
	"github.com/csi-prepare/csi-prepare/reference/kernel"
)

const (
	caseFUSERead     = "FUSE, sequential read"
	caseFUSEWrite    = "FUSE, sequential write"
	caseFUSERandom   = "FUSE, random 4 KiB read"
	caseFUSEMetadata = "FUSE, create, stat and unlink"

	native      = "the directory itself"
	classicFUSE = "go-fuse, mounted by its server"
	sectionFUSE = "FUSE: one tree, served two ways"
)

// fuseGoals: what serves over a device that the CO handed over is as fast as
// what mounts by itself: the same filesystem, in time and not in throughput.
func fuseGoals() []Goal {
	var all []Goal
	for _, name := range []string{caseFUSERead, caseFUSEWrite, caseFUSERandom, caseFUSEMetadata} {
		all = append(all, Goal{name + ", to a classic go-fuse mount", name, 0, 0, product, classicFUSE, 1.02, true, false})
	}
	return all
}

// The work of one cycle.
const (
	fuseFile   = 8 << 20
	fuseChunk  = 128 << 10
	fuseReads  = 256
	fuseNames  = 64
	serverRole = "BENCH_FUSE_SERVER"
)

// A server is a process of its own: what serves a mount must not touch it.
func init() {
	role, arguments, _ := strings.Cut(os.Getenv(serverRole), " ")
	if role == "" {
		return
	}
	if err := serveTree(role, strings.Fields(arguments)); err != nil {
		fmt.Fprintln(os.Stderr, "bench: server:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// serveTree serves a directory, on descriptor 3 or where it mounts by itself,
// and closes its standard output when it does.
func serveTree(role string, arguments []string) error {
	unix.Umask(0)
	data, orphans, point := arguments[0], arguments[1], arguments[2]
	tree, err := loopback.New(data, orphans, loopback.Options{})
	if err != nil {
		return err
	}
	options := gofuse.MountOptions{MaxWrite: 128 << 10, IDMappedMount: true, Logger: log.New(io.Discard, "", 0)}
	if role == "classic" {
		options.AllowOther, options.DirectMountStrict = true, true
		options.FsName, options.Name, options.Options = "bench", "bench", []string{"default_permissions"}
		server, err := gofuse.NewServer(tree, point, &options)
		if err != nil {
			return err
		}
		go server.Serve()
		if err := server.WaitMount(); err != nil {
			return err
		}
		os.Stdout.Close()
		server.Wait()
		return nil
	}
	device := os.NewFile(3, "device")
	server, _, err := attach.Start(context.Background(), device, tree, options)
	if err != nil {
		return err
	}
	device.Close()
	os.Stdout.Close()
	return server.Serve()
}

// served is a tree that a process serves, seen at point.
type served struct {
	point string
	cmd   *exec.Cmd
}

func (s *suite) serve(role string) (*served, error) {
	dir := s.ground.Dir("fuse", role)
	v := &served{point: s.ground.Dir("fuse", role, "point")}
	data, orphans := s.ground.Dir("fuse", role, "data"), s.ground.Dir("fuse", role, "orphans")
	v.cmd = exec.Command("/proc/self/exe")
	v.cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%s %s %s %s", serverRole, role, data, orphans, v.point))
	v.cmd.Stderr, v.cmd.Dir = os.Stderr, dir
	ready, err := v.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	var mount *os.File
	if role != "classic" {
		var device *os.File
		device, mount, err = fusemount.Policy{}.Mount(context.Background(), handoff.Key{}, handoff.FUSERequest{RootMode: unix.S_IFDIR | 0o755})
		if err != nil {
			return nil, err
		}
		defer device.Close()
		defer mount.Close()
		v.cmd.ExtraFiles = []*os.File{device}
	}
	if err := v.cmd.Start(); err != nil {
		return nil, err
	}
	if _, err := io.Copy(io.Discard, ready); err != nil {
		return nil, err
	}
	if mount != nil {
		err = kernel.MoveMountAt(int(mount.Fd()), "", unix.AT_FDCWD, v.point, 0)
	}
	return v, err
}

func (v *served) close() error {
	return errors.Join(unix.Unmount(v.point, 0), v.cmd.Wait())
}

// overFUSE makes a case of one piece of work, done in the directory itself and
// in the two that are served.
func (s *suite) overFUSE(name string, units int, work func(dir string) (func() error, func() error, error)) (Case, error) {
	c := Case{Name: name, Rounds: 2 * s.rounds, Makes: anyNumber}
	var closers []func() error
	for _, how := range []struct{ name, role string }{{native, ""}, {classicFUSE, "classic"}, {product, "ours"}} {
		dir := s.ground.Dir("fuse", "native")
		if how.role != "" {
			v, err := s.serve(how.role)
			if err != nil {
				c.Variants = append(c.Variants, Variant{Name: how.name, Missing: err.Error()})
				continue
			}
			closers = append(closers, v.close)
			dir = v.point
		}
		perform, done, err := work(dir)
		if err != nil {
			return c, err
		}
		closers = append(closers, done)
		c.Variants = append(c.Variants, Variant{Name: how.name, Divide: units, Perform: perform})
	}
	c.Close = func() (err error) {
		for i := range closers {
			err = errors.Join(err, closers[len(closers)-1-i]())
		}
		return err
	}
	return c, nil
}

// fileIn is a file with content; once its pages are dropped, the server is
// asked.
func fileIn(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, "file"), os.O_RDWR|os.O_CREATE, 0o644)
	if err == nil {
		_, err = f.WriteAt(make([]byte, fuseFile), 0)
	}
	return f, err
}

func drop(f *os.File) error { return unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED) }

func (s *suite) fuseRead() (Case, error) {
	return s.overFUSE(caseFUSERead, fuseFile/fuseChunk, func(dir string) (func() error, func() error, error) {
		f, err := fileIn(dir)
		buffer := make([]byte, fuseChunk)
		return func() error {
			if err := drop(f); err != nil {
				return err
			}
			for at := int64(0); at < fuseFile; at += fuseChunk {
				if _, err := f.ReadAt(buffer, at); err != nil {
					return err
				}
			}
			return nil
		}, f.Close, err
	})
}

func (s *suite) fuseWrite() (Case, error) {
	return s.overFUSE(caseFUSEWrite, fuseFile/fuseChunk, func(dir string) (func() error, func() error, error) {
		f, err := fileIn(dir)
		buffer := make([]byte, fuseChunk)
		return func() error {
			for at := int64(0); at < fuseFile; at += fuseChunk {
				if _, err := f.WriteAt(buffer, at); err != nil {
					return err
				}
			}
			return nil
		}, f.Close, err
	})
}

func (s *suite) fuseRandom() (Case, error) {
	return s.overFUSE(caseFUSERandom, fuseReads, func(dir string) (func() error, func() error, error) {
		f, err := fileIn(dir)
		if err == nil {
			err = unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_RANDOM)
		}
		buffer := make([]byte, 4096)
		order := rand.New(rand.NewPCG(1, 2)) //nolint:gosec // the same places for all
		return func() error {
			if err := drop(f); err != nil {
				return err
			}
			for range fuseReads {
				if _, err := f.ReadAt(buffer, order.Int64N(fuseFile/4096)*4096); err != nil {
					return err
				}
			}
			return nil
		}, f.Close, err
	})
}

func (s *suite) fuseMetadata() (Case, error) {
	return s.overFUSE(caseFUSEMetadata, fuseNames, func(dir string) (func() error, func() error, error) {
		return func() error {
			for n := range fuseNames {
				name := filepath.Join(dir, fmt.Sprintf("name-%d", n))
				f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
				if err != nil {
					return err
				}
				if err := f.Close(); err != nil {
					return err
				}
				var st unix.Stat_t
				if err := unix.Stat(name, &st); err != nil {
					return err
				}
				if err := unix.Unlink(name); err != nil {
					return err
				}
			}
			return nil
		}, func() error { return nil }, nil
	})
}
