package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/drivers/fuse"
)

// nobody is the user the driver of FUSE runs as: it needs no privilege, and
// what it does is to be seen without any.
const nobody = 65534

// embedFUSE gives the driver directories of its own. In the classic way it
// mounts by itself, and so is root.
func (s *settings) embedFUSE(dir, volumes, state string) error {
	run := filepath.Join(dir, "run")
	err := errors.Join(os.Mkdir(run, 0o700), os.Mkdir(state, 0o700), os.Chmod(dir, 0o711))
	if s.driver == "fuse" {
		for _, d := range []string{run, state, volumes} {
			err = errors.Join(err, os.Chown(d, nobody, nobody))
		}
	} else {
		s.config.Exec[2] = "fuse"
		s.config.Exec = append(s.config.Exec, "--classic")
	}
	if err != nil {
		return fmt.Errorf("making directories for the driver: %w", err)
	}
	s.config.Endpoint = "unix://" + filepath.Join(run, "csi.sock")
	s.config.Exec = append(s.config.Exec, "--dir", volumes)
	return nil
}

// fuseCommand is the driver of FUSE, which gives up being root unless it is to
// mount.
func fuseCommand() *cobra.Command {
	cmd := fuse.NewCommand()
	serve := cmd.RunE
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if classic, err := cmd.Flags().GetBool("classic"); err != nil || !classic && os.Geteuid() == 0 {
			if err := errors.Join(err, becomeNobody()); err != nil {
				return err
			}
		}
		return serve(cmd, args)
	}
	return cmd
}

func becomeNobody() error {
	err := errors.Join(syscall.Setgroups(nil), syscall.Setresgid(nobody, nobody, nobody), syscall.Setresuid(nobody, nobody, nobody))
	if err != nil {
		return fmt.Errorf("giving up being root: %w", err)
	}
	// Both are forgotten with the user: that the suite may see whose process
	// this is, and that it ends with the suite.
	return errors.Join(
		unix.Prctl(unix.PR_SET_DUMPABLE, 1, 0, 0, 0),
		unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0),
	)
}
