// Package handoff is the side channel over which file descriptors cross
// between a Plugin and a CO while a NodePrepareVolume call is pending:
// handle_socket of the wire contract. Both ends are here.
//
// The CO listens ([Listen]) and registers each call ([Listener.Begin]); the
// Plugin connects ([Dial]) and speaks first. A packet is one HandoffMessage
// with at most one descriptor, and each message of the Plugin gets one reply.
// A connection over which a process said that it serves stays open for as
// long as it serves: its end is how the CO learns of that process's death,
// which the device itself cannot tell while the CO holds a copy of it.
//
// The package knows messages, descriptors and who closes them. How a FUSE
// filesystem is mounted, proven alive or aborted it is told by functions in
// its [Config].
package handoff

import (
	"errors"
	"fmt"
	"regexp"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/csi-prepare/csi-prepare/reference/mountspec"
)

// Limits of the channel. A peer that goes past one of them is refused, and
// everything it sent with that packet is closed.
const (
	// MaxMessage is the most bytes one packet may have.
	MaxMessage = 16 << 10
	// MaxHandles is the most handles one call may bring.
	MaxHandles = 16
	// MaxDescriptors is the most descriptors (connections, devices and
	// mounts) a Listener holds for its Plugin at one time.
	MaxDescriptors = 256
	// MaxSession is the most bytes the two parts of a Session have in all.
	MaxSession = 4 << 10
	// MaxPath is the most bytes the path of a socket may have, as unix(7)
	// says for sun_path less its final NUL byte.
	MaxPath = 107

	// maxMessages bounds what one call or one serving connection may send,
	// so that a peer with a valid token cannot keep the CO mounting.
	maxMessages = 64
)

// The default deadlines of a Config.
const (
	DefaultSilence  = 5 * time.Second
	DefaultStep     = 30 * time.Second
	DefaultFailover = 60 * time.Second
)

// Key names one preparation, as in the NodePrepareVolume call.
type Key struct {
	VolumeID  string
	PrepareID string
}

// String returns the two ids for an error or a log.
func (k Key) String() string { return fmt.Sprintf("%q/%q", k.VolumeID, k.PrepareID) }

// FUSERequest is what a Plugin asks of a FUSE mount it is going to serve
// (HandoffFuseRequest).
type FUSERequest struct {
	// Subtype is shown as the type fuse.SUBTYPE; [a-z0-9_-], at most 32
	// bytes, may be empty.
	Subtype string
	// Parameters are any of max_read (a decimal number of bytes) and the
	// flags default_permissions and allow_other, each at most once.
	Parameters []mountspec.Parameter
	// RootMode is the st_mode of the root: a directory or a regular file.
	RootMode uint32
	// UserID and GroupID own the mount, in the user namespace of the CO.
	UserID, GroupID uint32
	// Resumable says that a later process of the Plugin is able to Resume.
	Resumable bool
	// ShareKey, if set, lets preparations of one volume share one mount and
	// one server; at most 128 bytes of UTF-8.
	ShareKey string
}

// Session is what a later process of the Plugin needs to take over a FUSE
// connection: the INIT request the first one read, and state of the Plugin's
// own. The CO keeps both as carefully as a secret and never reads State.
type Session struct {
	Init  []byte
	State []byte
}

// Refusal is the answer no: a reply with a code other than OK. A function of
// a Config returns one to choose what the Plugin is told; the text of any
// other error stays with the CO.
type Refusal struct {
	Code    codes.Code
	Message string // never a secret, never a parameter's value
}

// Error implements error.
func (r *Refusal) Error() string { return fmt.Sprintf("%s: %s", r.Code, r.Message) }

func refuse(code codes.Code, format string, args ...any) *Refusal {
	return &Refusal{Code: code, Message: fmt.Sprintf(format, args...)}
}

// ErrClosed is returned where the other end is gone, or the call has ended.
var ErrClosed = errors.New("handoff: closed")

// A ProtocolError says how a peer broke the channel's rules. The connection
// is closed and so is every descriptor that came with the packet.
type ProtocolError struct {
	Rule string // what the rule is
	Err  error  // a cause, if there is one
}

// Error implements error.
func (e *ProtocolError) Error() string {
	if e.Err != nil {
		return fmt.Sprintf("handoff: %s: %v", e.Rule, e.Err)
	}
	return "handoff: " + e.Rule
}

// Unwrap returns the cause.
func (e *ProtocolError) Unwrap() error { return e.Err }

var (
	handleID = regexp.MustCompile(`^[A-Za-z0-9._-]{1,128}$`)
	subtype  = regexp.MustCompile(`^[a-z0-9_-]{0,32}$`)
	maxRead  = regexp.MustCompile(`^[1-9][0-9]{0,9}$`)
)

// Check returns a Refusal with code INVALID_ARGUMENT, naming the field, if r
// breaks a rule of HandoffFuseRequest, and nil otherwise.
func (r FUSERequest) Check() error {
	bad := func(format string, args ...any) error {
		return refuse(codes.InvalidArgument, "fuse_request."+format, args...)
	}
	if !subtype.MatchString(r.Subtype) {
		return bad("subtype: want at most 32 bytes of [a-z0-9_-]")
	}
	if t := r.RootMode & unix.S_IFMT; t != unix.S_IFDIR && t != unix.S_IFREG || r.RootMode > 0o177777 {
		return bad("root_mode: want the st_mode of a directory or a regular file")
	}
	if r.UserID == 1<<32-1 || r.GroupID == 1<<32-1 {
		return bad("user_id, group_id: 4294967295 is no id")
	}
	if len(r.ShareKey) > 128 || !utf8.ValidString(r.ShareKey) {
		return bad("share_key: want at most 128 bytes of UTF-8")
	}
	seen := make(map[string]bool)
	for _, p := range r.Parameters {
		if seen[p.Key] {
			return bad("parameters: %s is given twice", p.Key)
		}
		switch p.Key {
		case "allow_other", "default_permissions":
			if p.Text != "" || !p.Secret.IsZero() {
				return bad("parameters: %s is a flag and takes no value", p.Key)
			}
		case "max_read":
			if !maxRead.MatchString(p.Text) || !p.Secret.IsZero() {
				return bad("parameters: max_read wants a decimal number of bytes")
			}
		default:
			return bad("parameters: only max_read, default_permissions and allow_other are a server's to choose")
		}
		seen[p.Key] = true
	}
	return nil
}

// equal reports whether r asks for the very mount that o asks for.
func (r FUSERequest) equal(o FUSERequest) bool {
	if len(r.Parameters) != len(o.Parameters) {
		return false
	}
	for i, p := range r.Parameters {
		if p != o.Parameters[i] {
			return false
		}
	}
	return r.Subtype == o.Subtype && r.RootMode == o.RootMode && r.UserID == o.UserID &&
		r.GroupID == o.GroupID && r.Resumable == o.Resumable
}

func (s Session) check(field string, resumable bool) error {
	if len(s.Init)+len(s.State) > MaxSession {
		return refuse(codes.InvalidArgument, "%s: fuse_init and state: at most %d bytes in all", field, MaxSession)
	}
	if resumable && len(s.Init) == 0 {
		return refuse(codes.InvalidArgument, "%s.fuse_init: REQUIRED where the request was resumable", field)
	}
	return nil
}
