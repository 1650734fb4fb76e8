package wire

import (
	"fmt"
	"strconv"
	"strings"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/csi-prepare/csi-prepare/reference/mountspec"
	"github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// losses collects what a conversion to Go values would lose.
type losses struct {
	index int
	path  []step // from the mount spec to the message being searched
	found []mountspec.Violation
}

// step is a field, and the element of it if it is repeated.
type step struct {
	name    protoreflect.Name
	element int // -1 if not repeated
}

func (l *losses) add(id requirement.ID, field, detail string) {
	l.found = append(l.found, mountspec.Violation{Index: l.index, Requirement: id, Field: field, Detail: detail})
}

func (l *losses) search(index int, m *preparev1alpha1.MountSpec) {
	l.index, l.path = index, l.path[:0]
	l.message(m.ProtoReflect())
	l.emptyValues(m)
}

// message searches m and everything in it, in the order of the proto file. An
// arm of a oneof that this version does not have is an unknown field too.
func (l *losses) message(m protoreflect.Message) {
	if raw := m.GetUnknown(); len(raw) > 0 {
		l.add(requirement.SpecNoUnknownFields, l.field(),
			fmt.Sprintf("unknown field %s of %s: send what this version of the document has",
				numbers(raw), m.Descriptor().Name()))
	}
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		fd := fields.Get(i)
		if !m.Has(fd) {
			continue
		}
		switch {
		case fd.IsList():
			list := m.Get(fd).List()
			for j := range list.Len() {
				l.value(fd, list.Get(j), j)
			}
		default:
			l.value(fd, m.Get(fd), -1)
		}
	}
}

func (l *losses) value(fd protoreflect.FieldDescriptor, v protoreflect.Value, element int) {
	switch fd.Kind() {
	case protoreflect.MessageKind:
		l.path = append(l.path, step{fd.Name(), element})
		l.message(v.Message())
		l.path = l.path[:len(l.path)-1]
	case protoreflect.EnumKind:
		if fd.Enum().Values().ByNumber(v.Enum()) != nil {
			return
		}
		l.path = append(l.path, step{fd.Name(), element})
		l.add(requirement.SpecNoUnknownFields, l.field(),
			fmt.Sprintf("unknown value %d of %s: send one this version of the document has",
				v.Enum(), fd.Enum().Name()))
		l.path = l.path[:len(l.path)-1]
	}
}

// field renders the path as violations have it: "filesystem.parameters[3]".
func (l *losses) field() string {
	var b strings.Builder
	for i, s := range l.path {
		if i > 0 {
			b.WriteByte('.')
		}
		b.WriteString(string(s.name))
		if s.element >= 0 {
			b.WriteString("[" + strconv.Itoa(s.element) + "]")
		}
	}
	return b.String()
}

// maxNumbers bounds what a detail lists.
const maxNumbers = 8

// numbers lists the field numbers in raw, which protobuf has parsed before.
func numbers(raw protoreflect.RawFields) string {
	var b strings.Builder
	for n := 0; len(raw) > 0; n++ {
		number, _, size := protowire.ConsumeField(raw)
		if size < 0 || n == maxNumbers {
			b.WriteString(", ...")
			break
		}
		if n > 0 {
			b.WriteString(", ")
		}
		b.WriteString(strconv.Itoa(int(number)))
		raw = raw[size:]
	}
	return b.String()
}
