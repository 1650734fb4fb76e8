package directory

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/drivers/server"
)

// ControllerGetCapabilities implements csi.ControllerServer.
func (d *Controller[T]) ControllerGetCapabilities(context.Context, *csi.ControllerGetCapabilitiesRequest) (*csi.ControllerGetCapabilitiesResponse, error) {
	types := []csi.ControllerServiceCapability_RPC_Type{
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME,
		csi.ControllerServiceCapability_RPC_LIST_VOLUMES,
		csi.ControllerServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
	}
	if d.config.Capacity {
		types = append(types, csi.ControllerServiceCapability_RPC_GET_CAPACITY)
	}
	if d.config.Copies {
		types = append(types,
			csi.ControllerServiceCapability_RPC_CREATE_DELETE_SNAPSHOT,
			csi.ControllerServiceCapability_RPC_LIST_SNAPSHOTS,
			csi.ControllerServiceCapability_RPC_GET_SNAPSHOT,
			csi.ControllerServiceCapability_RPC_CLONE_VOLUME,
		)
	}
	resp := &csi.ControllerGetCapabilitiesResponse{}
	for _, t := range types {
		resp.Capabilities = append(resp.Capabilities, &csi.ControllerServiceCapability{Type: &csi.ControllerServiceCapability_Rpc{
			Rpc: &csi.ControllerServiceCapability_RPC{Type: t},
		}})
	}
	return resp, nil
}

// banned are the characters CSI bans from names.
func banned(r rune) bool {
	return r <= 0x08 || r == 0x0b || r == 0x0c || r >= 0x0e && r <= 0x1f || r >= 0x7f && r <= 0x9f
}

func checkName(name string) error {
	if strings.ContainsFunc(name, banned) {
		return server.Invalid("name", "holds a control character", "leave out U+0000-U+0008, U+000B, U+000C, U+000E-U+001F and U+007F-U+009F")
	}
	return server.Required("name", name)
}

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

func (d *Controller[T]) checkCreate(req *csi.CreateVolumeRequest) error {
	for _, err := range []error{
		checkName(req.GetName()),
		d.checkCapabilities(req.GetVolumeCapabilities()),
		checkRange(req.GetCapacityRange()),
		d.checkSource(req.GetVolumeContentSource()),
	} {
		if err != nil {
			return err
		}
	}
	if len(req.GetMutableParameters()) > 0 {
		return server.Invalid("mutable_parameters", "are not supported", "leave them out")
	}
	return d.config.Driver.CheckParameters(req.GetParameters())
}

func (d *Controller[T]) checkSource(s *csi.VolumeContentSource) error {
	switch {
	case s == nil:
		return nil
	case !d.config.Copies:
		return server.Invalid("volume_content_source", "is not supported, volumes begin empty", "leave it out")
	case s.GetSnapshot() != nil:
		return server.Required("volume_content_source.snapshot.snapshot_id", s.GetSnapshot().GetSnapshotId())
	case s.GetVolume() != nil:
		return server.Required("volume_content_source.volume.volume_id", s.GetVolume().GetVolumeId())
	}
	return server.Invalid("volume_content_source", "names neither a snapshot nor a volume", "set one of them, or leave it out")
}

func sourceOf(req *csi.CreateVolumeRequest) Source {
	s := req.GetVolumeContentSource()
	return Source{Snapshot: s.GetSnapshot().GetSnapshotId(), Volume: s.GetVolume().GetVolumeId()}
}

// CreateVolume implements csi.ControllerServer.
func (d *Controller[T]) CreateVolume(ctx context.Context, req *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
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

func (d *Controller[T]) create(ctx context.Context, req *csi.CreateVolumeRequest) (Entry[T], error) {
	found, err := d.volumes.Named(req.GetName())
	if err != nil {
		return Entry[T]{}, err
	}
	if len(found) > 0 {
		return d.repeatCreate(ctx, found[0], req)
	}
	if err := d.config.Node.reachable(req.GetAccessibilityRequirements()); err != nil {
		return Entry[T]{}, err
	}
	e := Entry[T]{Key: server.Key{Volume: newID(), Name: req.GetName()}}
	e.Value.Phase, e.Value.Source = Creating, sourceOf(req)
	from, size, err := d.origin(e.Value.Source)
	if err != nil {
		return Entry[T]{}, err
	}
	if limit := req.GetCapacityRange().GetLimitBytes(); limit > 0 && limit < size {
		return Entry[T]{}, status.Errorf(codes.OutOfRange, "capacity_range.limit_bytes: is less than the %d bytes of the source; raise it", size)
	}
	if e.Value.Home, e.Value.Traits, err = d.config.Driver.Place(e.Key.Volume, req, from); err != nil {
		return Entry[T]{}, err
	}
	if err := d.volumes.Put(e.Key, e.Value); err != nil {
		d.config.Driver.Free(e.Key.Volume, e.Value)
		return Entry[T]{}, errors.Join(err, d.volumes.Delete(e.Key))
	}
	return d.finishCreate(ctx, e)
}

func (d *Controller[T]) repeatCreate(ctx context.Context, e Entry[T], req *csi.CreateVolumeRequest) (Entry[T], error) {
	field, how := d.config.Driver.Differs(e.Value, req)
	switch {
	case e.Value.Source != sourceOf(req):
		field, how = "volume_content_source", "was created from another source"
	case field == "" && d.config.Node.reachable(req.GetAccessibilityRequirements()) != nil:
		field, how = "accessibility_requirements", "is on another node"
	}
	switch {
	case field != "":
		return Entry[T]{}, status.Errorf(codes.AlreadyExists, "%s: the volume of this name %s; use another name, or the first arguments", field, how)
	case e.Value.Phase == Ready:
		return e, nil
	}
	return d.finishCreate(ctx, e)
}

// finishCreate brings a volume from creating to ready.
func (d *Controller[T]) finishCreate(ctx context.Context, e Entry[T]) (Entry[T], error) {
	return d.withSource(ctx, e.Value.Source, func(ctx context.Context) (Entry[T], error) {
		return server.Single(ctx, d.config.Flights, e.Key.Volume, func(ctx context.Context) (Entry[T], error) {
			return d.make(ctx, e)
		})
	})
}

func (d *Controller[T]) make(ctx context.Context, e Entry[T]) (Entry[T], error) {
	// While the flight was free the volume may have been deleted, or a
	// cancelled call for it may have come to its end.
	now, found, err := d.volumes.Get(e.Key)
	switch {
	case err != nil:
		return Entry[T]{}, err
	case !found, now.Phase == Deleting:
		return Entry[T]{}, status.Error(codes.Aborted, "the volume of this name is being deleted; repeat after DeleteVolume was OK")
	case now.Phase == Ready:
		return Entry[T]{Key: e.Key, Value: now}, nil
	}
	if err := d.makeDirectory(ctx, e); err != nil {
		return Entry[T]{}, d.abandon(ctx, e, err)
	}
	e.Value.Phase = Ready
	if err := d.volumes.Put(e.Key, e.Value); err != nil {
		return Entry[T]{}, d.abandon(ctx, e, err)
	}
	return e, nil
}

// makeDirectory makes the directory of a volume durable. It may be there from
// an attempt that was cut off; then a copy is begun anew.
func (d *Controller[T]) makeDirectory(ctx context.Context, e Entry[T]) error {
	volumes, err := d.openAll(e.Value.Home, VolumesDir, true)
	if err != nil {
		return err
	}
	defer unix.Close(volumes)
	if e.Value.Source != (Source{}) {
		return d.copySource(ctx, volumes, e)
	}
	data, err := d.layOut(volumes, e.Key.Volume)
	if err != nil {
		return err
	}
	defer unix.Close(data)
	// Consumers run as any user; the directory above keeps others out. It is
	// so whatever the umask.
	if err := unix.Fchmod(data, 0o777); err != nil {
		return err
	}
	return d.syncAll(volumes, e.Key.Volume)
}

// abandon leaves nothing of a volume whose creation failed for a reason. The
// record goes last: where the directory cannot be removed, it stays for a
// repeated call or DeleteVolume to find.
func (d *Controller[T]) abandon(ctx context.Context, e Entry[T], reason error) error {
	if ctx.Err() != nil {
		return reason // the caller repeats the call, or deletes what it names
	}
	if err := d.removeFrom(ctx, e.Value.Home, VolumesDir, e.Key.Volume); err != nil {
		return fmt.Errorf("%w; and its directory stays: %w", reason, err)
	}
	if err := d.volumes.Delete(e.Key); err != nil {
		return fmt.Errorf("%w; and its record stays: %w", reason, err)
	}
	d.config.Driver.Free(e.Key.Volume, e.Value)
	return reason
}

func (d *Controller[T]) describe(e Entry[T]) *csi.Volume {
	v := &csi.Volume{
		VolumeId:      e.Key.Volume,
		CapacityBytes: d.config.Driver.Capacity(e.Value),
	}
	if t := d.config.Node.topology(); t != nil {
		v.AccessibleTopology = []*csi.Topology{t}
	}
	if d.config.Context != nil {
		v.VolumeContext = d.config.Context(e)
	}
	switch s := e.Value.Source; {
	case s.Snapshot != "":
		v.ContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{
			Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: s.Snapshot},
		}}
	case s.Volume != "":
		v.ContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{
			Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: s.Volume},
		}}
	}
	return v
}
