// Package server is what the reference drivers share: serving CSI on a Unix
// socket, the rules every request has to keep, one call at a time for a
// volume, state that survives a restart, and the NodePrepare service with its
// rules of idempotency. What a driver adds is the mount specs of its volumes.
//
// Nothing here mounts anything.
package server

import (
	"context"
	"fmt"
	"log/slog"
	"runtime/debug"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/reflection"
)

// Defaults of Options.
const (
	// DefaultGrace is how long pending calls may run on after the server was
	// told to stop.
	DefaultGrace = 10 * time.Second
	// DefaultDeadline bounds a call whose caller set no deadline, or a later
	// one.
	DefaultDeadline = 2 * time.Minute
)

// Options say where and how to serve.
type Options struct {
	// Endpoint is unix:///PATH, unix:PATH or /PATH. Other transports are
	// refused: a CSI plugin trusts whoever reaches its socket.
	Endpoint string
	// Log receives one record a call, without secrets. Nil discards.
	Log *slog.Logger
	// Grace is DefaultGrace if zero.
	Grace time.Duration
	// Deadline is DefaultDeadline if zero.
	Deadline time.Duration
	// Server are more options of the gRPC server.
	Server []grpc.ServerOption
}

// Serve listens on the endpoint and serves the services that register adds,
// with gRPC reflection, until ctx is done. Then it takes no new call, lets
// pending ones finish for the grace, cancels the rest and removes the socket.
// The error is nil if it ended because ctx did.
func Serve(ctx context.Context, o Options, register func(grpc.ServiceRegistrar)) error {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Grace == 0 {
		o.Grace = DefaultGrace
	}
	if o.Deadline == 0 {
		o.Deadline = DefaultDeadline
	}
	socket, err := Listen(ctx, o.Endpoint)
	if err != nil {
		return err
	}
	s := grpc.NewServer(append(o.Server, grpc.ChainUnaryInterceptor(
		logCalls(o.Log),
		boundCalls(o.Deadline),
		checkSizes,
	))...)
	register(s)
	reflection.Register(s)

	ended := make(chan error, 1)
	go func() { ended <- s.Serve(socket) }()
	o.Log.Info("serving", "endpoint", o.Endpoint)
	select {
	case err := <-ended:
		return fmt.Errorf("serve %s: %w", o.Endpoint, err)
	case <-ctx.Done():
	}

	o.Log.Info("stopping", "grace", o.Grace)
	stopped := make(chan struct{})
	go func() { s.GracefulStop(); close(stopped) }()
	select {
	case <-stopped:
	case <-time.After(o.Grace):
		o.Log.Warn("calls still pending after the grace are cancelled")
		s.Stop()
		<-stopped
	}
	return nil
}

// Finish runs what waits for the last work of a driver and closes its state,
// for the end of a process: it gives up after the grace (DefaultGrace if
// zero), since a filesystem that does not answer must not keep the process.
// What was cut off can be repeated, as after a crash.
func Finish(grace time.Duration, closing func() error) error {
	if grace == 0 {
		grace = DefaultGrace
	}
	done := make(chan error, 1)
	go func() { done <- closing() }()
	select {
	case err := <-done:
		return err
	case <-time.After(grace):
		return fmt.Errorf("work for a volume goes on %v after the last call ended; it is cut off, and can be repeated after the next start", grace)
	}
}

// boundCalls gives every call a deadline.
func boundCalls(limit time.Duration) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
		ctx, cancel := context.WithTimeout(ctx, limit)
		defer cancel()
		return next(ctx, req)
	}
}

// Version is the version of the module this program was built from.
func Version() string {
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "(devel)"
}
