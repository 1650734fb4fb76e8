package co

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"github.com/csi-prepare/csi-prepare/reference/perform"
)

// recordVersion is the version of the JSON form of a Record.
const recordVersion = 1

// Key names a preparation. Volume ids are unique within a plugin only.
type Key struct {
	Driver    string `json:"driver"`
	VolumeID  string `json:"volume_id"`
	PrepareID string `json:"prepare_id"`
}

// String is "driver volume_id prepare_id".
func (k Key) String() string { return k.Driver + " " + k.VolumeID + " " + k.PrepareID }

// volume is the part of a position that all preparations of a volume share.
func (k Key) volume() string { return digest(k.Driver, k.VolumeID) }

// position is the name of everything on disk that belongs to a preparation: a
// digest of each part, so that no foreign text becomes part of a path, and so
// that a record that cannot be read still tells whose it is.
func (k Key) position() string { return k.volume() + "." + digest(k.PrepareID) }

// digest is 32 hexadecimal digits; no two lists of texts share it.
func digest(texts ...string) string {
	h := sha256.New()
	for _, t := range texts {
		fmt.Fprintf(h, "%d:%s", len(t), t)
	}
	return hex.EncodeToString(h.Sum(nil)[:16])
}

// Phase is what a preparation is about to go through. A record is written
// with a phase before its act begins, so that the act may have happened,
// wholly, in part or not at all.
type Phase string

// The phases, in order. Performed is the only one at rest: all others are
// under way, or were interrupted, or could not be finished.
const (
	Staging     Phase = "staging"
	Preparing   Phase = "preparing"
	Performing  Phase = "performing"
	Performed   Phase = "performed"
	Undoing     Phase = "undoing"
	Unpreparing Phase = "unpreparing"
	Unstaging   Phase = "unstaging"
	Removing    Phase = "removing" // of directories
)

var phases = []Phase{Staging, Preparing, Performing, Performed, Undoing, Unpreparing, Unstaging, Removing}

// Record is what the ledger says of one preparation. It holds no secret, no
// context and no value of a mount flag.
type Record struct {
	// Version is 1.
	Version int `json:"version"`
	// BootID is /proc/sys/kernel/random/boot_id. In another boot the
	// preparation and its performance are void.
	BootID string `json:"boot_id"`
	Driver string `json:"driver"`
	// Endpoint is the plugin's, as "unix:///path".
	Endpoint  string `json:"endpoint"`
	VolumeID  string `json:"volume_id"`
	PrepareID string `json:"prepare_id"`
	// PreparePath and StagingPath are those of the calls; StagingPath is
	// empty where the plugin does not stage.
	PreparePath string `json:"prepare_path"`
	StagingPath string `json:"staging_target_path,omitempty"`
	// CallerStages says that the staging path is not the CO's own.
	CallerStages bool `json:"caller_stages,omitempty"`
	Readonly     bool `json:"readonly"`
	Ephemeral    bool `json:"ephemeral,omitempty"`
	// Target is the path in the consumer, TargetNamespace the id of the
	// mount namespace it is in.
	Target          string `json:"target"`
	TargetNamespace uint64 `json:"target_mntns_id"`
	// RequestDigest tells calls with different arguments apart. Secrets and
	// what a repeat may refresh are no part of it.
	RequestDigest string `json:"request_digest"`

	Phase Phase `json:"phase"`
	// Uncertain says that a call of this phase was begun, or about to be,
	// and that its outcome is not known.
	Uncertain bool `json:"uncertain"`
	// SpecDigests are of the mount specs that were accepted.
	SpecDigests []string `json:"spec_digests,omitempty"`
	// Asked is what was asked for, and Specs are the mount specs that were
	// accepted, as protojson and without secrets. They are for reading:
	// nothing is decided by them.
	Asked *Asked          `json:"asked,omitempty"`
	Specs json.RawMessage `json:"mount_specs,omitempty"`
	// Receipts are of what is, or was about to be, performed.
	Receipts []perform.Receipt `json:"receipts,omitempty"`
	// Devices have to be free again after undo.
	Devices []Device `json:"devices,omitempty"`

	// Prepares counts NodePrepareVolume calls; Error is why the last act
	// failed, without secrets.
	Prepares int       `json:"prepares"`
	Error    string    `json:"error,omitempty"`
	Created  time.Time `json:"created"`
	Changed  time.Time `json:"changed"`
}

// Key returns the key of the record.
func (r *Record) Key() Key { return Key{r.Driver, r.VolumeID, r.PrepareID} }

// staged says that the CO stages the volume, and unstages it at the end.
func (r *Record) staged() bool { return r.StagingPath != "" && !r.CallerStages }

// uses says that the volume has to stay staged for the preparation.
func (r *Record) uses(boot string) bool {
	return r.BootID == boot && r.StagingPath != "" && r.Phase != Unstaging && r.Phase != Removing
}

// check refuses what Put cannot have written.
func (r *Record) check() error {
	known := false
	for _, p := range phases {
		known = known || r.Phase == p
	}
	for _, f := range []struct {
		name  string
		wrong bool
	}{
		{"boot_id", r.BootID == ""},
		{"driver", r.Driver == ""},
		{"endpoint", r.Endpoint == ""},
		{"volume_id", r.VolumeID == ""},
		{"prepare_id", r.PrepareID == ""},
		{"prepare_path", !cleanPath(r.PreparePath)},
		{"staging_target_path", r.StagingPath != "" && !cleanPath(r.StagingPath)},
		{"phase", !known},
		{"receipts", r.Phase == Performed && len(r.Receipts) == 0},
	} {
		if f.wrong {
			return fmt.Errorf("field %s: missing or not what a CO writes", f.name)
		}
	}
	return nil
}

// cleanPath says that a path is absolute, in its shortest form, and not the
// root.
func cleanPath(p string) bool {
	return strings.HasPrefix(p, "/") && p != "/" && filepath.Clean(p) == p
}
