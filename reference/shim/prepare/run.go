package prepare

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/drivers/server"
	"github.com/csi-prepare/csi-prepare/reference/shim/pass"
	pb "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// TokensKey is the key of volume_context by which Kubernetes renews what a
// plugin authenticates with (requiresRepublish). It may differ in a repeat.
const TokensKey = "csi.storage.k8s.io/serviceAccount.tokens" //nolint:gosec // a name of a field, no token

// Config says where to serve, and for which plugin.
type Config struct {
	// Endpoint is the socket to serve on, unix:///PATH.
	Endpoint string
	// Plugin is the plugin's socket, unix:///PATH.
	Plugin string
	// StateDir holds the durable records, for this process alone.
	StateDir string
	// Refreshable are the keys of volume_context that may differ in a repeat,
	// besides TokensKey.
	Refreshable []string
	// Log gets a line for each call, without secrets. Nil discards.
	Log *slog.Logger
	// Grace is server.DefaultGrace if zero.
	Grace time.Duration
}

// Check refuses what cannot be served, naming the flag.
func (c *Config) Check() error {
	own, err := server.SocketPath(c.Endpoint)
	if err != nil {
		return err
	}
	path, err := server.SocketPath(c.Plugin)
	if err != nil {
		return fmt.Errorf("plugin: %w", err)
	}
	if own == path {
		return errors.New("plugin: is the endpoint itself; give the two a socket each")
	}
	c.Plugin = "unix://" + path
	return server.AbsolutePath("state-dir", c.StateDir)
}

// Run waits for the plugin and serves until ctx ends. What is prepared stays.
func Run(ctx context.Context, c Config) error {
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if err := c.Check(); err != nil {
		return err
	}
	conn, err := pass.Dial(c.Plugin)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	claims, err := awaitClaims(ctx, csi.NewNodeClient(conn), c.Log)
	if err != nil {
		return err
	}
	boot, err := server.BootID()
	if err != nil {
		return err
	}
	state, err := server.OpenState(c.StateDir, c.Log)
	if err != nil {
		return err
	}
	s := &service{
		plugin: csi.NewNodeClient(conn), controller: csi.NewControllerClient(conn),
		socket: c.Plugin[len("unix://"):], claims: claims,
	}
	s.NodePrepare, err = server.NewNodePrepare(server.Config{
		Driver: s, State: state, Flights: &s.flights, Release: s.release, BootID: boot,
		Kinds: []pb.MountKind{
			pb.MountKind_MOUNT_KIND_BIND, pb.MountKind_MOUNT_KIND_BLOCK_DEVICE, pb.MountKind_MOUNT_KIND_HANDLE,
		},
		Propagates:  true,
		Refreshable: append([]string{TokensKey}, c.Refreshable...),
		MultiWriter: claims.multiWriter,
	})
	if err != nil {
		return errors.Join(err, state.Close())
	}
	err = server.Serve(ctx, server.Options{
		Endpoint: c.Endpoint, Log: c.Log, Grace: c.Grace, Server: pass.Rest(conn, server.DefaultDeadline),
	}, func(r grpc.ServiceRegistrar) {
		pb.RegisterNodePrepareServer(r, s)
		r.RegisterService(pass.Only(csi.Node_ServiceDesc, "NodeUnstageVolume", "NodeGetVolumeStats", "NodeExpandVolume"), &node{service: s})
		r.RegisterService(pass.Only(csi.Controller_ServiceDesc, "DeleteVolume"), &controller{service: s})
	})
	return errors.Join(err, server.Finish(c.Grace, func() error {
		s.flights.Wait()
		return state.Close()
	}))
}

// claims are what the plugin says of its Node service.
type claims struct{ stages, multiWriter, mountGroup bool }

const claimPause = 200 * time.Millisecond

// awaitClaims asks the plugin until it answers.
func awaitClaims(ctx context.Context, plugin csi.NodeClient, log *slog.Logger) (claims, error) {
	for said := false; ; {
		answer, err := plugin.NodeGetCapabilities(ctx, &csi.NodeGetCapabilitiesRequest{})
		if err == nil {
			claimed := func(t csi.NodeServiceCapability_RPC_Type) bool {
				return slices.ContainsFunc(answer.GetCapabilities(), func(c *csi.NodeServiceCapability) bool { return c.GetRpc().GetType() == t })
			}
			return claims{
				stages:      claimed(csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME),
				multiWriter: claimed(csi.NodeServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER),
				mountGroup:  claimed(csi.NodeServiceCapability_RPC_VOLUME_MOUNT_GROUP),
			}, nil
		}
		if status.Code(err) == codes.Unimplemented {
			return claims{}, fmt.Errorf("plugin: it has no Node service, so there is nothing to prepare: %w", err)
		}
		if !said {
			log.Warn("waiting for the plugin", "error", err)
			said = true
		}
		select {
		case <-ctx.Done():
			return claims{}, fmt.Errorf("plugin: it does not answer: %w", err)
		case <-time.After(claimPause):
		}
	}
}
