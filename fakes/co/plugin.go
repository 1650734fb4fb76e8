package co

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	preparev1alpha1 "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// plugin is a connection to one, with what it says it can do.
type plugin struct {
	node    csi.NodeClient
	prepare preparev1alpha1.NodePrepareClient
	stages  bool
	// absent is true once it said that it does not serve NodePrepare.
	absent bool
}

// plugin connects, and asks what there is, once for each connection.
func (o *Orchestrator) plugin(ctx context.Context, endpoint string) (*plugin, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	p := o.plugins[endpoint]
	if p != nil && (!p.absent || o.asksOnce) {
		if p.absent {
			return nil, o.absent()
		}
		return p, nil
	}
	if p == nil {
		conn, err := grpc.NewClient(endpoint, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority("localhost"))
		if err != nil {
			return nil, err
		}
		p = &plugin{node: csi.NewNodeClient(conn), prepare: preparev1alpha1.NewNodePrepareClient(conn)}
	}
	_, err := p.prepare.NodePrepareGetCapabilities(ctx, &preparev1alpha1.NodePrepareGetCapabilitiesRequest{}, grpc.WaitForReady(true))
	if status.Code(err) == codes.Unimplemented {
		p.absent = true
		o.plugins[endpoint] = p
		return nil, o.absent()
	}
	if err != nil {
		return nil, err
	}
	reply, err := p.node.NodeGetCapabilities(ctx, &csi.NodeGetCapabilitiesRequest{})
	if err != nil {
		return nil, err
	}
	for _, c := range reply.GetCapabilities() {
		p.stages = p.stages || c.GetRpc().GetType() == csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME
	}
	o.plugins[endpoint] = p
	return p, nil
}
