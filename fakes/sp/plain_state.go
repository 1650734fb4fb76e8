package sp

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/google/renameio/v2"
)

// plainState is everything a Plain remembers.
type plainState struct {
	BootID    string                    `json:"boot_id"`
	Volumes   map[string]*plainVolume   `json:"volumes"`
	Snapshots map[string]*plainSnapshot `json:"snapshots"`
	Groups    map[string]*plainGroup    `json:"groups"`
	// Of one boot.
	Attached  map[string]bool         `json:"attached"`  // volume id to readonly
	Staged    map[string]string       `json:"staged"`    // volume id to path
	Published map[string]*publication `json:"published"` // by target_path
}

type plainVolume struct {
	ID         string            `json:"id"`
	Name       string            `json:"name"`
	Capacity   int64             `json:"capacity_bytes"`
	Parameters map[string]string `json:"parameters,omitempty"`
	Mutable    map[string]string `json:"mutable_parameters,omitempty"`
	// Snapshot or Volume it was made of.
	Snapshot string `json:"snapshot,omitempty"`
	Volume   string `json:"volume,omitempty"`
}

type plainSnapshot struct {
	ID      string    `json:"id"`
	Name    string    `json:"name"`
	Volume  string    `json:"volume"`
	Size    int64     `json:"size_bytes"`
	Created time.Time `json:"created"`
	Group   string    `json:"group,omitempty"`
}

type plainGroup struct {
	ID        string   `json:"id"`
	Name      string   `json:"name"`
	Volumes   []string `json:"volumes"`
	Snapshots []string `json:"snapshots"`
}

type publication struct {
	Volume   string `json:"volume"`
	Readonly bool   `json:"readonly"`
	// Exclusive is of the access mode.
	Exclusive bool `json:"exclusive"`
}

func plainFile(dir string) string { return filepath.Join(dir, "plain.json") }

func (p *Plain) keep() error {
	if p.config.StateDir == "" {
		return nil
	}
	p.state.BootID = p.bootID
	data, err := json.Marshal(p.state)
	if err != nil {
		return err
	}
	return renameio.WriteFile(plainFile(p.config.StateDir), data, 0o600, renameio.WithTempDir(p.config.StateDir))
}

// recallPlain reads what keep wrote. What belongs to a boot ends with it.
func recallPlain(dir, boot string) (plainState, error) {
	var s plainState
	if dir != "" {
		data, err := os.ReadFile(plainFile(dir))
		if err == nil {
			err = json.Unmarshal(data, &s)
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return s, err
		}
	}
	if s.BootID != boot {
		s.Attached, s.Staged, s.Published = nil, nil, nil
	}
	fill(&s.Volumes)
	fill(&s.Snapshots)
	fill(&s.Groups)
	fill(&s.Attached)
	fill(&s.Staged)
	fill(&s.Published)
	return s, nil
}

func fill[V any](m *map[string]V) {
	if *m == nil {
		*m = map[string]V{}
	}
}
