package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	"github.com/csi-prepare/csi-prepare/drivers/block"
	"github.com/csi-prepare/csi-prepare/drivers/hostpath"
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
	if s.driver != "hostpath" && s.driver != "block" {
		return fmt.Errorf("--driver %s: there is no such reference driver; there are hostpath and block", s.driver)
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
	if s.driver == "block" {
		s.config.Exec = append(s.config.Exec, "--dir", volumes)
	} else {
		s.config.Exec = append(s.config.Exec, "--grant", "data="+volumes)
		s.config.Grants = map[string]string{"data": volumes}
	}
	s.config.StateDir = state
	s.config.Rerun = "prepare-sanity run"
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
	for _, driver := range []*cobra.Command{hostpath.NewCommand(), block.NewCommand()} {
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
			s, err := co.New(new(co.Reference), args[0])
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
