package co

import (
	"context"
	"fmt"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/stats"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// NoServiceError says that a plugin does not serve NodePrepare. It is no fault
// of the plugin's: NodePublishVolume is the way then.
type NoServiceError struct{ Endpoint string }

// Error says what to do.
func (e *NoServiceError) Error() string {
	return e.Endpoint + ": the plugin does not serve NodePrepare; use NodePublishVolume, or put prepare-shim before it"
}

// plugin is the connection to one endpoint. What the plugin says of itself is
// kept until the connection ends, the absence of NodePrepare too.
type plugin struct {
	endpoint string
	conn     *grpc.ClientConn
	node     csi.NodeClient
	prepare  preparev1alpha1.NodePrepareClient

	mu      sync.Mutex
	facts   *facts
	absence error
	who     owner
}

// facts are what a plugin says of itself.
type facts struct {
	name        string
	stages      bool
	refreshable map[string]bool // keys of volume_context
}

// reconnect suits a socket on the same machine, where a plugin that restarts is
// back in no time.
var reconnect = grpc.ConnectParams{
	Backoff:           backoff.Config{BaseDelay: 20 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 5 * time.Second},
	MinConnectTimeout: 5 * time.Second,
}

func dial(endpoint string) (*plugin, error) {
	path, ok := strings.CutPrefix(endpoint, "unix://")
	if !ok || !cleanPath(path) {
		return nil, fmt.Errorf("endpoint %q: has to be unix:// and an absolute path", endpoint)
	}
	p := &plugin{endpoint: endpoint}
	conn, err := grpc.NewClient("passthrough:///"+path, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithAuthority("localhost"), grpc.WithContextDialer(p.dial), grpc.WithStatsHandler(p), grpc.WithConnectParams(reconnect))
	if err != nil {
		return nil, fmt.Errorf("endpoint %s: %w", endpoint, err)
	}
	p.conn, p.node, p.prepare = conn, csi.NewNodeClient(conn), preparev1alpha1.NewNodePrepareClient(conn)
	return p, nil
}

// dial connects, and notes as whom the other process listens.
func (p *plugin) dial(ctx context.Context, path string) (net.Conn, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", path)
	if err != nil {
		return nil, err
	}
	raw, err := conn.(*net.UnixConn).SyscallConn()
	if err == nil {
		err = raw.Control(func(fd uintptr) {
			if cred, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err == nil {
				p.mu.Lock()
				defer p.mu.Unlock()
				p.who = owner{int(cred.Uid), int(cred.Gid)}
			}
		})
	}
	if err != nil {
		_ = conn.Close()
		return nil, err
	}
	return conn, nil
}

// listener is the user of the process that was connected to last.
func (p *plugin) listener() owner {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.who
}

// TagRPC implements stats.Handler.
func (p *plugin) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context { return ctx }

// HandleRPC implements stats.Handler.
func (p *plugin) HandleRPC(context.Context, stats.RPCStats) {}

// TagConn implements stats.Handler.
func (p *plugin) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }

// HandleConn implements stats.Handler: behind a new connection there may be
// another process, of another version.
func (p *plugin) HandleConn(_ context.Context, s stats.ConnStats) {
	if _, ended := s.(*stats.ConnEnd); ended {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.facts, p.absence = nil, nil
	}
}

// discover asks the plugin who it is and what it serves.
func (p *plugin) discover(ctx context.Context) (*facts, error) {
	p.mu.Lock()
	f, absence := p.facts, p.absence
	p.mu.Unlock()
	if f != nil || absence != nil {
		return f, absence
	}
	f, err := p.ask(ctx)
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, absent := err.(*NoServiceError); absent { //nolint:errorlint // ask returns it as it is
		p.absence = err
	}
	p.facts = f
	return f, err
}

// connectTime is how long a plugin that does not listen is waited for: its
// socket is on this machine.
const connectTime = time.Second

// connect waits for a connection, since one that failed while the plugin was
// away waits on its own before it tries again. Whether there is one then, the
// next call tells.
func (p *plugin) connect(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, connectTime)
	defer cancel()
	p.conn.ResetConnectBackoff()
	for {
		now := p.conn.GetState()
		if now == connectivity.Ready {
			return
		}
		p.conn.Connect()
		if !p.conn.WaitForStateChange(ctx, now) {
			return
		}
	}
}

func (p *plugin) ask(ctx context.Context) (*facts, error) {
	p.connect(ctx)
	info, err := csi.NewIdentityClient(p.conn).GetPluginInfo(ctx, &csi.GetPluginInfoRequest{})
	if err != nil {
		return nil, &CallError{"GetPluginInfo", err}
	}
	if info.GetName() == "" {
		return nil, &CallError{"GetPluginInfo", status.Error(codes.Internal, "name: the plugin has none")}
	}
	f := &facts{name: info.GetName(), refreshable: map[string]bool{}}
	prepare, err := p.prepare.NodePrepareGetCapabilities(ctx, &preparev1alpha1.NodePrepareGetCapabilitiesRequest{})
	if status.Code(err) == codes.Unimplemented {
		return nil, &NoServiceError{p.endpoint}
	}
	if err != nil {
		return nil, &CallError{"NodePrepareGetCapabilities", err}
	}
	for _, c := range prepare.GetCapabilities() {
		for _, key := range c.GetRefreshableContext().GetKeys() {
			f.refreshable[key] = true
		}
	}
	node, err := p.node.NodeGetCapabilities(ctx, &csi.NodeGetCapabilitiesRequest{})
	if err != nil {
		return nil, &CallError{"NodeGetCapabilities", err}
	}
	for _, c := range node.GetCapabilities() {
		if c.GetRpc().GetType() == csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME {
			f.stages = true
		}
	}
	return f, nil
}
