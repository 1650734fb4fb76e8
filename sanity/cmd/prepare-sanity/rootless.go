package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"syscall"

	"golang.org/x/sys/unix"
)

// insideNamespace tells the command that it is the one in the user namespace.
const insideNamespace = "PREPARE_SANITY_ROOTLESS"

// leftOut is what a user namespace does not allow.
const leftOut = `This is no run as root, but as root of a user namespace. It leaves out:
  - volumes on devices: no loop device and no block filesystem can be had here
  - network filesystems: a mount of one takes root on the machine
  - a plugin of another user, and mount namespaces of others: out of sight
What depends on these could not run; run it as root for the whole verdict.
`

// rootless starts the command again as root of a user namespace of its own, if
// it runs as somebody else, and returns true when that has ended. Whatever the
// user namespace does not allow shows as could-not-run.
func rootless(out io.Writer) (done bool, err error) {
	if os.Geteuid() == 0 {
		if os.Getenv(insideNamespace) != "" {
			fmt.Fprint(out, leftOut, "\n")
		}
		return false, nil
	}
	self, err := os.Executable()
	if err != nil {
		return true, fmt.Errorf("finding this command: %w", err)
	}
	cmd := exec.Command(self, os.Args[1:]...) //nolint:gosec // itself, once more
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), insideNamespace+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  unix.CLONE_NEWUSER | unix.CLONE_NEWNS,
		UidMappings: []syscall.SysProcIDMap{{HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{HostID: os.Getgid(), Size: 1}},
		Pdeathsig:   unix.SIGKILL,
	}
	err = cmd.Run()
	var ended *exec.ExitError
	switch {
	case err == nil:
		return true, nil
	case errors.As(err, &ended):
		return true, exit{code: ended.ExitCode()}
	default:
		return true, exit{3, fmt.Errorf("nothing can run here: not root, and no user namespace is to be had (%w); `prepare-sanity doctor` says how to enable it", err)}
	}
}
