package main

import (
	"bytes"
	"context"
	"encoding/json"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/csi-prepare/csi-prepare/fakes/kill"
	"github.com/csi-prepare/csi-prepare/fakes/mutant"
)

func run(ctx context.Context, arguments ...string) (string, int) {
	var out bytes.Buffer
	cmd := newCommand()
	cmd.SetOut(&out)
	cmd.SetErr(&out)
	cmd.SetArgs(arguments)
	err := cmd.ExecuteContext(ctx)
	if err != nil {
		out.WriteString(err.Error())
	}
	return out.String(), exitCode(err)
}

func TestCommandLine(t *testing.T) {
	socket := "unix://" + filepath.Join(t.TempDir(), "s")
	for _, test := range []struct {
		name      string
		arguments []string
		code      int
		text      string
	}{
		{"help", []string{"--help"}, 0, "breaks exactly"},
		{"unknown command", []string{"xx"}, 2, "xx"},
		{"no endpoint", []string{"sp", "--grant", "data=/tmp"}, 2, "--endpoint"},
		{"relative endpoint", []string{"co", "--endpoint", "here"}, 2, "--endpoint"},
		{"malformed grant", []string{"sp", "--endpoint", socket, "--grant", "data"}, 2, "NAME=DIR"},
		{"no grant", []string{"sp", "--endpoint", socket}, 1, "granted"},
		{"mutant of the other seat", []string{"sp", "--endpoint", socket, "--grant", "data=/tmp", "--mutant", "lazy-undo"}, 2, "lazy-undo"},
		{"unknown mutant", []string{"kill", "xx"}, 2, "xx"},
		{"unknown output", []string{"list", "-o", "xml"}, 2, "table or json"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Setenv("CSI_ENDPOINT", "")
			out, code := run(t.Context(), test.arguments...)
			if code != test.code || !strings.Contains(out, test.text) {
				t.Errorf("exit %d, want %d, with %q in: %s", code, test.code, test.text, out)
			}
		})
	}
}

func TestListShowsEveryMutant(t *testing.T) {
	table, _ := run(t.Context(), "list")
	text, _ := run(t.Context(), "list", "-o", "json")
	var listed []mutant.Mutant
	if err := json.Unmarshal([]byte(text), &listed); err != nil {
		t.Fatal(err)
	}
	all := kill.Mutants()
	if len(listed) != len(all) {
		t.Errorf("%d are listed of %d", len(listed), len(all))
	}
	for _, m := range all {
		if !strings.Contains(table, m.Name) || !strings.Contains(table, string(m.Breaks)) {
			t.Errorf("%s is not in the table", m.Name)
		}
	}
	if err := mutant.Check(all); err != nil {
		t.Error(err)
	}
}

func TestServesUntilToldToStop(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	for range 2 { // the second time over the socket of the first
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan int, 1)
		go func() {
			_, code := run(ctx, "sp", "--endpoint", "unix://"+socket, "--grant", "data="+t.TempDir(), "--mutant", "wrong-volume")
			ended <- code
		}()
		conn, err := grpc.NewClient("passthrough:fake", grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
				return new(net.Dialer).DialContext(ctx, "unix", socket)
			}))
		if err != nil {
			t.Fatal(err)
		}
		deadline, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		info, err := csi.NewIdentityClient(conn).GetPluginInfo(deadline, &csi.GetPluginInfoRequest{}, grpc.WaitForReady(true))
		if err != nil || info.GetName() == "" {
			t.Errorf("answered %v, %v", info, err)
		}
		cancel()
		conn.Close()
		stop()
		if code := <-ended; code != 0 {
			t.Errorf("exit %d", code)
		}
	}
}
