package nfs

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
	"github.com/csi-prepare/csi-prepare/reference/mountns"
)

// What a helper has mounted comes back as a clone, and nothing is seen of it by
// anybody; a helper that fails, lies or does not end is told apart.
func TestMountByHelper(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root: a mount namespace of its own")
	}
	for name, tt := range map[string]struct {
		script string
		check  func(t *testing.T, mount *os.File, err error)
	}{
		"mounts": {`mount -t tmpfs "$1" "$2" && echo "$4" >"$2/options"`, func(t *testing.T, mount *os.File, err error) {
			if err != nil {
				t.Fatal(err)
			}
			if _, err := kernel.UniqueID(int(mount.Fd()), ""); err != nil {
				t.Error(err)
			}
		}},
		"fails": {`echo "no route to $1" >&2; exit 32`, func(t *testing.T, _ *os.File, err error) {
			if err == nil || !strings.Contains(err.Error(), "no route to server:/export") {
				t.Errorf("got %v, want the helper's words", err)
			}
		}},
		"lies": {`exit 0`, func(t *testing.T, _ *os.File, err error) {
			if err == nil || !strings.Contains(err.Error(), "has not") {
				t.Errorf("got %v, want that nothing is mounted", err)
			}
		}},
		"does not end": {`sleep 1000`, func(t *testing.T, _ *os.File, err error) {
			if status.Code(err) != codes.DeadlineExceeded && !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("got %v, want the deadline", err)
			}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			helper := filepath.Join(dir, "mount.test")
			if err := os.WriteFile(helper, []byte("#!/bin/sh\n"+tt.script+"\n"), 0o755); err != nil {
				t.Fatal(err)
			}
			before := table(t)
			limit := time.Minute
			if name == "does not end" {
				limit = 300 * time.Millisecond
			}
			ctx, cancel := context.WithTimeout(t.Context(), limit)
			defer cancel()
			at := filepath.Join(dir, "at")
			if err := os.Mkdir(at, 0o700); err != nil {
				t.Fatal(err)
			}
			mount, err := mountByHelper(ctx, helper, "server:/export", at, "vers=4.2,sec=sys")
			tt.check(t, mount, err)
			if mount != nil {
				_ = mount.Close()
			}
			if c := mountns.Diff(before, table(t)); !c.Empty() {
				t.Errorf("the mount table has changed:\n%s", c)
			}
		})
	}
}

func table(t *testing.T) *mountns.Table {
	t.Helper()
	ns, err := mountns.Own()
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	found, err := ns.Table(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return found
}
