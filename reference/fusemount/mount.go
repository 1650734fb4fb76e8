// Package fusemount is the CO's part in a FUSE filesystem that a Plugin
// serves: it opens the device, makes the mount, sees that the server answers,
// and ends the connection when it does not.
//
// The device is opened and mounted before it leaves the CO. A server cannot
// delay that, and INIT waits in the device when the server first looks. The
// mount is detached: in no namespace, and gone with its last descriptor.
//
// A mount whose server is hostile or hung blocks whoever looks at it. Only
// Prove looks, on a thread that Abort sets free: ending a connection ends every
// wait for it, and the connection is found through a descriptor of its mount.
package fusemount

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/csi-prepare/csi-prepare/reference/handoff"
	"github.com/csi-prepare/csi-prepare/reference/kernel"
)

// DefaultMaxRead is the max_read of a Policy that sets none: 1 MiB, what a
// server can negotiate at most on a kernel with default settings.
const DefaultMaxRead = 1 << 20

// Policy is what the operator leaves to the servers of one Plugin. The zero
// value leaves them nothing but a max_read below DefaultMaxRead.
type Policy struct {
	// MaxRead caps max_read, in bytes; 0 is DefaultMaxRead.
	MaxRead uint32
	// ServerPermissions lets a server that does not ask for
	// default_permissions decide by itself who may do what. Ids cannot be
	// mapped on such a mount.
	ServerPermissions bool
	// Owner says whether a mount may belong to the ids; nil means any.
	Owner func(uid, gid uint32) bool
}

// Mount makes the detached mount r asks for, nosuid and nodev, and returns it
// with the device its server reads. It fits handoff.Config.Mount.
//
// allow_other is always set. The mount is visible to nobody but the consumers
// it is attached for, who may run as any user, and to the CO, which has to see
// that it is served; without the parameter only user_id gets past the kernel,
// root does not.
//
// Errors are a *handoff.Refusal where the Plugin is to be told: what it asked
// for is beyond the policy or unknown to the kernel, whose words it gets.
func (p Policy) Mount(_ context.Context, _ handoff.Key, r handoff.FUSERequest) (device, mount *os.File, err error) {
	if err := r.Check(); err != nil {
		return nil, nil, err
	}
	if p.Owner != nil && !p.Owner(r.UserID, r.GroupID) {
		return nil, nil, &handoff.Refusal{
			Code:    codes.PermissionDenied,
			Message: "fuse_request.user_id, group_id: not an owner this plugin may give a mount",
		}
	}
	device, err = openDevice()
	if err != nil {
		return nil, nil, err
	}
	defer func() {
		if err != nil {
			_ = device.Close()
		}
	}()
	raw, err := device.SyscallConn()
	if err != nil {
		return nil, nil, err
	}
	cerr := raw.Control(func(fd uintptr) { mount, err = p.mount(int(fd), r) })
	if err = errors.Join(cerr, err); err != nil {
		return nil, nil, refusal(err)
	}
	return device, mount, nil
}

func openDevice() (*os.File, error) {
	for {
		fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
		switch err {
		case nil:
			return os.NewFile(uintptr(fd), "/dev/fuse"), nil
		case unix.EINTR:
		case unix.EMFILE, unix.ENFILE:
			return nil, &handoff.Refusal{Code: codes.ResourceExhausted, Message: "the CO has no descriptor left"}
		default:
			return nil, fmt.Errorf("fusemount: %w", &os.PathError{Op: "open", Path: "/dev/fuse", Err: err})
		}
	}
}

// mount sets the four parameters the kernel insists on and those a server may
// choose; fd is a number, in decimal, that is looked up in this process.
func (p Policy) mount(fd int, r handoff.FUSERequest) (*os.File, error) {
	fs, err := kernel.OpenFS("fuse")
	if err != nil {
		return nil, err
	}
	defer func() { _ = fs.Close() }()
	limit := p.MaxRead
	if limit == 0 {
		limit = DefaultMaxRead
	}
	maxRead, permissions := uint64(limit), !p.ServerPermissions
	for _, q := range r.Parameters {
		switch q.Key {
		case "max_read":
			n, err := strconv.ParseUint(q.Text, 10, 32)
			if err != nil {
				return nil, &handoff.Refusal{Code: codes.InvalidArgument, Message: "fuse_request.parameters: max_read: does not fit 32 bits"}
			}
			maxRead = min(n, maxRead)
		case "default_permissions":
			permissions = true
		}
	}
	set := []struct{ key, value string }{
		{"source", "csi-prepare"},
		{"fd", strconv.Itoa(fd)},
		{"rootmode", strconv.FormatUint(uint64(r.RootMode), 8)},
		{"user_id", strconv.FormatUint(uint64(r.UserID), 10)},
		{"group_id", strconv.FormatUint(uint64(r.GroupID), 10)},
		{"max_read", strconv.FormatUint(maxRead, 10)},
	}
	if r.Subtype != "" {
		set = append(set, struct{ key, value string }{"subtype", r.Subtype})
	}
	for _, s := range set {
		if err := fs.SetString(s.key, s.value); err != nil {
			return nil, err
		}
	}
	flags := []string{"allow_other"}
	if permissions {
		flags = append(flags, "default_permissions")
	}
	for _, f := range flags {
		if err := fs.SetFlag(f); err != nil {
			return nil, err
		}
	}
	if err := fs.Create(); err != nil {
		return nil, err
	}
	m, err := fs.Mount(unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(m), "fuse"), nil
}

// refusal tells the Plugin what the kernel refused, and keeps everything else
// with the CO.
func refusal(err error) error {
	var fs *kernel.FSError
	if !errors.As(err, &fs) {
		return err
	}
	code := codes.InvalidArgument
	switch fs.Errno {
	case unix.ENODEV:
		return &handoff.Refusal{Code: codes.FailedPrecondition, Message: "the node's kernel has no FUSE"}
	case unix.EMFILE, unix.ENFILE, unix.ENOMEM, unix.ENOSPC:
		code = codes.ResourceExhausted
	case unix.EPERM, unix.EACCES:
		return fmt.Errorf("fusemount: %w", err)
	}
	return &handoff.Refusal{Code: code, Message: fs.Error()}
}
