package publish

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/csi-prepare/csi-prepare/drivers/server"
	"github.com/csi-prepare/csi-prepare/reference/co"
	"github.com/csi-prepare/csi-prepare/reference/perform"
)

// ephemeralKey is the key of volume_context by which Kubernetes says that a
// volume lives as long as its publication.
const ephemeralKey = "csi.storage.k8s.io/ephemeral"

// node serves the calls that have to do with target_path.
type node struct {
	csi.UnimplementedNodeServer
	co       *co.CO
	plugin   csi.NodeClient
	endpoint string
}

// prepareID names the publication at a target.
func prepareID(target string) string {
	sum := sha256.Sum256([]byte(target))
	return hex.EncodeToString(sum[:])
}

// NodePublishVolume implements csi.NodeServer.
func (n *node) NodePublishVolume(ctx context.Context, req *csi.NodePublishVolumeRequest) (*csi.NodePublishVolumeResponse, error) {
	for _, err := range []error{
		server.Required("volume_id", req.GetVolumeId()),
		server.Required("target_path", req.GetTargetPath()),
		server.CheckCapability("volume_capability", req.GetVolumeCapability()),
	} {
		if err != nil {
			return nil, err
		}
	}
	target, err := tidy("target_path", req.GetTargetPath())
	if err != nil {
		return nil, err
	}
	staging, err := tidy("staging_target_path", req.GetStagingTargetPath())
	if err != nil {
		return nil, err
	}
	ephemeral := req.GetVolumeContext()[ephemeralKey] == "true"
	if ephemeral {
		staging = ""
	}
	_, err = n.co.Up(ctx, co.Use{
		Endpoint: n.endpoint, VolumeID: req.GetVolumeId(), PrepareID: prepareID(target),
		Capability: req.GetVolumeCapability(), Readonly: req.GetReadonly(), Ephemeral: ephemeral,
		StagingPath: staging, CallerStages: true,
		PublishContext: req.GetPublishContext(), VolumeContext: req.GetVolumeContext(), Secrets: req.GetSecrets(),
		Target: perform.Target{Path: target},
	})
	if err != nil {
		return nil, statusOf(err)
	}
	return &csi.NodePublishVolumeResponse{}, nil
}

// tidy is a path in its shortest form: what a CO sends need not be.
func tidy(field, path string) (string, error) {
	if path == "" {
		return "", nil
	}
	if !filepath.IsAbs(path) {
		return "", server.Invalid(field, "is not an absolute path", "begin it with '/'")
	}
	return filepath.Clean(path), nil
}

// NodeUnpublishVolume implements csi.NodeServer. What is not published is
// unpublished already.
func (n *node) NodeUnpublishVolume(ctx context.Context, req *csi.NodeUnpublishVolumeRequest) (*csi.NodeUnpublishVolumeResponse, error) {
	for _, err := range []error{
		server.Required("volume_id", req.GetVolumeId()),
		server.Required("target_path", req.GetTargetPath()),
	} {
		if err != nil {
			return nil, err
		}
	}
	target, err := tidy("target_path", req.GetTargetPath())
	if err != nil {
		return nil, err
	}
	record, err := n.find(req.GetVolumeId(), target)
	if record == nil && err == nil {
		return &csi.NodeUnpublishVolumeResponse{}, nil
	}
	if record == nil {
		return nil, statusOf(err)
	}
	if err := n.co.Down(ctx, record.Key()); err != nil {
		return nil, statusOf(err)
	}
	return &csi.NodeUnpublishVolumeResponse{}, nil
}

// find returns the record of a publication, nil if there is none. A damaged
// record may be of it.
func (n *node) find(volumeID, target string) (*co.Record, error) {
	records, damaged := n.co.Records()
	id := prepareID(target)
	for i := range records {
		if records[i].VolumeID == volumeID && records[i].PrepareID == id {
			return &records[i], nil
		}
	}
	return nil, damaged
}

// NodeGetVolumeStats implements csi.NodeServer.
func (n *node) NodeGetVolumeStats(ctx context.Context, req *csi.NodeGetVolumeStatsRequest) (*csi.NodeGetVolumeStatsResponse, error) {
	if r := n.published(req.GetVolumeId(), req.GetVolumePath()); r != nil {
		req = proto.CloneOf(req)
		req.VolumePath = pluginPath(r)
	}
	return n.plugin.NodeGetVolumeStats(ctx, req)
}

// NodeExpandVolume implements csi.NodeServer.
func (n *node) NodeExpandVolume(ctx context.Context, req *csi.NodeExpandVolumeRequest) (*csi.NodeExpandVolumeResponse, error) {
	if r := n.published(req.GetVolumeId(), req.GetVolumePath()); r != nil {
		req = proto.CloneOf(req)
		req.VolumePath = pluginPath(r)
	}
	return n.plugin.NodeExpandVolume(ctx, req)
}

func (n *node) published(volumeID, path string) *co.Record {
	if !filepath.IsAbs(path) {
		return nil
	}
	r, _ := n.find(volumeID, filepath.Clean(path))
	return r
}

// pluginPath is the path by which the plugin knows a volume in use.
func pluginPath(r *co.Record) string {
	if r.StagingPath != "" {
		return r.StagingPath
	}
	return r.PreparePath
}

// statusOf is the gRPC status for an error of package co. The text holds no
// secret.
func statusOf(err error) error {
	var (
		call      *co.CallError
		pending   *co.PendingError
		damaged   *co.DamagedError
		noService *co.NoServiceError
		left      *co.LeftoverError
		busy      *perform.BusyError
		device    *co.DeviceBusyError
	)
	code := server.Code(err)
	switch {
	case errors.Is(err, co.ErrConflict):
		code = codes.AlreadyExists
	case errors.Is(err, co.ErrProtected):
		code = codes.InvalidArgument
		err = fmt.Errorf("target_path: %w", err)
	case errors.Is(err, perform.ErrTarget):
		code = codes.InvalidArgument
		if errors.Is(err, unix.EBUSY) || errors.Is(err, unix.EIO) || errors.Is(err, unix.ENOTCONN) {
			code = codes.Internal
		}
		err = fmt.Errorf("target_path: %w", err)
	case errors.As(err, &busy), errors.As(err, &device), errors.As(err, &left):
		code = codes.FailedPrecondition
	case errors.As(err, &pending):
		code = codes.Aborted
	case errors.As(err, &damaged), errors.Is(err, co.ErrNotEquivalent):
		code = codes.Internal
	case errors.As(err, &noService):
		code = codes.FailedPrecondition
	case errors.As(err, &call):
		code = status.Code(call)
		if code == codes.Unknown {
			code = codes.Internal
		}
	}
	return status.Error(code, err.Error())
}
