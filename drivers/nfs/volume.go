package nfs

import (
	"context"
	"errors"
	"fmt"
	"path"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/csi-prepare/csi-prepare/drivers/directory"
	"github.com/csi-prepare/csi-prepare/drivers/server"
	"github.com/csi-prepare/csi-prepare/drivers/tree"
)

// traits are what a volume was created with besides its home, which is a
// directory of the export, "." for its root.
type traits struct {
	// Version of the protocol, empty where the CO's mount flags are to say.
	Version version `json:"version,omitempty"`
}

type (
	volume = directory.Volume[traits]
	entry  = directory.Entry[traits]
)

// The parameters of CreateVolume.
const (
	parameterVersion      = "vers"
	parameterSubdirectory = "subdirectory"
)

// The keys of volume_context: all that a node needs of a volume.
const (
	contextDirectory = "directory" // of the volume, relative to the export
	contextVersion   = "vers"
)

const (
	// maxSource is what the kernel takes, in bytes.
	maxSource = 255
	// idLength is that of the ids the controller gives.
	idLength = 32
)

// maxBelow is as long as the longest directory of a volume.
var maxBelow = strings.Repeat("x", maxSubdirectory+1+len(directory.VolumesDir)+1+idLength)

func directoryOf(e entry) string {
	return path.Join(e.Value.Home, directory.VolumesDir, e.Key.Volume)
}

func volumeContext(e entry) map[string]string {
	c := map[string]string{contextDirectory: directoryOf(e)}
	if v := e.Value.Traits.Version; v != "" {
		c[contextVersion] = string(v)
	}
	return c
}

// CheckParameters implements directory.Driver.
func (d *Driver) CheckParameters(parameters map[string]string) error {
	for key, value := range parameters {
		field := fmt.Sprintf("parameters[%q]", key)
		switch key {
		case parameterVersion:
			if _, ok := versions[value]; !ok {
				return server.Invalid(field, "does not name a version that is fixed", versionRule)
			}
		case parameterSubdirectory:
			if err := checkSubdirectory(value); err != nil {
				return server.Invalid(field, err.Error(), "name a directory that is there in the export")
			}
		default:
			return server.Invalid(field, "is unknown", fmt.Sprintf("leave it out; this plugin knows %q and %q", parameterSubdirectory, parameterVersion))
		}
	}
	return nil
}

// home is the directory of the export that a request names.
func home(req *csi.CreateVolumeRequest) string {
	return path.Join(".", req.GetParameters()[parameterSubdirectory])
}

// Place implements directory.Driver. A size is refused, as nothing would hold
// the volume to it.
func (d *Driver) Place(_ string, req *csi.CreateVolumeRequest, _ string) (string, traits, error) {
	if hasRange(req.GetCapacityRange()) {
		return "", traits{}, status.Error(codes.OutOfRange, "capacity_range: NFS holds no directory to a size; leave it out, GetCapacity tells what is free on the server")
	}
	fd, err := d.Open(home(req))
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP), errors.Is(err, unix.EXDEV):
		return "", traits{}, server.Invalid(fmt.Sprintf("parameters[%q]", parameterSubdirectory),
			"is no directory of the export that is reached without links and mounts", "have the operator make it, or leave it out")
	case err != nil:
		return "", traits{}, err
	}
	_ = unix.Close(fd)
	return home(req), traits{versions[req.GetParameters()[parameterVersion]]}, nil
}

func hasRange(r *csi.CapacityRange) bool { return r.GetRequiredBytes() > 0 || r.GetLimitBytes() > 0 }

// Differs implements directory.Driver.
func (d *Driver) Differs(v volume, req *csi.CreateVolumeRequest) (field, how string) {
	switch p := req.GetParameters(); {
	case hasRange(req.GetCapacityRange()):
		return "capacity_range", "has no size"
	case p[parameterSubdirectory] != "" && home(req) != v.Home:
		return "parameters", "lies in another directory"
	case p[parameterVersion] != "" && versions[p[parameterVersion]] != v.Traits.Version:
		return "parameters", "is of another version of the protocol"
	}
	return "", ""
}

// Free implements directory.Driver: a volume takes nothing to itself.
func (d *Driver) Free(string, volume) {}

// Capacity implements directory.Driver: it is unknown.
func (d *Driver) Capacity(volume) int64 { return 0 }

// SnapshotHome implements directory.Driver: that of the volume.
func (d *Driver) SnapshotHome(v volume) (string, error) { return v.Home, nil }

// Open implements directory.Driver: a directory of the export, beneath its
// root and through no link.
func (d *Driver) Open(home string) (int, error) {
	root, err := unix.Open(d.config.Root, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("root of the export: open %s: %w", d.config.Root, err)
	}
	if home == "." {
		return root, nil
	}
	defer unix.Close(root)
	fd, err := tree.Open(root, home, unix.O_PATH)
	if err != nil {
		return -1, fmt.Errorf("root of the export: open %s in it: %w", home, err)
	}
	return fd, nil
}

// controller adds to the service what the export itself is asked.
type controller struct {
	*directory.Controller[traits]
	d *Driver
}

// GetCapacity implements csi.ControllerServer: what is free on the server, which
// no volume has to itself. A volume of a required size there is none.
func (c controller) GetCapacity(ctx context.Context, req *csi.GetCapacityRequest) (*csi.GetCapacityResponse, error) {
	if err := c.d.CheckParameters(req.GetParameters()); err != nil {
		return nil, err
	}
	none := &csi.GetCapacityResponse{MaximumVolumeSize: wrapperspb.Int64(0)}
	for i, capability := range req.GetVolumeCapabilities() {
		field := fmt.Sprintf("volume_capabilities[%d]", i)
		if err := server.CheckCapability(field, capability); err != nil {
			return nil, err
		}
		if reason := supported(capability); reason != "" {
			return none, nil
		}
	}
	st, err := c.d.statfs(ctx, "capacity", func() (int, error) { return c.d.Open(".") })
	if err != nil {
		return nil, err
	}
	none.AvailableCapacity = int64(st.Bavail) * st.Frsize
	return none, nil
}

// statfs asks the export, unless it is asked the same already, and waits for the
// answer no longer than ctx allows.
func (d *Driver) statfs(ctx context.Context, question string, open func() (int, error)) (*unix.Statfs_t, error) {
	done := d.measuring.DoChan(question, func() (any, error) {
		fd, err := open()
		if err != nil {
			return nil, err
		}
		defer unix.Close(fd)
		st := new(unix.Statfs_t)
		if err := unix.Fstatfs(fd, st); err != nil {
			return nil, fmt.Errorf("statfs: %w", err)
		}
		return st, nil
	})
	select {
	case r := <-done:
		if r.Err != nil {
			return nil, server.Status(r.Err)
		}
		return r.Val.(*unix.Statfs_t), nil
	case <-ctx.Done():
		return nil, server.Status(fmt.Errorf("the export does not answer: %w", ctx.Err()))
	}
}
