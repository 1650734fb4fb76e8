package wire

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"

	"google.golang.org/protobuf/encoding/protojson"

	"github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// Unmarshal reads a list of mount specs as files and command lines have it: a
// JSON array of messages in protojson. A name that is no field, a field given
// twice and anything after the array are errors.
//
// An error says where the fault is and never repeats a value, which may be a
// secret. The extension kind needs its message type linked into the program.
func Unmarshal(data []byte) ([]*preparev1alpha1.MountSpec, error) {
	var list []json.RawMessage
	if err := json.Unmarshal(data, &list); err != nil || list == nil { // nil: the word null
		return nil, fmt.Errorf("mount specs: not a JSON array of messages%s", where(err))
	}
	msgs := make([]*preparev1alpha1.MountSpec, len(list))
	for i, raw := range list {
		msgs[i] = new(preparev1alpha1.MountSpec)
		if err := protojson.Unmarshal(raw, msgs[i]); err != nil {
			return nil, fmt.Errorf("mount_specs[%d]: %s", i, withoutValues(err))
		}
	}
	return msgs, nil
}

// where says at which byte of the input the JSON stops making sense.
func where(err error) string {
	var syntax *json.SyntaxError
	if errors.As(err, &syntax) {
		return fmt.Sprintf(" (at byte %d)", syntax.Offset)
	}
	return ""
}

// speakable matches the beginning of a protojson error: the position, and the
// fault if it speaks of names only and not of values.
var speakable = regexp.MustCompile(`^proto:[\s\x{a0}]*(?:syntax error )?(\(line \d+:\d+\))?:? ?` +
	`((?:unknown|duplicate) field "[^"]*"|unable to resolve "[^"]*"|` +
	`error parsing "[^"]*", oneof \S+ is already set|invalid value for \S+ field \w+)?`)

// withoutValues says of a protojson error what holds no value of the input.
func withoutValues(err error) string {
	at, fault := "", ""
	if m := speakable.FindStringSubmatch(err.Error()); m != nil {
		at, fault = m[1], m[2]
	}
	if fault == "" {
		fault = "not a mount spec in protojson"
	}
	if at != "" {
		fault += " " + at
	}
	return fault
}

// Marshal writes a list of mount specs as Unmarshal reads it, indented, the
// same text each time. It refuses a spec with a secret: what is written
// stays where it was written.
func Marshal(msgs []*preparev1alpha1.MountSpec) ([]byte, error) {
	var all bytes.Buffer
	all.WriteByte('[')
	for i, m := range msgs {
		for j, p := range m.GetFilesystem().GetParameters() {
			if p.GetSecret() != "" {
				return nil, fmt.Errorf("mount_specs[%d].filesystem.parameters[%d].secret: not written to JSON; "+
					"use a kind that needs no secret, or keep the specs in memory", i, j)
			}
		}
		one, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(m)
		if err != nil {
			return nil, fmt.Errorf("mount_specs[%d]: %w", i, err)
		}
		if i > 0 {
			all.WriteByte(',')
		}
		all.Write(one)
	}
	all.WriteByte(']')

	// protojson varies its blanks on purpose; these do not.
	var out bytes.Buffer
	if err := json.Indent(&out, all.Bytes(), "", "  "); err != nil {
		return nil, fmt.Errorf("mount specs: %w", err)
	}
	out.WriteByte('\n')
	return out.Bytes(), nil
}
