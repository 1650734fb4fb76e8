// Command with-nfs-server runs a program beside an NFS server, in a guest: the
// kernel's, as the host nfs-server, which exports /export. It is at
// /srv/nfs-server/export here. The exit code is that of the program.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/csi-prepare/csi-prepare/vm/nfsd"
)

const (
	hostName = "nfs-server"
	root     = "/srv/" + hostName
	export   = "/export"
)

func main() {
	nfsd.MainIfServer()
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "usage: with-nfs-server PROGRAM [ARGUMENT…]")
		os.Exit(2)
	}
	err := run(context.Background(), os.Args[1:])
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit):
		os.Exit(exit.ExitCode())
	case err != nil:
		fmt.Fprintln(os.Stderr, "with-nfs-server:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, argv []string) (err error) {
	if err := os.MkdirAll(root, 0o755); err != nil {
		return err
	}
	if err := name(); err != nil {
		return err
	}
	h, err := nfsd.Start(ctx, root)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, h.Close()) }()
	if err := errors.Join(os.Mkdir(filepath.Join(root, export), 0o755), h.Export(export), h.Serve()); err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...) //nolint:gosec // to run its arguments is what the command is for
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	return cmd.Run()
}

// name makes the host known by name.
func name() error {
	f, err := os.OpenFile("/etc/hosts", os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o644)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(f, "%s %s\n", nfsd.Address4, hostName)
	return errors.Join(err, f.Close())
}
