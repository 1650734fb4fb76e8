package server

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	reflectionpb "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"

	prepare "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// text is a writer for a log that is read while it is written.
type text struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (w *text) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.b.Write(p)
}

func (w *text) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.b.String()
}

// serve runs the plugin on a socket until stop is called, which returns what
// Serve did.
func serve(t *testing.T, p *plugin, o Options) (conn *grpc.ClientConn, stop func() error) {
	t.Helper()
	o.Endpoint = "unix://" + filepath.Join(shortDir(t), "csi.sock")
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() {
		ended <- Serve(ctx, o, func(s grpc.ServiceRegistrar) {
			csi.RegisterIdentityServer(s, &Identity{Name: "test.example", Capabilities: []csi.PluginCapability_Service_Type{csi.PluginCapability_Service_CONTROLLER_SERVICE}})
			prepare.RegisterNodePrepareServer(s, p)
		})
	}()
	stop = sync.OnceValue(func() error {
		cancel()
		select {
		case err := <-ended:
			return err
		case <-time.After(20 * time.Second):
			return errors.New("Serve does not end")
		}
	})
	t.Cleanup(func() { _ = stop() })
	conn, err := grpc.NewClient(o.Endpoint, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	probe, err := csi.NewIdentityClient(conn).Probe(t.Context(), &csi.ProbeRequest{}, grpc.WaitForReady(true))
	if err != nil || !probe.GetReady().GetValue() {
		t.Fatalf("Probe: %v, %v", probe, err)
	}
	return conn, stop
}

// Whatever a driver or a library puts into an error, no secret of the request
// reaches the caller or the log, at any level.
func TestSecretsAreMasked(t *testing.T) {
	const secret, token, flag = "canary-secret-1", "canary-token-23", "canary-flag-3"
	var log text
	p := newPlugin(t, Config{})
	conn, stop := serve(t, p, Options{Log: slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))})
	client := prepare.NewNodePrepareClient(conn)

	req := p.request("v1", "p1", multiWriter)
	req.Secrets = map[string]string{"password": secret}
	req.HandleSocket, req.HandoffToken = "/run/co/s", []byte(token+"0")
	req.VolumeCapability.GetMount().MountFlags = []string{"nosuid", "password=" + flag}

	check := func(what string, err error) {
		t.Helper()
		for _, canary := range []string{secret, token, flag, "Y2FuYXJ5"} { // the last: the token in base64
			if err != nil && strings.Contains(err.Error(), canary) {
				t.Errorf("%s: the error holds %s: %v", what, canary, err)
			}
			if strings.Contains(log.String(), canary) {
				t.Errorf("%s: the log holds %s:\n%s", what, canary, log.String())
			}
		}
	}
	_, err := client.NodePrepareVolume(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	check("success", nil)

	p.driver.fail = fmt.Errorf("mount -o password=%s,pw=%s: token %s: failed", secret, flag, token+"0")
	_, err = client.NodePrepareVolume(t.Context(), req)
	if status.Code(err) != codes.Internal || !strings.Contains(err.Error(), stripped) {
		t.Errorf("got %v", err)
	}
	check("error", err)
	p.driver.fail = status.Error(codes.ResourceExhausted, "no room for "+secret)
	_, err = client.NodePrepareVolume(t.Context(), req)
	if status.Code(err) != codes.ResourceExhausted {
		t.Errorf("the code is lost: %v", err)
	}
	check("status", err)
	req.PreparePath = "relative"
	_, err = client.NodePrepareVolume(t.Context(), req)
	check("field rule", err)

	if err := stop(); err != nil {
		t.Error(err)
	}
	for _, word := range []string{"method=NodePrepareVolume", "volume_id=v1", "prepare_id=p1", "code=OK", "code=ResourceExhausted", `password=`} {
		if !strings.Contains(log.String(), word) {
			t.Errorf("the log lacks %q:\n%s", word, log.String())
		}
	}
}

func TestOversizedFieldsAreRefusedAndNotLoggedWhole(t *testing.T) {
	var log text
	p := newPlugin(t, Config{})
	conn, _ := serve(t, p, Options{Log: slog.New(slog.NewTextHandler(&log, nil))})
	_, err := prepare.NewNodePrepareClient(conn).NodeUnprepareVolume(t.Context(), &prepare.NodeUnprepareVolumeRequest{
		VolumeId: strings.Repeat("x", 1<<20), PrepareId: "p1", PreparePath: "/p",
	})
	p.failed(err, codes.InvalidArgument, "volume_id", "1048576", "128")
	if n := len(log.String()); n > 2000 {
		t.Errorf("the log has %d bytes", n)
	}
}

func TestReflectionListsTheServices(t *testing.T) {
	conn, _ := serve(t, newPlugin(t, Config{}), Options{})
	stream, err := reflectionpb.NewServerReflectionClient(conn).ServerReflectionInfo(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	ask := func(r *reflectionpb.ServerReflectionRequest) *reflectionpb.ServerReflectionResponse {
		t.Helper()
		if err := stream.Send(r); err != nil {
			t.Fatal(err)
		}
		resp, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		return resp
	}
	var names []string
	for _, s := range ask(&reflectionpb.ServerReflectionRequest{
		MessageRequest: &reflectionpb.ServerReflectionRequest_ListServices{},
	}).GetListServicesResponse().GetService() {
		names = append(names, s.GetName())
	}
	for _, want := range []string{"csi.v1.Identity", "csi.prepare.v1alpha1.NodePrepare"} {
		if !slices.Contains(names, want) {
			t.Errorf("%q lacks %s", names, want)
		}
	}
	if e := ask(&reflectionpb.ServerReflectionRequest{
		MessageRequest: &reflectionpb.ServerReflectionRequest_FileContainingSymbol{FileContainingSymbol: "csi.prepare.v1alpha1.NodePrepare"},
	}).GetErrorResponse(); e != nil {
		t.Errorf("describe NodePrepare: %v", e)
	}
}

func TestServeFinishesPendingCalls(t *testing.T) {
	p := newPlugin(t, Config{})
	conn, stop := serve(t, p, Options{})
	entered, leave := make(chan struct{}), make(chan struct{})
	p.driver.inside = func() { close(entered); <-leave }
	done := make(chan error, 1)
	req := p.request("v1", "p1", multiWriter)
	go func() {
		_, err := prepare.NewNodePrepareClient(conn).NodePrepareVolume(context.Background(), req)
		done <- err
	}()
	<-entered
	stopped := make(chan error, 1)
	go func() { stopped <- stop() }()
	close(leave)
	if err := <-done; err != nil {
		t.Errorf("pending call: %v", err)
	}
	if err := <-stopped; err != nil {
		t.Errorf("Serve: %v", err)
	}
	if _, err := os.Lstat(strings.TrimPrefix(conn.Target(), "unix://")); !os.IsNotExist(err) {
		t.Errorf("the socket is left: %v", err)
	}
}

func TestServeCancelsAfterTheGrace(t *testing.T) {
	p := newPlugin(t, Config{})
	conn, stop := serve(t, p, Options{Grace: 10 * time.Millisecond})
	entered, leave := make(chan struct{}), make(chan struct{})
	p.driver.inside = func() { close(entered); <-leave }
	done := make(chan error, 1)
	req := p.request("v1", "p1", multiWriter)
	go func() {
		_, err := prepare.NewNodePrepareClient(conn).NodePrepareVolume(context.Background(), req)
		done <- err
	}()
	<-entered
	if err := stop(); err != nil {
		t.Errorf("Serve: %v", err)
	}
	if err := <-done; status.Code(err) != codes.Canceled && status.Code(err) != codes.Unavailable {
		t.Errorf("pending call: %v", err)
	}
	close(leave)
	p.config.Flights.Wait()
}

func TestCallsHaveADeadline(t *testing.T) {
	p := newPlugin(t, Config{})
	conn, _ := serve(t, p, Options{Deadline: 10 * time.Millisecond})
	leave := make(chan struct{})
	p.driver.inside = func() { <-leave }
	_, err := prepare.NewNodePrepareClient(conn).NodePrepareVolume(t.Context(), p.request("v1", "p1", multiWriter))
	p.failed(err, codes.DeadlineExceeded)
	close(leave)
	p.config.Flights.Wait()
}

func TestIdentity(t *testing.T) {
	conn, _ := serve(t, newPlugin(t, Config{}), Options{})
	client := csi.NewIdentityClient(conn)
	info, err := client.GetPluginInfo(t.Context(), &csi.GetPluginInfoRequest{})
	if err != nil || info.GetName() != "test.example" || info.GetVendorVersion() == "" {
		t.Errorf("GetPluginInfo: %v, %v", info, err)
	}
	caps, err := client.GetPluginCapabilities(t.Context(), &csi.GetPluginCapabilitiesRequest{})
	if err != nil || len(caps.GetCapabilities()) != 1 {
		t.Errorf("GetPluginCapabilities: %v, %v", caps, err)
	}
}

func TestFinishGivesUp(t *testing.T) {
	hang := make(chan struct{})
	defer close(hang)
	if err := Finish(time.Millisecond, func() error { <-hang; return nil }); err == nil || !strings.Contains(err.Error(), "cut off") {
		t.Errorf("got %v", err)
	}
	closed := errors.New("closed")
	if err := Finish(0, func() error { return closed }); !errors.Is(err, closed) {
		t.Errorf("got %v", err)
	}
}
