package sanity

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"path"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/kubernetes-csi/csi-lib-utils/protosanitizer"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// call is one RPC as a failure message shows it. It holds no secret: request
// and answer are text from which the fields marked csi_secret are left out.
type call struct {
	method  string
	request string
	answer  string // of a call that was OK
	code    codes.Code
	message string // of the error, which comes from the plugin
	// command is what makes the call again, without its secrets.
	command string
}

// String returns one line: "NodePrepareVolume volume_id=v1 -> OK, 1 mount
// spec".
func (c call) String() string {
	line := c.method
	if c.request != "" {
		line += " " + c.request
	}
	if c.code != codes.OK {
		return fmt.Sprintf("%s -> %s: %s", line, codeName(c.code), c.message)
	}
	line += " -> OK"
	if c.answer != "" {
		line += ", " + c.answer
	}
	return line
}

// codeName returns the name CSI uses, for example "FAILED_PRECONDITION".
func codeName(c codes.Code) string {
	if c == codes.Canceled {
		return "CANCELLED"
	}
	var b strings.Builder
	for i, r := range c.String() {
		if i > 0 && r >= 'A' && r <= 'Z' && !strings.HasPrefix(c.String(), "OK") {
			b.WriteByte('_')
		}
		b.WriteRune(r)
	}
	return strings.ToUpper(b.String())
}

// describe renders the fields that are set, in the order of the message.
func describe(m proto.Message) string {
	if m == nil {
		return ""
	}
	var parts []string
	r := m.ProtoReflect()
	for i := range r.Descriptor().Fields().Len() {
		f := r.Descriptor().Fields().Get(i)
		if !r.Has(f) {
			continue
		}
		parts = append(parts, fmt.Sprintf("%s=%s", f.TextName(), fieldText(f, r.Get(f))))
	}
	return strings.Join(parts, " ")
}

func fieldText(f protoreflect.FieldDescriptor, v protoreflect.Value) string {
	if secret, _ := proto.GetExtension(f.Options(), csi.E_CsiSecret).(bool); secret {
		return "***stripped***"
	}
	switch {
	case f.IsList():
		var items []string
		for i := range v.List().Len() {
			items = append(items, scalarText(f, v.List().Get(i)))
		}
		return "[" + strings.Join(items, " ") + "]"
	case f.IsMap():
		plain := map[string]any{}
		v.Map().Range(func(k protoreflect.MapKey, e protoreflect.Value) bool {
			plain[k.String()] = e.Interface()
			return true
		})
		text, err := json.Marshal(plain)
		if err != nil {
			return "(unreadable)"
		}
		return string(text)
	default:
		return scalarText(f, v)
	}
}

func scalarText(f protoreflect.FieldDescriptor, v protoreflect.Value) string {
	const most = 160
	var s string
	switch f.Kind() {
	case protoreflect.MessageKind, protoreflect.GroupKind:
		s = protosanitizer.StripSecrets(v.Message().Interface()).String()
	case protoreflect.EnumKind:
		if d := f.Enum().Values().ByNumber(v.Enum()); d != nil {
			return string(d.Name())
		}
		return fmt.Sprint(v.Enum())
	case protoreflect.StringKind:
		if s = v.String(); strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r > '~' }) {
			s = fmt.Sprintf("%q", s)
		}
	case protoreflect.BytesKind:
		return fmt.Sprintf("(%d bytes)", len(v.Bytes()))
	default:
		s = fmt.Sprint(v.Interface())
	}
	if len(s) > most {
		s = fmt.Sprintf("%s… (%d bytes)", s[:most], len(s))
	}
	return s
}

// brief says what an answer holds, where that is longer than a line.
func brief(m proto.Message) string {
	switch r := m.(type) {
	case *preparev1alpha1.NodePrepareVolumeResponse:
		return count(len(r.GetMountSpecs()), "mount spec")
	case *preparev1alpha1.NodeListPreparedVolumesResponse:
		s := count(len(r.GetEntries()), "entry")
		if r.GetNextToken() != "" {
			s += ", next_token=" + r.GetNextToken()
		}
		return s
	case *csi.CreateVolumeResponse:
		return "volume_id=" + r.GetVolume().GetVolumeId()
	default:
		return describe(m)
	}
}

func count(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	switch {
	case strings.HasSuffix(noun, "y"):
		noun = strings.TrimSuffix(noun, "y") + "ie"
	case strings.HasSuffix(noun, "s"):
		noun += "e"
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

// journal keeps the calls of one spec, in the order in which they ended.
type journal struct {
	mu    sync.Mutex
	calls []call
}

func (j *journal) add(c call) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.calls = append(j.calls, c)
}

// last returns the call that ended last.
func (j *journal) last() (call, bool) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if len(j.calls) == 0 {
		return call{}, false
	}
	return j.calls[len(j.calls)-1], true
}

// tail are the last calls, the oldest first.
func (j *journal) tail(most int) []call {
	j.mu.Lock()
	defer j.mu.Unlock()
	return slices.Clone(j.calls[max(0, len(j.calls)-most):])
}

// lines are the last calls as a failure shows them.
func (j *journal) lines(most int) []string {
	var all []string
	for _, c := range j.tail(most) {
		all = append(all, c.String())
	}
	return all
}

// commands make the last calls again.
func (j *journal) commands(most int) []string {
	var all []string
	for _, c := range j.tail(most) {
		if c.command != "" {
			all = append(all, c.command)
		}
	}
	return all
}

// command is a command line that makes a call.
func command(method string, request proto.Message) string {
	const most = 2000 // bytes, beyond which nobody types it
	if request == nil {
		return ""
	}
	request = proto.Clone(request)
	withoutSecrets(request.ProtoReflect())
	text, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(request)
	if err != nil || len(text) > most {
		return ""
	}
	// protojson varies its spaces on purpose.
	var compact bytes.Buffer
	if json.Compact(&compact, text) != nil {
		return ""
	}
	return fmt.Sprintf("prepare-sanity call %s '%s'", path.Base(method), strings.ReplaceAll(compact.String(), "'", `'\''`))
}

// withoutSecrets clears every field that is marked csi_secret.
func withoutSecrets(m protoreflect.Message) {
	m.Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		secret, _ := proto.GetExtension(f.Options(), csi.E_CsiSecret).(bool)
		switch {
		case secret:
			m.Clear(f)
		case f.IsMap() || f.Message() == nil:
		case f.IsList():
			for i := range v.List().Len() {
				withoutSecrets(v.List().Get(i).Message())
			}
		default:
			withoutSecrets(v.Message())
		}
		return true
	})
}

type journalKey struct{}

// recorded makes calls under ctx go into j.
func recorded(ctx context.Context, j *journal) context.Context {
	return context.WithValue(ctx, journalKey{}, j)
}

// record gives each call a deadline and keeps what it came to.
func record(timeout time.Duration, seen func(req, answer proto.Message)) grpc.UnaryClientInterceptor {
	return func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
		ctx, cancel := context.WithTimeout(ctx, timeout)
		defer cancel()
		err := invoke(ctx, method, req, reply, cc, opts...)
		request, _ := req.(proto.Message)
		answer, _ := reply.(proto.Message)
		if j, ok := ctx.Value(journalKey{}).(*journal); ok {
			c := call{method: path.Base(method), request: describe(request), code: status.Code(err), command: command(method, request)}
			if err != nil {
				c.message = status.Convert(err).Message()
			} else {
				c.answer = brief(answer)
			}
			j.add(c)
		}
		if err == nil && seen != nil {
			seen(request, answer)
		}
		return err
	}
}
