package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/rogpeppe/go-internal/testscript"
	"google.golang.org/grpc"

	"github.com/csi-prepare/csi-prepare/fakes/sp"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){
		"prepare-sanity": main,
		"dying":          dying,
		// silent listens at $CSI_ENDPOINT and never answers.
		"silent": func() {
			listener, err := net.Listen("unix", os.Getenv("CSI_ENDPOINT")[len("unix://"):])
			if err != nil {
				os.Exit(1)
			}
			for {
				if _, err := listener.Accept(); err != nil {
					os.Exit(1)
				}
			}
		},
	})
}

// dying serves the in-memory plugin at $CSI_ENDPOINT until the first
// NodePrepareVolume.
func dying() {
	fake, err := sp.New(sp.Config{Grants: map[string]string{"data": os.TempDir()}})
	if err != nil {
		os.Exit(1)
	}
	listener, err := net.Listen("unix", os.Getenv("CSI_ENDPOINT")[len("unix://"):])
	if err != nil {
		os.Exit(1)
	}
	g := grpc.NewServer(grpc.UnaryInterceptor(func(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
		if strings.HasSuffix(info.FullMethod, "/NodePrepareVolume") {
			fmt.Fprintln(os.Stderr, "panic: nil map")
			os.Exit(2)
		}
		return next(ctx, req)
	}))
	fake.Serve(g)
	if g.Serve(listener) != nil {
		os.Exit(1)
	}
}

func TestScripts(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("mount namespaces need root")
	}
	testscript.Run(t, testscript.Params{
		Dir: "testdata/script",
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			// exits CODE COMMAND… wants a command to end with a code.
			"exits": func(ts *testscript.TestScript, _ bool, args []string) {
				want, err := strconv.Atoi(args[0])
				ts.Check(err)
				err = ts.Exec(args[1], args[2:]...)
				code := 0
				var exit *exec.ExitError
				if errors.As(err, &exit) {
					code = exit.ExitCode()
				}
				if code != want {
					ts.Fatalf("exit code %d, want %d", code, want)
				}
			},
		},
	})
}

func TestOneDashIsEnoughForCSISanityFlags(t *testing.T) {
	got := twoDashes([]string{"run", "-csi.endpoint", "/x", "-v", "--csi.secrets=a", "-ginkgo.focus=x"})
	if diff := cmp.Diff([]string{"run", "--csi.endpoint", "/x", "-v", "--csi.secrets=a", "--ginkgo.focus=x"}, got); diff != "" {
		t.Error(diff)
	}
}

func TestRerunLeavesOutWhatItNamesItself(t *testing.T) {
	got := rerunOf([]string{"run", "--exec", "my driver", "--id", "a.b", "--seed=3", "--report", "out", "--grant", "d=/d"})
	if want := "prepare-sanity run --exec 'my driver' --grant d=/d"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}
