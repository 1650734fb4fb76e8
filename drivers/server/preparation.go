package server

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"

	prepare "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// preparation is the record of one preparation. Its key is (volume_id,
// prepare_id), the boot it belongs to is the name of its directory.
type preparation struct {
	PreparePath       string         `json:"prepare_path"`
	StagingTargetPath string         `json:"staging_target_path,omitempty"`
	Readonly          bool           `json:"readonly"`
	AccessMode        accessMode     `json:"access_mode"`
	Arguments         argumentDigest `json:"arguments"`
	// Uncertain is true from before the driver acts until it has succeeded.
	Uncertain bool `json:"uncertain,omitempty"`
	// Answer of the first call that was OK.
	Answer answer `json:"answer,omitempty"`
}

// accessMode is a CSI access mode, by name on disk.
type accessMode csi.VolumeCapability_AccessMode_Mode

// MarshalText implements encoding.TextMarshaler.
func (m accessMode) MarshalText() ([]byte, error) {
	return []byte(csi.VolumeCapability_AccessMode_Mode(m).String()), nil
}

// UnmarshalText implements encoding.TextUnmarshaler.
func (m *accessMode) UnmarshalText(text []byte) error {
	n, ok := csi.VolumeCapability_AccessMode_Mode_value[string(text)]
	if !ok {
		return fmt.Errorf("unknown access mode %q", text)
	}
	*m = accessMode(n)
	return nil
}

// exclusive tells whether the mode allows one preparation of a volume alone.
// With the capability SINGLE_NODE_MULTI_WRITER the old single-node modes mean
// one workload; without it COs use them for several on one node.
func (m accessMode) exclusive(multiWriterCapability bool) bool {
	switch csi.VolumeCapability_AccessMode_Mode(m) {
	case csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER:
		return true
	case csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER, csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY:
		return multiWriterCapability
	}
	return false
}

// argumentDigest has a digest for each argument that makes a repeated call the
// same call, by field. Digests, because publish_context and mount flags may be
// sensitive and have no business on disk.
type argumentDigest map[string]string

// digestArguments leaves out what may differ in a repeat: secrets, the fields
// of the handoff, the performer, and the refreshable keys of volume_context.
func digestArguments(req *prepare.NodePrepareVolumeRequest, refreshable []string) argumentDigest {
	volumeContext := maps.Clone(req.GetVolumeContext())
	for _, k := range refreshable {
		delete(volumeContext, k)
	}
	c := req.GetVolumeCapability()
	capability := map[string]any{"access_mode": c.GetAccessMode().GetMode().String()}
	switch access := c.GetAccessType().(type) {
	case *csi.VolumeCapability_Block:
		capability["access_type"] = "block"
	case *csi.VolumeCapability_Mount:
		capability["access_type"] = "mount"
		capability["fs_type"] = access.Mount.GetFsType()
		capability["mount_flags"] = access.Mount.GetMountFlags()
		capability["volume_mount_group"] = access.Mount.GetVolumeMountGroup()
	}
	a := argumentDigest{}
	for field, value := range map[string]any{
		"publish_context":     req.GetPublishContext(),
		"staging_target_path": req.GetStagingTargetPath(),
		"volume_capability":   capability,
		"readonly":            req.GetReadonly(),
		"volume_context":      volumeContext,
		"prepare_path":        req.GetPreparePath(),
	} {
		// JSON of strings, booleans and maps, with the keys sorted: one
		// text for one meaning, in every version of this program.
		text, err := json.Marshal(value)
		if err != nil {
			panic(err) // strings, booleans and maps of them alone
		}
		if string(text) == "null" {
			text = []byte("{}") // an absent map is an empty one
		}
		sum := sha256.Sum256(text)
		a[field] = hex.EncodeToString(sum[:])
	}
	return a
}

// differing names the fields in which two calls differ, sorted.
func (a argumentDigest) differing(b argumentDigest) []string {
	var fields []string
	for field := range a {
		if a[field] != b[field] {
			fields = append(fields, field)
		}
	}
	slices.Sort(fields)
	return fields
}

// openPreparations opens the records of this boot.
func openPreparations(s *State, boot string) (*Records[preparation], error) {
	return OpenBootRecords[preparation](s, "preparations", boot)
}
