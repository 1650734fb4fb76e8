package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"

	"github.com/csi-prepare/csi-prepare/fakes/co"
	"github.com/csi-prepare/csi-prepare/fakes/sp"
)

// service is a fake as gRPC sees it.
type service interface {
	Options() []grpc.ServerOption
	Serve(*grpc.Server)
}

func newSP() *cobra.Command {
	var endpoint, name string
	var grants []string
	var plain, overFUSE bool
	var as odd
	config := sp.Config{Grants: make(map[string]string)}
	cmd := &cobra.Command{
		Use:   "sp --endpoint unix:///PATH --grant NAME=DIR",
		Short: "Serve the in-memory plugin",
		Long: `sp serves a plugin whose volumes are directories in a granted directory. It
answers NodePrepareVolume with a BIND of one and never mounts. What it knows is
kept in memory, and in --state-dir if that is given: then it survives a restart.`,
		Example: "  prepare-fake sp --endpoint unix:///run/fake.sock --grant data=/srv/data\n" +
			"  prepare-fake sp --endpoint unix:///run/fake.sock --grant data=/srv/data --mutant ignores-readonly",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			for _, g := range grants {
				grant, directory, found := strings.Cut(g, "=")
				if !found || grant == "" || !filepath.IsAbs(directory) {
					return fmt.Errorf("--grant %s: has to be NAME=DIR with an absolute directory", g)
				}
				config.Grants[grant] = directory
			}
			build := func(c sp.Config) (sp.Service, error) { return sp.New(c) }
			switch {
			case plain:
				build = func(c sp.Config) (sp.Service, error) { return sp.NewPlain(c) }
			case overFUSE:
				build = func(c sp.Config) (sp.Service, error) { return sp.NewFUSE(c) }
			}
			if name != "" {
				m, err := find(sp.Mutants(), name)
				if err != nil {
					return err
				}
				build = m.New
			}
			s, err := build(config)
			if err != nil {
				return failure{err}
			}
			return serve(cmd.Context(), endpoint, s, as.option())
		},
	}
	addServing(cmd, &endpoint, &name, &config.StateDir)
	as.flags(cmd)
	cmd.Flags().StringArrayVar(&grants, "grant", nil, "directory for volumes, as NAME=DIR; the CO knows it by the same name")
	cmd.Flags().StringVar(&config.NodeID, "node-id", "fake-node", "answer to NodeGetInfo")
	cmd.Flags().BoolVar(&config.Staging, "staging", false, "ask for NodeStageVolume")
	cmd.Flags().BoolVar(&config.Block, "block", false, "make volumes of files that are loop devices; implies --staging")
	cmd.Flags().BoolVar(&overFUSE, "fuse", false, "serve volumes over FUSE, a process each, instead of answering a BIND; needs --state-dir")
	cmd.Flags().BoolVar(&plain, "without-prepare", false, "be a plugin of before NodePrepare, with all that CSI has, which publishes volumes itself")
	cmd.Flags().BoolVar(&config.Attach, "attach", false, "ask for ControllerPublishVolume; goes with --without-prepare")
	cmd.Flags().BoolVar(&config.LegacyWriters, "legacy-writers", false, "lack the SINGLE_NODE_MULTI_WRITER capability")
	return cmd
}

func newCO() *cobra.Command {
	var endpoint, name, directory string
	var plain bool
	var programs map[string]string
	cmd := &cobra.Command{
		Use:   "co --endpoint unix:///PATH",
		Short: "Serve the executor of mount specs",
		Long: `co serves csi.prepare.testing.v1alpha1.Performer: it performs mount specs in a
mount namespace it is told, and undoes them, by the reference executor, or with
--plain by a small one of its own, which the mutants are made of. What it
performed is kept in --state-dir, so that a successor can recover. It needs root.`,
		Example: "  prepare-fake co --endpoint unix:///run/fake.sock --state-dir /var/lib/fake --mutant lazy-undo",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			build := func(directory string) (*co.Server, error) { return conformant(plain, directory, programs) }
			if name != "" {
				m, err := find(co.Mutants(), name)
				if err != nil {
					return err
				}
				build = m.New
			}
			s, err := build(directory)
			if err != nil {
				return failure{err}
			}
			return serve(cmd.Context(), endpoint, s)
		},
	}
	addServing(cmd, &endpoint, &name, &directory)
	cmd.Flags().BoolVar(&plain, "plain", false, "perform by the small executor")
	cmd.Flags().StringToStringVar(&programs, "allow-program", nil, "let an extension run a program, as NAME=PATH; goes with --plain")
	return cmd
}

// conformant is a whole CO over an executor if it has a directory, else an
// executor alone.
func conformant(plain bool, directory string, programs map[string]string) (*co.Server, error) {
	small := co.NewPlain()
	small.AllowPrograms(programs)
	switch {
	case directory == "" && plain:
		return co.New(small, "")
	case directory == "":
		return co.New(new(co.Reference), "")
	case plain:
		return co.NewPlainCO(small, directory)
	default:
		return co.NewReferenceServer(directory)
	}
}

func addServing(cmd *cobra.Command, endpoint, name, directory *string) {
	cmd.Flags().StringVar(endpoint, "endpoint", os.Getenv("CSI_ENDPOINT"), "socket to serve, as unix:///PATH; by default $CSI_ENDPOINT")
	cmd.Flags().StringVar(name, "mutant", "", "be wrong in this way; see prepare-fake list")
	cmd.Flags().StringVar(directory, "state-dir", "", "directory to keep what is known in; by default memory alone")
}

// find looks a mutant up by its name.
func find[M interface{ Title() string }](all []M, name string) (M, error) {
	for _, m := range all {
		if m.Title() == name {
			return m, nil
		}
	}
	var none M
	return none, fmt.Errorf("--mutant %s: there is none of this name in this seat; prepare-fake list shows all", name)
}

// serve serves s at the endpoint until ctx ends.
func serve(ctx context.Context, endpoint string, s service, more ...grpc.ServerOption) error {
	path := strings.TrimPrefix(endpoint, "unix://")
	if !filepath.IsAbs(path) {
		return fmt.Errorf("--endpoint %q: has to be unix:// and an absolute path", endpoint)
	}
	// A predecessor that was killed has left its socket.
	if info, err := os.Lstat(path); err == nil && info.Mode().Type() == fs.ModeSocket {
		if err := os.Remove(path); err != nil {
			return failure{err}
		}
	}
	listener, err := net.Listen("unix", path)
	if err != nil {
		return failure{err}
	}
	server := grpc.NewServer(append(s.Options(), more...)...)
	s.Serve(server)
	// Calls that hang, as those of some mutants, are not waited for.
	defer context.AfterFunc(ctx, server.Stop)()
	if err := server.Serve(listener); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
		return failure{err}
	}
	return nil
}
