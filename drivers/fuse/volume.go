package fuse

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/drivers/directory"
	"github.com/csi-prepare/csi-prepare/drivers/server"
)

// The home of a volume is its medium: where its files are. Those that a program
// serves are elsewhere, and the directory of such a volume stays empty.
const (
	disk    = "disk"
	memory  = "memory"
	program = "program"
)

// traits are what the parameters of a volume say.
type traits struct {
	// UID and GID are who consumers see its files to belong to.
	UID uint32 `json:"uid"`
	GID uint32 `json:"gid"`
	// Share lets its preparations have one mount and one server.
	Share bool `json:"share,omitempty"`
	// Program serves it, of Source.
	Program string `json:"program,omitempty"`
	Source  string `json:"source,omitempty"`
}

type volume = directory.Volume[traits]

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
	case medium == disk, medium == program:
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
	parameterMedium  = "medium"
	parameterOwner   = "owner"
	parameterShare   = "share"
	parameterProgram = "program"
	parameterSource  = "source"
)

// parse reads the parameters of a volume.
func (d *Driver) parse(parameters map[string]string) (home string, o traits, err error) {
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
			o.UID, o.GID = uint32(u), uint32(g)
		case parameterShare:
			if o.Share = value == "true"; !o.Share && value != "false" {
				return home, o, server.Invalid(field, "is neither true nor false", "use one of them")
			}
		case parameterProgram:
			if d.config.Programs[value] == nil {
				return home, o, server.Invalid(field, "is no program of this plugin's", "use one the plugin was started with: "+programNames(d.config.Programs))
			}
			o.Program = value
		case parameterSource:
			o.Source = value
		default:
			return home, o, server.Invalid(field, "is unknown", "leave it out; this plugin knows medium, owner, share, program and source")
		}
	}
	return d.parseProgram(parameters, home, o)
}

// parseProgram sees that the parameters of a volume go with its program.
func (d *Driver) parseProgram(parameters map[string]string, home string, o traits) (string, traits, error) {
	field := func(key string) string { return fmt.Sprintf("parameters[%q]", key) }
	p, given := d.config.Programs[o.Program]
	_, source := parameters[parameterSource]
	_, medium := parameters[parameterMedium]
	switch {
	case !given && source:
		return home, o, server.Invalid(field(parameterSource), "is of a volume that a program serves", "leave it out, or set program")
	case !given:
		return home, o, nil
	case medium || o.Share:
		return home, o, server.Invalid(field(parameterProgram), "goes with neither medium nor share", "leave them out: the program's files are elsewhere, and each preparation has one of its own")
	case p.hasSource():
		if rule, remedy := checkSource(o.Source); rule != "" {
			return home, o, server.Invalid(field(parameterSource), rule, remedy)
		}
	case source:
		return home, o, server.Invalid(field(parameterSource), "is not used by this program", "leave it out")
	}
	return program, o, nil
}

func programNames(programs map[string]Program) string {
	if len(programs) == 0 {
		return "none"
	}
	return strings.Join(slices.Sorted(maps.Keys(programs)), ", ")
}

// CheckParameters implements directory.Driver.
func (d *Driver) CheckParameters(parameters map[string]string) error {
	_, _, err := d.parse(parameters)
	return err
}

// Place implements directory.Driver.
func (d *Driver) Place(_ string, req *csi.CreateVolumeRequest, from string) (string, traits, error) {
	home, o, err := d.parse(req.GetParameters())
	if err == nil && from != "" && (home == program || from == program) {
		err = server.Invalid("volume_content_source", "is not for volumes that a program serves, this plugin does not have their files", "leave it out")
	}
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
func (d *Driver) SnapshotHome(v volume) (string, error) {
	if v.Home == program {
		return "", server.Invalid("source_volume_id", "is a volume that a program serves, this plugin does not have its files", "make the snapshot where they are")
	}
	return v.Home, nil
}
