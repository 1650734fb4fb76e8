package co

import (
	"context"
	"errors"
	"os"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/fakes/sp"
	"github.com/csi-prepare/csi-prepare/reference/handoff"
	"github.com/csi-prepare/csi-prepare/reference/kernel"
	"github.com/csi-prepare/csi-prepare/reference/perform"
	"github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// offer has NodePrepareVolume hand a descriptor over and name it in a HANDLE.
func (r *rig) offer(fsType string, open func() (int, error)) {
	r.answering(func(ctx context.Context, method string, request any, next func(context.Context) (any, error)) (any, error) {
		answer, err := next(ctx)
		p, prepares := request.(*preparev1alpha1.NodePrepareVolumeRequest)
		if !prepares || err != nil {
			return answer, err
		}
		if open != nil {
			fd, err := open()
			if err != nil {
				return nil, err
			}
			mount := os.NewFile(uintptr(fd), "offered")
			defer mount.Close()
			conn, err := handoff.Dial(ctx, p.GetHandleSocket(), handoff.Key{VolumeID: p.GetVolumeId(), PrepareID: p.GetPrepareId()}, p.GetHandoffToken())
			if err != nil {
				return nil, err
			}
			defer conn.Close()
			// Whoever is refused may claim to be done all the same.
			_ = conn.Offer(ctx, "h", mount)
		}
		return &preparev1alpha1.NodePrepareVolumeResponse{MountSpecs: []*preparev1alpha1.MountSpec{{
			Kind: &preparev1alpha1.MountSpec_Handle{Handle: &preparev1alpha1.MountHandle{HandleId: "h", FsType: fsType}},
		}}}, nil
	})
}

// detached is a tmpfs in no namespace, with a file in it.
func detached() (int, error) {
	fs, err := kernel.OpenFS("tmpfs")
	if err != nil {
		return -1, err
	}
	defer fs.Close()
	if err := fs.Create(); err != nil {
		return -1, err
	}
	fd, err := fs.Mount(0)
	if err != nil {
		return -1, err
	}
	f, err := unix.Openat(fd, "file", unix.O_CREAT|unix.O_CLOEXEC, 0o644)
	if err == nil {
		unix.Close(f)
	}
	return fd, err
}

func openFiles(t *testing.T) int {
	t.Helper()
	files, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(files)
}

func TestHandle(t *testing.T) {
	r := newRig(t)
	r.offer("tmpfs", detached)
	u := r.use(r.volume("v"))
	r.down(r.up(u).Key()) // opens what stays open
	before := openFiles(t)
	record := r.up(u)
	if _, err := os.Stat(u.Target.Path + "/file"); err != nil {
		t.Error(err)
	}
	top, _ := r.table().Top(u.Target.Path)
	if top.FSType != "tmpfs" || top.Attributes() != "rw,nosuid,nodev,relatime" {
		t.Errorf("the consumer has %v", top)
	}
	if n := openFiles(t); n != before {
		t.Errorf("%d descriptors while it is performed, %d before", n, before)
	}
	// A repeat offers another: nothing is performed again, and nothing kept.
	r.up(u)
	r.mountsAt(u.Target.Path, 1)
	if n := openFiles(t); n != before {
		t.Errorf("%d descriptors after a repeat, %d before", n, before)
	}
	r.down(record.Key())
	r.nothingLeft()
}

func TestHandleIsRefused(t *testing.T) {
	for _, test := range []struct {
		name   string
		fsType string
		open   func() (int, error)
		rule   requirement.ID
	}{
		{"that was never sent", "tmpfs", nil, requirement.HandleDelivered},
		{"that is a directory", "tmpfs", func() (int, error) { return unix.Open("/", unix.O_DIRECTORY|unix.O_CLOEXEC, 0) }, requirement.HandleDelivered},
		{"that is a file", "tmpfs", func() (int, error) { return unix.Open("/proc/self/exe", unix.O_CLOEXEC, 0) }, requirement.HandleDelivered},
		{"that is attached", "tmpfs", func() (int, error) { return kernel.OpenTree(unix.AT_FDCWD, "/proc", 0) }, requirement.HandleFSType},
		{"of another type than declared", "ext4", detached, requirement.HandleFSType},
		{"that is a clone of the node's root", "tmpfs", func() (int, error) {
			return kernel.OpenTree(unix.AT_FDCWD, "/", unix.OPEN_TREE_CLONE)
		}, requirement.HandleFSType},
		{"declared of a forbidden type", "proc", detached, requirement.HandleFSType},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := newRig(t)
			r.offer(test.fsType, test.open)
			_, err := r.co.Up(r.ctx, r.use(r.volume("v")))
			var invalid *perform.InvalidError
			if !errors.As(err, &invalid) || invalid.Violations[0].Requirement != test.rule {
				t.Errorf("%v, want a violation of %s", err, test.rule)
			}
			if !slices.Contains(r.called(), "NodeUnprepareVolume") {
				t.Error("it was not unprepared")
			}
			r.nothingLeft()
			if n := r.co.channels[sp.Name]; n != nil && n.Descriptors() > 1 { // a connection may be closing
				t.Errorf("%d descriptors are held", n.Descriptors())
			}
		})
	}
}

// TestHandleWithoutACall has a plugin that keeps the token of an earlier call.
func TestHandleWithoutACall(t *testing.T) {
	r := newRig(t)
	var old []byte
	r.answering(func(ctx context.Context, method string, request any, next func(context.Context) (any, error)) (any, error) {
		p, prepares := request.(*preparev1alpha1.NodePrepareVolumeRequest)
		if !prepares {
			return next(ctx)
		}
		if slices.Equal(p.GetHandoffToken(), old) || len(p.GetHandoffToken()) < 16 {
			t.Error("the token is not a new one")
		}
		token := p.GetHandoffToken()
		if old != nil {
			token = old
		}
		old = p.GetHandoffToken()
		conn, err := handoff.Dial(ctx, p.GetHandleSocket(), handoff.Key{VolumeID: p.GetVolumeId(), PrepareID: p.GetPrepareId()}, token)
		if err != nil {
			return nil, err
		}
		defer conn.Close()
		fd, err := detached()
		if err != nil {
			return nil, err
		}
		mount := os.NewFile(uintptr(fd), "offered")
		defer mount.Close()
		offered := conn.Offer(ctx, "h", mount)
		if first := slices.Equal(token, old); first != (offered == nil) {
			t.Errorf("first call %v, offering: %v", first, offered)
		}
		return next(ctx)
	})
	u := r.use(r.volume("v"))
	record := r.up(u)
	r.up(u)
	r.answering(nil)
	r.down(record.Key())
	r.nothingLeft()
}
