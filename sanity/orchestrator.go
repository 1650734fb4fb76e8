package sanity

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
	"github.com/csi-prepare/csi-prepare/spec/testingv1alpha1"
)

// Orchestrate is the claim of a performer that it is a whole CO: it serves
// csi.prepare.testing.v1alpha1.Orchestrator.
const Orchestrate Feature = "orchestrator"

// stub is the plugin that a CO under test talks to. It is right in all it
// does, unless a spec replaces an answer, and keeps what it was asked.
type stub struct {
	csi.UnimplementedIdentityServer
	csi.UnimplementedNodeServer
	preparev1alpha1.UnimplementedNodePrepareServer

	endpoint string
	absent   bool // NodePrepare is not served
	stages   bool
	text     string // in the file "file" of every volume
	// prepare and unprepare answer in place of the right answer, if set and
	// if they do not return nil, nil.
	prepare   func(*prepareRequest) (*prepareResponse, error)
	unprepare func(*unprepareRequest) error

	mu     sync.Mutex
	events []event
	busy   map[string]int // calls of a volume that are under way
	most   int            // of these at a time
}

// event is one call that the stub got.
type event struct {
	method   string
	volume   string
	prepare  string // prepare_id
	path     string // prepare_path
	answered codes.Code
}

// stub serves a plugin for the spec, until its end.
func (t *trial) stub(change func(*stub)) *stub {
	if !t.features[Orchestrate] {
		t.unsupported(lacking(Orchestrate))
	}
	dir, err := os.MkdirTemp(t.Suite.dir, "plugin-")
	t.sysfail("making a directory for the plugin of the suite", err)
	t.cleanup(func() error { return os.RemoveAll(dir) })
	p := &stub{endpoint: "unix://" + filepath.Join(dir, "s"), text: t.nonce(), busy: map[string]int{}}
	if change != nil {
		change(p)
	}
	listener, err := net.Listen("unix", filepath.Join(dir, "s"))
	t.sysfail("serving the plugin of the suite", err)
	g := grpc.NewServer(grpc.UnaryInterceptor(p.record))
	csi.RegisterIdentityServer(g, p)
	csi.RegisterNodeServer(g, p)
	preparev1alpha1.RegisterNodePrepareServer(g, p)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = g.Serve(listener) // until it is stopped
	}()
	t.cleanup(func() error {
		g.Stop()
		<-ended
		return nil
	})
	return p
}

// record keeps every call, and how many there are for a volume at a time.
func (p *stub) record(ctx context.Context, request any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	e := event{method: filepath.Base(info.FullMethod)}
	if r, ok := request.(interface{ GetVolumeId() string }); ok {
		e.volume = r.GetVolumeId()
	}
	if r, ok := request.(interface{ GetPrepareId() string }); ok {
		e.prepare = r.GetPrepareId()
	}
	if r, ok := request.(interface{ GetPreparePath() string }); ok {
		e.path = r.GetPreparePath()
	}
	p.mu.Lock()
	if e.volume != "" {
		p.busy[e.volume]++
		p.most = max(p.most, p.busy[e.volume])
	}
	p.mu.Unlock()
	answer, err := next(ctx, request)
	e.answered = status.Code(err)
	p.mu.Lock()
	defer p.mu.Unlock()
	if e.volume != "" {
		p.busy[e.volume]--
	}
	p.events = append(p.events, e)
	return answer, err
}

// of are the calls of a method so far.
func (p *stub) of(method string) []event {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(p.events), func(e event) bool { return e.method != method })
}

// all are the names of the calls so far, for a message.
func (p *stub) all() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	text := ""
	for _, e := range p.events {
		text += fmt.Sprintf("%s -> %s; ", e.method, codeName(e.answered))
	}
	return orElse(text, "no call")
}

// refuses answers FAILED_PRECONDITION to the next calls that would end a
// preparation. What is in prepare_path is gone all the same, so that nothing
// but the answer tells that the volume is in use.
func (p *stub) refuses(calls int32) {
	var refused atomic.Int32
	p.unprepare = func(r *unprepareRequest) error {
		if refused.Add(1) > calls {
			return nil
		}
		if err := empty(r.GetPreparePath()); err != nil {
			return status.Error(codes.Internal, err.Error())
		}
		return status.Error(codes.FailedPrecondition, "still in use")
	}
}

// empty removes what the stub makes in a prepare_path.
func empty(path string) error {
	if path == "" {
		return nil
	}
	return errors.Join(ignoreMissing(os.Remove(filepath.Join(path, "volume/file"))), ignoreMissing(os.Remove(filepath.Join(path, "volume"))))
}

// ended reports whether the preparation of a call was ended by an OK to
// NodeUnprepareVolume.
func (p *stub) ended(prepare event) bool {
	return slices.ContainsFunc(p.of("NodeUnprepareVolume"), func(e event) bool {
		return e.answered == codes.OK && e.volume == prepare.volume && e.prepare == prepare.prepare
	})
}

// GetPluginInfo implements csi.IdentityServer.
func (p *stub) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	return &csi.GetPluginInfoResponse{Name: "suite.csi-prepare.dev", VendorVersion: "1"}, nil
}

// GetPluginCapabilities implements csi.IdentityServer.
func (p *stub) GetPluginCapabilities(context.Context, *csi.GetPluginCapabilitiesRequest) (*csi.GetPluginCapabilitiesResponse, error) {
	return &csi.GetPluginCapabilitiesResponse{}, nil
}

// Probe implements csi.IdentityServer.
func (p *stub) Probe(context.Context, *csi.ProbeRequest) (*csi.ProbeResponse, error) {
	return &csi.ProbeResponse{}, nil
}

// NodeGetInfo implements csi.NodeServer.
func (p *stub) NodeGetInfo(context.Context, *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	return &csi.NodeGetInfoResponse{NodeId: "suite"}, nil
}

// NodeGetCapabilities implements csi.NodeServer.
func (p *stub) NodeGetCapabilities(context.Context, *csi.NodeGetCapabilitiesRequest) (*csi.NodeGetCapabilitiesResponse, error) {
	answer := &csi.NodeGetCapabilitiesResponse{}
	if p.stages {
		answer.Capabilities = append(answer.Capabilities, &csi.NodeServiceCapability{Type: &csi.NodeServiceCapability_Rpc{
			Rpc: &csi.NodeServiceCapability_RPC{Type: csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME},
		}})
	}
	return answer, nil
}

// NodeStageVolume implements csi.NodeServer.
func (p *stub) NodeStageVolume(context.Context, *csi.NodeStageVolumeRequest) (*csi.NodeStageVolumeResponse, error) {
	return &csi.NodeStageVolumeResponse{}, nil
}

// NodeUnstageVolume implements csi.NodeServer.
func (p *stub) NodeUnstageVolume(context.Context, *csi.NodeUnstageVolumeRequest) (*csi.NodeUnstageVolumeResponse, error) {
	return &csi.NodeUnstageVolumeResponse{}, nil
}

// NodePublishVolume implements csi.NodeServer: it is counted, and mounts
// nothing.
func (p *stub) NodePublishVolume(context.Context, *csi.NodePublishVolumeRequest) (*csi.NodePublishVolumeResponse, error) {
	return &csi.NodePublishVolumeResponse{}, nil
}

// NodeUnpublishVolume implements csi.NodeServer.
func (p *stub) NodeUnpublishVolume(context.Context, *csi.NodeUnpublishVolumeRequest) (*csi.NodeUnpublishVolumeResponse, error) {
	return &csi.NodeUnpublishVolumeResponse{}, nil
}

// NodePrepareGetCapabilities implements preparev1alpha1.NodePrepareServer.
func (p *stub) NodePrepareGetCapabilities(context.Context, *preparev1alpha1.NodePrepareGetCapabilitiesRequest) (*preparev1alpha1.NodePrepareGetCapabilitiesResponse, error) {
	if p.absent {
		return nil, status.Error(codes.Unimplemented, "unknown service csi.prepare.v1alpha1.NodePrepare")
	}
	return &preparev1alpha1.NodePrepareGetCapabilitiesResponse{Capabilities: []*preparev1alpha1.NodePrepareServiceCapability{
		{Type: &preparev1alpha1.NodePrepareServiceCapability_Rpc{Rpc: &preparev1alpha1.NodePrepareServiceCapability_RPC{
			Type: preparev1alpha1.NodePrepareServiceCapability_RPC_PREPARE_UNPREPARE_VOLUME,
		}}},
		{Type: &preparev1alpha1.NodePrepareServiceCapability_Kind_{Kind: &preparev1alpha1.NodePrepareServiceCapability_Kind{
			Kind: preparev1alpha1.MountKind_MOUNT_KIND_BIND,
		}}},
	}}, nil
}

// NodePrepareVolume implements preparev1alpha1.NodePrepareServer: the volume
// is a directory in prepare_path.
func (p *stub) NodePrepareVolume(_ context.Context, r *prepareRequest) (*prepareResponse, error) {
	if p.prepare != nil {
		if answer, err := p.prepare(r); answer != nil || err != nil {
			return answer, err
		}
	}
	return p.prepared(r)
}

func (p *stub) prepared(r *prepareRequest) (*prepareResponse, error) {
	dir := filepath.Join(r.GetPreparePath(), "volume")
	err := os.Mkdir(dir, 0o755)
	if err == nil || os.IsExist(err) {
		err = os.WriteFile(filepath.Join(dir, "file"), []byte(p.text), 0o644)
	}
	if err != nil {
		return nil, status.Error(codes.FailedPrecondition, "prepare_path: "+err.Error())
	}
	return &prepareResponse{MountSpecs: []*mountSpec{{
		Attributes: &attributes{Readonly: r.GetReadonly()},
		Kind: &preparev1alpha1.MountSpec_Bind{Bind: &preparev1alpha1.BindMount{
			Source: &preparev1alpha1.PathRef{Base: preparev1alpha1.PathRef_PREPARE, Relative: "volume"},
		}},
	}}}, nil
}

// NodeUnprepareVolume implements preparev1alpha1.NodePrepareServer.
func (p *stub) NodeUnprepareVolume(_ context.Context, r *unprepareRequest) (*preparev1alpha1.NodeUnprepareVolumeResponse, error) {
	if p.unprepare != nil {
		if err := p.unprepare(r); err != nil {
			return nil, err
		}
	}
	if err := empty(r.GetPreparePath()); err != nil {
		return nil, status.Error(codes.FailedPrecondition, err.Error())
	}
	return &preparev1alpha1.NodeUnprepareVolumeResponse{}, nil
}

// NodeListPreparedVolumes implements preparev1alpha1.NodePrepareServer.
func (p *stub) NodeListPreparedVolumes(context.Context, *preparev1alpha1.NodeListPreparedVolumesRequest) (*preparev1alpha1.NodeListPreparedVolumesResponse, error) {
	return &preparev1alpha1.NodeListPreparedVolumesResponse{}, nil
}

// user is a consumer of a volume of the stub's.
type user struct {
	*consumer
	up *testingv1alpha1.UpRequest
}

// user makes a consumer that has not got the volume yet.
func (t *trial) user(p *stub, volume string) *user {
	c := t.consumer()
	u := &user{c, &testingv1alpha1.UpRequest{
		Endpoint: p.endpoint, VolumeId: volume, Consumer: t.name("consumer"), VolumeCapability: mountCapability(nodeWriter),
		Target: &testingv1alpha1.Target{Namespace: t.namespacePath(), Path: c.target},
	}}
	t.cleanup(func() error { return wrap("Down", t.down(u)) })
	return u
}

func (t *trial) up(u *user) error {
	_, err := t.clients.orchestrator.Up(t.ctx, u.up)
	return err
}

func (t *trial) down(u *user) error {
	_, err := t.clients.orchestrator.Down(t.ctx, &testingv1alpha1.DownRequest{
		Endpoint: u.up.GetEndpoint(), VolumeId: u.up.GetVolumeId(), Consumer: u.up.GetConsumer(),
	})
	return err
}

// isUp gives the consumer the volume, which has to work for the spec to go on.
func (t *trial) isUp(u *user, p *stub) {
	t.need(requirement.PerformVerified, t.up(u), "OK to Up; the plugin was asked: "+p.all())
	same, found := holds(filepath.Join(u.target, "file"), p.text)
	t.want(requirement.PerformVerified, same, "the plugin's file in the consumer", "%s", found)
}

// isDown takes it away.
func (t *trial) isDown(u *user) {
	t.need(requirement.UndoIdempotent, t.down(u), "OK to Down")
}
