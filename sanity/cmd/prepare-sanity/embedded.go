package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	"github.com/csi-prepare/csi-prepare/drivers/block"
	"github.com/csi-prepare/csi-prepare/drivers/hostpath"
	"github.com/csi-prepare/csi-prepare/drivers/nfs"
	"github.com/csi-prepare/csi-prepare/fakes/co"
)

// The names under which the command starts itself again, so that what it
// tests is a process of its own, which can be killed and looked at.
const (
	embeddedDriver   = "embedded-driver"
	embeddedExecutor = "embedded-executor"
)

// embed makes the reference driver what is tested.
func (s *settings) embed() error {
	if !slices.Contains(drivers(), s.driver) {
		return fmt.Errorf("--driver %s: there is no such reference driver; there are %s", s.driver, strings.Join(drivers(), ", "))
	}
	dir, err := os.MkdirTemp(s.config.WorkDir, "prepare-sanity-"+s.driver+"-")
	if err != nil {
		return fmt.Errorf("making a directory for the driver: %w", err)
	}
	s.removeWhenDone = dir
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("finding this command: %w", err)
	}
	volumes, state := filepath.Join(dir, "volumes"), filepath.Join(dir, "state")
	if err := os.Mkdir(volumes, 0o755); err != nil {
		return fmt.Errorf("making a directory for volumes: %w", err)
	}
	s.config.Exec = []string{self, embeddedDriver, s.driver, "--state-dir", state, "--node-id", "sanity", "--verbose"}
	switch s.driver {
	case "block":
		s.config.Exec = append(s.config.Exec, "--dir", volumes)
		s.config.DataDirs = []string{volumes}
	case "nfs":
		if err := s.embedNFS(volumes); err != nil {
			return err
		}
	case "fuse", "fuse-classic":
		if err := s.embedFUSE(dir, volumes, state); err != nil {
			return err
		}
	default:
		s.config.Exec = append(s.config.Exec, "--grant", "data="+volumes)
		s.config.Grants = map[string]string{"data": volumes}
	}
	s.config.StateDir = state
	s.config.Rerun = "prepare-sanity run"
	return nil
}

// embedNFS has the driver use the one export that was given, or one of no
// server, whose volumes cannot be performed then.
func (s *settings) embedNFS(volumes string) error {
	export, root := "localhost:"+volumes, volumes
	switch len(s.exports) {
	case 0:
		s.config.NoServer = "needs an NFS server; --export HOST:PATH=DIR names an export and the directory it is of"
	case 1:
		i := strings.LastIndexByte(s.exports[0], '=')
		if i < 0 {
			return fmt.Errorf("--export %s: write it as HOST:PATH=DIR", s.exports[0])
		}
		export, root = s.exports[0][:i], s.exports[0][i+1:]
	default:
		return errors.New("--export: the NFS driver has one; give it once")
	}
	s.config.Exec = append(s.config.Exec, "--export", export, "--root", root)
	return nil
}

func (s *settings) embedExecutor() error {
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("finding this command: %w", err)
	}
	dir, err := os.MkdirTemp(s.config.WorkDir, "prepare-sanity-executor-")
	if err != nil {
		return fmt.Errorf("making a directory for the executor: %w", err)
	}
	s.removeWhenDone = dir
	s.config.Exec = []string{self, embeddedExecutor, dir}
	s.config.Rerun = "prepare-sanity executor"
	s.config.Name = "the reference executor"
	return nil
}

func newEmbedded() *cobra.Command {
	cmd := &cobra.Command{Use: embeddedDriver, Hidden: true}
	for _, driver := range []*cobra.Command{hostpath.NewCommand(), block.NewCommand(), nfs.NewCommand(), fuseCommand()} {
		serve := driver.RunE
		driver.RunE = func(cmd *cobra.Command, args []string) error {
			ctx, stop := signal.NotifyContext(cmd.Context(), unix.SIGTERM, unix.SIGINT)
			defer stop()
			cmd.SetContext(ctx)
			return serve(cmd, args)
		}
		cmd.AddCommand(driver)
	}
	return cmd
}

func newEmbeddedExecutor() *cobra.Command {
	return &cobra.Command{
		Use: embeddedExecutor + " DIRECTORY", Hidden: true, Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx, stop := signal.NotifyContext(cmd.Context(), unix.SIGTERM, unix.SIGINT)
			defer stop()
			s, err := co.NewReferenceServer(args[0])
			if err != nil {
				return err
			}
			listener, err := net.Listen("unix", strings.TrimPrefix(os.Getenv("CSI_ENDPOINT"), "unix://"))
			if err != nil {
				return err
			}
			g := grpc.NewServer(s.Options()...)
			s.Serve(g)
			defer context.AfterFunc(ctx, g.GracefulStop)()
			return g.Serve(listener)
		},
	}
}
