package sanity

import (
	"net"
	"os"
	"path/filepath"
	"testing"

	"google.golang.org/grpc"

	"github.com/csi-prepare/csi-prepare/fakes/co"
	"github.com/csi-prepare/csi-prepare/fakes/sp"
	"github.com/csi-prepare/csi-prepare/reference/perform"
	"github.com/csi-prepare/csi-prepare/sanity/report"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

func needRoot(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("mount namespaces need root")
	}
}

// service is a fake as gRPC sees it.
type service interface {
	Options() []grpc.ServerOption
	Serve(*grpc.Server)
}

// serve serves a fake in this process and returns its endpoint.
func serve(t testing.TB, s service) string {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "csi.sock")
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	g := grpc.NewServer(s.Options()...)
	s.Serve(g)
	go g.Serve(listener)
	t.Cleanup(g.Stop)
	return "unix://" + socket
}

// plugin serves the in-memory plugin and returns a configuration for it.
func plugin(t testing.TB) Config {
	t.Helper()
	grant := t.TempDir()
	fake, err := sp.New(sp.Config{Grants: map[string]string{"data": grant}})
	if err != nil {
		t.Fatal(err)
	}
	return Config{Endpoint: serve(t, fake), Grants: map[string]string{"data": grant}, WorkDir: t.TempDir()}
}

// TestMain lets the executor under test ask what may hang in a child.
func TestMain(m *testing.M) {
	perform.MainIfChild()
	os.Exit(m.Run())
}

// executor serves the reference executor and returns a configuration for it.
func executor(t testing.TB) Config {
	t.Helper()
	fake, err := co.New(new(co.Reference), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	return Config{Performer: serve(t, fake), WorkDir: t.TempDir()}
}

// started is a suite that has begun, against the in-memory plugin.
func started(t testing.TB, change func(*Config)) *Suite {
	t.Helper()
	needRoot(t)
	c := plugin(t)
	change(&c)
	s := newSuite(&c)
	t.Cleanup(s.Stop)
	if err := s.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	return s
}

func unchanged(*Config) {}

// about is a spec about prepare.readonly.
func about(body func(*trial), n ...Feature) definition {
	return definition{name: "a spec", covers: Covers(requirement.PrepareReadonly), body: body, needs: n}
}

func BenchmarkEmptySpec(b *testing.B) {
	s := started(b, unchanged)
	for b.Loop() {
		if r := s.run(b.Context(), about(func(*trial) {})); r.Outcome != report.Passed {
			b.Fatal(r.Message)
		}
	}
}
