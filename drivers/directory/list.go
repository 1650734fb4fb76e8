package directory

import (
	"context"
	"fmt"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/drivers/server"
)

// ValidateVolumeCapabilities implements csi.ControllerServer.
func (d *Controller[T]) ValidateVolumeCapabilities(_ context.Context, req *csi.ValidateVolumeCapabilitiesRequest) (*csi.ValidateVolumeCapabilitiesResponse, error) {
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
	if _, err := d.Usable(req.GetVolumeId()); err != nil {
		return nil, server.Status(err)
	}
	err := d.checkCapabilities(req.GetVolumeCapabilities())
	if err == nil {
		err = d.config.Driver.CheckParameters(req.GetParameters())
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

// ListVolumes implements csi.ControllerServer. Volumes whose creation or
// deletion was cut off are not listed.
func (d *Controller[T]) ListVolumes(_ context.Context, req *csi.ListVolumesRequest) (*csi.ListVolumesResponse, error) {
	records, err := d.volumes.All()
	if err != nil {
		return nil, server.Status(err)
	}
	var all []*csi.ListVolumesResponse_Entry
	positions := map[string]string{}
	for _, e := range records {
		if e.Value.Phase == Ready {
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

// ListSnapshots implements csi.ControllerServer. Snapshots whose creation or
// deletion was cut off are not listed.
func (d *Controller[T]) ListSnapshots(_ context.Context, req *csi.ListSnapshotsRequest) (*csi.ListSnapshotsResponse, error) {
	if !d.config.Copies {
		return nil, errNoCopies
	}
	records, err := d.snapshots.All()
	if err != nil {
		return nil, server.Status(err)
	}
	var all []*csi.ListSnapshotsResponse_Entry
	positions := map[string]string{}
	for _, e := range records {
		switch {
		case e.Value.Phase != Ready,
			req.GetSnapshotId() != "" && req.GetSnapshotId() != e.Key.Volume,
			req.GetSourceVolumeId() != "" && req.GetSourceVolumeId() != e.Value.Volume:
			continue
		}
		all = append(all, &csi.ListSnapshotsResponse_Entry{Snapshot: describeSnapshot(e)})
		positions[e.Key.Volume] = e.Key.Position()
	}
	position := func(e *csi.ListSnapshotsResponse_Entry) string { return positions[e.GetSnapshot().GetSnapshotId()] }
	entries, next, err := server.Page(d.pages, all, position, req.GetMaxEntries(), req.GetStartingToken())
	if err != nil {
		return nil, err
	}
	return &csi.ListSnapshotsResponse{Entries: entries, NextToken: next}, nil
}
