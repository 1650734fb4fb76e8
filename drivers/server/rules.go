package server

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	prepare "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// Size limits in bytes, from the section "Size Limits" of the CSI
// specification and the fields that override it.
const (
	maxString = 128
	maxMap    = 4096 // keys and values of a map, elements of a repeated string
	maxPath   = 4095 // PATH_MAX less the final zero byte
	maxNodeID = 256
)

// limits holds the fields that override the general limit of a string.
var limits = map[protoreflect.Name]int{
	"staging_target_path": maxPath,
	"target_path":         maxPath,
	"volume_path":         maxPath,
	"prepare_path":        maxPath,
	"handle_socket":       maxSocketPath,
	"node_id":             maxNodeID,
}

// Invalid is INVALID_ARGUMENT for a field, with the rule it breaks and what
// to do. Neither may hold the field's value.
func Invalid(field, rule, remedy string) error {
	return status.Errorf(codes.InvalidArgument, "%s: %s; %s", field, rule, remedy)
}

// Required refuses an empty field.
func Required(field, value string) error {
	if value == "" {
		return Invalid(field, "is required", "set it")
	}
	return nil
}

// PrepareID refuses a prepare_id outside 1 to 128 bytes of [A-Za-z0-9._-],
// not starting with '.'.
func PrepareID(id string) error {
	const field = "prepare_id"
	switch {
	case id == "":
		return Required(field, id)
	case len(id) > 128:
		return Invalid(field, fmt.Sprintf("has %d bytes, at most 128 are allowed", len(id)), "use a shorter one, for example a hash")
	case id[0] == '.':
		return Invalid(field, "begins with '.'", "begin it with a letter or digit")
	case strings.ContainsFunc(id, func(r rune) bool { return !inPrepareID(r) }):
		return Invalid(field, "holds a byte outside [A-Za-z0-9._-]", "use those alone, for example a hash in hex")
	}
	return nil
}

func inPrepareID(r rune) bool {
	return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '.' || r == '_' || r == '-'
}

// AbsolutePath refuses a path that is empty, relative or not in its shortest
// form, and one with a zero byte.
func AbsolutePath(field, path string) error {
	switch {
	case path == "":
		return Required(field, path)
	case !filepath.IsAbs(path):
		return Invalid(field, "is not an absolute path", "begin it with '/'")
	case strings.ContainsRune(path, 0):
		return Invalid(field, "holds a zero byte", "leave it out")
	case filepath.Clean(path) != path:
		return Invalid(field, "is not in its shortest form", "leave out '.', '..', double and trailing slashes")
	}
	return nil
}

// OptionalPath is AbsolutePath for a field that may be empty.
func OptionalPath(field, path string) error {
	if path == "" {
		return nil
	}
	return AbsolutePath(field, path)
}

func checkPerformer(p *prepare.Performer) error {
	const field = "performer"
	if p == nil {
		return Invalid(field, "is required", "say what the CO is able to perform")
	}
	switch p.GetKernel() {
	case prepare.Performer_NODE, prepare.Performer_OTHER:
	default:
		return Invalid(field+".kernel", "is required", "set NODE or OTHER")
	}
	if len(p.GetKinds()) == 0 {
		return Invalid(field+".kinds", "is required", "name at least one kind the CO is able to perform")
	}
	return nil
}

// checkHandoff checks the fields of the side socket, which mean something
// only together: without handle_socket the others are ignored.
func checkHandoff(req *prepare.NodePrepareVolumeRequest) error {
	if req.GetHandleSocket() == "" {
		return nil
	}
	if err := AbsolutePath("handle_socket", req.GetHandleSocket()); err != nil {
		return err
	}
	if n := len(req.GetHandoffToken()); n < 16 || n > 32 {
		return Invalid("handoff_token", fmt.Sprintf("has %d bytes, 16 to 32 are required with handle_socket", n), "send as many random bytes")
	}
	return nil
}

// checkSizes refuses requests with a field over its size limit.
func checkSizes(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	if m, ok := req.(proto.Message); ok {
		if err := Sizes(m); err != nil {
			return nil, err
		}
	}
	return next(ctx, req)
}

// Sizes refuses a message in which a string, a map or a repeated string is
// longer than CSI, or the field itself, allows.
func Sizes(m proto.Message) error {
	var broken error
	walk(m.ProtoReflect(), func(_ protoreflect.Message, fd protoreflect.FieldDescriptor, v protoreflect.Value) {
		size, limit := 0, maxMap
		switch {
		case fd.IsMap():
			if fd.MapValue().Kind() != protoreflect.StringKind {
				return
			}
			v.Map().Range(func(k protoreflect.MapKey, v protoreflect.Value) bool {
				size += len(k.String()) + len(v.String())
				return true
			})
		case fd.Kind() != protoreflect.StringKind:
			return
		case fd.IsList():
			for i := range v.List().Len() {
				size += len(v.List().Get(i).String())
			}
		default:
			size, limit = len(v.String()), maxString
			if l, ok := limits[fd.Name()]; ok {
				limit = l
			}
		}
		if size > limit && broken == nil {
			broken = Invalid(string(fd.Name()), fmt.Sprintf("has %d bytes, at most %d are allowed", size, limit), "make it shorter")
		}
	})
	return broken
}

// Code is the gRPC code for an error that is no status: of a context, of a
// resource that ran out, else INTERNAL.
func Code(err error) codes.Code {
	switch {
	case errors.Is(err, context.Canceled):
		return codes.Canceled
	case errors.Is(err, context.DeadlineExceeded):
		return codes.DeadlineExceeded
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT), errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE):
		return codes.ResourceExhausted
	}
	return codes.Internal
}

// Status is err with the code Code gives it; a status stays as it is.
func Status(err error) error {
	if err == nil {
		return nil
	}
	if s, ok := status.FromError(err); ok {
		return s.Err()
	}
	return status.Error(Code(err), err.Error())
}

// CheckCapability refuses a capability that is not set or leaves out a part.
// Whether the volume supports it is for the driver to say.
func CheckCapability(field string, c *csi.VolumeCapability) error {
	if c == nil {
		return Invalid(field, "is required", "set it")
	}
	if c.GetAccessType() == nil {
		return Invalid(field+".access_type", "is required", "set block or mount")
	}
	mode := c.GetAccessMode().GetMode()
	if _, known := csi.VolumeCapability_AccessMode_Mode_name[int32(mode)]; !known || mode == csi.VolumeCapability_AccessMode_UNKNOWN {
		return Invalid(field+".access_mode", "is required", "set a mode of CSI v1.13 or earlier")
	}
	return nil
}
