package prepare

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/csi-prepare/csi-prepare/drivers/server"
	"github.com/csi-prepare/csi-prepare/reference/handoff"
	"github.com/csi-prepare/csi-prepare/reference/kernel"
	"github.com/csi-prepare/csi-prepare/reference/mountns"
	pb "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// answer says what the plugin has published at target.
func (s *service) answer(ctx context.Context, req *pb.NodePrepareVolumeRequest, target string) (*pb.MountSpec, error) {
	a, err := attributesOf(req)
	if err != nil {
		return nil, err
	}
	spec := &pb.MountSpec{Attributes: a}
	if req.GetVolumeCapability().GetBlock() != nil {
		spec.Attributes = &pb.MountAttributes{Readonly: a.GetReadonly()}
		spec.Kind, err = s.device(ctx, target, a.GetReadonly())
		return spec, err
	}
	m, err := mountAt(ctx, target)
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return nil, err
	}
	if m == nil {
		return nil, s.nothingThere(ctx, target)
	}
	if flag, found := unheeded(m, req.GetVolumeCapability().GetMount().GetMountFlags()); found {
		return nil, server.Invalid(flagsField, fmt.Sprintf("%q cannot be honoured, the plugin published a directory of a filesystem that was mounted without", server.FlagName(flag)),
			"leave it out, or use an attribute of a mount such as noexec or noatime")
	}
	facts, err := kernel.FactsOf(unix.AT_FDCWD, target, kernel.Probe().UniqueID)
	if err != nil {
		return nil, err
	}
	below, err := mountsBelow(ctx, m, target)
	if err != nil {
		return nil, err
	}
	a.Recursive = below && !proto.Equal(a, new(pb.MountAttributes))
	isDir := facts.Mode&unix.S_IFMT == unix.S_IFDIR
	if isDir && slices.Contains(req.GetPerformer().GetKinds(), pb.MountKind_MOUNT_KIND_HANDLE) && !onRoot(facts) {
		// A name of its own for each clone: the CO may have an earlier one.
		id := rand.Text()
		spec.Kind = &pb.MountSpec_Handle{Handle: &pb.MountHandle{HandleId: id, FsType: m.Type(), Served: m.FSType == "fuse"}}
		return spec, offer(ctx, req, target, id, below)
	}
	spec.Kind = &pb.MountSpec_Bind{Bind: &pb.BindMount{
		Source:    &pb.PathRef{Base: pb.PathRef_PREPARE, Relative: targetName},
		Recursive: below, IsFile: !isDir, MountFsType: m.Type(),
	}}
	return spec, nil
}

// mountAt is the mount whose root is at path, nil if path is within one.
func mountAt(ctx context.Context, path string) (*mountns.Mount, error) {
	facts, err := kernel.FactsOf(unix.AT_FDCWD, path, kernel.Probe().UniqueID)
	if err != nil || !facts.MountRoot {
		return nil, err
	}
	own, err := mountns.Own()
	if err != nil {
		return nil, err
	}
	defer own.Close()
	found, err := own.Lookup(ctx, facts.MountID)
	if err != nil {
		return nil, err
	}
	if len(found) != 1 {
		return nil, fmt.Errorf("prepare_path: mount %d on %s is gone again", facts.MountID, targetName)
	}
	return &found[0], nil
}

// mountsBelow says whether something is mounted below the mount m at path.
func mountsBelow(ctx context.Context, m *mountns.Mount, path string) (bool, error) {
	own, err := mountns.Own()
	if err != nil {
		return false, err
	}
	defer own.Close()
	if f := kernel.Probe(); f.Listmount && f.UniqueID {
		below, err := kernel.ListMounts(nil, own.ID(), m.ID, 0)
		return len(below) > 0, err
	}
	t, err := own.Table(ctx)
	if err != nil {
		return false, err
	}
	return slices.ContainsFunc(t.Below(path), func(m mountns.Mount) bool { return m.Point != path }), nil
}

// onRoot says that a file is of the filesystem that is the node's root: no CO
// takes that as a HANDLE, since it might be of anything.
func onRoot(f kernel.Facts) bool {
	root, err := kernel.FactsOf(unix.AT_FDCWD, "/", kernel.Probe().UniqueID)
	return err != nil || root.DevMajor == f.DevMajor && root.DevMinor == f.DevMinor
}

// offer sends a clone of the mount at target. It does so also while the CO has
// an earlier one: a plugin that was started again may have mounted anew.
func offer(ctx context.Context, req *pb.NodePrepareVolumeRequest, target, handleID string, recursive bool) error {
	if req.GetHandleSocket() == "" {
		return server.Invalid("handle_socket", "is required with HANDLE in performer.kinds", "listen on one, or do not offer HANDLE")
	}
	flags := uint(unix.OPEN_TREE_CLONE)
	if recursive {
		flags |= unix.AT_RECURSIVE
	}
	fd, err := kernel.OpenTree(unix.AT_FDCWD, target, flags|unix.AT_SYMLINK_NOFOLLOW)
	if err != nil {
		return fmt.Errorf("clone what the plugin published: %w", err)
	}
	mount := os.NewFile(uintptr(fd), "clone")
	defer mount.Close()
	conn, err := handoff.Dial(ctx, req.GetHandleSocket(), handoff.Key{VolumeID: req.GetVolumeId(), PrepareID: req.GetPrepareId()}, req.GetHandoffToken())
	if err != nil {
		return status.Errorf(codes.Unavailable, "handle_socket: %v", err)
	}
	defer func() { _ = conn.Close() }()
	err = conn.Offer(ctx, handleID, mount)
	var refused *handoff.Refusal
	if errors.As(err, &refused) {
		return status.Errorf(refused.Code, "handle_socket: the CO refuses the handle: %s", refused.Message)
	}
	return err
}

// device is the block device that the plugin published as a node, or as a link
// to one.
func (s *service) device(ctx context.Context, target string, readonly bool) (*pb.MountSpec_BlockDevice, error) {
	// Opened without reading, a device does nothing; what is no device is
	// seen before it is opened.
	info, err := os.Stat(target)
	if errors.Is(err, os.ErrNotExist) {
		return nil, s.nothingThere(ctx, target)
	}
	if err != nil {
		return nil, err
	}
	if info.Mode()&os.ModeType != os.ModeDevice {
		if info.Mode().IsRegular() && info.Size() == 0 {
			return nil, s.nothingThere(ctx, target) // where a device was to be mounted
		}
		return nil, status.Errorf(codes.Internal, "the plugin published a %v for a block volume, and not a device", info.Mode().Type())
	}
	flags := unix.O_RDONLY | unix.O_NONBLOCK | unix.O_CLOEXEC
	fd, err := unix.Open(target, flags, 0)
	if err != nil {
		return nil, fmt.Errorf("open the published device: %w", err)
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, err
	}
	d := &pb.BlockDevice{Major: unix.Major(st.Rdev), Minor: unix.Minor(st.Rdev)}
	if seq, err := kernel.Diskseq(fd); err == nil {
		d.Diskseq = seq
	}
	if readonly {
		refuses, err := unix.IoctlGetUint32(fd, unix.BLKROGET)
		if err == nil && refuses == 0 {
			return nil, status.Error(codes.FailedPrecondition, "readonly: the plugin published a device that takes writes, which no mount spec can prevent; use a plugin that sets its device read-only, or leave readonly out")
		}
		if err != nil {
			return nil, fmt.Errorf("BLKROGET: %w", err)
		}
	}
	return &pb.MountSpec_BlockDevice{BlockDevice: d}, nil
}

// nothingThere says where the mount is instead, if that can be seen.
func (s *service) nothingThere(ctx context.Context, target string) error {
	const remedy = "share the directory of prepare_path between the two (mountPropagation: Bidirectional for the plugin, HostToContainer here), or run both in one mount namespace"
	own, err := mountns.Own()
	if err != nil {
		return err
	}
	defer own.Close()
	theirs, err := s.pluginNamespace(ctx)
	if err != nil {
		return status.Errorf(codes.FailedPrecondition, "prepare_path: the plugin answered OK and nothing is mounted on %s in this mount namespace (%d); the plugin's cannot be looked at (%v). If it mounted there, propagation is missing: %s",
			targetName, own.ID(), err, remedy)
	}
	defer theirs.Close()
	t, err := theirs.Table(ctx)
	if err != nil {
		return err
	}
	m, mounted := t.Top(target)
	switch {
	case theirs.ID() == own.ID(), !mounted:
		return status.Errorf(codes.FailedPrecondition, "prepare_path: the plugin answered OK and nothing is mounted on %s, neither here nor in the plugin's mount namespace (%d); it sees another directory under this path, or publishes without mounting, which is no volume",
			targetName, theirs.ID())
	}
	return status.Errorf(codes.FailedPrecondition, "prepare_path: propagation is missing: the plugin mounted a %s on %s in its own mount namespace (%d), and that does not reach this one (%d); %s",
		m.Type(), targetName, theirs.ID(), own.ID(), remedy)
}

// pluginNamespace is the mount namespace of the process behind the plugin's
// socket.
func (s *service) pluginNamespace(ctx context.Context) (*mountns.Namespace, error) {
	conn, err := new(net.Dialer).DialContext(ctx, "unix", s.socket)
	if err != nil {
		return nil, err
	}
	defer func() { _ = conn.Close() }()
	raw, err := conn.(*net.UnixConn).SyscallConn()
	if err != nil {
		return nil, err
	}
	var cred *unix.Ucred
	cerr := raw.Control(func(fd uintptr) { cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	if err := errors.Join(cerr, err); err != nil {
		return nil, err
	}
	if cred.Pid == 0 {
		return nil, errors.New("it is in another pid namespace")
	}
	return mountns.OfPID(int(cred.Pid))
}
