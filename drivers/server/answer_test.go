package server

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"

	prepare "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

func share(address, password string, extra ...*prepare.FsParameter) *prepare.MountSpec {
	return &prepare.MountSpec{
		Kind: &prepare.MountSpec_Filesystem{Filesystem: &prepare.FilesystemMount{
			FsType: "cifs", Source: &prepare.FilesystemMount_Opaque{Opaque: address + ":/export"},
			Parameters: append([]*prepare.FsParameter{
				{Key: "addr", Value: &prepare.FsParameter_Text{Text: address}},
				{Key: "password", Value: &prepare.FsParameter_Secret{Secret: password}},
			}, extra...),
		}},
		Attributes: &prepare.MountAttributes{Nosuid: true},
	}
}

// A repeat is answered with what was answered first, by a later process with
// other options too; only what ages is fresh.
func TestRepeatsAreAnsweredTheSame(t *testing.T) {
	p := newPlugin(t, Config{})
	set := func(s *prepare.MountSpec) {
		p.driver.change = func(m *prepare.MountSpec) { m.Kind, m.Attributes = s.Kind, s.Attributes }
	}
	req := p.request("v1", "p1", multiWriter)
	req.Performer.Kinds = append(req.Performer.Kinds, prepare.MountKind_MOUNT_KIND_FILESYSTEM)
	req.Performer.FsTypes = []string{"cifs"}

	set(share("192.0.2.1", "first-canary"))
	p.driver.accepting = true
	first, err := p.NodePrepareVolume(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(share("192.0.2.1", "first-canary"), first.GetMountSpecs()[0], protocmp.Transform()); diff != "" {
		t.Error(diff)
	}
	err = filepath.WalkDir(p.dir, func(path string, d os.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			if text, _ := os.ReadFile(path); strings.Contains(string(text), "canary") {
				t.Errorf("a secret is in %s", path)
			}
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}

	p.start()
	changed := share("192.0.2.2", "second", &prepare.FsParameter{Key: "soft"})
	changed.Attributes = &prepare.MountAttributes{}
	set(changed)
	again, err := p.NodePrepareVolume(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(share("192.0.2.2", "second"), again.GetMountSpecs()[0], protocmp.Transform()); diff != "" {
		t.Error(diff)
	}

	p.driver.change = nil // a bind: another kind than at first
	if _, err := p.NodePrepareVolume(t.Context(), req); err == nil || !strings.Contains(err.Error(), "FILESYSTEM") {
		t.Errorf("another kind: %v", err)
	}
}
