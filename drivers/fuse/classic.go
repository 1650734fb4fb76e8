package fuse

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	gofuse "github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/drivers/fuse/loopback"
	"github.com/csi-prepare/csi-prepare/reference/kernel"
)

const (
	// mountDir is where the driver mounts, below prepare_path.
	mountDir = "mount"
	// targetSuffix is that of the file that says where a server has mounted. It
	// is written before that, and by its absence nothing is mounted.
	targetSuffix = ".target"
	fsType       = "fuse." + subtype
)

// mount makes the mount as well as serving it: that is the classic way, for a
// CO that is able to bind and nothing else. It takes the right to mount, and
// propagation to the CO.
func (p *process) mount(o order) (err error) {
	p.fs, err = loopback.New(o.Data, o.Orphans, loopback.Options{UID: o.UID, GID: o.GID})
	if err != nil {
		return err
	}
	options := serverOptions(p.log)
	options.AllowOther, options.DirectMountStrict = true, true
	options.FsName, options.Name = "csi-prepare", subtype
	options.Options = []string{"default_permissions"}
	server, err := gofuse.NewServer(p.fs, o.Target, &options)
	if err != nil {
		return fmt.Errorf("mount: %w", err)
	}
	go func() {
		server.Serve()
		close(p.finished)
	}()
	return server.WaitMount()
}

// serveAt sees to it that a process serves a mount at the target of the order.
func (s *servers) serveAt(ctx context.Context, o order) error {
	name := o.server()
	o.Act = report
	a, err := tell(ctx, s.path(name+".sock"), o)
	if err == nil && a.err() == nil && !a.Gone {
		return nil
	}
	if err != nil && !errors.Is(err, errGone) {
		return err
	}
	if err := s.end(ctx, name); err != nil { // a dead mount may be there
		return err
	}
	o.Act, o.Handle = start, newConnection()
	err = os.Mkdir(o.Target, 0o755)
	if err == nil {
		err = os.WriteFile(s.path(name+targetSuffix), []byte(o.Target), 0o600)
	}
	if err == nil {
		_, err = s.start(ctx, o)
	}
	if err != nil {
		return errors.Join(err, s.end(context.WithoutCancel(ctx), name))
	}
	return nil
}

// unmount takes away what a server has mounted by itself, if it has. A mount
// that is in use stays, and so does one that is not of this driver.
func (s *servers) unmount(name string) error {
	text, err := os.ReadFile(s.path(name + targetSuffix))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("where a server has mounted: %w", err)
	}
	target := string(text)
	for range 16 { // a server that was killed may have left one below
		// What is there is known without asking its server, which may be gone.
		facts, err := kernel.FactsOf(unix.AT_FDCWD, target, true)
		switch {
		case errors.Is(err, unix.ENOENT):
			return nil
		case err != nil:
			return fmt.Errorf("what is mounted at %s: %w", target, err)
		case !facts.MountRoot:
			return os.NewSyscallError("rmdir", unix.Rmdir(target))
		}
		m, err := kernel.StatMount(0, facts.MountID, kernel.StatFSType|kernel.StatSubtype|kernel.StatPoint)
		if err != nil {
			return fmt.Errorf("what is mounted at %s: %w", target, err)
		}
		if m.FSType+"."+m.Subtype != fsType {
			return status.Errorf(codes.FailedPrecondition, "prepare_path: a %s that this plugin has not mounted is on %s; take it away", m.FSType, filepath.Base(target))
		}
		err = kernel.Unmount(target, unix.UMOUNT_NOFOLLOW)
		if errors.Is(err, unix.EBUSY) {
			return status.Error(codes.FailedPrecondition, "prepare_path: the mount below it is in use; undo what was bound from it, and repeat")
		}
		if err != nil {
			return err
		}
	}
	return fmt.Errorf("something mounts on %s all the time", target)
}
