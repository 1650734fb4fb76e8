package main

import (
	"fmt"
	"os"
	"path/filepath"

	containerd "github.com/containerd/containerd/v2/core/mount"
	"github.com/moby/sys/mount"
	"golang.org/x/sys/unix"
	mountutils "k8s.io/mount-utils"
)

// The peers do what the product does, each in the way that favours it: no
// systemd scope, and no check that a caller could leave out.

const (
	narrow   = unix.MS_REMOUNT | unix.MS_BIND | unix.MS_RDONLY | unix.MS_NOSUID | unix.MS_NODEV
	tmpfsSet = unix.MS_NOSUID | unix.MS_NODEV
)

var bindOptions = []string{"bind", "ro", "nosuid", "nodev"}

// rawBinds is the floor: for each target bind and narrow, then unmount in
// reverse.
func rawBinds(source string, targets ...string) Variant {
	return Variant{
		Name: "raw mount(2)",
		Perform: func() error {
			for _, t := range targets {
				if err := unix.Mount(source, t, "", unix.MS_BIND, ""); err != nil {
					return err
				}
				if err := unix.Mount("", t, "", narrow, ""); err != nil {
					return err
				}
			}
			return nil
		},
		Undo: rawUnmount(targets),
	}
}

// rawPlainBind is a bind with the source's attributes, for where the source
// is the point.
func rawPlainBind(source, target string) Variant {
	return Variant{
		Name:    "raw mount(2)",
		Perform: func() error { return unix.Mount(source, target, "", unix.MS_BIND, "") },
		Undo:    rawUnmount([]string{target}),
	}
}

func rawTmpfs(target string) Variant {
	return Variant{
		Name:    "raw mount(2)",
		Perform: func() error { return unix.Mount("none", target, "tmpfs", tmpfsSet, "size=1m") },
		Undo:    rawUnmount([]string{target}),
	}
}

func rawUnmount(targets []string) func() error {
	return func() error {
		for i := len(targets) - 1; i >= 0; i-- {
			if err := unix.Unmount(targets[i], 0); err != nil {
				return err
			}
		}
		return nil
	}
}

func mobyBind(source, target string) Variant {
	return Variant{
		Name:    "moby/sys/mount",
		Perform: func() error { return mount.Mount(source, target, "none", "bind,ro,nosuid,nodev") },
		Undo:    func() error { return mount.Unmount(target) },
	}
}

func mobyTmpfs(target string) Variant {
	return Variant{
		Name:    "moby/sys/mount",
		Perform: func() error { return mount.Mount("none", target, "tmpfs", "nosuid,nodev,size=1m") },
		Undo:    func() error { return mount.Unmount(target) },
	}
}

// containerdBinds performs a list at targets relative to root.
func containerdBinds(source, root string, targets ...string) Variant {
	list := make([]containerd.Mount, len(targets))
	for i, t := range targets {
		list[i] = containerd.Mount{Type: "bind", Source: source, Target: t, Options: bindOptions}
	}
	return containerdList(root, list)
}

func containerdTmpfs(target string) Variant {
	return containerdList(target, []containerd.Mount{
		{Type: "tmpfs", Source: "none", Options: []string{"nosuid", "nodev", "size=1m"}},
	})
}

func containerdList(root string, list []containerd.Mount) Variant {
	return Variant{
		Name:    "containerd core/mount",
		Perform: func() error { return containerd.All(list, root) },
		Undo:    func() error { return containerd.UnmountMounts(list, root, 0) },
	}
}

func mountUtilsBinds(source string, targets ...string) Variant {
	m := mountutils.NewWithoutSystemd("")
	return Variant{
		Name: "k8s.io/mount-utils",
		Perform: func() error {
			for _, t := range targets {
				if err := m.Mount(source, t, "", bindOptions); err != nil {
					return err
				}
			}
			return nil
		},
		Undo: func() error {
			for i := len(targets) - 1; i >= 0; i-- {
				if err := m.Unmount(targets[i]); err != nil {
					return err
				}
			}
			return nil
		},
	}
}

func mountUtilsTmpfs(target string) Variant {
	m := mountutils.NewWithoutSystemd("")
	return Variant{
		Name:    "k8s.io/mount-utils",
		Perform: func() error { return m.Mount("none", target, "tmpfs", []string{"nosuid", "nodev", "size=1m"}) },
		Undo:    func() error { return m.Unmount(target) },
	}
}

// audited wraps a variant in the peer's own reading of the table, before and
// after, with a comparison of what it read.
func audited(v Variant, name string, read func() (int, error)) Variant {
	perform, undo := v.Perform, v.Undo
	v.Name = name
	var before int
	v.Perform = func() (err error) {
		if before, err = read(); err != nil {
			return err
		}
		return perform()
	}
	v.Undo = func() error {
		if err := undo(); err != nil {
			return err
		}
		after, err := read()
		if err == nil && after != before {
			err = fmt.Errorf("%s: %d mounts before, %d after", name, before, after)
		}
		return err
	}
	return v
}

// nestedTargets are k targets relative to a root: the root itself and places
// just below it.
func nestedTargets(k int) []string {
	rel := make([]string, k)
	for i := 1; i < k; i++ {
		rel[i] = fmt.Sprintf("d%02d", i)
	}
	return rel
}

// below joins each target to root; make also makes it a directory.
func below(root string, targets []string) []string {
	abs := make([]string, len(targets))
	for i, t := range targets {
		abs[i] = filepath.Join(root, t)
	}
	return abs
}

func makeBelow(root string, targets []string) error {
	for _, dir := range below(root, targets) {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	return nil
}
