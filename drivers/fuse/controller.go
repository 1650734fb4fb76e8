package fuse

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
	"github.com/csi-prepare/csi-prepare/drivers/tree"
)

// ControllerGetCapabilities implements csi.ControllerServer.
func (d *Driver) ControllerGetCapabilities(context.Context, *csi.ControllerGetCapabilitiesRequest) (*csi.ControllerGetCapabilitiesResponse, error) {
	resp := &csi.ControllerGetCapabilitiesResponse{}
	for _, t := range []csi.ControllerServiceCapability_RPC_Type{
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME,
		csi.ControllerServiceCapability_RPC_LIST_VOLUMES,
		csi.ControllerServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
	} {
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

func (d *Driver) checkCreate(req *csi.CreateVolumeRequest) (volume, error) {
	if err := server.Required("name", req.GetName()); err != nil {
		return volume{}, err
	}
	if strings.ContainsFunc(req.GetName(), banned) {
		return volume{}, server.Invalid("name", "holds a control character", "leave out U+0000-U+0008, U+000B, U+000C, U+000E-U+001F and U+007F-U+009F")
	}
	if err := checkCapabilities(req.GetVolumeCapabilities()); err != nil {
		return volume{}, err
	}
	required, limit := req.GetCapacityRange().GetRequiredBytes(), req.GetCapacityRange().GetLimitBytes()
	switch {
	case required < 0 || limit < 0:
		return volume{}, server.Invalid("capacity_range", "has a negative number of bytes", "set 0 for no requirement and no limit")
	case limit > 0 && required > limit:
		return volume{}, server.Invalid("capacity_range", "requires more bytes than its limit allows", "raise limit_bytes or lower required_bytes")
	case req.GetVolumeContentSource() != nil:
		return volume{}, server.Invalid("volume_content_source", "is not supported, volumes begin empty", "leave it out")
	case len(req.GetMutableParameters()) > 0:
		return volume{}, server.Invalid("mutable_parameters", "are not supported", "leave them out")
	}
	v, err := d.parse(req.GetParameters())
	if err == nil && (required > 0 || limit > 0) {
		err = status.Error(codes.OutOfRange, "capacity_range: a directory cannot be held to a size; leave it out")
	}
	return v, err
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
	v, err := d.checkCreate(req)
	if err != nil {
		return nil, err
	}
	return server.Single(ctx, &d.byName, req.GetName(), func(ctx context.Context) (*csi.CreateVolumeResponse, error) {
		e, err := d.create(ctx, req, v)
		if err != nil {
			return nil, server.Status(err)
		}
		return &csi.CreateVolumeResponse{Volume: d.describe(e)}, nil
	})
}

func (d *Driver) create(ctx context.Context, req *csi.CreateVolumeRequest, v volume) (entry, error) {
	found, err := d.volumes.Named(req.GetName())
	if err != nil {
		return entry{}, err
	}
	if len(found) == 0 {
		if err := d.reachable(req.GetAccessibilityRequirements()); err != nil {
			return entry{}, err
		}
		e := entry{Key: server.Key{Volume: newVolumeID(), Name: req.GetName()}, Value: v}
		if err := d.volumes.Put(e.Key, e.Value); err != nil {
			return entry{}, errors.Join(err, d.volumes.Delete(e.Key))
		}
		return d.finishCreate(ctx, e)
	}
	e := found[0]
	exists := func(field, rule string) error {
		return status.Errorf(codes.AlreadyExists, "%s: the volume of this name %s; use another name, or the first arguments", field, rule)
	}
	v.Phase = e.Value.Phase
	switch {
	case v != e.Value:
		return entry{}, exists("parameters", "was created with others")
	case d.reachable(req.GetAccessibilityRequirements()) != nil:
		return entry{}, exists("accessibility_requirements", "is on another node")
	case e.Value.Phase == ready:
		return e, nil
	}
	return d.finishCreate(ctx, e)
}

// finishCreate brings a volume from creating to ready.
func (d *Driver) finishCreate(ctx context.Context, e entry) (entry, error) {
	return server.Single(ctx, &d.byVolume, e.Key.Volume, func(ctx context.Context) (entry, error) {
		// While the flight was free the volume may have been deleted, or a
		// cancelled call for it may have come to its end.
		now, found, err := d.volumes.Get(e.Key)
		switch {
		case err != nil:
			return entry{}, err
		case !found, now.Phase == deleting:
			return entry{}, status.Error(codes.Aborted, "the volume of this name is being deleted; repeat after DeleteVolume was OK")
		case now.Phase == ready:
			return entry{Key: e.Key, Value: now}, nil
		}
		err = d.makeVolume(e.Value.Medium, e.Key.Volume)
		if err == nil {
			e.Value.Phase = ready
			err = d.volumes.Put(e.Key, e.Value)
		}
		if err != nil {
			// Whoever repeats the call finds the record; whoever does not
			// has a volume_id from nobody and nothing in the directory.
			return entry{}, fmt.Errorf("make the volume: %w", err)
		}
		return e, nil
	})
}

// DeleteVolume implements csi.ControllerServer.
func (d *Driver) DeleteVolume(ctx context.Context, req *csi.DeleteVolumeRequest) (*csi.DeleteVolumeResponse, error) {
	if err := server.Required("volume_id", req.GetVolumeId()); err != nil {
		return nil, err
	}
	return server.Single(ctx, &d.byVolume, req.GetVolumeId(), func(ctx context.Context) (*csi.DeleteVolumeResponse, error) {
		if err := d.remove(ctx, req.GetVolumeId()); err != nil {
			return nil, server.Status(err)
		}
		return &csi.DeleteVolumeResponse{}, nil
	})
}

func (d *Driver) remove(ctx context.Context, id string) error {
	prepared, err := d.preparations.Prepared(id)
	if err != nil {
		return err
	}
	if prepared {
		return status.Error(codes.FailedPrecondition, "volume_id: the volume is prepared; call NodeUnprepareVolume first, NodeListPreparedVolumes shows where")
	}
	e, _, err := d.find(id)
	if err != nil {
		return err
	}
	if e.Key.Volume == "" {
		return nil
	}
	volumes, err := d.open(e.Value.Medium)
	if err != nil {
		return err
	}
	defer volumes.Close()
	if err := checkRemovable(int(volumes.Fd()), id); err != nil {
		return err
	}
	e.Value.Phase = deleting
	if err := d.volumes.Put(e.Key, e.Value); err != nil {
		return err
	}
	if err := tree.Remove(ctx, int(volumes.Fd()), id); err != nil {
		return err
	}
	return d.volumes.Delete(e.Key)
}

// checkRemovable refuses a directory with a mount at or below it, before
// anything is removed.
func checkRemovable(volumes int, id string) error {
	fd, err := tree.Open(volumes, id, unix.O_RDONLY)
	switch {
	case errors.Is(err, unix.ENOENT):
		return nil
	case errors.Is(err, unix.EXDEV):
		err = &tree.MountError{Point: "the directory itself"}
	case err != nil:
		return fmt.Errorf("open the directory of the volume: %w", err)
	default:
		defer unix.Close(fd)
		err = tree.CheckNoMount(fd)
	}
	var mounted *tree.MountError
	if errors.As(err, &mounted) {
		return status.Error(codes.FailedPrecondition, "volume_id: "+err.Error())
	}
	return err
}

// ValidateVolumeCapabilities implements csi.ControllerServer.
func (d *Driver) ValidateVolumeCapabilities(_ context.Context, req *csi.ValidateVolumeCapabilitiesRequest) (*csi.ValidateVolumeCapabilitiesResponse, error) {
	const field = "volume_capabilities"
	if err := server.Required("volume_id", req.GetVolumeId()); err != nil {
		return nil, err
	}
	if len(req.GetVolumeCapabilities()) == 0 {
		return nil, server.Invalid(field, "is required", "set at least one")
	}
	for i, c := range req.GetVolumeCapabilities() {
		if err := server.CheckCapability(fmt.Sprintf("%s[%d]", field, i), c); err != nil {
			return nil, err
		}
	}
	_, ok, err := d.find(req.GetVolumeId())
	if err != nil {
		return nil, server.Status(err)
	}
	if !ok {
		return nil, errNoVolume
	}
	if err := checkCapabilities(req.GetVolumeCapabilities()); err != nil {
		return &csi.ValidateVolumeCapabilitiesResponse{Message: status.Convert(err).Message()}, nil
	}
	if _, err := d.parse(req.GetParameters()); err != nil {
		return &csi.ValidateVolumeCapabilitiesResponse{Message: status.Convert(err).Message()}, nil
	}
	return &csi.ValidateVolumeCapabilitiesResponse{Confirmed: &csi.ValidateVolumeCapabilitiesResponse_Confirmed{
		VolumeContext:      req.GetVolumeContext(),
		VolumeCapabilities: req.GetVolumeCapabilities(),
		Parameters:         req.GetParameters(),
	}}, nil
}

var errNoVolume = status.Error(codes.NotFound, "volume_id: there is no such volume; ListVolumes shows those there are")

// ListVolumes implements csi.ControllerServer. Volumes whose creation or
// deletion was cut off are not listed.
func (d *Driver) ListVolumes(_ context.Context, req *csi.ListVolumesRequest) (*csi.ListVolumesResponse, error) {
	records, err := d.volumes.All()
	if err != nil {
		return nil, server.Status(err)
	}
	var all []*csi.ListVolumesResponse_Entry
	positions := map[string]string{}
	for _, e := range records {
		if e.Value.Phase == ready {
			all = append(all, &csi.ListVolumesResponse_Entry{Volume: d.describe(e)})
			positions[e.Key.Volume] = e.Key.Position()
		}
	}
	position := func(e *csi.ListVolumesResponse_Entry) string { return positions[e.GetVolume().GetVolumeId()] }
	entries, next, err := server.Page(d.pages, all, position, req.GetMaxEntries(), req.GetStartingToken())
	if err != nil {
		return nil, err
	}
	return &csi.ListVolumesResponse{Entries: entries, NextToken: next}, nil
}
