package nfs

import (
	"context"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	prepare "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// newDriver makes a driver whose export is at root, or nowhere.
func newDriver(t *testing.T, root string) *Driver {
	t.Helper()
	d, err := New(Config{
		Endpoint: "unix://" + filepath.Join(t.TempDir(), "csi.sock"), StateDir: filepath.Join(t.TempDir(), "state"), NodeID: "node",
		Export: Export{"server", "/srv"}, Root: root,
		Lookup: func(context.Context, string, string) ([]netip.Addr, error) {
			return []netip.Addr{netip.MustParseAddr("192.0.2.1")}, nil
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

func create(t *testing.T, d *Driver, parameters map[string]string, r *csi.CapacityRange) (*csi.Volume, error) {
	t.Helper()
	resp, err := d.controller.CreateVolume(t.Context(), &csi.CreateVolumeRequest{
		Name: t.Name(), Parameters: parameters, CapacityRange: r,
		VolumeCapabilities: []*csi.VolumeCapability{withMountFlags()},
	})
	return resp.GetVolume(), err
}

// A subdirectory is one of the export, reached without links.
func TestSubdirectories(t *testing.T) {
	root := t.TempDir()
	for _, err := range []error{
		os.MkdirAll(filepath.Join(root, "team", "a"), 0o755),
		os.Symlink("/etc", filepath.Join(root, "out")),
		os.Symlink("team", filepath.Join(root, "link")),
		os.WriteFile(filepath.Join(root, "file"), nil, 0o644),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for dir, ok := range map[string]bool{
		"team": true, "team/a": true,
		"out": false, "link/a": false, "file": false, "none": false, "../etc": false, "team/../..": false,
	} {
		t.Run(dir, func(t *testing.T) {
			d := newDriver(t, root)
			v, err := create(t, d, map[string]string{"subdirectory": dir}, nil)
			switch {
			case ok && err != nil:
				t.Fatal(err)
			case !ok && status.Code(err) != codes.InvalidArgument:
				t.Fatalf("got %v, want INVALID_ARGUMENT", err)
			case !ok:
				return
			}
			want := dir + "/volumes/" + v.GetVolumeId()
			if got := v.GetVolumeContext()["directory"]; got != want {
				t.Errorf("the volume is in %s, want %s", got, want)
			}
			if _, err := os.Stat(filepath.Join(root, want)); err != nil {
				t.Error(err)
			}
		})
	}
}

// A size is refused, never pretended.
func TestNoSize(t *testing.T) {
	d := newDriver(t, t.TempDir())
	for _, r := range []*csi.CapacityRange{{RequiredBytes: 1}, {LimitBytes: 1 << 40}} {
		if _, err := create(t, d, nil, r); status.Code(err) != codes.OutOfRange {
			t.Errorf("%v: got %v, want OUT_OF_RANGE", r, err)
		}
	}
	v, err := create(t, d, nil, nil)
	if err != nil || v.GetCapacityBytes() != 0 || len(v.GetAccessibleTopology()) != 0 {
		t.Errorf("got %v, %v; want a volume of no known size that every node reaches", v, err)
	}
}

func prepareRequest(t *testing.T, id string, volumeContext map[string]string) *prepare.NodePrepareVolumeRequest {
	t.Helper()
	return &prepare.NodePrepareVolumeRequest{
		VolumeId: id, PrepareId: "c1", VolumeContext: volumeContext, PreparePath: t.TempDir(),
		VolumeCapability: withMountFlags(),
		Performer: &prepare.Performer{
			Kernel: prepare.Performer_NODE, Kinds: []prepare.MountKind{prepare.MountKind_MOUNT_KIND_FILESYSTEM}, FsTypes: []string{"nfs", "nfs4"},
		},
	}
}

// A driver for a node takes the place of a volume from its context, and is not
// led out of the export, or to another volume, by it.
func TestNodeWithoutRoot(t *testing.T) {
	d := newDriver(t, "")
	resp, err := d.preparations.NodePrepareVolume(t.Context(), prepareRequest(t, "v1", map[string]string{"directory": "team/volumes/v1", "vers": "3"}))
	if err != nil {
		t.Fatal(err)
	}
	fs := resp.GetMountSpecs()[0].GetFilesystem()
	if fs.GetOpaque() != "server:/srv/team/volumes/v1" || fs.GetFsType() != "nfs" || !strings.Contains(joined(fs.GetParameters()), "vers=3") {
		t.Errorf("got %v", fs)
	}
	for name, tt := range map[string]struct {
		context map[string]string
		code    codes.Code
	}{
		"none":           {nil, codes.NotFound},
		"climbs":         {map[string]string{"directory": "../volumes/v2"}, codes.InvalidArgument},
		"climbs within":  {map[string]string{"directory": "a/../../volumes/v2"}, codes.InvalidArgument},
		"absolute":       {map[string]string{"directory": "/volumes/v2"}, codes.InvalidArgument},
		"another volume": {map[string]string{"directory": "volumes/v1"}, codes.InvalidArgument},
		"a part of one":  {map[string]string{"directory": "xvolumes/v2"}, codes.InvalidArgument},
		"a comma":        {map[string]string{"directory": "a,ro/volumes/v2"}, codes.InvalidArgument},
		"no version":     {map[string]string{"directory": "volumes/v2", "vers": "4"}, codes.InvalidArgument},
	} {
		t.Run(name, func(t *testing.T) {
			r := prepareRequest(t, "v2", tt.context)
			r.PrepareId = "c2"
			if _, err := d.preparations.NodePrepareVolume(t.Context(), r); status.Code(err) != tt.code {
				t.Errorf("got %v, want %v", err, tt.code)
			}
		})
	}
}

// The performer decides what can be answered.
func TestPerformers(t *testing.T) {
	d := newDriver(t, "")
	for name, change := range map[string]func(*prepare.NodePrepareVolumeRequest){
		"another kernel": func(r *prepare.NodePrepareVolumeRequest) { r.Performer.Kernel = prepare.Performer_OTHER },
		"no filesystem": func(r *prepare.NodePrepareVolumeRequest) {
			r.Performer.Kinds = []prepare.MountKind{prepare.MountKind_MOUNT_KIND_BIND}
		},
		"no NFS": func(r *prepare.NodePrepareVolumeRequest) { r.Performer.FsTypes = []string{"ext4"} },
		"no NFS of version 3": func(r *prepare.NodePrepareVolumeRequest) {
			r.Performer.FsTypes = []string{"nfs4"}
			r.VolumeCapability = withMountFlags("vers=3")
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := prepareRequest(t, "v1", map[string]string{"directory": "volumes/v1"})
			change(r)
			if _, err := d.preparations.NodePrepareVolume(t.Context(), r); status.Code(err) != codes.FailedPrecondition {
				t.Errorf("got %v, want FAILED_PRECONDITION", err)
			}
		})
	}
}
