package hostpath

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/drivers/server"
	"github.com/csi-prepare/csi-prepare/drivers/tree"
)

// phase of a volume's life, as recorded.
type phase string

const (
	creating phase = "creating" // its directory may be missing
	ready    phase = "ready"
	deleting phase = "deleting" // its directory may be there in part
)

// volume is the record of a volume; its key is (volume_id, name).
type volume struct {
	Grant string `json:"grant"`
	Phase phase  `json:"phase"`
	// Capacity is what anybody can store, Ceiling what nobody can exceed,
	// in bytes. Both are 0 for a volume that shares its filesystem.
	Capacity int64 `json:"capacity_bytes,omitempty"`
	Ceiling  int64 `json:"ceiling_bytes,omitempty"`
}

type entry = server.Entry[volume]

// volumesDir is the directory in a grant that holds the volumes, one directory
// each. Its mode is 0700: only the driver, and the CO that binds from it, get
// to the volumes below, which are open to every user of a consumer.
const volumesDir = "volumes"

// newVolumeID returns an id of 32 hex digits, never given before: not even to
// a volume of the same name.
func newVolumeID() string {
	b := make([]byte, 16)
	rand.Read(b)
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

func (d *Driver) grant(name string) (Grant, bool) {
	for _, g := range d.config.Grants {
		if g.Name == name {
			return g, true
		}
	}
	return Grant{}, false
}

// grantOf returns the grant a volume was created in.
func (d *Driver) grantOf(v volume) (Grant, error) {
	g, ok := d.grant(v.Grant)
	if !ok {
		return g, fmt.Errorf("the volume lies in grant %s, which this driver was not given; start it with --grant %s=DIR", v.Grant, v.Grant)
	}
	return g, nil
}

// openVolumes opens the directory of all volumes of a grant, and makes it if
// asked to.
func openVolumes(g Grant, create bool) (int, error) {
	dir, err := g.open()
	if err != nil {
		return -1, err
	}
	defer unix.Close(dir)
	if create {
		switch err := unix.Mkdirat(dir, volumesDir, 0o700); {
		case errors.Is(err, unix.EEXIST):
		case err != nil:
			return -1, fmt.Errorf("grant %s: make %s: %w", g.Name, volumesDir, err)
		default:
			if err := syncFd(dir, "."); err != nil {
				return -1, fmt.Errorf("grant %s: %w", g.Name, err)
			}
		}
	}
	fd, err := tree.Open(dir, volumesDir, unix.O_RDONLY)
	if err != nil {
		return -1, fmt.Errorf("grant %s: open %s: %w", g.Name, volumesDir, err)
	}
	return fd, nil
}

// makeDir makes the directory of a volume durable. It may be there from an
// attempt that was cut off.
func makeDir(g Grant, id string) error {
	volumes, err := openVolumes(g, true)
	if err != nil {
		return err
	}
	defer unix.Close(volumes)
	if err := unix.Mkdirat(volumes, id, 0o700); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("grant %s: make the directory of the volume: %w", g.Name, err)
	}
	fd, err := tree.Open(volumes, id, unix.O_RDONLY)
	if err != nil {
		return fmt.Errorf("grant %s: open the directory of the volume: %w", g.Name, err)
	}
	defer unix.Close(fd)
	err = unix.Fchmod(fd, 0o777) // whatever the umask
	if err == nil {
		err = unix.Fsync(volumes)
	}
	if err != nil {
		return fmt.Errorf("grant %s: %w", g.Name, err)
	}
	return nil
}

// openDir opens the directory of a volume.
func openDir(g Grant, id string, flags uint64) (int, error) {
	volumes, err := openVolumes(g, false)
	if err != nil {
		return -1, err
	}
	defer unix.Close(volumes)
	fd, err := tree.Open(volumes, id, flags)
	if err != nil {
		return -1, fmt.Errorf("grant %s: open the directory of the volume: %w", g.Name, err)
	}
	return fd, nil
}

// syncFd makes durable what a directory holds, found from a descriptor that
// may be O_PATH.
func syncFd(dir int, name string) error {
	fd, err := tree.Open(dir, name, unix.O_RDONLY)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return unix.Fsync(fd)
}

func (d *Driver) describe(e entry) *csi.Volume {
	return &csi.Volume{
		VolumeId:           e.Key.Volume,
		CapacityBytes:      e.Value.Capacity,
		AccessibleTopology: []*csi.Topology{d.topology()},
	}
}
