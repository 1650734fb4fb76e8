package fuse

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/drivers/server"
)

// phase of a volume's life, as recorded.
type phase string

const (
	creating phase = "creating" // its directory may be missing
	ready    phase = "ready"
	deleting phase = "deleting" // its directory may be there in part
)

// medium is where the files of a volume are.
type medium string

const (
	disk   medium = "disk"
	memory medium = "memory"
)

// volume is the record of a volume; its key is (volume_id, name).
type volume struct {
	Phase  phase  `json:"phase"`
	Medium medium `json:"medium"`
	// UID and GID are the owner that consumers see.
	UID uint32 `json:"uid"`
	GID uint32 `json:"gid"`
}

type entry = server.Entry[volume]

// The directory of a volume holds what consumers see and, for each
// preparation, what they have removed and may yet have open.
const (
	volumesDir = "volumes"
	dataDir    = "data"
	orphansDir = "orphans"
)

// newVolumeID returns an id of 32 hex digits, never given before: not even to
// a volume of the same name.
func newVolumeID() string {
	b := make([]byte, 16)
	_, _ = rand.Read(b) // it ends the program rather than fail
	return hex.EncodeToString(b)
}

// find returns the volume of an id if it can be used.
func (d *Driver) find(id string) (entry, bool, error) {
	found, err := d.volumes.OfVolume(id)
	if err != nil || len(found) == 0 {
		return entry{}, false, err
	}
	return found[0], found[0].Value.Phase == ready, nil
}

// home is the directory of all volumes of a medium.
func (d *Driver) home(m medium) (string, error) {
	switch {
	case m == disk:
		return filepath.Join(d.config.Dir, volumesDir), nil
	case d.config.MemoryDir == "":
		return "", errors.New("the volume is in memory, and this driver was given no directory for that; start it with --memory-dir")
	}
	return filepath.Join(d.config.MemoryDir, volumesDir), nil
}

// open opens the directory of all volumes of a medium, made if it is missing.
func (d *Driver) open(m medium) (*os.File, error) {
	home, err := d.home(m)
	if err != nil {
		return nil, err
	}
	if err := os.Mkdir(home, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return nil, err
	}
	f, err := os.OpenFile(home, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	return f, nil
}

// makeVolume makes the directories of a volume durable. They may be there
// from an attempt that was cut off.
func (d *Driver) makeVolume(m medium, id string) error {
	volumes, err := d.open(m)
	if err != nil {
		return err
	}
	defer volumes.Close()
	root, err := os.OpenRoot(volumes.Name())
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }()
	for _, name := range []string{id, id + "/" + dataDir, id + "/" + orphansDir} {
		if err := root.Mkdir(name, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
	}
	// Consumers run as any user; the directory above keeps others out.
	if err := root.Chmod(id+"/"+dataDir, 0o777); err != nil {
		return err
	}
	for _, name := range []string{id, "."} {
		f, err := root.Open(name)
		if err != nil {
			return err
		}
		err = f.Sync()
		_ = f.Close()
		if err != nil {
			return err
		}
	}
	return nil
}

// The parameters of CreateVolume.
const (
	parameterMedium = "medium"
	parameterOwner  = "owner"
)

// parse reads the parameters of a volume.
func (d *Driver) parse(parameters map[string]string) (volume, error) {
	v := volume{Phase: creating, Medium: disk}
	for key, value := range parameters {
		field := fmt.Sprintf("parameters[%q]", key)
		switch key {
		case parameterMedium:
			switch v.Medium = medium(value); v.Medium {
			case disk:
			case memory:
				if d.config.MemoryDir == "" {
					return v, server.Invalid(field, "memory is not offered by this node's plugin", "use disk, or start the plugin with --memory-dir")
				}
			default:
				return v, server.Invalid(field, "is neither disk nor memory", "use one of them")
			}
		case parameterOwner:
			uid, gid, ok := strings.Cut(value, ":")
			u, uerr := strconv.ParseUint(uid, 10, 32)
			g, gerr := strconv.ParseUint(gid, 10, 32)
			if !ok || uerr != nil || gerr != nil || u == 1<<32-1 || g == 1<<32-1 {
				return v, server.Invalid(field, "is not UID:GID, two decimal numbers", "use for example 1000:1000")
			}
			v.UID, v.GID = uint32(u), uint32(g)
		default:
			return v, server.Invalid(field, "is unknown", fmt.Sprintf("leave it out; this plugin knows %q and %q", parameterMedium, parameterOwner))
		}
	}
	return v, nil
}

func (d *Driver) describe(e entry) *csi.Volume {
	return &csi.Volume{
		VolumeId:           e.Key.Volume,
		AccessibleTopology: []*csi.Topology{d.topology()},
	}
}
