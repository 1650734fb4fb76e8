package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	prepare "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// Driver is what NodePrepare asks of a driver: the mount specs of its
// volumes. For one volume there is at most one call at a time. Errors are
// gRPC statuses and hold no secret.
type Driver interface {
	// Check refuses, without any effect, what the driver is not able to do:
	// NOT_FOUND for a volume that does not exist, FAILED_PRECONDITION for a
	// capability the volume does not support or a performer that accepts
	// nothing the driver could return, INVALID_ARGUMENT for a mount flag or
	// a volume_mount_group that cannot be honoured.
	Check(context.Context, *prepare.NodePrepareVolumeRequest) error
	// Specs returns what the CO is to perform, for a request that passed
	// Check. For equal requests the specs are equivalent. If it fails with
	// a final error, nothing it made is left.
	Specs(context.Context, *prepare.NodePrepareVolumeRequest) ([]*prepare.MountSpec, error)
}

// Config is what NodePrepare is made of.
type Config struct {
	Driver Driver
	State  *State
	// Flights are shared with the other services of the plugin, with the
	// volume's id as the key.
	Flights *Flights
	// Release, if set, frees what Specs made for a preparation, before
	// Unprepare answers OK and for a pair that is not known, too: it is OK
	// where there is nothing. FAILED_PRECONDITION says what is in use.
	Release func(ctx context.Context, volumeID, prepareID string) error
	// BootID is BootID() outside tests.
	BootID string
	// Kinds the driver may return.
	Kinds []prepare.MountKind
	// Propagates says that the driver mounts below prepare_path and that the
	// mount has to reach the CO by propagation (requires_propagation).
	Propagates bool
	// Refreshable are the keys of volume_context that may differ in a
	// repeated call.
	Refreshable []string
	// MultiWriter is true if the plugin has the capability
	// SINGLE_NODE_MULTI_WRITER, which makes SINGLE_NODE_WRITER and
	// SINGLE_NODE_READER_ONLY exclusive.
	MultiWriter bool
}

// NodePrepare serves csi.prepare.v1alpha1.NodePrepare: field rules,
// idempotency, exclusive access modes and durable preparations are its own,
// the mount specs are the driver's.
type NodePrepare struct {
	prepare.UnimplementedNodePrepareServer

	config       Config
	preparations *Records[preparation]
	pages        *Pages
}

// NewNodePrepare reads the preparations of this boot from the state.
func NewNodePrepare(c Config) (*NodePrepare, error) {
	r, err := openPreparations(c.State, c.BootID)
	if err != nil {
		return nil, err
	}
	return &NodePrepare{config: c, preparations: r, pages: NewPages()}, nil
}

// NodePrepareGetCapabilities implements preparev1alpha1.NodePrepareServer.
func (n *NodePrepare) NodePrepareGetCapabilities(context.Context, *prepare.NodePrepareGetCapabilitiesRequest) (*prepare.NodePrepareGetCapabilitiesResponse, error) {
	caps := []*prepare.NodePrepareServiceCapability{{
		Type: &prepare.NodePrepareServiceCapability_Rpc{Rpc: &prepare.NodePrepareServiceCapability_RPC{
			Type: prepare.NodePrepareServiceCapability_RPC_PREPARE_UNPREPARE_VOLUME,
		}},
	}}
	for _, k := range n.config.Kinds {
		caps = append(caps, &prepare.NodePrepareServiceCapability{
			Type: &prepare.NodePrepareServiceCapability_Kind_{Kind: &prepare.NodePrepareServiceCapability_Kind{Kind: k}},
		})
	}
	if n.config.Propagates {
		caps = append(caps, &prepare.NodePrepareServiceCapability{
			Type: &prepare.NodePrepareServiceCapability_RequiresPropagation_{
				RequiresPropagation: &prepare.NodePrepareServiceCapability_RequiresPropagation{Prepare: true},
			},
		})
	}
	if len(n.config.Refreshable) > 0 {
		caps = append(caps, &prepare.NodePrepareServiceCapability{
			Type: &prepare.NodePrepareServiceCapability_RefreshableContext_{
				RefreshableContext: &prepare.NodePrepareServiceCapability_RefreshableContext{Keys: n.config.Refreshable},
			},
		})
	}
	return &prepare.NodePrepareGetCapabilitiesResponse{Capabilities: caps}, nil
}

// NodePrepareVolume implements preparev1alpha1.NodePrepareServer.
func (n *NodePrepare) NodePrepareVolume(ctx context.Context, req *prepare.NodePrepareVolumeRequest) (*prepare.NodePrepareVolumeResponse, error) {
	if err := checkPrepare(req); err != nil {
		return nil, err
	}
	return Single(ctx, n.config.Flights, req.GetVolumeId(), func(ctx context.Context) (*prepare.NodePrepareVolumeResponse, error) {
		specs, err := n.prepare(ctx, req)
		if err != nil {
			return nil, Status(err)
		}
		return &prepare.NodePrepareVolumeResponse{MountSpecs: specs}, nil
	})
}

func checkPrepare(req *prepare.NodePrepareVolumeRequest) error {
	for _, err := range []error{
		Required("volume_id", req.GetVolumeId()),
		PrepareID(req.GetPrepareId()),
		CheckCapability("volume_capability", req.GetVolumeCapability()),
		AbsolutePath("prepare_path", req.GetPreparePath()),
		OptionalPath("staging_target_path", req.GetStagingTargetPath()),
		checkPerformer(req.GetPerformer()),
		checkHandoff(req),
	} {
		if err != nil {
			return err
		}
	}
	return nil
}

// prepare is one step in the life of one preparation:
//
//	absent    -> uncertain -> prepared, or absent again after a final error
//	uncertain -> prepared, or absent after a final error
//	prepared  -> prepared, whatever a repeat comes to
//
// Until the driver has answered, the record says uncertain: a process killed
// in between leaves a call that can be repeated, and a pair the CO can find.
func (n *NodePrepare) prepare(ctx context.Context, req *prepare.NodePrepareVolumeRequest) ([]*prepare.MountSpec, error) {
	key := Key{req.GetVolumeId(), req.GetPrepareId()}
	earlier, known, err := n.preparations.Get(key)
	if err != nil {
		return nil, err
	}
	p := preparation{
		PreparePath:       req.GetPreparePath(),
		StagingTargetPath: req.GetStagingTargetPath(),
		Readonly:          req.GetReadonly(),
		AccessMode:        accessMode(req.GetVolumeCapability().GetAccessMode().GetMode()),
		Arguments:         digestArguments(req, n.config.Refreshable),
		Uncertain:         true,
	}
	if known {
		if fields := p.Arguments.differing(earlier.Arguments); len(fields) > 0 {
			return nil, status.Errorf(codes.AlreadyExists,
				"prepare_id: is taken by a preparation with another %s; repeat the first arguments, or call NodeUnprepareVolume first", strings.Join(fields, ", "))
		}
	}
	if len(earlier.Answer) > 0 {
		performer, err := earlier.Answer.only(req.GetPerformer())
		if err != nil {
			return nil, err
		}
		req = proto.CloneOf(req)
		req.Performer = performer
	}
	if err := n.config.Driver.Check(ctx, req); err != nil {
		return nil, n.failed(key, earlier, known, err)
	}
	if !known {
		if err := n.checkAccess(key, p.AccessMode); err != nil {
			return nil, err
		}
	}
	if err := checkDirectory(p.PreparePath, !known); err != nil {
		return nil, n.failed(key, earlier, known, err)
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if !known {
		if err := n.preparations.Put(key, p); err != nil {
			return nil, errors.Join(err, n.preparations.Delete(key))
		}
		earlier, known = p, true
	}
	specs, err := n.config.Driver.Specs(ctx, req)
	if err != nil {
		return nil, n.failed(key, earlier, known, err)
	}
	if !earlier.Uncertain {
		return earlier.Answer.refreshed(specs)
	}
	p.Uncertain, p.Answer = false, answerOf(specs)
	if err := n.preparations.Put(key, p); err != nil {
		return nil, n.failed(key, earlier, known, err)
	}
	return specs, nil
}

// failed ends a preparation that was never answered OK and now got a final
// error. What was prepared stays so.
func (n *NodePrepare) failed(key Key, p preparation, known bool, err error) error {
	switch status.Code(Status(err)) {
	case codes.Canceled, codes.DeadlineExceeded, codes.Aborted, codes.Unavailable:
		return err
	}
	if known && p.Uncertain {
		if failed := n.preparations.Delete(key); failed != nil {
			return fmt.Errorf("%w; and what was recorded of it stays: %w", err, failed)
		}
	}
	return err
}

// checkAccess refuses a further preparation of a volume where its access mode,
// or that of another preparation, is exclusive.
func (n *NodePrepare) checkAccess(key Key, mode accessMode) error {
	others, err := n.preparations.OfVolume(key.Volume)
	if err != nil {
		return err
	}
	for _, o := range others {
		if mode.exclusive(n.config.MultiWriter) || o.Value.AccessMode.exclusive(n.config.MultiWriter) {
			return status.Errorf(codes.FailedPrecondition,
				"volume_capability.access_mode: the volume is prepared under another prepare_id, and %s allows one; call NodeUnprepareVolume for that first, NodeListPreparedVolumes shows it",
				exclusiveOf(mode, o.Value.AccessMode, n.config.MultiWriter))
		}
	}
	return nil
}

func exclusiveOf(asked, held accessMode, multiWriter bool) csi.VolumeCapability_AccessMode_Mode {
	if asked.exclusive(multiWriter) {
		return csi.VolumeCapability_AccessMode_Mode(asked)
	}
	return csi.VolumeCapability_AccessMode_Mode(held)
}

// checkDirectory wants a directory, and an empty one where the driver has not
// yet had it.
func checkDirectory(path string, empty bool) error {
	const field = "prepare_path"
	f, err := os.OpenFile(path, unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err == nil {
		defer f.Close()
		if !empty {
			return nil
		}
		_, err = f.Readdirnames(1)
		switch {
		case err == nil:
			return status.Errorf(codes.FailedPrecondition, "%s: is not empty; make an empty directory for each preparation", field)
		case errors.Is(err, io.EOF):
			return nil
		}
	}
	var reason unix.Errno
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP), errors.Is(err, unix.EACCES):
		errors.As(err, &reason)
		return status.Errorf(codes.FailedPrecondition, "%s: is not a directory this process can read (%v); make it, for the user id %d, before the call", field, reason, os.Geteuid())
	}
	return fmt.Errorf("%s: %w", field, err)
}

// NodeUnprepareVolume implements preparev1alpha1.NodePrepareServer.
func (n *NodePrepare) NodeUnprepareVolume(ctx context.Context, req *prepare.NodeUnprepareVolumeRequest) (*prepare.NodeUnprepareVolumeResponse, error) {
	for _, err := range []error{
		Required("volume_id", req.GetVolumeId()),
		PrepareID(req.GetPrepareId()),
		AbsolutePath("prepare_path", req.GetPreparePath()),
		OptionalPath("staging_target_path", req.GetStagingTargetPath()),
	} {
		if err != nil {
			return nil, err
		}
	}
	return Single(ctx, n.config.Flights, req.GetVolumeId(), func(ctx context.Context) (*prepare.NodeUnprepareVolumeResponse, error) {
		key := Key{req.GetVolumeId(), req.GetPrepareId()}
		p, known, err := n.preparations.Get(key)
		// A damaged record is no reason to keep a preparation whose end the
		// CO asks for: its key is all that is needed.
		if err == nil && known && p.PreparePath != req.GetPreparePath() {
			return nil, Invalid("prepare_path", "is not that of the preparation", "use the one NodeListPreparedVolumes shows")
		}
		if n.config.Release != nil {
			if err := n.config.Release(ctx, key.Volume, key.Name); err != nil {
				return nil, Status(err)
			}
		}
		if err := n.preparations.Delete(key); err != nil {
			return nil, Status(err)
		}
		return &prepare.NodeUnprepareVolumeResponse{}, nil
	})
}

// NodeListPreparedVolumes implements preparev1alpha1.NodePrepareServer.
func (n *NodePrepare) NodeListPreparedVolumes(_ context.Context, req *prepare.NodeListPreparedVolumesRequest) (*prepare.NodeListPreparedVolumesResponse, error) {
	records, err := n.preparations.All()
	if err != nil {
		return nil, Status(err)
	}
	all := make([]*prepare.NodeListPreparedVolumesResponse_Entry, 0, len(records))
	for _, r := range records {
		all = append(all, &prepare.NodeListPreparedVolumesResponse_Entry{
			VolumeId:          r.Key.Volume,
			PrepareId:         r.Key.Name,
			Readonly:          r.Value.Readonly,
			PreparePath:       r.Value.PreparePath,
			StagingTargetPath: r.Value.StagingTargetPath,
			Uncertain:         r.Value.Uncertain,
		})
	}
	position := func(e *prepare.NodeListPreparedVolumesResponse_Entry) string {
		return Key{e.GetVolumeId(), e.GetPrepareId()}.Position()
	}
	entries, next, err := Page(n.pages, all, position, req.GetMaxEntries(), req.GetStartingToken())
	if err != nil {
		return nil, err
	}
	return &prepare.NodeListPreparedVolumesResponse{Entries: entries, NextToken: next}, nil
}

// Prepared tells whether the volume has a preparation, uncertain ones
// included. Whoever acts on the answer holds the volume's flight.
func (n *NodePrepare) Prepared(volumeID string) (bool, error) {
	found, err := n.preparations.OfVolume(volumeID)
	return len(found) > 0, err
}

// Writable tells whether the volume has a preparation that a consumer may
// write through. Whoever acts on the answer holds the volume's flight.
func (n *NodePrepare) Writable(volumeID string) (bool, error) {
	found, err := n.preparations.OfVolume(volumeID)
	return slices.ContainsFunc(found, func(e Entry[preparation]) bool {
		return !e.Value.Readonly && !strings.HasSuffix(csi.VolumeCapability_AccessMode_Mode(e.Value.AccessMode).String(), "_READER_ONLY")
	}), err
}

// PrepareIDs are those of the volume's preparations, uncertain ones included.
// Whoever acts on the answer holds the volume's flight.
func (n *NodePrepare) PrepareIDs(volumeID string) ([]string, error) {
	found, err := n.preparations.OfVolume(volumeID)
	var ids []string
	for _, p := range found {
		ids = append(ids, p.Key.Name)
	}
	return ids, err
}

// PreparedAs tells whether the volume has a preparation of this id, which may
// be uncertain.
func (n *NodePrepare) PreparedAs(volumeID, prepareID string) (bool, error) {
	_, found, err := n.preparations.Get(Key{volumeID, prepareID})
	return found, err
}

// Settled tells whether a call for the preparation has been answered OK.
func (n *NodePrepare) Settled(volumeID, prepareID string) (bool, error) {
	p, found, err := n.preparations.Get(Key{volumeID, prepareID})
	return found && !p.Uncertain, err
}

// PreparedAt tells whether the volume has a preparation at a prepare_path. It
// waits for no other call.
func (n *NodePrepare) PreparedAt(volumeID, preparePath string) (bool, error) {
	found, err := n.preparations.OfVolume(volumeID)
	for _, p := range found {
		if p.Value.PreparePath == preparePath {
			return true, nil
		}
	}
	return false, err
}
