package fuse

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/drivers/directory"
	"github.com/csi-prepare/csi-prepare/drivers/server"
)

// The home of a volume is its medium: where its files are.
const (
	disk   = "disk"
	memory = "memory"
)

// owner is who consumers see the files of a volume to belong to.
type owner struct {
	UID uint32 `json:"uid"`
	GID uint32 `json:"gid"`
}

type volume = directory.Volume[owner]

// The directory of a volume holds what consumers see and, for each
// preparation, what they have removed and may yet have open.
const (
	dataDir    = "data"
	orphansDir = "orphans"
)

// home is the directory of all volumes of a medium.
func (d *Driver) home(medium string) (string, error) {
	dir, err := d.place(medium)
	return filepath.Join(dir, directory.VolumesDir), err
}

func (d *Driver) place(medium string) (string, error) {
	switch {
	case medium == disk:
		return d.config.Dir, nil
	case d.config.MemoryDir == "":
		return "", errors.New("the volume is in memory, and this driver was given no directory for that; start it with --memory-dir")
	}
	return d.config.MemoryDir, nil
}

// Open implements directory.Driver.
func (d *Driver) Open(home string) (int, error) {
	dir, err := d.place(home)
	if err != nil {
		return -1, err
	}
	return unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
}

// open opens the directory of all volumes of a medium.
func (d *Driver) open(medium string) (*os.File, error) {
	home, err := d.home(medium)
	if err != nil {
		return nil, err
	}
	f, err := os.OpenFile(home, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	return f, nil
}

// The parameters of CreateVolume.
const (
	parameterMedium = "medium"
	parameterOwner  = "owner"
)

// parse reads the parameters of a volume.
func (d *Driver) parse(parameters map[string]string) (home string, o owner, err error) {
	home = disk
	for key, value := range parameters {
		field := fmt.Sprintf("parameters[%q]", key)
		switch key {
		case parameterMedium:
			switch home = value; home {
			case disk:
			case memory:
				if d.config.MemoryDir == "" {
					return home, o, server.Invalid(field, "memory is not offered by this node's plugin", "use disk, or start the plugin with --memory-dir")
				}
			default:
				return home, o, server.Invalid(field, "is neither disk nor memory", "use one of them")
			}
		case parameterOwner:
			uid, gid, ok := strings.Cut(value, ":")
			u, uerr := strconv.ParseUint(uid, 10, 32)
			g, gerr := strconv.ParseUint(gid, 10, 32)
			if !ok || uerr != nil || gerr != nil || u == 1<<32-1 || g == 1<<32-1 {
				return home, o, server.Invalid(field, "is not UID:GID, two decimal numbers", "use for example 1000:1000")
			}
			o = owner{UID: uint32(u), GID: uint32(g)}
		default:
			return home, o, server.Invalid(field, "is unknown", fmt.Sprintf("leave it out; this plugin knows %q and %q", parameterMedium, parameterOwner))
		}
	}
	return home, o, nil
}

// CheckParameters implements directory.Driver.
func (d *Driver) CheckParameters(parameters map[string]string) error {
	_, _, err := d.parse(parameters)
	return err
}

// Place implements directory.Driver.
func (d *Driver) Place(_ string, req *csi.CreateVolumeRequest, _ string) (string, owner, error) {
	home, o, err := d.parse(req.GetParameters())
	if r := req.GetCapacityRange(); err == nil && (r.GetRequiredBytes() > 0 || r.GetLimitBytes() > 0) {
		err = status.Error(codes.OutOfRange, "capacity_range: a directory cannot be held to a size; leave it out")
	}
	return home, o, err
}

// Differs implements directory.Driver.
func (d *Driver) Differs(v volume, req *csi.CreateVolumeRequest) (field, how string) {
	if r := req.GetCapacityRange(); r.GetRequiredBytes() > 0 || r.GetLimitBytes() > 0 {
		return "capacity_range", "has no size"
	}
	home, o, err := d.parse(req.GetParameters())
	if err != nil || home != v.Home || o != v.Traits {
		return "parameters", "was created with others"
	}
	return "", ""
}

// Free implements directory.Driver: a volume has nothing to itself.
func (d *Driver) Free(string, volume) {}

// Capacity implements directory.Driver: it is not known.
func (d *Driver) Capacity(volume) int64 { return 0 }

// SnapshotHome implements directory.Driver.
func (d *Driver) SnapshotHome(v volume) (string, error) { return v.Home, nil }
