package block

import (
	"context"
	"errors"
	"fmt"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/drivers/block/device"
	"github.com/csi-prepare/csi-prepare/drivers/block/filesystem"
)

// settle erases what a mkfs that was cut off has left: the device was blank
// before, and no consumer has had it since.
func (d *Driver) settle(ctx context.Context, e *volumeEntry, number device.Number) error {
	if e.Value.Format == nil || e.Value.Format.Made {
		return nil
	}
	dev, err := d.nodes.Claim(number, unix.O_RDWR)
	if err != nil {
		return err
	}
	defer dev.Close()
	d.log.Info("erasing a filesystem whose making was cut off", "volume_id", e.Key.Volume, "type", e.Value.Format.Type)
	before("erase")
	if err := filesystem.Erase(ctx, dev); err != nil {
		return err
	}
	e.Value.Format = nil
	return d.volumes.Put(e.Key, e.Value)
}

// ensureFilesystem returns the type of the filesystem on the device after it
// has checked it and let it take the whole device, or made one where there is
// certainly nothing.
func (d *Driver) ensureFilesystem(ctx context.Context, e *volumeEntry, number device.Number, c *csi.VolumeCapability) (filesystem.Type, error) {
	dev, err := d.nodes.Claim(number, unix.O_RDONLY)
	if err != nil {
		return "", err
	}
	found, err := filesystem.Probe(ctx, dev)
	_ = dev.Close() // the programs below claim it themselves
	if err != nil {
		return "", notFormatted(err)
	}
	t, known := found.Filesystem()
	asked := filesystem.Type(c.GetMount().GetFsType())
	switch {
	case found.IsZero() && e.Value.Format != nil:
		return "", status.Errorf(codes.FailedPrecondition, "volume_id: the driver made a filesystem (%s) on this volume and it is not there any more; nothing is formatted over what was lost", e.Value.Format.Type)
	case found.IsZero():
		t = d.typeOf(c)
		return t, d.format(ctx, e, number, t)
	case !known:
		return "", notFormatted(&filesystem.NotBlankError{Found: found.String()})
	case asked != "" && asked != t:
		return "", status.Errorf(codes.FailedPrecondition, "volume_capability.mount.fs_type: the volume has a filesystem of type %s, and is not formatted again; ask for that, or for none", t)
	}
	return t, d.adopt(ctx, e, number, t)
}

// notFormatted says why no filesystem was made.
func notFormatted(reason error) error {
	var found *filesystem.NotBlankError
	if errors.As(reason, &found) {
		return status.Errorf(codes.FailedPrecondition, "volume_id: %v; no filesystem is made over it: use the volume as a block volume, or empty it", reason)
	}
	return fmt.Errorf("whether the device is blank cannot be told, so no filesystem is made: %w", reason)
}

// format makes a filesystem, after the proof that there is nothing.
func (d *Driver) format(ctx context.Context, e *volumeEntry, number device.Number, t filesystem.Type) error {
	if err := d.proveBlank(ctx, *e, number); err != nil {
		return notFormatted(err)
	}
	e.Value.Format = &format{Type: t}
	if err := d.volumes.Put(e.Key, e.Value); err != nil {
		return err
	}
	before("make the filesystem")
	if err := filesystem.Make(ctx, d.nodes, number, t, d.tools); err != nil {
		return err
	}
	e.Value.Format = &format{Type: t, Made: true}
	return d.volumes.Put(e.Key, e.Value)
}

func (d *Driver) proveBlank(ctx context.Context, e volumeEntry, number device.Number) error {
	dev, err := d.nodes.Claim(number, unix.O_RDONLY)
	if err != nil {
		return err
	}
	defer dev.Close()
	if e.Value.Disk != nil {
		return filesystem.ProveBlank(ctx, dev, nil)
	}
	file, err := d.files.open(volumeFiles, e.Key.Volume, e.Value.Inode, unix.O_RDONLY)
	if err != nil {
		return err
	}
	defer file.Close()
	return filesystem.ProveBlank(ctx, dev, file)
}

// adopt checks a filesystem that is there, and lets it grow where the volume
// was made larger.
func (d *Driver) adopt(ctx context.Context, e *volumeEntry, number device.Number, t filesystem.Type) error {
	dev, err := d.nodes.Open(number, unix.O_RDWR)
	if err != nil {
		return err
	}
	defer dev.Close()
	before("check the filesystem")
	if err := filesystem.Check(ctx, dev, t); err != nil {
		return fmt.Errorf("check the %s: %w", t, err)
	}
	needs, err := filesystem.NeedsGrowth(dev, t)
	if err != nil {
		return err
	}
	if needs {
		s := stage{Type: t, Copied: e.Value.Source != nil}
		before("grow the filesystem")
		if err := filesystem.Grow(ctx, dev, number, t, s.viewParameters()...); err != nil {
			return err
		}
	}
	if e.Value.Format == nil {
		e.Value.Format = &format{Type: t, Made: true}
		return d.volumes.Put(e.Key, e.Value)
	}
	return nil
}
