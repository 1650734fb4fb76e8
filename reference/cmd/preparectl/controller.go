package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"strconv"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/csi-prepare/csi-prepare/reference/co"
)

// prepareIDOf names the use of a volume at a target, so that a repeat is one.
func prepareIDOf(target string, pid int) string {
	sum := sha256.Sum256([]byte(strconv.Itoa(pid) + " " + target))
	return "preparectl-" + hex.EncodeToString(sum[:6])
}

// controller is the controller service of a driver, if it serves one.
type controller struct {
	csi.ControllerClient
	conn      *grpc.ClientConn
	publishes bool
}

func controllerAt(ctx context.Context, endpoint string) (*controller, error) {
	conn, err := grpc.NewClient(endpoint, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, err
	}
	c := &controller{csi.NewControllerClient(conn), conn, false}
	r, err := c.ControllerGetCapabilities(ctx, &csi.ControllerGetCapabilitiesRequest{})
	if err != nil {
		_ = conn.Close()
		return nil, fmt.Errorf("%s: no controller service: %w", endpoint, err)
	}
	for _, one := range r.GetCapabilities() {
		if one.GetRpc().GetType() == csi.ControllerServiceCapability_RPC_PUBLISH_UNPUBLISH_VOLUME {
			c.publishes = true
		}
	}
	return c, nil
}

// node is the id of the node that the driver at the same endpoint runs on.
func (c *controller) node(ctx context.Context) (string, error) {
	r, err := csi.NewNodeClient(c.conn).NodeGetInfo(ctx, &csi.NodeGetInfoRequest{})
	return r.GetNodeId(), err
}

// createVolume creates the volume that use names, and completes use with what
// the controller answers.
func createVolume(ctx context.Context, use *co.Use, bytes int64) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	c, err := controllerAt(ctx, use.Endpoint)
	if err != nil {
		return err
	}
	defer func() { _ = c.conn.Close() }()
	request := &csi.CreateVolumeRequest{Name: use.VolumeID, VolumeCapabilities: []*csi.VolumeCapability{use.Capability}}
	if bytes > 0 {
		request.CapacityRange = &csi.CapacityRange{RequiredBytes: bytes}
	}
	r, err := c.CreateVolume(ctx, request)
	if err != nil {
		return fmt.Errorf("CreateVolume: %w", err)
	}
	use.VolumeID = r.GetVolume().GetVolumeId()
	context := maps.Clone(r.GetVolume().GetVolumeContext())
	if context == nil {
		context = map[string]string{}
	}
	maps.Copy(context, use.VolumeContext)
	use.VolumeContext = context
	if !c.publishes {
		return nil
	}
	node, err := c.node(ctx)
	if err != nil {
		return fmt.Errorf("NodeGetInfo: %w", err)
	}
	p, err := c.ControllerPublishVolume(ctx, &csi.ControllerPublishVolumeRequest{
		VolumeId: use.VolumeID, NodeId: node, VolumeCapability: use.Capability, Readonly: use.Readonly, VolumeContext: use.VolumeContext,
	})
	if err != nil {
		return fmt.Errorf("ControllerPublishVolume: %w", err)
	}
	use.PublishContext = p.GetPublishContext()
	return nil
}

// deleteVolume deletes a volume that nobody on this node has any more.
func deleteVolume(ctx context.Context, endpoint, volume string) error {
	c, err := controllerAt(ctx, endpoint)
	if err != nil {
		return err
	}
	defer func() { _ = c.conn.Close() }()
	if c.publishes {
		node, err := c.node(ctx)
		if err != nil {
			return fmt.Errorf("NodeGetInfo: %w", err)
		}
		_, err = c.ControllerUnpublishVolume(ctx, &csi.ControllerUnpublishVolumeRequest{VolumeId: volume, NodeId: node})
		if err != nil {
			return fmt.Errorf("ControllerUnpublishVolume: %w", err)
		}
	}
	if _, err := c.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: volume}); err != nil {
		return fmt.Errorf("DeleteVolume: %w", err)
	}
	return nil
}
