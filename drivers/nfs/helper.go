package nfs

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/drivers/server"
	"github.com/csi-prepare/csi-prepare/reference/handoff"
	"github.com/csi-prepare/csi-prepare/reference/kernel"
	prepare "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// handleID is the one handle of a preparation.
const handleID = "nfs"

// handle mounts by the helper and hands a clone of the mount over, unless the
// CO still holds the one it got.
func (d *Driver) handle(ctx context.Context, req *prepare.NodePrepareVolumeRequest, p place, o *options) (*prepare.MountSpec_Handle, error) {
	fsType := typeNFS4
	if o.version == "3" {
		fsType = typeNFS
	}
	spec := &prepare.MountSpec_Handle{Handle: &prepare.MountHandle{HandleId: handleID, FsType: fsType}}
	if slices.Contains(req.GetHeldHandles(), handleID) {
		return spec, nil
	}
	mount, err := mountByHelper(ctx, d.config.Helper, d.config.Export.source(p.directory), req.GetPreparePath(), o.helperText())
	if err != nil {
		return nil, err
	}
	defer mount.Close()
	conn, err := handoff.Dial(ctx, req.GetHandleSocket(), handoff.Key{VolumeID: req.GetVolumeId(), PrepareID: req.GetPrepareId()}, req.GetHandoffToken())
	if err != nil {
		return nil, status.Errorf(codes.Unavailable, "handle_socket: %v", err)
	}
	defer func() { _ = conn.Close() }()
	if err := conn.Offer(ctx, handleID, mount); err != nil {
		var refused *handoff.Refusal
		if errors.As(err, &refused) {
			return nil, status.Errorf(refused.Code, "handle_socket: the CO refuses the handle: %s", refused.Message)
		}
		return nil, err
	}
	return spec, nil
}

// helperText are the options as a mount helper takes them. None of the values
// holds a comma: parseOptions refuses those.
func (o *options) helperText() string {
	words := []string{"vers=" + string(o.version)}
	if o.version == "3" && !o.has("nolock") {
		words = append(words, "nolock")
	}
	if !o.has("sec") {
		words = append(words, "sec=sys")
	}
	for _, key := range o.sorted() {
		if value := o.set[key]; value != "" {
			key += "=" + value
		}
		words = append(words, key)
	}
	return strings.Join(words, ",")
}

// maxHelperText bounds what is told of a helper's own words.
const maxHelperText = 512

// mountByHelper has a mount helper mount at dir, in a mount namespace that
// nobody else ever sees, and returns a clone of that mount, which is all that is
// left of it.
func mountByHelper(ctx context.Context, helper, source, dir, options string) (*os.File, error) {
	type result struct {
		mount *os.File
		err   error
	}
	done := make(chan result, 1)
	kernel.StartThread(func() {
		var r result
		defer func() { done <- r }()
		if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
			r.err = fmt.Errorf("a mount namespace for the helper: %w; it takes CAP_SYS_ADMIN", err)
			return
		}
		if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
			r.err = fmt.Errorf("make the helper's mounts private: %w", err)
			return
		}
		if r.err = runHelper(ctx, helper, source, dir, options); r.err == nil {
			r.mount, r.err = cloneMounted(dir)
		}
	})
	select {
	case r := <-done:
		return r.mount, r.err
	case <-ctx.Done():
		// It is being killed; what it may still mount ends with its thread.
		go func() {
			if r := <-done; r.mount != nil {
				_ = r.mount.Close()
			}
		}()
		return nil, server.Status(fmt.Errorf("the mount helper does not end: %w", ctx.Err()))
	}
}

// runHelper runs the helper in the mount namespace of this thread.
func runHelper(ctx context.Context, helper, source, dir, options string) error {
	cmd := exec.CommandContext(ctx, helper, source, dir, "-o", options)
	cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C"}
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return unix.Kill(-cmd.Process.Pid, unix.SIGKILL) }
	cmd.WaitDelay = time.Second
	var text bytes.Buffer
	cmd.Stdout, cmd.Stderr = &text, &text
	if err := cmd.Run(); err != nil {
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		return fmt.Errorf("mount helper %s: %w: %s", helper, err, bytes.TrimSpace(text.Next(maxHelperText)))
	}
	return nil
}

// cloneMounted returns a clone of the mount at dir. That it is one has to be
// looked for: a helper may say that it has mounted, and have not.
func cloneMounted(dir string) (*os.File, error) {
	facts, err := kernel.FactsOf(unix.AT_FDCWD, dir, false)
	if err != nil {
		return nil, err
	}
	if !facts.MountRoot {
		return nil, errors.New("the mount helper said that it has mounted, and has not")
	}
	fd, err := kernel.OpenTree(unix.AT_FDCWD, dir, unix.OPEN_TREE_CLONE|unix.AT_SYMLINK_NOFOLLOW)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), "mount"), nil
}
