package wire

import (
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/csi-prepare/csi-prepare/reference/mountspec"
	"github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// variants returns messages of m's type that between them set every field,
// every arm of each oneof in one of its own.
func variants(m protoreflect.MessageType) []protoreflect.Message {
	base := m.New()
	var arms []protoreflect.FieldDescriptor
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		fd := fields.Get(i)
		if fd.ContainingOneof() != nil {
			arms = append(arms, fd)
			continue
		}
		for _, v := range values(base, fd) {
			fill(base, fd, v)
		}
	}
	all := []protoreflect.Message{base}
	for _, fd := range arms {
		for _, v := range values(base, fd) {
			with := proto.Clone(base.Interface()).ProtoReflect()
			fill(with, fd, v)
			all = append(all, with)
		}
	}
	return all
}

func fill(m protoreflect.Message, fd protoreflect.FieldDescriptor, v protoreflect.Value) {
	if fd.IsList() {
		m.Mutable(fd).List().Append(v)
		return
	}
	m.Set(fd, v)
}

// values are values of fd that differ from its default.
func values(m protoreflect.Message, fd protoreflect.FieldDescriptor) []protoreflect.Value {
	switch fd.Kind() {
	case protoreflect.BoolKind:
		return []protoreflect.Value{protoreflect.ValueOfBool(true)}
	case protoreflect.EnumKind:
		return []protoreflect.Value{protoreflect.ValueOfEnum(protoreflect.EnumNumber(fd.Enum().Values().Len() - 1))}
	case protoreflect.Uint32Kind:
		return []protoreflect.Value{protoreflect.ValueOfUint32(uint32(fd.Number()) + 6)}
	case protoreflect.Uint64Kind:
		return []protoreflect.Value{protoreflect.ValueOfUint64(uint64(fd.Number()) + 6)}
	case protoreflect.BytesKind:
		return []protoreflect.Value{protoreflect.ValueOfBytes([]byte(fd.Name()))}
	case protoreflect.StringKind:
		return []protoreflect.Value{protoreflect.ValueOfString(string(fd.Name()))}
	case protoreflect.MessageKind:
		var of protoreflect.Message
		if fd.IsList() {
			of = m.Mutable(fd).List().NewElement().Message()
		} else {
			of = m.NewField(fd).Message()
		}
		var all []protoreflect.Value
		for _, v := range variants(of.Type()) {
			all = append(all, protoreflect.ValueOfMessage(v))
		}
		return all
	default:
		panic("a field of a type no conversion knows: " + fd.FullName())
	}
}

// TestNoFieldIsForgotten sets each field the proto file has, so that one that
// is added there and not here fails.
func TestNoFieldIsForgotten(t *testing.T) {
	all := variants((&preparev1alpha1.MountSpec{}).ProtoReflect().Type())
	if len(all) < 8 { // none, six kinds, two sources of one
		t.Fatalf("only %d variants", len(all))
	}
	for _, m := range all {
		sent := m.Interface().(*preparev1alpha1.MountSpec)
		specs, lost := FromProto([]*preparev1alpha1.MountSpec{sent})
		if len(lost) > 0 {
			t.Errorf("lost: %v", lost)
		}
		if diff := cmp.Diff(sent, Proto(specs)[0], protocmp.Transform()); diff != "" {
			t.Errorf("changed on the way (-sent +got):\n%s", diff)
		}
	}
}

// TestUnknownFieldsAreFoundAnywhere appends a field of a later version to
// each message of each variant in turn, on the wire.
func TestUnknownFieldsAreFoundAnywhere(t *testing.T) {
	later := protowire.AppendVarint(protowire.AppendTag(nil, 1000, protowire.VarintType), 1)
	for _, m := range variants((&preparev1alpha1.MountSpec{}).ProtoReflect().Type()) {
		var visit func(in protoreflect.Message)
		visit = func(in protoreflect.Message) {
			in.SetUnknown(later)
			data, err := proto.Marshal(m.Interface())
			if err != nil {
				t.Fatal(err)
			}
			in.SetUnknown(nil)

			got := new(preparev1alpha1.MountSpec)
			if err := proto.Unmarshal(data, got); err != nil {
				t.Fatal(err)
			}
			_, lost := FromProto([]*preparev1alpha1.MountSpec{got})
			if len(lost) != 1 || lost[0].Requirement != requirement.SpecNoUnknownFields ||
				!strings.Contains(lost[0].Detail, "unknown field 1000 of "+string(in.Descriptor().Name())) {
				t.Errorf("in %s: %v", in.Descriptor().FullName(), lost)
			}
			in.Range(func(fd protoreflect.FieldDescriptor, v protoreflect.Value) bool {
				switch {
				case fd.IsList() && fd.Kind() == protoreflect.MessageKind:
					for i := range v.List().Len() {
						visit(v.List().Get(i).Message())
					}
				case fd.Kind() == protoreflect.MessageKind:
					visit(v.Message())
				}
				return true
			})
		}
		visit(m)
	}
}

// TestFromProtoTakesWhatOnlyGoCanBuild covers messages that did not come from
// the wire.
func TestFromProtoTakesWhatOnlyGoCanBuild(t *testing.T) {
	msgs := []*preparev1alpha1.MountSpec{
		nil,
		{},
		{Kind: &preparev1alpha1.MountSpec_Filesystem{}},
		{Kind: &preparev1alpha1.MountSpec_Extension{}},
		{Kind: &preparev1alpha1.MountSpec_Filesystem{Filesystem: &preparev1alpha1.FilesystemMount{
			Source:     &preparev1alpha1.FilesystemMount_Device{},
			Parameters: []*preparev1alpha1.FsParameter{nil, {}},
		}}},
	}
	specs, _ := FromProto(msgs)
	for i := range msgs[:4] {
		if specs[i].Kind != nil {
			t.Errorf("mount_specs[%d]: kind %T, want none", i, specs[i].Kind)
		}
	}
	if k, ok := specs[4].Kind.(*mountspec.Filesystem); !ok || len(k.Parameters) != 2 {
		t.Errorf("mount_specs[4]: %+v", specs[4].Kind)
	}
	if found := mountspec.Validate(specs, mountspec.Request{}); len(found) < len(msgs) {
		t.Errorf("accepted: %v", found)
	}
}

func TestFromProtoSharesNoMemory(t *testing.T) {
	value := []byte("abc")
	msgs := []*preparev1alpha1.MountSpec{
		{Kind: &preparev1alpha1.MountSpec_Extension{Extension: &anypb.Any{TypeUrl: "a/b", Value: value}}},
	}
	specs, _ := FromProto(msgs)
	value[0] = 'x'
	if got := string(specs[0].Kind.(*mountspec.Extension).Value); got != "abc" {
		t.Errorf("value changed to %q with the message", got)
	}
	back := Proto(specs)
	specs[0].Kind.(*mountspec.Extension).Value[0] = 'y'
	if got := string(back[0].GetExtension().GetValue()); got != "abc" {
		t.Errorf("message changed to %q with the spec", got)
	}
}

func TestUnknownFieldsAreListedBriefly(t *testing.T) {
	m := &preparev1alpha1.MountSpec{}
	var raw []byte
	for n := range protowire.Number(100_000) {
		raw = protowire.AppendVarint(protowire.AppendTag(raw, 1000+n, protowire.VarintType), 1)
	}
	m.ProtoReflect().SetUnknown(raw)
	_, lost := FromProto([]*preparev1alpha1.MountSpec{m})
	if len(lost) != 1 || !strings.Contains(lost[0].Detail, "1000, 1001, ") || len(lost[0].Detail) > 200 {
		t.Errorf("%v", lost)
	}
}

func TestRequestFromProto(t *testing.T) {
	mode := func(m csi.VolumeCapability_AccessMode_Mode) *csi.VolumeCapability {
		return &csi.VolumeCapability{AccessMode: &csi.VolumeCapability_AccessMode{Mode: m}}
	}
	block := &csi.VolumeCapability{AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}}
	for _, tc := range []struct {
		name string
		in   *preparev1alpha1.NodePrepareVolumeRequest
		want mountspec.Request
	}{
		{"nil", nil, mountspec.Request{}},
		{"empty", &preparev1alpha1.NodePrepareVolumeRequest{}, mountspec.Request{}},
		{
			"read-only", &preparev1alpha1.NodePrepareVolumeRequest{Readonly: true},
			mountspec.Request{Readonly: true},
		},
		{
			"single node reader", &preparev1alpha1.NodePrepareVolumeRequest{
				VolumeCapability: mode(csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY),
			}, mountspec.Request{Readonly: true},
		},
		{
			"multi node reader", &preparev1alpha1.NodePrepareVolumeRequest{
				VolumeCapability: mode(csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY),
			}, mountspec.Request{Readonly: true},
		},
		{
			"writer", &preparev1alpha1.NodePrepareVolumeRequest{
				VolumeCapability: mode(csi.VolumeCapability_AccessMode_MULTI_NODE_SINGLE_WRITER),
			}, mountspec.Request{},
		},
		{
			"block, staged", &preparev1alpha1.NodePrepareVolumeRequest{
				VolumeCapability: block, StagingTargetPath: "/s",
			}, mountspec.Request{Block: true, Staging: true},
		},
		{
			"performer", &preparev1alpha1.NodePrepareVolumeRequest{Performer: &preparev1alpha1.Performer{
				Kernel: preparev1alpha1.Performer_OTHER,
				Kinds: []preparev1alpha1.MountKind{
					preparev1alpha1.MountKind_MOUNT_KIND_BLOCK_DEVICE, 99, preparev1alpha1.MountKind_MOUNT_KIND_UNKNOWN,
					preparev1alpha1.MountKind_MOUNT_KIND_FUSE,
				},
				FsTypes: []string{"ext4"}, UserNamespace: true, Idmap: true,
				Extensions: []string{"a/b"}, Grants: []string{"g"},
			}}, mountspec.Request{Performer: mountspec.Performer{
				OtherKernel: true,
				Kinds:       []mountspec.KindName{mountspec.KindBlockDevice, mountspec.KindFUSE},
				FSTypes:     []string{"ext4"}, UserNamespace: true, IDMap: true,
				Extensions: []string{"a/b"}, Grants: []string{"g"},
			}},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if diff := cmp.Diff(tc.want, RequestFromProto(tc.in)); diff != "" {
				t.Errorf("request (-want +got):\n%s", diff)
			}
		})
	}
}

func TestPerformerRoundTrip(t *testing.T) {
	for _, m := range variants((&preparev1alpha1.Performer{}).ProtoReflect().Type()) {
		sent := m.Interface().(*preparev1alpha1.Performer)
		if diff := cmp.Diff(sent, PerformerProto(PerformerFromProto(sent)), protocmp.Transform()); diff != "" {
			t.Errorf("changed on the way (-sent +got):\n%s", diff)
		}
	}
	want := mountspec.Performer{Kinds: []mountspec.KindName{
		mountspec.KindFilesystem, mountspec.KindBind, mountspec.KindBlockDevice,
		mountspec.KindHandle, mountspec.KindFUSE, mountspec.KindExtension,
	}}
	if diff := cmp.Diff(want, PerformerFromProto(PerformerProto(want))); diff != "" {
		t.Errorf("kinds (-want +got):\n%s", diff)
	}
}
