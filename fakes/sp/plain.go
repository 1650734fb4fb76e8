package sp

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// Service is a fake as gRPC sees it.
type Service interface {
	// Options of the grpc.Server that serves it.
	Options() []grpc.ServerOption
	// Serve registers its services.
	Serve(*grpc.Server)
}

// Plain is a conformant plugin of before NodePrepare, with all that CSI has:
// it copies, grows and groups volumes, which are directories, and publishes
// them itself, by bind mounts. Sizes are told and not enforced.
type Plain struct {
	csi.UnimplementedIdentityServer
	csi.UnimplementedControllerServer
	csi.UnimplementedGroupControllerServer
	csi.UnimplementedNodeServer

	config Config
	dir    string // of all volumes and snapshots
	rules  plainRules
	faults []grpc.UnaryServerInterceptor
	bootID string

	mu    sync.Mutex
	state plainState
}

// plainRules are the decisions a mutant may take another way.
type plainRules struct {
	// copy copies a directory to one that is not there.
	copy func(p *Plain, to, from string) error
	// keep makes the state durable.
	keep func(p *Plain) error
	// mount binds a directory.
	mount func(p *Plain, to, from string, flags uintptr) error
	// unmount takes that away.
	unmount func(p *Plain, at string) error
	// lock serialises calls.
	lock func(p *Plain) (unlock func())
}

// NewPlain returns a Plain with the state of its predecessor, if there is any.
// Volumes lie in the first grant.
func NewPlain(c Config) (*Plain, error) { return buildPlain(c, func(*Plain) {}) }

func buildPlain(c Config, fault func(*Plain)) (*Plain, error) {
	if len(c.Grants) == 0 {
		return nil, errors.New("no granted directory: name one")
	}
	if c.NodeID == "" {
		c.NodeID = "fake-node"
	}
	p := &Plain{config: c, rules: plainRules{
		copy: func(_ *Plain, to, from string) error { return os.CopyFS(to, os.DirFS(from)) },
		keep: (*Plain).keep, mount: (*Plain).mount, unmount: (*Plain).unmount,
		lock: func(p *Plain) func() { p.mu.Lock(); return p.mu.Unlock },
	}}
	p.dir = c.Grants[slices.Min(slices.Collect(maps.Keys(c.Grants)))]
	fault(p)
	boot, err := bootID()
	if err != nil {
		return nil, fmt.Errorf("asking for the boot id: %w", err)
	}
	p.bootID = boot
	if c.StateDir != "" {
		if err := os.MkdirAll(c.StateDir, 0o700); err != nil {
			return nil, fmt.Errorf("making the state directory: %w", err)
		}
	}
	if p.state, err = recallPlain(c.StateDir, boot); err != nil {
		return nil, fmt.Errorf("reading the state in %s: %w", c.StateDir, err)
	}
	return p, nil
}

// Serve implements Service.
func (p *Plain) Serve(g *grpc.Server) {
	csi.RegisterIdentityServer(g, p)
	csi.RegisterControllerServer(g, p)
	csi.RegisterGroupControllerServer(g, p)
	csi.RegisterNodeServer(g, p)
}

// Options implements Service.
func (p *Plain) Options() []grpc.ServerOption {
	return []grpc.ServerOption{grpc.ChainUnaryInterceptor(p.faults...)}
}

func (p *Plain) save() error {
	if err := p.rules.keep(p); err != nil {
		return status.Errorf(codes.Internal, "keeping the state: %v", err)
	}
	return nil
}

// place is where the data of a volume or a snapshot lies.
func (p *Plain) place(id string) string { return filepath.Join(p.dir, id) }

// GetPluginInfo implements csi.IdentityServer.
func (p *Plain) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	return &csi.GetPluginInfoResponse{Name: "plain." + Name, VendorVersion: Version}, nil
}

// GetPluginCapabilities implements csi.IdentityServer.
func (p *Plain) GetPluginCapabilities(context.Context, *csi.GetPluginCapabilitiesRequest) (*csi.GetPluginCapabilitiesResponse, error) {
	answer := new(csi.GetPluginCapabilitiesResponse)
	for _, t := range []csi.PluginCapability_Service_Type{
		csi.PluginCapability_Service_CONTROLLER_SERVICE, csi.PluginCapability_Service_GROUP_CONTROLLER_SERVICE,
	} {
		answer.Capabilities = append(answer.Capabilities, &csi.PluginCapability{
			Type: &csi.PluginCapability_Service_{Service: &csi.PluginCapability_Service{Type: t}},
		})
	}
	return answer, nil
}

// Probe implements csi.IdentityServer.
func (p *Plain) Probe(context.Context, *csi.ProbeRequest) (*csi.ProbeResponse, error) {
	return &csi.ProbeResponse{Ready: wrapperspb.Bool(true)}, nil
}

// ControllerGetCapabilities implements csi.ControllerServer.
func (p *Plain) ControllerGetCapabilities(context.Context, *csi.ControllerGetCapabilitiesRequest) (*csi.ControllerGetCapabilitiesResponse, error) {
	types := []csi.ControllerServiceCapability_RPC_Type{
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME,
		csi.ControllerServiceCapability_RPC_LIST_VOLUMES,
		csi.ControllerServiceCapability_RPC_GET_VOLUME,
		csi.ControllerServiceCapability_RPC_GET_CAPACITY,
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_SNAPSHOT,
		csi.ControllerServiceCapability_RPC_LIST_SNAPSHOTS,
		csi.ControllerServiceCapability_RPC_GET_SNAPSHOT,
		csi.ControllerServiceCapability_RPC_CLONE_VOLUME,
		csi.ControllerServiceCapability_RPC_EXPAND_VOLUME,
		csi.ControllerServiceCapability_RPC_MODIFY_VOLUME,
		csi.ControllerServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
	}
	if p.config.Attach {
		types = append(types, csi.ControllerServiceCapability_RPC_PUBLISH_UNPUBLISH_VOLUME)
	}
	answer := new(csi.ControllerGetCapabilitiesResponse)
	for _, t := range types {
		answer.Capabilities = append(answer.Capabilities, &csi.ControllerServiceCapability{
			Type: &csi.ControllerServiceCapability_Rpc{Rpc: &csi.ControllerServiceCapability_RPC{Type: t}},
		})
	}
	return answer, nil
}

// GroupControllerGetCapabilities implements csi.GroupControllerServer.
func (p *Plain) GroupControllerGetCapabilities(context.Context, *csi.GroupControllerGetCapabilitiesRequest) (*csi.GroupControllerGetCapabilitiesResponse, error) {
	return &csi.GroupControllerGetCapabilitiesResponse{Capabilities: []*csi.GroupControllerServiceCapability{{
		Type: &csi.GroupControllerServiceCapability_Rpc{Rpc: &csi.GroupControllerServiceCapability_RPC{
			Type: csi.GroupControllerServiceCapability_RPC_CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT,
		}},
	}}}, nil
}

// NodeGetCapabilities implements csi.NodeServer.
func (p *Plain) NodeGetCapabilities(context.Context, *csi.NodeGetCapabilitiesRequest) (*csi.NodeGetCapabilitiesResponse, error) {
	types := []csi.NodeServiceCapability_RPC_Type{
		csi.NodeServiceCapability_RPC_GET_VOLUME_STATS,
		csi.NodeServiceCapability_RPC_EXPAND_VOLUME,
		csi.NodeServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
	}
	if p.config.Staging {
		types = append(types, csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME)
	}
	answer := new(csi.NodeGetCapabilitiesResponse)
	for _, t := range types {
		answer.Capabilities = append(answer.Capabilities, &csi.NodeServiceCapability{
			Type: &csi.NodeServiceCapability_Rpc{Rpc: &csi.NodeServiceCapability_RPC{Type: t}},
		})
	}
	return answer, nil
}

// NodeGetInfo implements csi.NodeServer.
func (p *Plain) NodeGetInfo(context.Context, *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	return &csi.NodeGetInfoResponse{NodeId: p.config.NodeID}, nil
}
