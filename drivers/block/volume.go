package block

import (
	"crypto/rand"
	"encoding/hex"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/drivers/block/filesystem"
	"github.com/csi-prepare/csi-prepare/drivers/server"
)

// phase of the life of a volume or snapshot, as recorded.
type phase string

const (
	creating phase = "creating" // its file may be missing
	ready    phase = "ready"
	deleting phase = "deleting" // its file may be gone
)

// volume is the record of a volume; its key is (volume_id, name).
type volume struct {
	Phase    phase `json:"phase"`
	Capacity int64 `json:"capacity_bytes"`
	// Inode of its file, 0 before there is one.
	Inode uint64 `json:"inode,omitempty"`
	// Disk is the real device it is, if it is none of the files.
	Disk *disk `json:"disk,omitempty"`
	// Source it began as a copy of.
	Source *source `json:"source,omitempty"`
	// Format is the filesystem the driver made, or began to make.
	Format *format `json:"format,omitempty"`
}

// source of a volume: a snapshot or another volume.
type source struct {
	Snapshot string `json:"snapshot,omitempty"`
	Volume   string `json:"volume,omitempty"`
}

// format is on disk before mkfs runs: what a crash leaves on a device that was
// proven blank is then known to be mkfs's and nobody's data.
type format struct {
	Type filesystem.Type `json:"type"`
	Made bool            `json:"made"`
}

// snapshot is the record of a snapshot; its key is (snapshot_id, name).
type snapshot struct {
	Phase   phase     `json:"phase"`
	Volume  string    `json:"volume"`
	Size    int64     `json:"size_bytes"`
	Created time.Time `json:"created"`
	Inode   uint64    `json:"inode,omitempty"`
	// Format of the volume then.
	Format *format `json:"format,omitempty"`
}

type (
	volumeEntry   = server.Entry[volume]
	snapshotEntry = server.Entry[snapshot]
)

// newID returns an id of 32 hex digits, never given before: not even to a
// volume of the same name.
func newID() string {
	b := make([]byte, 16)
	rand.Read(b)
	return hex.EncodeToString(b)
}

var (
	errNoVolume   = status.Error(codes.NotFound, "volume_id: there is no such volume; ListVolumes shows those there are")
	errNoSnapshot = status.Error(codes.NotFound, "snapshot_id: there is no such snapshot; ListSnapshots shows those there are")
)

// find returns the volume of an id in whatever phase; one without a key where
// there is none.
func (d *Driver) find(id string) (volumeEntry, error) {
	found, err := d.volumes.OfVolume(id)
	if err != nil || len(found) == 0 {
		return volumeEntry{}, err
	}
	return found[0], nil
}

// usable returns the volume of an id, or NOT_FOUND.
func (d *Driver) usable(id string) (volumeEntry, error) {
	e, err := d.find(id)
	if err == nil && e.Value.Phase != ready {
		err = errNoVolume
	}
	return e, err
}

func (d *Driver) findSnapshot(id string) (snapshotEntry, error) {
	found, err := d.snapshots.OfVolume(id)
	if err != nil || len(found) == 0 {
		return snapshotEntry{}, err
	}
	return found[0], nil
}

func (d *Driver) describe(e volumeEntry) *csi.Volume {
	v := &csi.Volume{
		VolumeId:           e.Key.Volume,
		CapacityBytes:      e.Value.Capacity,
		AccessibleTopology: []*csi.Topology{d.topology()},
	}
	if s := e.Value.Source; s != nil {
		v.ContentSource = s.message()
	}
	return v
}

func (s *source) message() *csi.VolumeContentSource {
	if s.Snapshot != "" {
		return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{
			Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: s.Snapshot},
		}}
	}
	return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{
		Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: s.Volume},
	}}
}

func sourceOf(m *csi.VolumeContentSource) *source {
	switch s := m.GetType().(type) {
	case *csi.VolumeContentSource_Snapshot:
		return &source{Snapshot: s.Snapshot.GetSnapshotId()}
	case *csi.VolumeContentSource_Volume:
		return &source{Volume: s.Volume.GetVolumeId()}
	}
	return nil
}

func (d *Driver) topology() *csi.Topology {
	return &csi.Topology{Segments: map[string]string{TopologyKey: d.config.NodeID}}
}

// isHere tells whether a topology means this node.
func (d *Driver) isHere(t *csi.Topology) bool {
	return len(t.GetSegments()) == 1 && t.GetSegments()[TopologyKey] == d.config.NodeID
}
