package main

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/vm/job"
)

type mount struct {
	source, target, fstype string
	flags                  uintptr
	data                   string
}

var kernelFilesystems = []mount{
	{"proc", "/proc", "proc", unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC, ""},
	{"sysfs", "/sys", "sysfs", unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC, ""},
	{"devtmpfs", "/dev", "devtmpfs", unix.MS_NOSUID, ""},
}

// ownFilesystems are mounted when the root is in place.
var ownFilesystems = []mount{
	{"devpts", "/dev/pts", "devpts", unix.MS_NOSUID | unix.MS_NOEXEC, "newinstance,ptmxmode=0666"},
	{"tmpfs", "/dev/shm", "tmpfs", unix.MS_NOSUID | unix.MS_NODEV, ""},
	{"tmpfs", "/tmp", "tmpfs", unix.MS_NOSUID | unix.MS_NODEV, "mode=1777"},
	{"tmpfs", "/run", "tmpfs", unix.MS_NOSUID | unix.MS_NODEV, "mode=755"},
	{"tmpfs", job.Results, "tmpfs", unix.MS_NOSUID | unix.MS_NODEV, "mode=755"},
	{"cgroup2", "/sys/fs/cgroup", "cgroup2", unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC, ""},
	{"fusectl", "/sys/fs/fuse/connections", "fusectl", unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC, ""},
}

func mountAll(all []mount) error {
	for _, m := range all {
		if m.fstype != "fusectl" && m.fstype != "cgroup2" {
			if err := os.MkdirAll(m.target, 0o755); err != nil {
				return err
			}
		}
		if err := unix.Mount(m.source, m.target, m.fstype, m.flags, m.data); err != nil {
			return fmt.Errorf("mount %s at %s: %w", m.fstype, m.target, err)
		}
	}
	return nil
}

// makeRoot makes the root that the steps are to see.
func makeRoot(j *job.Job) error {
	if err := enterHostRoot(j.Payload); err != nil {
		return err
	}
	if err := mountAll(ownFilesystems); err != nil {
		return err
	}
	return unix.Mount("", "/", "", unix.MS_PRIVATE|unix.MS_REC, "")
}

// enterHostRoot makes the host's root this process's own: read-only by hostfs,
// as every write there would be a write on the host, below a layer of the
// guest's memory.
func enterHostRoot(payload string) error {
	const host, layer, root, laid = "/.host", "/.layer", "/.root", "/.payload"
	steps := []mount{
		{"none", host, "hostfs", unix.MS_RDONLY, "/"},
		{"tmpfs", layer, "tmpfs", 0, "mode=755"},
	}
	if err := mountAll(steps); err != nil {
		return err
	}
	for _, dir := range []string{layer + "/upper", layer + "/work", root} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			return err
		}
	}
	steps = []mount{
		{"overlay", root, "overlay", 0, "lowerdir=" + host + ",upperdir=" + layer + "/upper,workdir=" + layer + "/work"},
		{"none", laid, "hostfs", unix.MS_RDONLY, payload},
		{"tmpfs", root + job.Payload, "tmpfs", unix.MS_NOSUID | unix.MS_NODEV, "mode=755"},
	}
	if err := mountAll(steps); err != nil {
		return err
	}
	// To fault a program in page by page from the host takes far longer.
	if err := os.CopyFS(root+job.Payload, os.DirFS(laid)); err != nil {
		return fmt.Errorf("copy the payload: %w", err)
	}
	if err := unix.Unmount(laid, 0); err != nil {
		return err
	}
	for _, m := range kernelFilesystems {
		if err := os.MkdirAll(root+m.target, 0o755); err != nil {
			return err
		}
		if err := unix.Mount(m.target, root+m.target, "", unix.MS_MOVE, ""); err != nil {
			return fmt.Errorf("move %s: %w", m.target, err)
		}
	}
	if err := os.Chdir(root); err != nil {
		return err
	}
	// The initramfs cannot be unmounted: the new root goes over it.
	if err := unix.Mount(".", "/", "", unix.MS_MOVE, ""); err != nil {
		return fmt.Errorf("move the root: %w", err)
	}
	if err := unix.Chroot("."); err != nil {
		return fmt.Errorf("chroot: %w", err)
	}
	return os.Chdir("/")
}

// loopbackUp brings the loopback interface up.
func loopbackUp() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("socket: %w", err)
	}
	defer unix.Close(fd)
	req, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	req.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	if err := unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, req); err != nil {
		return fmt.Errorf("bring up lo: %w", err)
	}
	return nil
}
