package sp

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/renameio/v2"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	preparev1alpha1 "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// state is everything a Server remembers.
type state struct {
	volumes  map[string]*volume // by id
	prepared map[pair]*preparev1alpha1.NodePrepareVolumeRequest
	staged   map[string]*csi.NodeStageVolumeRequest // by volume id
}

// volume is one directory of a granted directory.
type volume struct {
	ID         string            `json:"id"`
	Name       string            `json:"name"`
	Grant      string            `json:"grant"`
	Required   int64             `json:"required_bytes"`
	Parameters map[string]string `json:"parameters,omitempty"`
}

// pair is the key of a preparation.
type pair struct{ volume, prepare string }

// of returns the preparations of a volume.
func (s *state) of(volume string) map[pair]*preparev1alpha1.NodePrepareVolumeRequest {
	found := make(map[pair]*preparev1alpha1.NodePrepareVolumeRequest)
	for p, r := range s.prepared {
		if p.volume == volume {
			found[p] = r
		}
	}
	return found
}

// snapshot is the state as one file. A preparation and a stage are kept as
// the request that made them, without what is secret or passing.
type snapshot struct {
	BootID   string            `json:"boot_id"`
	Volumes  []*volume         `json:"volumes"`
	Prepared []json.RawMessage `json:"prepared"`
	Staged   []json.RawMessage `json:"staged"`
}

func file(dir string) string { return filepath.Join(dir, "state.json") }

// keep writes the state to dir in one step, or does nothing if dir is empty.
func keep(dir, boot string, s *state) error {
	if dir == "" {
		return nil
	}
	var err error
	kept := snapshot{BootID: boot}
	for _, v := range s.volumes {
		kept.Volumes = append(kept.Volumes, v)
	}
	for _, r := range s.prepared {
		if kept.Prepared, err = appendMessage(kept.Prepared, r); err != nil {
			return err
		}
	}
	for _, r := range s.staged {
		if kept.Staged, err = appendMessage(kept.Staged, r); err != nil {
			return err
		}
	}
	data, err := json.Marshal(kept)
	if err != nil {
		return err
	}
	return renameio.WriteFile(file(dir), data, 0o600, renameio.WithTempDir(dir))
}

func appendMessage(to []json.RawMessage, m proto.Message) ([]json.RawMessage, error) {
	data, err := protojson.Marshal(m)
	return append(to, data), err
}

// recall reads what keep wrote. Preparations and stages of another boot are
// void: what they stood for ended with that boot. Nothing is ever concluded
// from the directories that are there.
func recall(dir, boot string) (state, error) {
	s := state{
		volumes:  make(map[string]*volume),
		prepared: make(map[pair]*preparev1alpha1.NodePrepareVolumeRequest),
		staged:   make(map[string]*csi.NodeStageVolumeRequest),
	}
	if dir == "" {
		return s, nil
	}
	data, err := os.ReadFile(file(dir))
	if errors.Is(err, fs.ErrNotExist) {
		return s, nil
	}
	if err != nil {
		return s, err
	}
	var kept snapshot
	if err := json.Unmarshal(data, &kept); err != nil {
		return s, err
	}
	for _, v := range kept.Volumes {
		s.volumes[v.ID] = v
	}
	if boot != kept.BootID {
		return s, nil
	}
	for _, raw := range kept.Prepared {
		r := new(preparev1alpha1.NodePrepareVolumeRequest)
		if err := protojson.Unmarshal(raw, r); err != nil {
			return s, err
		}
		s.prepared[pair{r.GetVolumeId(), r.GetPrepareId()}] = r
	}
	for _, raw := range kept.Staged {
		r := new(csi.NodeStageVolumeRequest)
		if err := protojson.Unmarshal(raw, r); err != nil {
			return s, err
		}
		s.staged[r.GetVolumeId()] = r
	}
	return s, nil
}

func bootID() (string, error) {
	id, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(id)), err
}
