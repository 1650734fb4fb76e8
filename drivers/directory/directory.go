// Package directory is what drivers have in common whose volumes are
// directories of the node: the Controller service, snapshots and copies with
// it, the rules of capabilities, and the parts of the Node service that say
// the same for all of them.
//
// In a directory of the driver's own, a home, each volume is a directory of
// "volumes" and each snapshot one of "snapshots", by its id. Both have mode
// 0700, unless the driver says otherwise; the data of a volume is open to every user of a consumer. What is
// made, copied and removed is reached by descriptors, through no link and no
// mount.
package directory

import (
	"crypto/rand"
	"encoding/hex"
	"log/slog"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/drivers/server"
)

// The directories of a home.
const (
	VolumesDir   = "volumes"
	SnapshotsDir = "snapshots"
)

// Phase of the life of a volume or a snapshot, as recorded.
type Phase string

// The phases.
const (
	Creating Phase = "creating" // its directory may be missing, or half copied
	Ready    Phase = "ready"
	Deleting Phase = "deleting" // its directory may be there in part
)

// Volume is the record of a volume; its key is (volume_id, name). T is what
// the driver records beside.
type Volume[T comparable] struct {
	Phase Phase `json:"phase"`
	// Home is the driver's name of the home the volume is in.
	Home string `json:"home"`
	// Source is what it was copied from, zero for a volume that began empty.
	Source Source `json:"source,omitzero"`
	Traits T      `json:"traits"`
}

// Source names a snapshot or a volume, or neither.
type Source struct {
	Snapshot string `json:"snapshot,omitempty"`
	Volume   string `json:"volume,omitempty"`
}

// Snapshot is the record of a snapshot; its key is (snapshot_id, name).
type Snapshot struct {
	Phase   Phase     `json:"phase"`
	Home    string    `json:"home"`
	Volume  string    `json:"volume"`
	Created time.Time `json:"created,omitzero"`
	// Size is what a volume made of it has to have, in bytes, 0 if that is
	// not known.
	Size int64 `json:"size_bytes,omitempty"`
}

// Entry is a volume with its key.
type Entry[T comparable] = server.Entry[Volume[T]]

type snapshotEntry = server.Entry[Snapshot]

// Driver is what the homes of volumes know. Its errors are statuses that hold
// no secret, or become INTERNAL.
type Driver[T comparable] interface {
	// CheckParameters refuses parameters of CreateVolume the driver does not
	// have, with INVALID_ARGUMENT.
	CheckParameters(map[string]string) error
	// Place chooses the home and the traits of a new volume, which may be a
	// copy of what lies in the home from, and takes for the id what it needs
	// to itself.
	Place(id string, r *csi.CreateVolumeRequest, from string) (home string, traits T, err error)
	// Differs tells the field, and in words how, a volume is not what a
	// repeated call asks for; field is empty where it is.
	Differs(v Volume[T], r *csi.CreateVolumeRequest) (field, how string)
	// Free gives up what Place took.
	Free(id string, v Volume[T])
	// Capacity of a volume in bytes, 0 if it is not known.
	Capacity(v Volume[T]) int64
	// SnapshotHome chooses the home of a snapshot.
	SnapshotHome(v Volume[T]) (string, error)
	// Open opens a home.
	Open(home string) (fd int, err error)
}

// Layout is how the directory of a volume is divided.
type Layout struct {
	// Data is the directory consumers see, below that of the volume; empty
	// if they are one.
	Data string
	// Beside are directories of the driver's own.
	Beside []string
}

// Config is what a Controller is made of.
type Config[T comparable] struct {
	Driver Driver[T]
	Node   Node
	State  *server.State
	Layout Layout
	// Flights are shared with NodePrepare.
	Flights *server.Flights
	// Copies says that there are snapshots and clones.
	Copies bool
	// Capacity says that the driver serves GetCapacity itself.
	Capacity bool
	// Mode of the directories of all volumes and snapshots; 0700 if zero.
	Mode uint32
	// Capability stands for Supported and Attributes, if set: it tells why
	// no volume supports a capability, or what mount flag of it cannot be
	// honoured.
	Capability func(field string, c *csi.VolumeCapability, readonly bool) (reason string, err error)
	// Context is the volume_context of a volume, if set.
	Context func(Entry[T]) map[string]string
	Log     *slog.Logger
}

// Controller serves the Controller service. What it does not serve is
// UNIMPLEMENTED.
type Controller[T comparable] struct {
	csi.UnimplementedControllerServer

	config       Config[T]
	preparations *server.NodePrepare
	volumes      *server.Records[Volume[T]]
	snapshots    *server.Records[Snapshot]
	byName       server.Flights
	pages        *server.Pages
}

// New reads the volumes and snapshots there are.
func New[T comparable](c Config[T]) (*Controller[T], error) {
	if c.Mode == 0 {
		c.Mode = 0o700
	}
	if c.Capability == nil {
		c.Capability = checkCapability
	}
	d := &Controller[T]{config: c, pages: server.NewPages()}
	var err error
	if d.volumes, err = server.OpenRecords[Volume[T]](c.State, "volumes"); err != nil {
		return nil, err
	}
	if c.Copies {
		d.snapshots, err = server.OpenRecords[Snapshot](c.State, "snapshots")
	}
	return d, err
}

// Guard gives the controller the preparations, which keep a volume from being
// deleted or copied. It is called before the first request.
func (d *Controller[T]) Guard(p *server.NodePrepare) { d.preparations = p }

// Wait returns when nothing is being done any more.
func (d *Controller[T]) Wait() {
	d.byName.Wait()
	d.config.Flights.Wait()
}

// All returns the records of all volumes.
func (d *Controller[T]) All() ([]Entry[T], error) { return d.volumes.All() }

// Find returns the volume of an id, and whether it can be used.
func (d *Controller[T]) Find(id string) (Entry[T], bool, error) {
	found, err := d.volumes.OfVolume(id)
	if err != nil || len(found) == 0 {
		return Entry[T]{}, false, err
	}
	return found[0], found[0].Value.Phase == Ready, nil
}

// Usable is Find where a volume that cannot be used is NOT_FOUND.
func (d *Controller[T]) Usable(id string) (Entry[T], error) {
	e, ok, err := d.Find(id)
	if err == nil && !ok {
		err = ErrNoVolume
	}
	return e, err
}

// What there is not.
var (
	ErrNoVolume   = status.Error(codes.NotFound, "volume_id: there is no such volume; ListVolumes shows those there are")
	errNoSnapshot = status.Error(codes.NotFound, "snapshot_id: there is no such snapshot; ListSnapshots shows those there are")
)

func (d *Controller[T]) findSnapshot(id string) (snapshotEntry, bool, error) {
	found, err := d.snapshots.OfVolume(id)
	if err != nil || len(found) == 0 {
		return snapshotEntry{}, false, err
	}
	return found[0], found[0].Value.Phase == Ready, nil
}

// newID returns an id of 32 hex digits, never given before: not even to a
// volume of the same name.
func newID() string {
	b := make([]byte, 16)
	_, _ = rand.Read(b) // it ends the program rather than fail
	return hex.EncodeToString(b)
}
