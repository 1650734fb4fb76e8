package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
	"github.com/csi-prepare/csi-prepare/reference/mountns"
)

func newDoctor() *cobra.Command {
	return &cobra.Command{
		Use:   "doctor",
		Short: "Say what this machine can test, and how to enable the rest",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if done, err := rootless(cmd.OutOrStdout()); done {
				return err
			}
			out := cmd.OutOrStdout()
			able := true
			all := append(checks(cmd.Context()), profileChecks()...)
			for _, c := range all {
				mark := "yes"
				switch {
				case c.ok:
				case c.needed:
					mark, able = "NO", false
				default:
					mark = "no"
				}
				fmt.Fprintf(out, "%-4s %s\n", mark, c.what)
				if !c.ok {
					fmt.Fprintf(out, "       %s\n", c.without)
				}
			}
			if !able {
				return exit{3, errors.New("nothing can run here: see NO above")}
			}
			return nil
		},
	}
}

// check is one thing a run makes use of.
type check struct {
	what    string
	ok      bool
	needed  bool
	without string // what is lost, and how to enable it
}

func checks(ctx context.Context) []check {
	f := kernel.Probe()
	namespace := func() error {
		ns, err := mountns.New(ctx)
		if err != nil {
			return err
		}
		return ns.Close()
	}()
	reason := "start it as root"
	if namespace != nil {
		reason = namespace.Error() + "; start it as root, in a container with CAP_SYS_ADMIN, or allow user namespaces: sysctl user.max_user_namespaces=10000 kernel.apparmor_restrict_unprivileged_userns=0"
	}
	_, all := mountns.All(ctx)
	return []check{
		{"runs as root of the machine", os.Geteuid() == 0 && os.Getenv(insideNamespace) == "", false, "a plugin of another user cannot be looked at, and devices cannot be mounted; start it with sudo"},
		{"can make mount namespaces", namespace == nil, true, reason},
		{"can see every mount namespace of the machine", all == nil, false, "leaks into namespaces without a process go unnoticed; they need Linux 6.12 and CAP_SYS_ADMIN"},
		{"mount ids are unique (Linux 6.8)", f.UniqueID && f.Statmount && f.Listmount, false, "a mount that replaces another may be taken for it"},
		{"mounts can be made detached (Linux 5.12)", f.NewMountAPI && f.MountSetattr, false, "the suite's own performing is visible before it is narrowed"},
	}
}

// profileChecks say for each profile what the machine lacks for it.
func profileChecks() []check {
	loop := writable("/dev/loop-control")
	return []check{
		{"profiles controller, node-publish, node-mount", true, false, ""},
		{
			"profile node-block", loop == nil && program("mkfs.ext4") && program("blkid"), false,
			lack("loop devices", loop, "modprobe loop, and pass /dev/loop* into the container") +
				lackProgram("mkfs.ext4", "apt-get install e2fsprogs") + lackProgram("blkid", "apt-get install util-linux"),
		},
		{
			"profile node-fuse", writable("/dev/fuse") == nil, false,
			lack("FUSE", writable("/dev/fuse"), "modprobe fuse, and pass /dev/fuse into the container"),
		},
		{
			"profile node-network: the kernel mounts nfs4", filesystem("nfs4"), false,
			"what would be performed could not run; modprobe nfsv4 and name a server with --export, or use `make vm`, a guest that has both",
		},
		{"profile co-executor", true, false, ""},
	}
}

func lack(what string, err error, how string) string {
	if err == nil {
		return ""
	}
	return fmt.Sprintf("no %s (%v): %s. ", what, err, how)
}

func lackProgram(name, how string) string {
	if program(name) {
		return ""
	}
	return fmt.Sprintf("no %s: %s. ", name, how)
}

func writable(path string) error {
	if err := unix.Access(path, unix.R_OK|unix.W_OK); err != nil {
		return &os.PathError{Op: "access", Path: path, Err: err}
	}
	return nil
}

func program(name string) bool {
	if _, err := exec.LookPath(name); err == nil {
		return true
	}
	_, err := os.Stat("/usr/sbin/" + name)
	return err == nil
}

// filesystem reports whether the kernel has a filesystem type.
func filesystem(name string) bool {
	text, err := os.ReadFile("/proc/filesystems")
	if err != nil {
		return false
	}
	for line := range strings.Lines(string(text)) {
		words := strings.Fields(line)
		if len(words) > 0 && words[len(words)-1] == name {
			return true
		}
	}
	return false
}
