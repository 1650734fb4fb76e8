package hostpath

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
		csi.ControllerServiceCapability_RPC_GET_CAPACITY,
		csi.ControllerServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
	} {
		resp.Capabilities = append(resp.Capabilities, &csi.ControllerServiceCapability{Type: &csi.ControllerServiceCapability_Rpc{
			Rpc: &csi.ControllerServiceCapability_RPC{Type: t},
		}})
	}
	return resp, nil
}

// parameterGrant is the one parameter of CreateVolume: the grant a volume is
// to lie in.
const parameterGrant = "grant"

func (d *Driver) checkParameters(parameters map[string]string) (grant string, err error) {
	for key := range parameters {
		if key != parameterGrant {
			return "", server.Invalid(fmt.Sprintf("parameters[%q]", key), "is unknown", fmt.Sprintf("leave it out; this plugin knows %q", parameterGrant))
		}
	}
	grant, given := parameters[parameterGrant]
	if _, ok := d.grant(grant); given && !ok {
		return "", server.Invalid(fmt.Sprintf("parameters[%q]", parameterGrant), "names no grant of this plugin", "use a name the operator gave to the plugin with --grant or --sized-grant")
	}
	return grant, nil
}

// banned are the characters CSI bans from names.
func banned(r rune) bool {
	return r <= 0x08 || r == 0x0b || r == 0x0c || r >= 0x0e && r <= 0x1f || r >= 0x7f && r <= 0x9f
}

func (d *Driver) checkCreate(req *csi.CreateVolumeRequest) (grant string, err error) {
	if err := server.Required("name", req.GetName()); err != nil {
		return "", err
	}
	if strings.ContainsFunc(req.GetName(), banned) {
		return "", server.Invalid("name", "holds a control character", "leave out U+0000-U+0008, U+000B, U+000C, U+000E-U+001F and U+007F-U+009F")
	}
	if err := checkCapabilities(req.GetVolumeCapabilities()); err != nil {
		return "", err
	}
	if err := checkRange(req.GetCapacityRange()); err != nil {
		return "", err
	}
	if req.GetVolumeContentSource() != nil {
		return "", server.Invalid("volume_content_source", "is not supported, volumes begin empty", "leave it out")
	}
	if len(req.GetMutableParameters()) > 0 {
		return "", server.Invalid("mutable_parameters", "are not supported", "leave them out")
	}
	return d.checkParameters(req.GetParameters())
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
	grant, err := d.checkCreate(req)
	if err != nil {
		return nil, err
	}
	return server.Single(ctx, &d.byName, req.GetName(), func(ctx context.Context) (*csi.CreateVolumeResponse, error) {
		e, err := d.create(ctx, req, grant)
		if err != nil {
			return nil, server.Status(err)
		}
		return &csi.CreateVolumeResponse{Volume: d.describe(e)}, nil
	})
}

func (d *Driver) create(ctx context.Context, req *csi.CreateVolumeRequest, grant string) (entry, error) {
	found, err := d.volumes.Named(req.GetName())
	if err != nil {
		return entry{}, err
	}
	if len(found) > 0 {
		return d.repeatCreate(ctx, found[0], req, grant)
	}
	if err := d.reachable(req.GetAccessibilityRequirements()); err != nil {
		return entry{}, err
	}
	e := entry{Key: server.Key{Volume: newVolumeID(), Name: req.GetName()}}
	if e.Value, err = d.place(e.Key.Volume, grant, req.GetCapacityRange()); err != nil {
		return entry{}, err
	}
	e.Value.Phase = creating
	if err := d.volumes.Put(e.Key, e.Value); err != nil {
		d.freeSized(e.Value.Grant, e.Key.Volume)
		return entry{}, errors.Join(err, d.volumes.Delete(e.Key))
	}
	return d.finishCreate(ctx, e)
}

func (d *Driver) repeatCreate(ctx context.Context, e entry, req *csi.CreateVolumeRequest, grant string) (entry, error) {
	exists := func(field, rule string) error {
		return status.Errorf(codes.AlreadyExists, "%s: the volume of this name %s; use another name, or the first arguments", field, rule)
	}
	switch {
	case !keeps(req.GetCapacityRange(), e.Value):
		return entry{}, exists("capacity_range", "is of another size")
	case grant != "" && grant != e.Value.Grant:
		return entry{}, exists("parameters", "lies in another grant")
	case d.reachable(req.GetAccessibilityRequirements()) != nil:
		return entry{}, exists("accessibility_requirements", "is on another node")
	case e.Value.Phase == ready:
		return e, nil
	}
	return d.finishCreate(ctx, e)
}

// finishCreate brings a volume from creating to ready.
func (d *Driver) finishCreate(ctx context.Context, e entry) (entry, error) {
	return server.Single(ctx, &d.byVolume, e.Key.Volume, func(context.Context) (entry, error) {
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
		g, err := d.grantOf(e.Value)
		if err != nil {
			return entry{}, err
		}
		if err := makeDir(g, e.Key.Volume); err != nil {
			return entry{}, d.abandon(e, g, err)
		}
		e.Value.Phase = ready
		if err := d.volumes.Put(e.Key, e.Value); err != nil {
			return entry{}, d.abandon(e, g, err)
		}
		return e, nil
	})
}

// abandon leaves nothing of a volume whose creation failed for a reason. The
// record goes last: where the directory cannot be removed, it stays for a
// repeated call or DeleteVolume to find.
func (d *Driver) abandon(e entry, g Grant, reason error) error {
	if volumes, err := openVolumes(g, false); err == nil {
		defer unix.Close(volumes)
		if err := unix.Unlinkat(volumes, e.Key.Volume, unix.AT_REMOVEDIR); err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("%w; and its directory stays: %w", reason, err)
		}
	}
	if err := d.volumes.Delete(e.Key); err != nil {
		return fmt.Errorf("%w; and its record stays: %w", reason, err)
	}
	d.freeSized(e.Value.Grant, e.Key.Volume)
	return reason
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
	// A record that is damaged, here or of a preparation, stops the removal.
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
	g, err := d.grantOf(e.Value)
	if err != nil {
		return err
	}
	volumes, err := openVolumes(g, true)
	if err != nil {
		return err
	}
	defer unix.Close(volumes)
	if err := checkRemovable(volumes, id); err != nil {
		return err
	}
	e.Value.Phase = deleting
	if err := d.volumes.Put(e.Key, e.Value); err != nil {
		return err
	}
	if err := tree.Remove(ctx, volumes, id); err != nil {
		return err
	}
	if err := d.volumes.Delete(e.Key); err != nil {
		return err
	}
	d.freeSized(e.Value.Grant, id)
	return nil
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
	err = checkCapabilities(req.GetVolumeCapabilities())
	if err == nil {
		_, err = d.checkParameters(req.GetParameters())
	}
	if refused := status.Convert(err); refused.Code() != codes.OK {
		return &csi.ValidateVolumeCapabilitiesResponse{Message: refused.Message()}, nil
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
