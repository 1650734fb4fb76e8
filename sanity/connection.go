package sanity

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync/atomic"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"

	"github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
	"github.com/csi-prepare/csi-prepare/spec/testingv1alpha1"
)

// clients are the services of the plugin, or of the performer.
type clients struct {
	identity   csi.IdentityClient
	controller csi.ControllerClient
	node       csi.NodeClient
	group      csi.GroupControllerClient
	prepare    preparev1alpha1.NodePrepareClient
	performer  testingv1alpha1.PerformerClient
	// orchestrator is the performer, if it is a whole CO.
	orchestrator testingv1alpha1.OrchestratorClient

	// channel is what handles come over.
	channel *channel

	connections []*grpc.ClientConn
	// peer is the process behind the socket, 0 if that is not known.
	peer *atomic.Int64
}

// socketPath returns the path of a unix socket that an endpoint names, ""
// if it names something else.
func socketPath(endpoint string) string {
	if p, ok := strings.CutPrefix(endpoint, "unix://"); ok {
		return p
	}
	if p, ok := strings.CutPrefix(endpoint, "unix:"); ok {
		return p
	}
	if strings.HasPrefix(endpoint, "/") || !strings.Contains(endpoint, ":") {
		return endpoint
	}
	return ""
}

// dial connects to the plugin's services. Nothing is sent yet.
func dial(endpoint, controller string, timeout time.Duration, seen func(req, answer proto.Message)) (*clients, error) {
	c := &clients{peer: new(atomic.Int64), channel: newChannel()}
	node, err := c.connect(endpoint, timeout, seen)
	if err != nil {
		return nil, err
	}
	elsewhere := node
	if controller != "" && controller != endpoint {
		if elsewhere, err = c.connect(controller, timeout, seen); err != nil {
			c.close()
			return nil, err
		}
	}
	c.identity = csi.NewIdentityClient(node)
	c.controller = csi.NewControllerClient(elsewhere)
	c.group = csi.NewGroupControllerClient(elsewhere)
	c.node = csi.NewNodeClient(node)
	c.prepare = preparev1alpha1.NewNodePrepareClient(node)
	c.performer = testingv1alpha1.NewPerformerClient(node)
	c.orchestrator = testingv1alpha1.NewOrchestratorClient(node)
	return c, nil
}

func (c *clients) connect(endpoint string, timeout time.Duration, seen func(req, answer proto.Message)) (*grpc.ClientConn, error) {
	first := len(c.connections) == 0
	options := []grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithAuthority("localhost"),
		grpc.WithChainUnaryInterceptor(record(timeout, seen), c.channel.intercept),
		grpc.WithConnectParams(grpc.ConnectParams{
			// A plugin that is being started is asked again at once.
			Backoff:           backoff.Config{BaseDelay: 5 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 100 * time.Millisecond},
			MinConnectTimeout: time.Second,
		}),
	}
	target := endpoint
	if p := socketPath(endpoint); p != "" {
		target = "passthrough:///unix"
		options = append(options, grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			conn, err := (&net.Dialer{}).DialContext(ctx, "unix", p)
			if err == nil && first {
				c.peer.Store(int64(peerOf(conn)))
			}
			return conn, err
		}))
	}
	conn, err := grpc.NewClient(target, options...)
	if err != nil {
		return nil, fmt.Errorf("endpoint %s: %w", endpoint, err)
	}
	c.connections = append(c.connections, conn)
	return conn, nil
}

func (c *clients) close() {
	for _, conn := range c.connections {
		_ = conn.Close() // nothing is sent any more
	}
	c.connections = nil
}

// peerOf returns the process that listens on the other side of a unix
// socket, 0 if it is in a pid namespace this process cannot see.
func peerOf(conn net.Conn) int {
	u, ok := conn.(*net.UnixConn)
	if !ok {
		return 0
	}
	raw, err := u.SyscallConn()
	if err != nil {
		return 0
	}
	pid := 0
	if err := raw.Control(func(fd uintptr) {
		if cred, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err == nil {
			pid = int(cred.Pid)
		}
	}); err != nil {
		return 0
	}
	return pid
}

// socketState says in words why a unix socket cannot be connected to, for the
// commonest case that there is nobody there.
func socketState(endpoint string) error {
	p := socketPath(endpoint)
	if p == "" {
		return nil
	}
	conn, err := net.Dial("unix", p)
	switch {
	case err == nil:
		_ = conn.Close() // it was only tried
		return nil
	case errors.Is(err, unix.ENOENT):
		return fmt.Errorf("there is no socket at %s; is the plugin running, with this endpoint?", p)
	case errors.Is(err, unix.ECONNREFUSED):
		return fmt.Errorf("nobody listens at %s; the plugin that made the socket is gone", p)
	default:
		return fmt.Errorf("connecting to %s: %w", p, err)
	}
}
