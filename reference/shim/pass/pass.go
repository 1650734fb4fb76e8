// Package pass lets one gRPC server stand before another: what it does not
// serve itself goes on to the other, as the bytes it came in, and so does the
// answer. Services that nobody here has heard of pass as well, and so do fields.
package pass

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// reconnect suits a socket on the same machine: a plugin that restarts is back
// in no time.
var reconnect = grpc.ConnectParams{
	Backoff:           backoff.Config{BaseDelay: 20 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second},
	MinConnectTimeout: 5 * time.Second,
}

// Dial makes a connection to the plugin at an endpoint, unix:///PATH,
// unix:PATH or /PATH. It connects when it is first used.
func Dial(endpoint string) (*grpc.ClientConn, error) {
	path, hasScheme := strings.CutPrefix(endpoint, "unix://")
	if !hasScheme {
		path = strings.TrimPrefix(endpoint, "unix:")
	}
	if !filepath.IsAbs(path) {
		return nil, fmt.Errorf("plugin %q: has to be a Unix socket by its absolute path, for example unix:///run/csi/csi.sock", endpoint)
	}
	return grpc.NewClient("unix://"+filepath.Clean(path), grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithAuthority("localhost"), grpc.WithConnectParams(reconnect))
}

// Rest are the options of a server whose unknown methods conn serves. A call
// goes on with its deadline and its metadata; without a deadline it gets one of
// limit.
func Rest(conn *grpc.ClientConn, limit time.Duration) []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.ForceServerCodecV2(codec{}),
		grpc.UnknownServiceHandler(func(_ any, caller grpc.ServerStream) error {
			return forward(caller, conn, limit)
		}),
	}
}

// Only is a service with some of its methods; the others are unknown to a
// server that it is registered at.
func Only(service grpc.ServiceDesc, methods ...string) *grpc.ServiceDesc {
	service.Methods = slices.DeleteFunc(slices.Clone(service.Methods), func(m grpc.MethodDesc) bool {
		return !slices.Contains(methods, m.MethodName)
	})
	service.Streams = nil
	return &service
}

var both = grpc.StreamDesc{ServerStreams: true, ClientStreams: true}

func forward(caller grpc.ServerStream, conn *grpc.ClientConn, limit time.Duration) error {
	method, ok := grpc.MethodFromServerStream(caller)
	if !ok {
		return status.Error(codes.Internal, "a call without a method")
	}
	ctx, cancel := context.WithTimeout(caller.Context(), limit)
	defer cancel()
	if md, ok := metadata.FromIncomingContext(ctx); ok {
		ctx = metadata.NewOutgoingContext(ctx, md)
	}
	plugin, err := conn.NewStream(ctx, &both, method, grpc.ForceCodecV2(codec{}))
	if err != nil {
		return err
	}
	go func() {
		// The plugin's end of the call tells how this went.
		for {
			var f frame
			if err := caller.RecvMsg(&f); err != nil {
				if errors.Is(err, io.EOF) {
					_ = plugin.CloseSend()
				} else {
					cancel()
				}
				return
			}
			if plugin.SendMsg(&f) != nil {
				return
			}
		}
	}()
	if err := answers(plugin, caller); err != nil {
		return err
	}
	return nil
}

// answers brings back what the plugin says.
func answers(plugin grpc.ClientStream, caller grpc.ServerStream) error {
	defer func() { caller.SetTrailer(plugin.Trailer()) }()
	for first := true; ; first = false {
		var f frame
		if err := plugin.RecvMsg(&f); err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
		if first {
			md, err := plugin.Header()
			if err != nil {
				return err
			}
			if err := caller.SetHeader(md); err != nil {
				return err
			}
		}
		if err := caller.SendMsg(&f); err != nil {
			return err
		}
	}
}
