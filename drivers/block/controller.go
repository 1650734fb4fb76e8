package block

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/csi-prepare/csi-prepare/drivers/block/device"
	"github.com/csi-prepare/csi-prepare/drivers/server"
)

// ControllerGetCapabilities implements csi.ControllerServer. Disks cannot be
// copied or expanded.
func (d *Driver) ControllerGetCapabilities(context.Context, *csi.ControllerGetCapabilitiesRequest) (*csi.ControllerGetCapabilitiesResponse, error) {
	types := []csi.ControllerServiceCapability_RPC_Type{
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME,
		csi.ControllerServiceCapability_RPC_LIST_VOLUMES,
		csi.ControllerServiceCapability_RPC_GET_CAPACITY,
		csi.ControllerServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
	}
	if d.files != nil {
		types = append(types,
			csi.ControllerServiceCapability_RPC_CREATE_DELETE_SNAPSHOT,
			csi.ControllerServiceCapability_RPC_LIST_SNAPSHOTS,
			csi.ControllerServiceCapability_RPC_CLONE_VOLUME,
			csi.ControllerServiceCapability_RPC_EXPAND_VOLUME,
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

// checkParameters refuses all: there are none.
func checkParameters(parameters map[string]string) error {
	for key := range parameters {
		return server.Invalid(fmt.Sprintf("parameters[%q]", key), "is unknown, this plugin has no parameters", "leave it out")
	}
	return nil
}

// banned are the characters CSI bans from names.
func banned(r rune) bool {
	return r <= 0x08 || r == 0x0b || r == 0x0c || r >= 0x0e && r <= 0x1f || r >= 0x7f && r <= 0x9f
}

func checkName(name string) error {
	if err := server.Required("name", name); err != nil {
		return err
	}
	if strings.ContainsFunc(name, banned) {
		return server.Invalid("name", "holds a control character", "leave out U+0000-U+0008, U+000B, U+000C, U+000E-U+001F and U+007F-U+009F")
	}
	return nil
}

// DeleteVolume implements csi.ControllerServer.
func (d *Driver) DeleteVolume(ctx context.Context, req *csi.DeleteVolumeRequest) (*csi.DeleteVolumeResponse, error) {
	if err := server.Required("volume_id", req.GetVolumeId()); err != nil {
		return nil, err
	}
	return server.Single(ctx, &d.byVolume, req.GetVolumeId(), func(ctx context.Context) (*csi.DeleteVolumeResponse, error) {
		if err := d.remove(ctx, req.GetVolumeId()); err != nil {
			return nil, refusal(err)
		}
		return &csi.DeleteVolumeResponse{}, nil
	})
}

func (d *Driver) remove(ctx context.Context, id string) error {
	// A record that is damaged, here or of what uses the volume, stops the
	// removal.
	prepared, err := d.preparations.Prepared(id)
	if err != nil {
		return err
	}
	if prepared {
		return status.Error(codes.FailedPrecondition, "volume_id: the volume is prepared; call NodeUnprepareVolume first, NodeListPreparedVolumes shows where")
	}
	_, staged, err := d.stages.Get(stageKey(id))
	if err != nil {
		return err
	}
	if staged {
		return status.Error(codes.FailedPrecondition, "volume_id: the volume is staged; call NodeUnstageVolume first")
	}
	e, err := d.find(id)
	if err != nil || e.Key.Volume == "" {
		return err
	}
	if err := d.unused(e); err != nil {
		return err
	}
	if e.Value.Phase != deleting {
		e.Value.Phase = deleting
		if err := d.volumes.Put(e.Key, e.Value); err != nil {
			return err
		}
	}
	if e.Value.Disk != nil {
		err = d.eraseDisk(ctx, *e.Value.Disk)
	} else {
		err = d.files.remove(volumeFiles, id, e.Value.Inode)
	}
	if err != nil {
		return err
	}
	return d.volumes.Delete(e.Key)
}

// unused refuses a volume that somebody uses by other means, before anything is
// done to it.
func (d *Driver) unused(e volumeEntry) error {
	if e.Value.Disk != nil {
		return d.releaseDisk(e)
	}
	if e.Value.Inode == 0 {
		return nil
	}
	f, err := d.files.open(volumeFiles, e.Key.Volume, e.Value.Inode, unix.O_RDONLY)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	return d.unusedByOthers(f)
}

// unusedByOthers refuses a file that is attached as a loop device by other
// means: two devices over one file do not see each other's writes.
func (d *Driver) unusedByOthers(f *os.File) error {
	b, err := device.BackingOf(f)
	if err != nil {
		return err
	}
	mine, err := d.marks()
	if err != nil {
		return err
	}
	others, err := d.nodes.Others(b, mine)
	if err != nil || len(others) == 0 {
		return err
	}
	return &device.BusyError{Number: others[0], Use: "it is attached to the file of the volume, and not by this plugin; detach it"}
}

// marks of all loop devices on record.
func (d *Driver) marks() (map[string]bool, error) {
	stages, err := d.stages.All()
	if err != nil {
		return nil, err
	}
	uses, err := d.uses.All()
	if err != nil {
		return nil, err
	}
	marks := map[string]bool{}
	for _, s := range stages {
		if s.Value.Loop != nil {
			marks[s.Value.Loop.Mark] = true
		}
	}
	for _, u := range uses {
		if u.Value.Loop != nil {
			marks[u.Value.Loop.Mark] = true
		}
	}
	return marks, nil
}

// refusal is the status of an error of this package.
func refusal(err error) error {
	var (
		busy    *device.BusyError
		foreign *foreignError
	)
	switch {
	case err == nil:
		return nil
	case errors.As(err, &busy), errors.As(err, &foreign):
		return status.Error(codes.FailedPrecondition, "volume_id: "+err.Error())
	case errors.Is(err, unix.EFBIG):
		return status.Error(codes.OutOfRange, err.Error())
	}
	return server.Status(err)
}

// also is err, with what failed after it, if anything did.
func also(err, later error) error {
	if later == nil {
		return err
	}
	return fmt.Errorf("%w; and then: %w", err, later)
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
	if _, err := d.usable(req.GetVolumeId()); err != nil {
		return nil, server.Status(err)
	}
	for _, err := range []error{d.checkCapabilities(req.GetVolumeCapabilities()), checkParameters(req.GetParameters())} {
		if err != nil {
			return &csi.ValidateVolumeCapabilitiesResponse{Message: status.Convert(err).Message()}, nil
		}
	}
	return &csi.ValidateVolumeCapabilitiesResponse{Confirmed: &csi.ValidateVolumeCapabilitiesResponse_Confirmed{
		VolumeContext:      req.GetVolumeContext(),
		VolumeCapabilities: req.GetVolumeCapabilities(),
		Parameters:         req.GetParameters(),
	}}, nil
}

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

// GetCapacity implements csi.ControllerServer. Files are thin: a volume may be
// larger than what is available, but not than the whole filesystem.
func (d *Driver) GetCapacity(_ context.Context, req *csi.GetCapacityRequest) (*csi.GetCapacityResponse, error) {
	if err := checkParameters(req.GetParameters()); err != nil {
		return nil, err
	}
	none := &csi.GetCapacityResponse{MaximumVolumeSize: wrapperspb.Int64(0)}
	for i, c := range req.GetVolumeCapabilities() {
		if err := server.CheckCapability(fmt.Sprintf("volume_capabilities[%d]", i), c); err != nil {
			return nil, err
		}
		if d.supported(c) != "" {
			return none, nil
		}
	}
	if t := req.GetAccessibleTopology(); t != nil && !d.isHere(t) {
		return none, nil
	}
	if d.files == nil {
		return d.diskCapacity()
	}
	available, total, err := d.files.space()
	if err != nil {
		return nil, server.Status(err)
	}
	return &csi.GetCapacityResponse{
		AvailableCapacity: available,
		MaximumVolumeSize: wrapperspb.Int64(total),
		MinimumVolumeSize: wrapperspb.Int64(minSize),
	}, nil
}
