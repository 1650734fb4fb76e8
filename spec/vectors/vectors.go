// Package vectors holds the cases of mount specs that README.md beside it
// describes, for programs in Go. Programs in other languages read the files.
package vectors

import (
	"bytes"
	"embed"
	"encoding/json"
	"fmt"
	"io/fs"
	"strings"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

//go:embed valid/*.json invalid/*.json
var files embed.FS

// Case is one answer of a Plugin and what a validator has to say of it.
type Case struct {
	// Name is the file's, without its ending: "invalid/target-absolute".
	Name        string
	Description string
	Request     Request
	MountSpecs  []*preparev1alpha1.MountSpec
	// Expect is empty if and only if the answer is valid.
	Expect []Expectation
}

// Request is what the answer has to agree with.
type Request struct {
	Performer *preparev1alpha1.Performer
	Readonly  bool // readonly was set, or the access mode is a READER_ONLY one
	Block     bool // the volume has block access type
	Staging   bool // staging_target_path was set
}

// Expectation is one violation.
type Expectation struct {
	Index       int // of the mount spec, -1 for the response as a whole
	Requirement requirement.ID
	Field       string // below the mount spec, as on the wire
}

// All returns every case, the invalid ones first, each group by name. The
// cases are the caller's own.
func All() ([]Case, error) {
	names, err := fs.Glob(files, "*/*.json")
	if err != nil {
		return nil, fmt.Errorf("vectors: %w", err)
	}
	all := make([]Case, len(names))
	for i, name := range names {
		data, err := files.ReadFile(name)
		if err != nil {
			return nil, fmt.Errorf("vectors: %w", err)
		}
		if all[i], err = parse(data); err != nil {
			return nil, fmt.Errorf("vectors: %s: %w", name, err)
		}
		all[i].Name = strings.TrimSuffix(name, ".json")
	}
	return all, nil
}

// parse reads one file. It is strict: a misspelt name would weaken the case
// without a word.
func parse(data []byte) (Case, error) {
	var f struct {
		Description string `json:"description"`
		Request     struct {
			Performer json.RawMessage `json:"performer"`
			Readonly  bool            `json:"readonly"`
			Block     bool            `json:"block"`
			Staging   bool            `json:"staging"`
		} `json:"request"`
		MountSpecs []json.RawMessage `json:"mount_specs"`
		Wire       [][]byte          `json:"mount_specs_wire"`
		Expect     []struct {
			Index       int            `json:"index"`
			Requirement requirement.ID `json:"requirement"`
			Field       string         `json:"field"`
		} `json:"expect"`
	}
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	if err := d.Decode(&f); err != nil {
		return Case{}, err
	}
	if (f.MountSpecs == nil) == (f.Wire == nil) {
		return Case{}, fmt.Errorf("one of mount_specs and mount_specs_wire has to be there")
	}
	c := Case{
		Description: f.Description,
		Request: Request{
			Performer: new(preparev1alpha1.Performer),
			Readonly:  f.Request.Readonly,
			Block:     f.Request.Block,
			Staging:   f.Request.Staging,
		},
	}
	if err := protojson.Unmarshal(f.Request.Performer, c.Request.Performer); err != nil {
		return Case{}, fmt.Errorf("performer: %w", err)
	}
	for i, raw := range f.MountSpecs {
		m := new(preparev1alpha1.MountSpec)
		if err := protojson.Unmarshal(raw, m); err != nil {
			return Case{}, fmt.Errorf("mount_specs[%d]: %w", i, err)
		}
		c.MountSpecs = append(c.MountSpecs, m)
	}
	for i, raw := range f.Wire {
		m := new(preparev1alpha1.MountSpec)
		if err := proto.Unmarshal(raw, m); err != nil {
			return Case{}, fmt.Errorf("mount_specs_wire[%d]: %w", i, err)
		}
		c.MountSpecs = append(c.MountSpecs, m)
	}
	for _, e := range f.Expect {
		c.Expect = append(c.Expect, Expectation(e))
	}
	return c, nil
}
