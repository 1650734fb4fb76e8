package block

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/drivers/server"
)

// Sizes of volumes that are files, in bytes.
const (
	minSize     = 1 << 20 // and what sizes are rounded up to
	defaultSize = 1 << 30 // without a capacity_range
)

func checkRange(r *csi.CapacityRange) error {
	required, limit := r.GetRequiredBytes(), r.GetLimitBytes()
	switch {
	case required < 0:
		return server.Invalid("capacity_range.required_bytes", "is negative", "set 0 for no requirement")
	case limit < 0:
		return server.Invalid("capacity_range.limit_bytes", "is negative", "set 0 for no limit")
	case limit > 0 && required > limit:
		return server.Invalid("capacity_range", "requires more bytes than its limit allows", "raise limit_bytes or lower required_bytes")
	}
	return nil
}

// within tells whether a size keeps to a range.
func within(r *csi.CapacityRange, size int64) bool {
	return size >= r.GetRequiredBytes() && (r.GetLimitBytes() == 0 || size <= r.GetLimitBytes())
}

// fileSize chooses the size of a volume with a range, at least least bytes.
func (d *Driver) fileSize(r *csi.CapacityRange, least int64) (int64, error) {
	size := max(r.GetRequiredBytes(), least)
	if size == 0 {
		size = defaultSize
		if limit := r.GetLimitBytes(); limit > 0 {
			size = min(size, limit/minSize*minSize)
		}
	}
	_, total, err := d.files.space()
	if err != nil {
		return 0, err
	}
	if size > total {
		return 0, status.Errorf(codes.OutOfRange, "capacity_range: a volume has at most the %d bytes of the filesystem it lies on", total)
	}
	size = max(minSize, (size+minSize-1)/minSize*minSize)
	if !within(r, size) {
		return 0, status.Errorf(codes.OutOfRange, "capacity_range: volumes have a multiple of %d bytes, and one that copies another at least its size; no such size is in the range", minSize)
	}
	return size, nil
}

func (d *Driver) checkCreate(req *csi.CreateVolumeRequest) error {
	if err := checkName(req.GetName()); err != nil {
		return err
	}
	if err := d.checkCapabilities(req.GetVolumeCapabilities()); err != nil {
		return err
	}
	if err := checkRange(req.GetCapacityRange()); err != nil {
		return err
	}
	if len(req.GetMutableParameters()) > 0 {
		return server.Invalid("mutable_parameters", "are not supported", "leave them out")
	}
	if req.GetVolumeContentSource() != nil {
		s := sourceOf(req.GetVolumeContentSource())
		switch {
		case d.files == nil:
			return server.Invalid("volume_content_source", "is not supported for disks, which begin empty", "leave it out")
		case s == nil || *s == (source{}):
			return server.Invalid("volume_content_source", "names nothing", "set the id of a snapshot or volume, or leave it out")
		}
	}
	return checkParameters(req.GetParameters())
}

// reachable refuses a topology that leaves out this node.
func (d *Driver) reachable(r *csi.TopologyRequirement) error {
	for _, t := range r.GetRequisite() {
		if d.isHere(t) {
			return nil
		}
	}
	if len(r.GetRequisite()) == 0 {
		return nil
	}
	return status.Errorf(codes.ResourceExhausted, "accessibility_requirements: volumes of this plugin are on one node, which is not among the requisite ones; add %s=%s", TopologyKey, d.config.NodeID)
}

// CreateVolume implements csi.ControllerServer.
func (d *Driver) CreateVolume(ctx context.Context, req *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	if err := d.checkCreate(req); err != nil {
		return nil, err
	}
	return server.Single(ctx, &d.byName, "volume "+req.GetName(), func(ctx context.Context) (*csi.CreateVolumeResponse, error) {
		e, err := d.create(ctx, req)
		if err != nil {
			return nil, refusal(err)
		}
		return &csi.CreateVolumeResponse{Volume: d.describe(e)}, nil
	})
}

func (d *Driver) create(ctx context.Context, req *csi.CreateVolumeRequest) (volumeEntry, error) {
	found, err := d.volumes.Named(req.GetName())
	if err != nil {
		return volumeEntry{}, err
	}
	if len(found) > 0 {
		return d.repeatCreate(ctx, found[0], req)
	}
	if err := d.reachable(req.GetAccessibilityRequirements()); err != nil {
		return volumeEntry{}, err
	}
	e := volumeEntry{Key: server.Key{Volume: newID(), Name: req.GetName()}}
	e.Value = volume{Phase: creating, Source: sourceOf(req.GetVolumeContentSource())}
	if d.files == nil {
		return d.createDisk(ctx, e, req.GetCapacityRange())
	}
	least, err := d.sourceSize(e.Value.Source)
	if err != nil {
		return volumeEntry{}, err
	}
	if e.Value.Capacity, err = d.fileSize(req.GetCapacityRange(), least); err != nil {
		return volumeEntry{}, err
	}
	if err := d.volumes.Put(e.Key, e.Value); err != nil {
		return volumeEntry{}, also(err, d.volumes.Delete(e.Key))
	}
	return d.finishCreate(ctx, e)
}

func (d *Driver) repeatCreate(ctx context.Context, e volumeEntry, req *csi.CreateVolumeRequest) (volumeEntry, error) {
	exists := func(field, rule string) error {
		return status.Errorf(codes.AlreadyExists, "%s: the volume of this name %s; use another name, or the first arguments", field, rule)
	}
	asked := sourceOf(req.GetVolumeContentSource())
	switch {
	case !within(req.GetCapacityRange(), e.Value.Capacity):
		return volumeEntry{}, exists("capacity_range", "is of another size")
	case (asked == nil) != (e.Value.Source == nil), asked != nil && *asked != *e.Value.Source:
		return volumeEntry{}, exists("volume_content_source", "began with other content")
	case d.reachable(req.GetAccessibilityRequirements()) != nil:
		return volumeEntry{}, exists("accessibility_requirements", "is on another node")
	case e.Value.Phase == ready:
		return e, nil
	}
	return d.finishCreate(ctx, e)
}

// finishCreate brings a volume from creating to ready.
func (d *Driver) finishCreate(ctx context.Context, e volumeEntry) (volumeEntry, error) {
	return server.Single(ctx, &d.byVolume, e.Key.Volume, func(ctx context.Context) (volumeEntry, error) {
		// While the flight was free the volume may have been deleted, or a
		// cancelled call for it may have come to its end.
		now, found, err := d.volumes.Get(e.Key)
		e.Value = now
		switch {
		case err != nil:
			return volumeEntry{}, err
		case !found, now.Phase == deleting:
			return volumeEntry{}, status.Error(codes.Aborted, "the volume of this name is being deleted; repeat after DeleteVolume was OK")
		case now.Phase == ready:
			return e, nil
		case now.Disk != nil:
			return e, d.ready(&e) // it was blank when it was recorded
		}
		if err := d.makeFile(ctx, &e); err != nil {
			return volumeEntry{}, d.abandon(e, err)
		}
		return e, nil
	})
}

// makeFile makes the file of a volume with all it is to hold, and names it
// once it is whole. The inode is on record before it has a name: a name that
// is there and belongs to another inode is not the driver's.
func (d *Driver) makeFile(ctx context.Context, e *volumeEntry) error {
	if e.Value.Inode != 0 {
		switch f, err := d.files.open(volumeFiles, e.Key.Volume, e.Value.Inode, unix.O_RDONLY); {
		case err == nil: // whole, or it would have no name
			_ = f.Close()
			return d.ready(e)
		case !errors.Is(err, unix.ENOENT):
			return err
		}
	}
	f, inode, err := d.files.temporary(volumeFiles)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := d.fill(ctx, f, e); err != nil {
		return err
	}
	if err := f.Truncate(e.Value.Capacity); err != nil {
		return fmt.Errorf("size the file of the volume: %w", err)
	}
	if err := f.Sync(); err != nil {
		return err
	}
	e.Value.Inode = inode
	if err := d.volumes.Put(e.Key, e.Value); err != nil {
		return err
	}
	if err := d.files.name(volumeFiles, f, e.Key.Volume); err != nil {
		return err
	}
	return d.ready(e)
}

func (d *Driver) ready(e *volumeEntry) error {
	e.Value.Phase = ready
	return d.volumes.Put(e.Key, e.Value)
}

// fill copies what the volume begins with.
func (d *Driver) fill(ctx context.Context, to *os.File, e *volumeEntry) error {
	switch s := e.Value.Source; {
	case s == nil:
		return nil
	case s.Snapshot != "":
		format, err := server.Single(ctx, &d.byVolume, s.Snapshot, func(ctx context.Context) (*format, error) {
			return d.copySnapshot(ctx, to, s.Snapshot)
		})
		e.Value.Format = format
		return err
	default:
		format, err := server.Single(ctx, &d.byVolume, s.Volume, func(ctx context.Context) (*format, error) {
			return d.copyVolume(ctx, to, s.Volume)
		})
		e.Value.Format = format
		return err
	}
}

// abandon leaves nothing of a volume whose creation failed for a final
// reason. One that was cut off stays for a repeated call.
func (d *Driver) abandon(e volumeEntry, reason error) error {
	switch status.Code(refusal(reason)) {
	case codes.Canceled, codes.DeadlineExceeded, codes.Aborted, codes.Unavailable:
		return reason
	}
	var err error
	if e.Value.Inode != 0 {
		err = d.files.remove(volumeFiles, e.Key.Volume, e.Value.Inode)
	}
	var foreign *foreignError
	if errors.As(err, &foreign) {
		err = nil // nothing of the driver's is there
	}
	if err == nil {
		err = d.volumes.Delete(e.Key)
	}
	if err != nil {
		return fmt.Errorf("%w; and what was made of it stays: %w", reason, err)
	}
	return reason
}
