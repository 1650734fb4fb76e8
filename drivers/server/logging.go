package server

import (
	"bytes"
	"context"
	"log/slog"
	"path"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/kubernetes-csi/csi-lib-utils/protosanitizer"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

const stripped = "***stripped***"

// logCalls logs one record for each call: Info with the method, ids, code and
// time, Warn with the message where the call failed, and at Debug the request
// and response. Secrets and the values of mount flags appear in none of them,
// nor in the error the caller gets.
func logCalls(log *slog.Logger) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
		start := time.Now()
		method := path.Base(info.FullMethod)
		if log.Enabled(ctx, slog.LevelDebug) {
			log.DebugContext(ctx, "request", "method", method, "request", printable(req))
		}
		resp, err := next(ctx, req)
		attrs := []any{"method", method}
		if r, ok := req.(interface{ GetVolumeId() string }); ok {
			attrs = append(attrs, "volume_id", clip(r.GetVolumeId()))
		}
		if r, ok := req.(interface{ GetPrepareId() string }); ok {
			attrs = append(attrs, "prepare_id", clip(r.GetPrepareId()))
		}
		attrs = append(attrs, "code", status.Code(err).String(), "took", time.Since(start))
		if err != nil {
			err = mask(req, err)
			log.WarnContext(ctx, "call", append(attrs, "message", status.Convert(err).Message())...)
			return nil, err
		}
		log.InfoContext(ctx, "call", attrs...)
		if log.Enabled(ctx, slog.LevelDebug) {
			log.DebugContext(ctx, "response", "method", method, "response", printable(resp))
		}
		return resp, nil
	}
}

// clip keeps an id that breaks the size limit from filling the log.
func clip(id string) string {
	if len(id) > maxString {
		return id[:maxString] + "…"
	}
	return id
}

// printable is the message as JSON, with secrets stripped and mount flags cut
// at '='.
func printable(m any) string {
	msg, ok := m.(proto.Message)
	if !ok {
		return ""
	}
	msg = proto.Clone(msg)
	walk(msg.ProtoReflect(), func(m protoreflect.Message, _ protoreflect.FieldDescriptor, _ protoreflect.Value) {
		if mount, ok := m.Interface().(*csi.VolumeCapability_MountVolume); ok {
			for i, flag := range mount.MountFlags {
				mount.MountFlags[i] = FlagName(flag)
			}
		}
	})
	return protosanitizer.StripSecrets(msg).String()
}

// FlagName is what an error or a log may show of a mount flag: the text up to
// and with the first '='. The value may be a password.
func FlagName(flag string) string {
	if name, _, found := strings.Cut(flag, "="); found {
		return name + "="
	}
	return flag
}

// mask makes a status of err whose message holds no secret of the request.
// The drivers put no request values into messages; what a library or the
// kernel adds is caught here. Values of fewer than four bytes are left: they
// would tear any text apart.
func mask(req any, err error) error {
	s := status.Convert(err)
	code := s.Code()
	if _, isStatus := status.FromError(err); !isStatus {
		code = Code(err)
	}
	message := s.Message()
	if msg, ok := req.(proto.Message); ok {
		for _, secret := range secrets(msg) {
			if len(secret) >= 4 {
				message = strings.ReplaceAll(message, secret, stripped)
			}
		}
	}
	if code == codes.Unknown {
		code = codes.Internal
	}
	return status.Error(code, message)
}

// secrets collects the values of all fields that carry csi_secret, and of
// mount flags behind '='.
func secrets(msg proto.Message) []string {
	var found []string
	add := func(fd protoreflect.FieldDescriptor, v protoreflect.Value) {
		switch fd.Kind() {
		case protoreflect.StringKind:
			found = append(found, v.String())
		case protoreflect.BytesKind:
			found = append(found, string(bytes.Clone(v.Bytes())))
		}
	}
	walk(msg.ProtoReflect(), func(_ protoreflect.Message, fd protoreflect.FieldDescriptor, v protoreflect.Value) {
		isFlags := fd.Name() == "mount_flags"
		if secret, _ := proto.GetExtension(fd.Options(), csi.E_CsiSecret).(bool); !secret && !isFlags {
			return
		}
		switch {
		case isFlags:
			for i := range v.List().Len() {
				if _, value, ok := strings.Cut(v.List().Get(i).String(), "="); ok {
					found = append(found, value)
				}
			}
		case fd.IsMap():
			v.Map().Range(func(_ protoreflect.MapKey, v protoreflect.Value) bool {
				add(fd.MapValue(), v)
				return true
			})
		case fd.IsList():
			for i := range v.List().Len() {
				add(fd, v.List().Get(i))
			}
		default:
			add(fd, v)
		}
	})
	return found
}

// walk visits every set field of a message and of the messages in it.
func walk(m protoreflect.Message, visit func(protoreflect.Message, protoreflect.FieldDescriptor, protoreflect.Value)) {
	m.Range(func(fd protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		visit(m, fd, v)
		switch {
		case fd.IsMap():
			if fd.MapValue().Message() != nil {
				v.Map().Range(func(_ protoreflect.MapKey, v protoreflect.Value) bool {
					walk(v.Message(), visit)
					return true
				})
			}
		case fd.Message() == nil:
		case fd.IsList():
			for i := range v.List().Len() {
				walk(v.List().Get(i).Message(), visit)
			}
		default:
			walk(v.Message(), visit)
		}
		return true
	})
}
