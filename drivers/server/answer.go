package server

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	prepare "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// answer is what a preparation was answered with, without secrets: repeats are
// answered the same, also by a process that was started with other options.
type answer []*prepare.MountSpec

// MarshalJSON implements json.Marshaler.
func (a answer) MarshalJSON() ([]byte, error) {
	texts := make([]json.RawMessage, len(a))
	for i, s := range a {
		text, err := protojson.Marshal(s)
		if err != nil {
			return nil, err
		}
		texts[i] = text
	}
	return json.Marshal(texts)
}

// UnmarshalJSON implements json.Unmarshaler.
func (a *answer) UnmarshalJSON(text []byte) error {
	var texts []json.RawMessage
	if err := json.Unmarshal(text, &texts); err != nil {
		return err
	}
	for _, t := range texts {
		s := new(prepare.MountSpec)
		if err := protojson.Unmarshal(t, s); err != nil {
			return err
		}
		*a = append(*a, s)
	}
	return nil
}

// answerOf is specs as they are kept.
func answerOf(specs []*prepare.MountSpec) answer {
	kept := make(answer, len(specs))
	for i, s := range specs {
		kept[i] = proto.CloneOf(s)
		for _, p := range kept[i].GetFilesystem().GetParameters() {
			if _, secret := p.GetValue().(*prepare.FsParameter_Secret); secret {
				p.Value = &prepare.FsParameter_Secret{}
			}
		}
	}
	return kept
}

// only is a performer that offers no more than what a was made of, so that a
// driver with a choice chooses the same again. FAILED_PRECONDITION says what p
// does not offer any more.
func (a answer) only(p *prepare.Performer) (*prepare.Performer, error) {
	if len(a) == 0 {
		return p, nil
	}
	narrow := proto.CloneOf(p)
	narrow.Kinds = nil
	for _, s := range a {
		kind := kindOf(s)
		if !slices.Contains(p.GetKinds(), kind) {
			return nil, uncovered("kinds", kind)
		}
		if !slices.Contains(narrow.Kinds, kind) {
			narrow.Kinds = append(narrow.Kinds, kind)
		}
		if t := s.GetFilesystem().GetFsType(); t != "" && !slices.Contains(p.GetFsTypes(), t) {
			return nil, uncovered("fs_types", t)
		}
		if g := s.GetBind().GetSource().GetGrant(); g != "" && !slices.Contains(p.GetGrants(), g) {
			return nil, uncovered("grants", g)
		}
		if t := s.GetExtension().GetTypeUrl(); t != "" && !slices.Contains(p.GetExtensions(), t) {
			return nil, uncovered("extensions", t)
		}
	}
	return narrow, nil
}

func uncovered(field string, value any) error {
	return status.Errorf(codes.FailedPrecondition, "performer.%s: lacks %v, with which the volume is prepared; offer it, or call NodeUnprepareVolume first", field, value)
}

func kindOf(s *prepare.MountSpec) prepare.MountKind {
	switch s.GetKind().(type) {
	case *prepare.MountSpec_Filesystem:
		return prepare.MountKind_MOUNT_KIND_FILESYSTEM
	case *prepare.MountSpec_Bind:
		return prepare.MountKind_MOUNT_KIND_BIND
	case *prepare.MountSpec_BlockDevice:
		return prepare.MountKind_MOUNT_KIND_BLOCK_DEVICE
	case *prepare.MountSpec_Handle:
		return prepare.MountKind_MOUNT_KIND_HANDLE
	case *prepare.MountSpec_Fuse:
		return prepare.MountKind_MOUNT_KIND_FUSE
	case *prepare.MountSpec_Extension:
		return prepare.MountKind_MOUNT_KIND_EXTENSION
	}
	return prepare.MountKind_MOUNT_KIND_UNKNOWN
}

// refreshed is a with what ages taken from fresh: secrets, addresses, device
// numbers and ids of handles.
func (a answer) refreshed(fresh []*prepare.MountSpec) ([]*prepare.MountSpec, error) {
	if len(a) != len(fresh) {
		return nil, fmt.Errorf("the volume was prepared with %d mount specs and would be with %d now", len(a), len(fresh))
	}
	specs := make([]*prepare.MountSpec, len(a))
	for i, s := range a {
		if was, is := kindOf(s), kindOf(fresh[i]); was != is {
			return nil, fmt.Errorf("the volume was prepared with %s and would be with %s now", was, is)
		}
		specs[i] = proto.CloneOf(s)
		switch kind := specs[i].GetKind().(type) {
		case *prepare.MountSpec_Filesystem:
			refreshFilesystem(kind.Filesystem, fresh[i].GetFilesystem())
		case *prepare.MountSpec_BlockDevice:
			kind.BlockDevice = fresh[i].GetBlockDevice()
		case *prepare.MountSpec_Handle:
			kind.Handle.HandleId = fresh[i].GetHandle().GetHandleId()
		case *prepare.MountSpec_Fuse:
			kind.Fuse.HandleId = fresh[i].GetFuse().GetHandleId()
		}
	}
	return specs, nil
}

func refreshFilesystem(kept, fresh *prepare.FilesystemMount) {
	if fresh.GetDevice() != nil && kept.GetDevice() != nil {
		kept.Source = fresh.GetSource()
	}
	if exportOf(kept.GetOpaque()) == exportOf(fresh.GetOpaque()) {
		kept.Source = fresh.GetSource()
	}
	for _, p := range kept.GetParameters() {
		_, secret := p.GetValue().(*prepare.FsParameter_Secret)
		if !secret && p.GetKey() != "addr" && p.GetKey() != "ip" {
			continue
		}
		for _, f := range fresh.GetParameters() {
			if f.GetKey() == p.GetKey() {
				p.Value = f.GetValue()
			}
		}
	}
}

// exportOf is a source without the server's address in it.
func exportOf(source string) string {
	if i := strings.Index(source, ":/"); i >= 0 {
		return source[i+1:]
	}
	return source
}
