package sp

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	preparev1alpha1 "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// blockSize is what a volume has that was asked for without a size: enough
// for ext4 and for a spec that writes far from the start.
const blockSize = 64 << 20

// makeFile makes the thin file that a volume is.
func (s *Server) makeFile(v *volume) error {
	f, err := os.OpenFile(s.directory(v), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if errors.Is(err, os.ErrExist) {
		return nil
	}
	if err != nil {
		return err
	}
	return errors.Join(f.Truncate(v.size()), f.Close())
}

func (v *volume) size() int64 { return max(v.Required, blockSize) }

// mark of the loop device of a volume, and of the one that a read-only
// preparation has for itself.
func (s *Server) mark(v *volume, prepareID string) string {
	if prepareID == "" {
		return "fake:" + v.ID
	}
	sum := sha256.Sum256([]byte(prepareID))
	return "fake:" + v.ID + ":" + hex.EncodeToString(sum[:8])
}

// stageDevice attaches the file and, for a mount volume, makes or finds its
// filesystem. The caller holds s.mu.
func (s *Server) stageDevice(v *volume, c *csi.VolumeCapability) error {
	d, err := s.rules.device(s, v, "")
	if err != nil || c.GetBlock() != nil {
		return internal(err)
	}
	if err := s.filesystem(v, d); err != nil {
		return errors.Join(err, detach(s.mark(v, "")))
	}
	return nil
}

// filesystem sees that the device has an ext4, and makes one where the file
// holds nothing whatever.
func (s *Server) filesystem(v *volume, d device) error {
	blank, err := s.rules.blank(s.directory(v))
	if err != nil {
		return internal(err)
	}
	if !blank {
		ours, err := hasExt4(d.path)
		if err != nil {
			return internal(err)
		}
		if !ours {
			return status.Error(codes.FailedPrecondition, "volume_id: the volume holds data, and no ext4; use it as a block volume")
		}
		return nil
	}
	mkfs, err := exec.LookPath("mkfs.ext4")
	if err != nil {
		mkfs = "/usr/sbin/mkfs.ext4"
	}
	if out, err := exec.Command(mkfs, "-q", "-F", d.path).CombinedOutput(); err != nil {
		return status.Errorf(codes.Internal, "making an ext4: %v: %s", err, bytes.TrimSpace(out))
	}
	return nil
}

// isBlank reports whether a file is one hole.
func isBlank(file string) (bool, error) {
	f, err := os.Open(file)
	if err != nil {
		return false, err
	}
	defer f.Close()
	_, err = unix.Seek(int(f.Fd()), 0, unix.SEEK_DATA)
	if errors.Is(err, unix.ENXIO) {
		return true, nil
	}
	return false, err
}

func hasExt4(path string) (bool, error) {
	f, err := os.Open(path)
	if err != nil {
		return false, err
	}
	defer f.Close()
	magic := make([]byte, 2)
	_, err = f.ReadAt(magic, 1024+0x38)
	return bytes.Equal(magic, []byte{0x53, 0xef}), err
}

// deviceOf attaches the file of a volume, for a preparation read-only and for
// itself.
func deviceOf(s *Server, v *volume, prepareID string) (device, error) {
	return attach(s.directory(v), s.mark(v, prepareID), prepareID != "")
}

// blockSpec is the mount spec of a volume that is a device. The caller holds
// s.mu.
func (s *Server) blockSpec(v *volume, r *preparev1alpha1.NodePrepareVolumeRequest, a *preparev1alpha1.MountAttributes) (*preparev1alpha1.MountSpec, error) {
	block := r.GetVolumeCapability().GetBlock() != nil
	own := ""
	if block && a.GetReadonly() {
		own = r.GetPrepareId()
	}
	d, err := s.rules.device(s, v, own)
	if err != nil {
		return nil, internal(err)
	}
	message := &preparev1alpha1.BlockDevice{Major: d.major, Minor: d.minor, Diskseq: d.diskseq}
	if block {
		return &preparev1alpha1.MountSpec{
			Kind:       &preparev1alpha1.MountSpec_BlockDevice{BlockDevice: message},
			Attributes: &preparev1alpha1.MountAttributes{Readonly: a.GetReadonly()},
		}, nil
	}
	fs := &preparev1alpha1.FilesystemMount{FsType: "ext4", Source: &preparev1alpha1.FilesystemMount_Device{Device: message}}
	for _, flag := range s.parameters(r) {
		key, value, isText := strings.Cut(flag, "=")
		p := &preparev1alpha1.FsParameter{Key: key}
		if isText {
			p.Value = &preparev1alpha1.FsParameter_Text{Text: value}
		}
		fs.Parameters = append(fs.Parameters, p)
	}
	return &preparev1alpha1.MountSpec{Kind: &preparev1alpha1.MountSpec_Filesystem{Filesystem: fs}, Attributes: a}, nil
}

// ext4Flags are the mount flags that become parameters of the superblock.
var ext4Flags = []string{"discard", "nodiscard", "commit=17"}

// parameters are those flags of a request, sorted.
func (s *Server) parameters(r *preparev1alpha1.NodePrepareVolumeRequest) []string {
	var found []string
	for _, flag := range r.GetVolumeCapability().GetMount().GetMountFlags() {
		if s.config.Block && slices.Contains(ext4Flags, flag) {
			found = append(found, flag)
		}
	}
	slices.Sort(found)
	return found
}

// agree refuses parameters that are not those the device is mounted with, or
// may be: the kernel would ignore them.
func agree(s *Server, r *preparev1alpha1.NodePrepareVolumeRequest) error {
	for key, other := range s.state.of(r.GetVolumeId()) {
		if was := s.parameters(other); key.prepare != r.GetPrepareId() && !slices.Equal(was, s.parameters(r)) {
			return status.Errorf(codes.FailedPrecondition, "volume_capability.mount.mount_flags: the volume is prepared with the parameters %q, as %q", was, key.prepare)
		}
	}
	return nil
}

// acceptsDevice reports whether the performer can perform what a device comes
// to.
func acceptsDevice(p *preparev1alpha1.Performer, spec *preparev1alpha1.MountSpec) bool {
	if fs := spec.GetFilesystem(); fs != nil {
		return slices.Contains(p.GetKinds(), preparev1alpha1.MountKind_MOUNT_KIND_FILESYSTEM) && slices.Contains(p.GetFsTypes(), fs.GetFsType())
	}
	return slices.Contains(p.GetKinds(), preparev1alpha1.MountKind_MOUNT_KIND_BLOCK_DEVICE)
}

// release ends what a preparation had for itself.
func release(s *Server, v *volume, prepareID string) error {
	return internal(detach(s.mark(v, prepareID)))
}

func internal(err error) error {
	if err == nil || status.Code(err) != codes.Unknown {
		return err
	}
	return status.Error(codes.Internal, fmt.Sprint("the device of the volume: ", err))
}
