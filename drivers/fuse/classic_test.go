package fuse

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/reference/handoff"
	"github.com/csi-prepare/csi-prepare/reference/kernel"
	"github.com/csi-prepare/csi-prepare/reference/mountns"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
	"github.com/csi-prepare/csi-prepare/reference/mountspec/wire"
	"github.com/csi-prepare/csi-prepare/reference/perform"
	prepare "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// classicSite has a driver that mounts by itself, in a namespace in which the
// directory of preparations is shared, and a consumer's that follows it.
func classicSite(t *testing.T) *site {
	t.Helper()
	var beyond *mountns.Namespace
	s := newSiteOf(t, 0, func(c *Config) {
		c.Classic = true
		var err error
		if beyond, err = mountns.New(t.Context()); err != nil {
			t.Fatal(err)
		}
		dir := filepath.Join(filepath.Dir(c.StateDir), "prepare")
		err = beyond.Do(t.Context(), func() error {
			if err := unix.Mount(dir, dir, "", unix.MS_BIND, ""); err != nil {
				return err
			}
			return unix.Mount("", dir, "", unix.MS_SHARED, "")
		})
		if err != nil {
			t.Fatal(err)
		}
	}, nil)
	s.stop(unix.SIGKILL)
	s.home = beyond
	s.start()
	consumer, err := beyond.Copy(t.Context(), mountns.Slave())
	s.must(err)
	s.consumer.Close()
	s.consumer = consumer
	t.Cleanup(func() { consumer.Close(); beyond.Close() })
	return s
}

// bind prepares for a CO that can only bind, and performs.
func (s *site) bind(key handoff.Key, a mountspec.Attributes) ([]perform.Receipt, error) {
	s.t.Helper()
	path := filepath.Join(s.base, "prepare", key.PrepareID)
	if err := os.Mkdir(path, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return nil, err
	}
	req := &prepare.NodePrepareVolumeRequest{
		VolumeId: key.VolumeID, PrepareId: key.PrepareID, PreparePath: path, VolumeCapability: capability(), Readonly: a.Readonly,
		Performer: &prepare.Performer{Kernel: prepare.Performer_NODE, Kinds: []prepare.MountKind{prepare.MountKind_MOUNT_KIND_BIND}},
	}
	resp, err := s.prepare.NodePrepareVolume(s.t.Context(), req)
	if err != nil {
		return nil, err
	}
	specs, violations := wire.Validate(resp.GetMountSpecs(), wire.RequestFromProto(req))
	if len(violations) > 0 {
		s.t.Errorf("violations: %v", violations)
	}
	s.must(os.MkdirAll(s.point(key.PrepareID), 0o755))
	var receipts []perform.Receipt
	err = s.consumer.Do(s.t.Context(), func() error {
		done, err := perform.Perform(s.t.Context(), perform.Target{Path: s.point(key.PrepareID)}, specs,
			perform.Options{Request: wire.RequestFromProto(req), Prepare: path})
		if err == nil {
			receipts = done.Receipts
		}
		return err
	})
	return receipts, err
}

func (s *site) unbind(key handoff.Key, receipts []perform.Receipt) {
	s.t.Helper()
	s.must(perform.Undo(s.t.Context(), s.consumer, receipts))
	s.must(s.unprepare(key))
	s.must(os.Remove(filepath.Join(s.base, "prepare", key.PrepareID))) // it is empty
}

func TestClassic(t *testing.T) {
	s := classicSite(t)
	before, err := s.consumer.Table(t.Context())
	s.must(err)
	caps, err := s.prepare.NodePrepareGetCapabilities(t.Context(), &prepare.NodePrepareGetCapabilitiesRequest{})
	s.must(err)
	if text := caps.String(); !strings.Contains(text, "requires_propagation") || strings.Contains(text, "FUSE") {
		t.Errorf("capabilities: %s", text)
	}
	key := handoff.Key{VolumeID: s.create("v", nil), PrepareID: "p"}
	for range 2 {
		receipts, err := s.bind(key, mountspec.Attributes{})
		s.must(err)
		s.inConsumer(func() error { return os.WriteFile(s.point("p")+"/f", []byte("x"), 0o644) })
		again, err := s.prepare.NodePrepareVolume(t.Context(), &prepare.NodePrepareVolumeRequest{
			VolumeId: key.VolumeID, PrepareId: "p", PreparePath: filepath.Join(s.base, "prepare", "p"), VolumeCapability: capability(),
			Performer: &prepare.Performer{Kernel: prepare.Performer_NODE, Kinds: []prepare.MountKind{prepare.MountKind_MOUNT_KIND_BIND}},
		})
		if err != nil || again.GetMountSpecs()[0].GetBind().GetMountFsType() != "fuse.csi-prepare" {
			t.Errorf("a repeat: %v, %v", again, err)
		}
		// The death of the process behind the socket is not that of the mount.
		s.stop(unix.SIGKILL)
		s.start()
		s.inConsumer(func() error { return os.WriteFile(s.point("p")+"/g", []byte("x"), 0o644) })
		s.unbind(key, receipts)
	}
	after, err := s.consumer.Table(t.Context())
	s.must(err)
	if len(after.Mounts) != len(before.Mounts) {
		t.Errorf("%d mounts, %d before", len(after.Mounts), len(before.Mounts))
	}
}

// A dead mount is never answered: it is taken away, and a new one made.
func TestClassicAfterItsServerDied(t *testing.T) {
	s := classicSite(t)
	key := handoff.Key{VolumeID: s.create("v", nil), PrepareID: "p"}
	receipts, err := s.bind(key, mountspec.Attributes{})
	s.must(err)
	for _, pid := range s.servers() {
		s.must(unix.Kill(pid, unix.SIGKILL))
	}
	s.waitFor(func() bool {
		var st unix.Statfs_t
		return errors.Is(s.consumer.Do(t.Context(), func() error { return unix.Statfs(s.point("p"), &st) }), unix.ENOTCONN)
	})
	s.must(perform.Undo(t.Context(), s.consumer, receipts))
	if receipts, err = s.bind(key, mountspec.Attributes{Readonly: false}); err != nil {
		t.Fatal(err)
	}
	s.inConsumer(func() error { return os.WriteFile(s.point("p")+"/f", nil, 0o644) })
	s.unbind(key, receipts)
}

func TestClassicKeepsAMountInUse(t *testing.T) {
	s := classicSite(t)
	key := handoff.Key{VolumeID: s.create("v", nil), PrepareID: "p"}
	receipts, err := s.bind(key, mountspec.Attributes{})
	s.must(err)
	// Somebody else's mount on it is not the driver's to take away.
	target := filepath.Join(s.base, "prepare", "p", mountDir)
	s.must(s.home.Do(t.Context(), func() error { return unix.Mount("x", target, "tmpfs", 0, "") }))
	if err := s.unprepare(key); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("below a mount of somebody else's: %v", err)
	}
	s.must(s.home.Do(t.Context(), func() error { return kernel.Unmount(target, 0) }))
	var fd int
	s.must(s.home.Do(t.Context(), func() (err error) {
		fd, err = unix.Open(target, unix.O_PATH|unix.O_CLOEXEC, 0)
		return err
	}))
	if err := s.unprepare(key); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("in use: %v", err)
	}
	s.must(unix.Close(fd))
	s.unbind(key, receipts)
}

// Without propagation the mount never reaches the CO, and nothing is bound
// instead of it.
func TestClassicWithoutPropagation(t *testing.T) {
	s := classicSite(t)
	alone, err := mountns.New(t.Context())
	s.must(err)
	defer alone.Close()
	followed := s.consumer
	s.consumer = alone
	key := handoff.Key{VolumeID: s.create("v", nil), PrepareID: "p"}
	if _, err := s.bind(key, mountspec.Attributes{}); !errors.Is(err, perform.ErrSource) {
		t.Errorf("got %v", err)
	}
	s.consumer = followed
	s.must(s.unprepare(key))
}
