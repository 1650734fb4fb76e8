package crash

import (
	"context"
	"errors"
	"net"
	"path"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
)

// proxy is between the CO and a plugin, and looks at every call.
type proxy struct {
	server  *grpc.Server
	backend *grpc.ClientConn
	// around is told of each call, twice: with done nil before it, and after
	// it by calling what it returned.
	around func(method string, request []byte) (done func(error))
}

// frame is a message that is passed on as it is.
type frame []byte

// verbatim is the codec of frames.
type verbatim struct{}

func (verbatim) Marshal(v any) ([]byte, error) {
	f, ok := v.(*frame)
	if !ok {
		return nil, errors.New("not a frame")
	}
	return *f, nil
}

func (verbatim) Unmarshal(data []byte, v any) error {
	f, ok := v.(*frame)
	if !ok {
		return errors.New("not a frame")
	}
	*f = append((*f)[:0], data...)
	return nil
}

func (verbatim) Name() string { return "proto" }

// soon suits a plugin that is started again at once.
var soon = grpc.ConnectParams{
	Backoff:           backoff.Config{BaseDelay: 2 * time.Millisecond, Multiplier: 1.5, MaxDelay: 50 * time.Millisecond},
	MinConnectTimeout: time.Second,
}

// newProxy serves at the socket front what it gets from the socket behind.
func newProxy(front, behind string, around func(method string, request []byte) func(error)) (*proxy, error) {
	conn, err := grpc.NewClient("unix://"+behind, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithConnectParams(soon))
	if err != nil {
		return nil, err
	}
	l, err := net.Listen("unix", front)
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	p := &proxy{backend: conn, around: around}
	p.server = grpc.NewServer(grpc.ForceServerCodec(verbatim{}), grpc.UnknownServiceHandler(p.pass))
	go func() { _ = p.server.Serve(l) }()
	return p, nil
}

func (p *proxy) pass(_ any, stream grpc.ServerStream) error {
	method, _ := grpc.MethodFromServerStream(stream)
	var request, response frame
	if err := stream.RecvMsg(&request); err != nil {
		return err
	}
	done := p.around(path.Base(method), request)
	err := p.call(stream.Context(), method, &request, &response)
	done(err)
	if err != nil {
		return status.Convert(err).Err()
	}
	return stream.SendMsg(&response)
}

func (p *proxy) call(ctx context.Context, method string, request, response *frame) error {
	return p.backend.Invoke(ctx, method, request, response, grpc.ForceCodec(verbatim{}))
}

func (p *proxy) close() error {
	p.server.Stop()
	return p.backend.Close()
}
