// Package sp is a conformant storage plugin in a few hundred lines, kept in
// memory: what the suite is tested against, and what its mutants are made of.
//
// The data of each volume is a directory of its own in a directory that the
// operator granted; a preparation is answered with one BIND of it. Or it is a
// file, attached as a loop device; then it is answered with that device. The
// package makes no mount and shares no code with the reference drivers: a
// second implementation of the contract is a check on the contract.
package sp

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"sync"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	preparev1alpha1 "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// Name and Version are what GetPluginInfo answers.
const (
	Name    = "fake.csi-prepare.dev"
	Version = "1"
)

// Config is what the operator decides.
type Config struct {
	// NodeID is the answer to NodeGetInfo. Empty means "fake-node".
	NodeID string
	// Grants are the directories volumes may lie in, by the name both the
	// SP and the CO know them by. At least one; each exists already.
	Grants map[string]string
	// StateDir is where the state is kept so that it outlives the process.
	// Empty means that it does not.
	StateDir string
	// Staging makes the SP ask for NodeStageVolume. Staging does nothing
	// but be remembered.
	Staging bool
	// Block makes volumes of files that are attached as loop devices when
	// they are staged, for both access types: the filesystem is ext4.
	Block bool
	// Attach makes a Plain ask for ControllerPublishVolume.
	Attach bool
	// LegacyWriters leaves the SINGLE_NODE_MULTI_WRITER capability out: two
	// consumers on one node may then share a SINGLE_NODE_WRITER volume.
	LegacyWriters bool
}

// Server serves Identity, Controller, Node and NodePrepare.
type Server struct {
	csi.UnimplementedIdentityServer
	csi.UnimplementedControllerServer
	csi.UnimplementedNodeServer
	preparev1alpha1.UnimplementedNodePrepareServer

	config Config
	rules  rules
	faults []grpc.UnaryServerInterceptor
	bootID string

	mu    sync.Mutex
	state state
}

// rules are the decisions a mutant may take another way.
type rules struct {
	// same reports whether two requests for one pair differ in nothing that
	// counts.
	same func(a, b *preparev1alpha1.NodePrepareVolumeRequest) bool
	// accepts reports whether the performer can perform the spec.
	accepts func(*preparev1alpha1.Performer, *preparev1alpha1.MountSpec) bool
	// device returns the loop device of a volume, or with a prepare_id the
	// read-only one of that preparation.
	device func(s *Server, v *volume, prepareID string) (device, error)
	// blank reports whether a file certainly holds nothing.
	blank func(file string) (bool, error)
	// agree refuses parameters that differ from those of other preparations.
	agree func(s *Server, r *preparev1alpha1.NodePrepareVolumeRequest) error
	// release ends what a preparation has for itself.
	release func(s *Server, v *volume, prepareID string) error
	// keep makes the state durable.
	keep func(dir, boot string, s *state) error
	// boot identifies this boot of the node.
	boot func() (string, error)
	// refuse is the last word on a preparation that is not to be: what it
	// returns is answered.
	refuse func(s *Server, r *preparev1alpha1.NodePrepareVolumeRequest, err error) error
}

// New returns a Server with the state of its predecessor, if there is any.
func New(c Config) (*Server, error) { return build(c, func(*Server) {}) }

// build makes a Server with a fault, which may change all of it but the
// state, and that through the rules alone.
func build(c Config, f fault) (*Server, error) {
	if len(c.Grants) == 0 {
		return nil, errors.New("no granted directory: name at least one")
	}
	if c.NodeID == "" {
		c.NodeID = "fake-node"
	}
	c.Staging = c.Staging || c.Block
	s := &Server{config: c, rules: rules{
		same:    sameRequest,
		accepts: accepts,
		device:  deviceOf,
		blank:   isBlank,
		agree:   agree,
		release: release,
		keep:    keep,
		boot:    bootID,
		refuse: func(_ *Server, _ *preparev1alpha1.NodePrepareVolumeRequest, err error) error {
			return err
		},
	}}
	if c.Block {
		s.rules.accepts = acceptsDevice
	}
	f(s)
	boot, err := s.rules.boot()
	if err != nil {
		return nil, fmt.Errorf("asking for the boot id: %w", err)
	}
	s.bootID = boot
	if c.StateDir != "" {
		if err := os.MkdirAll(c.StateDir, 0o700); err != nil {
			return nil, fmt.Errorf("making the state directory: %w", err)
		}
	}
	if s.state, err = recall(c.StateDir, boot); err != nil {
		return nil, fmt.Errorf("reading the state in %s: %w", c.StateDir, err)
	}
	return s, nil
}

// Serve registers the services of s. The grpc.Server has to be made with
// s.Options().
func (s *Server) Serve(g *grpc.Server) {
	csi.RegisterIdentityServer(g, s)
	csi.RegisterControllerServer(g, s)
	csi.RegisterNodeServer(g, s)
	preparev1alpha1.RegisterNodePrepareServer(g, s)
}

// Options are the options of the grpc.Server that s is served by.
func (s *Server) Options() []grpc.ServerOption {
	return []grpc.ServerOption{grpc.ChainUnaryInterceptor(s.faults...)}
}

// save makes the state durable; the caller holds s.mu. It comes before the
// answer, so that nothing is promised that a crash can take back.
func (s *Server) save() error {
	if err := s.rules.keep(s.config.StateDir, s.bootID, &s.state); err != nil {
		return status.Errorf(codes.Internal, "keeping the state: %v", err)
	}
	return nil
}

// grant returns the name of the grant new volumes lie in.
func (s *Server) grant() string {
	return slices.Min(slices.Collect(maps.Keys(s.config.Grants)))
}

// GetPluginInfo implements csi.IdentityServer.
func (s *Server) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	return &csi.GetPluginInfoResponse{Name: Name, VendorVersion: Version}, nil
}

// GetPluginCapabilities implements csi.IdentityServer.
func (s *Server) GetPluginCapabilities(context.Context, *csi.GetPluginCapabilitiesRequest) (*csi.GetPluginCapabilitiesResponse, error) {
	return &csi.GetPluginCapabilitiesResponse{Capabilities: []*csi.PluginCapability{{
		Type: &csi.PluginCapability_Service_{Service: &csi.PluginCapability_Service{
			Type: csi.PluginCapability_Service_CONTROLLER_SERVICE,
		}},
	}}}, nil
}

// Probe implements csi.IdentityServer.
func (s *Server) Probe(context.Context, *csi.ProbeRequest) (*csi.ProbeResponse, error) {
	return &csi.ProbeResponse{Ready: wrapperspb.Bool(true)}, nil
}
