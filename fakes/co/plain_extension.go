package co

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
	"github.com/csi-prepare/csi-prepare/reference/mountns"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
	testingv1alpha1 "github.com/csi-prepare/csi-prepare/spec/testingv1alpha1"
)

// CommandMountURL is the type URL of the worked extension: a program fills a
// new filesystem.
const CommandMountURL = "type.csi-prepare.dev/csi.prepare.testing.v1alpha1.CommandMount"

// nobody is the user a program runs as.
const nobody = 65534

// extension performs the one extension there is, if the operator allows the
// program that it names.
func (p *Plain) extension(ctx context.Context, e *mountspec.Extension) (fd int, err error) {
	if e.TypeURL != CommandMountURL || len(p.programs) == 0 {
		return -1, &StateError{"extension", fmt.Errorf("%s is not performed: the operator allows no program", e.TypeURL)}
	}
	m := new(testingv1alpha1.CommandMount)
	if err := proto.Unmarshal(e.Value, m); err != nil {
		return -1, refusedExtension("is no CommandMount: " + err.Error())
	}
	if p.strictExtension && len(m.ProtoReflect().GetUnknown()) > 0 {
		return -1, refusedExtension("has a field of a later version")
	}
	path, allowed := p.programs[m.GetProgram()]
	if !allowed {
		return -1, &StateError{"extension.program", fmt.Errorf("%q is none that the operator allows", m.GetProgram())}
	}
	return p.run(ctx, path, m.GetArguments())
}

func refusedExtension(detail string) error {
	return &RefusedError{Violations: []mountspec.Violation{{Requirement: requirement.ExtensionUnknownField, Field: "extension", Detail: detail}}}
}

// sandboxed runs a program as nobody, in namespaces of its own, in a root that
// has the machine's programs read-only and nothing else of it, without an
// environment. It returns the filesystem that the program filled, detached.
func sandboxed(ctx context.Context, path string, arguments []string) (fd int, err error) {
	ns, err := mountns.New(ctx)
	if err != nil {
		return -1, err
	}
	root, err := os.MkdirTemp("", "sandbox-")
	if err != nil {
		return -1, errors.Join(err, ns.Close())
	}
	fd = -1
	err = ns.Do(ctx, func() error {
		if err := furnish(root); err != nil {
			return err
		}
		cmd := exec.CommandContext(ctx, path, arguments...)
		cmd.Dir, cmd.Env = "/volume", []string{}
		cmd.SysProcAttr = &syscall.SysProcAttr{
			Chroot: root, Credential: &syscall.Credential{Uid: nobody, Gid: nobody}, Pdeathsig: unix.SIGKILL,
			Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWNET | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS,
		}
		if err := cmd.Run(); err != nil {
			return &StateError{"extension.program", err}
		}
		var err error
		fd, err = kernel.OpenTree(unix.AT_FDCWD, filepath.Join(root, "volume"), unix.OPEN_TREE_CLONE)
		return err
	})
	// The namespace takes what is mounted in it along.
	err = errors.Join(err, ns.Close(), os.Remove(root))
	if err != nil && fd >= 0 {
		_ = unix.Close(fd)
		fd = -1
	}
	return fd, err
}

// furnish makes the root of a sandbox, in the namespace of the thread.
func furnish(root string) error {
	if err := unix.Mount("sandbox", root, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "size=64k,mode=755"); err != nil {
		return err
	}
	for _, name := range []string{"usr", "bin", "lib", "lib64"} {
		to := filepath.Join(root, name)
		if link, err := os.Readlink("/" + name); err == nil {
			if err := os.Symlink(link, to); err != nil {
				return err
			}
			continue
		}
		if _, err := os.Stat("/" + name); err != nil {
			continue // this machine has none
		}
		if err := os.Mkdir(to, 0o755); err != nil {
			return err
		}
		if err := unix.Mount("/"+name, to, "", unix.MS_BIND, ""); err != nil {
			return err
		}
		if err := unix.Mount("", to, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NODEV, ""); err != nil {
			return err
		}
	}
	volume := filepath.Join(root, "volume")
	if err := os.Mkdir(volume, 0o755); err != nil {
		return err
	}
	return unix.Mount("volume", volume, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, fmt.Sprintf("size=1m,mode=755,uid=%d,gid=%d", nobody, nobody))
}

// bare runs a program as it comes: with all that the CO has.
func bare(ctx context.Context, path string, arguments []string) (fd int, err error) {
	c, err := kernel.OpenFS("tmpfs")
	if err != nil {
		return -1, err
	}
	defer func() { _ = c.Close() }()
	if err := c.Create(); err != nil {
		return -1, err
	}
	if fd, err = c.Mount(0); err != nil {
		return -1, err
	}
	cmd := exec.CommandContext(ctx, path, arguments...)
	cmd.Dir = fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), fd)
	if err := cmd.Run(); err != nil {
		return -1, errors.Join(&StateError{"extension.program", err}, unix.Close(fd))
	}
	return fd, nil
}
