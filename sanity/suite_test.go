package sanity

import (
	"net"
	"os"
	"path/filepath"
	"testing"

	"google.golang.org/grpc"

	"github.com/csi-prepare/csi-prepare/fakes/sp"
	"github.com/csi-prepare/csi-prepare/sanity/report"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// served is a suite that has begun, against the in-memory plugin in this
// process.
func served(t testing.TB) *Suite {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("mount namespaces need root")
	}
	dir := t.TempDir()
	grant := filepath.Join(dir, "grant")
	if err := os.Mkdir(grant, 0o755); err != nil {
		t.Fatal(err)
	}
	fake, err := sp.New(sp.Config{Grants: map[string]string{"data": grant}})
	if err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(dir, "csi.sock")
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	g := grpc.NewServer(fake.Options()...)
	fake.Serve(g)
	go g.Serve(listener) //nolint:errcheck // ends with Stop
	t.Cleanup(g.Stop)
	s := newSuite(&Config{Endpoint: "unix://" + socket, Grants: map[string]string{"data": grant}, WorkDir: dir})
	t.Cleanup(s.Stop)
	if err := s.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	return s
}

func empty(body func(*trial)) definition {
	return definition{name: "a spec", covers: Covers(requirement.PrepareReadonly), body: body}
}

func BenchmarkEmptySpec(b *testing.B) {
	s := served(b)
	for b.Loop() {
		if r := s.run(b.Context(), empty(func(*trial) {})); r.Outcome != report.Passed {
			b.Fatal(r.Message)
		}
	}
}
