package publish

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"

	"github.com/csi-prepare/csi-prepare/drivers/server"
	"github.com/csi-prepare/csi-prepare/reference/co"
	"github.com/csi-prepare/csi-prepare/reference/shim/pass"
)

// Config says where to serve, and over which plugin.
type Config struct {
	// Endpoint is the socket to serve on, unix:///PATH.
	Endpoint string
	// Plugin is the socket of the plugin that serves NodePrepare, unix:///PATH.
	Plugin string
	// StateDir is a directory for this process alone, made if missing, by an
	// absolute path that is the plugin's too. On a tmpfs it costs least, and
	// after a reboot nothing of it is of use.
	StateDir string
	// Policy is the operator's; nil is the defaults.
	Policy *co.Policy
	// Log gets a line for each call, without secrets. Nil discards.
	Log *slog.Logger
	// Grace is server.DefaultGrace if zero.
	Grace time.Duration
}

// Check refuses what cannot be served, naming the flag.
func (c *Config) Check() error {
	if _, err := server.SocketPath(c.Endpoint); err != nil {
		return err
	}
	if err := server.AbsolutePath("state-dir", c.StateDir); err != nil {
		return err
	}
	path, err := server.SocketPath(c.Plugin)
	if err != nil {
		return fmt.Errorf("plugin: %w", err)
	}
	c.Plugin = "unix://" + path
	if own, _ := server.SocketPath(c.Endpoint); own == path {
		return errors.New("plugin: is the endpoint itself; give the two a socket each")
	}
	return nil
}

// Pauses between attempts to recover while the plugin does not answer.
const (
	firstPause   = 200 * time.Millisecond
	longestPause = 30 * time.Second
)

// Run serves until ctx ends. What is published stays. co.Child has to be
// called first thing in main.
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
	reference, err := co.Open(co.Config{Dir: c.StateDir, Policy: c.Policy, Log: c.Log})
	if err != nil {
		return err
	}
	recovering, stop := context.WithCancel(ctx)
	recovered := make(chan struct{})
	go func() {
		defer close(recovered)
		recoverUntil(recovering, reference, c.Plugin, c.Log)
	}()
	n := &node{co: reference, plugin: csi.NewNodeClient(conn), endpoint: c.Plugin}
	err = server.Serve(ctx, server.Options{
		Endpoint: c.Endpoint, Log: c.Log, Grace: c.Grace, Server: pass.Rest(conn, server.DefaultDeadline),
	}, func(r grpc.ServiceRegistrar) {
		r.RegisterService(pass.Only(csi.Node_ServiceDesc,
			"NodePublishVolume", "NodeUnpublishVolume", "NodeGetVolumeStats", "NodeExpandVolume"), n)
	})
	stop()
	<-recovered
	return errors.Join(err, server.Finish(c.Grace, reference.Close))
}

// recoverUntil ends what was interrupted, and has the plugin take back what the
// ledger lost. It goes on until all is done: a plugin may start later than this
// process. Calls that come meanwhile wait for their own volume alone.
func recoverUntil(ctx context.Context, c *co.CO, plugin string, log *slog.Logger) {
	for pause := firstPause; ; pause = min(2*pause, longestPause) {
		done, err := c.Recover(ctx, plugin)
		if err == nil {
			log.Info("recovered", "kept", len(done.Kept), "taken_back", len(done.Taken), "orphans", len(done.Orphans))
			return
		}
		log.Warn("not all is recovered yet", "error", err)
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
	}
}
