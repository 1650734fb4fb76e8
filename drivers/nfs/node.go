package nfs

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"path"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/drivers/directory"
	"github.com/csi-prepare/csi-prepare/drivers/server"
	prepare "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// The kernel's types: "nfs" has every version, "nfs4" those from 4.0 on.
const (
	typeNFS  = "nfs"
	typeNFS4 = "nfs4"
)

// supported tells why no volume supports a capability, "" if all do.
func supported(c *csi.VolumeCapability) (reason string) {
	if c.GetBlock() != nil {
		return "access_type: block is not supported, a volume is a directory; use mount"
	}
	switch t := c.GetMount().GetFsType(); t {
	case "", typeNFS, typeNFS4:
		return ""
	}
	return "fs_type: a volume of this plugin has none but nfs; leave it empty"
}

// checkCapability implements the rules of directory.Config.
func (d *Driver) checkCapability(field string, c *csi.VolumeCapability, readonly bool) (reason string, err error) {
	if reason := supported(c); reason != "" {
		return reason, nil
	}
	_, err = parseOptions(field, c, readonly, "")
	return "", err
}

// place is where a volume is.
type place struct {
	directory string // relative to the export
	version   version
}

// find returns the place of the volume a request is about. A driver without a
// root knows what the controller has put into volume_context.
func (d *Driver) find(req *prepare.NodePrepareVolumeRequest) (place, error) {
	if d.controller != nil {
		e, err := d.controller.Usable(req.GetVolumeId())
		return place{directoryOf(e), e.Value.Traits.Version}, err
	}
	dir, given := req.GetVolumeContext()[contextDirectory]
	if !given {
		return place{}, status.Errorf(codes.NotFound, "volume_id: there is no such volume: volume_context has no %q; pass on what CreateVolume answered", contextDirectory)
	}
	p := place{directory: dir}
	field := fmt.Sprintf("volume_context[%q]", contextDirectory)
	home, ok := strings.CutSuffix(dir, path.Join(directory.VolumesDir, req.GetVolumeId()))
	if !ok || home != "" && (!strings.HasSuffix(home, "/") || checkSubdirectory(strings.TrimSuffix(home, "/")) != nil) {
		return p, server.Invalid(field, "is not the directory of this volume", "pass on what CreateVolume answered")
	}
	if v := req.GetVolumeContext()[contextVersion]; v != "" {
		if p.version, ok = versions[v]; !ok {
			return p, server.Invalid(fmt.Sprintf("volume_context[%q]", contextVersion), "does not name a version that is fixed", versionRule)
		}
	}
	return p, nil
}

// Check implements server.Driver.
func (d *Driver) Check(_ context.Context, req *prepare.NodePrepareVolumeRequest) error {
	const field = "volume_capability"
	p, err := d.find(req)
	if err != nil {
		return err
	}
	c := req.GetVolumeCapability()
	if reason := supported(c); reason != "" {
		return status.Errorf(codes.FailedPrecondition, "%s.%s", field, reason)
	}
	o, err := parseOptions(field, c, req.GetReadonly(), p.version)
	if err != nil {
		return err
	}
	performer := req.GetPerformer()
	kind := prepare.MountKind_MOUNT_KIND_FILESYSTEM
	if d.config.Helper != "" {
		kind = prepare.MountKind_MOUNT_KIND_HANDLE
	}
	switch {
	case performer.GetKernel() != prepare.Performer_NODE:
		return status.Error(codes.FailedPrecondition, "performer.kernel: a network filesystem is mounted by the node's kernel; prepare for NODE")
	case !slices.Contains(performer.GetKinds(), kind):
		return status.Errorf(codes.FailedPrecondition, "performer.kinds: this plugin returns %s alone; offer it", kind)
	case d.config.Helper != "" && req.GetHandleSocket() == "":
		return status.Error(codes.FailedPrecondition, "handle_socket: the mount is handed over there; set it")
	case d.config.Helper == "" && o.fsType(performer.GetFsTypes()) == "":
		return status.Errorf(codes.FailedPrecondition, "performer.fs_types: has no type for version %s; offer nfs, or nfs4 from 4.0 on", o.version)
	}
	return nil
}

// fsType is the type for the version among those offered, "" if none is.
func (o *options) fsType(offered []string) string {
	if o.version != "3" && slices.Contains(offered, typeNFS4) {
		return typeNFS4
	}
	if slices.Contains(offered, typeNFS) {
		return typeNFS
	}
	return ""
}

// Specs implements server.Driver: one filesystem, or one handle.
func (d *Driver) Specs(ctx context.Context, req *prepare.NodePrepareVolumeRequest) ([]*prepare.MountSpec, error) {
	p, err := d.find(req)
	if err != nil {
		return nil, err
	}
	if err := d.reach(req.GetVolumeId()); err != nil {
		return nil, err
	}
	o, err := parseOptions("volume_capability", req.GetVolumeCapability(), req.GetReadonly(), p.version)
	if err != nil {
		return nil, err
	}
	spec := &prepare.MountSpec{Attributes: o.attributes}
	if d.config.Helper != "" {
		spec.Kind, err = d.handle(ctx, req, p, o)
	} else {
		spec.Kind, err = d.filesystem(ctx, req, p, o)
	}
	if err != nil {
		return nil, err
	}
	return []*prepare.MountSpec{spec}, nil
}

// reach says here that the directory of a volume is missing, not in the
// consumer, where the export can be reached.
func (d *Driver) reach(id string) error {
	if d.controller == nil {
		return nil
	}
	e, err := d.controller.Usable(id)
	if err != nil {
		return err
	}
	fd, err := d.controller.OpenVolume(e, unix.O_PATH)
	if err == nil {
		return unix.Close(fd)
	}
	for _, missing := range []error{unix.ENOENT, unix.ENOTDIR, unix.ELOOP, unix.EXDEV, unix.ESTALE} {
		if errors.Is(err, missing) {
			return status.Errorf(codes.FailedPrecondition, "volume_id: the directory of the volume cannot be reached: %v; is the export mounted at the root?", err)
		}
	}
	return err
}

func (d *Driver) filesystem(ctx context.Context, req *prepare.NodePrepareVolumeRequest, p place, o *options) (*prepare.MountSpec_Filesystem, error) {
	addr, err := d.resolve(ctx, o)
	if err != nil {
		return nil, err
	}
	return &prepare.MountSpec_Filesystem{Filesystem: &prepare.FilesystemMount{
		FsType:     o.fsType(req.GetPerformer().GetFsTypes()),
		Source:     &prepare.FilesystemMount_Opaque{Opaque: d.config.Export.source(p.directory)},
		Parameters: o.parameters(addr),
	}}, nil
}

// parameters are all that the kernel would otherwise choose by itself or ask a
// mount helper for.
func (o *options) parameters(addr netip.Addr) []*prepare.FsParameter {
	proto := "tcp"
	if addr.Is6() {
		proto = "tcp6"
	}
	words := [][2]string{{"addr", addr.String()}, {"vers", string(o.version)}, {"proto", proto}}
	if o.version == "3" {
		// The locks of version 3 need rpc.statd, a program of the node.
		words = append(words, [2]string{"mountaddr", addr.String()}, [2]string{"mountproto", proto}, [2]string{"nolock"})
	}
	if !o.has("hard", "soft", "softerr") {
		words = append(words, [2]string{"hard"})
	}
	if !o.has("sec") {
		words = append(words, [2]string{"sec", "sys"})
	}
	for _, key := range o.sorted() {
		if key != "proto" && key != "nolock" {
			words = append(words, [2]string{key, o.set[key]})
		}
	}
	var all []*prepare.FsParameter
	for _, w := range words {
		parameter := &prepare.FsParameter{Key: w[0]}
		if w[1] != "" {
			parameter.Value = &prepare.FsParameter_Text{Text: w[1]}
		}
		all = append(all, parameter)
	}
	return all
}

func (o *options) has(keys ...string) bool {
	return slices.ContainsFunc(keys, func(key string) bool { _, ok := o.set[key]; return ok })
}

// NodeGetCapabilities implements csi.NodeServer. The figures of a volume are
// those of the export, which has to be reached for them.
func (d *Driver) NodeGetCapabilities(ctx context.Context, req *csi.NodeGetCapabilitiesRequest) (*csi.NodeGetCapabilitiesResponse, error) {
	resp, err := d.Node.NodeGetCapabilities(ctx, req)
	if err == nil && d.controller == nil {
		resp.Capabilities = slices.DeleteFunc(resp.Capabilities, func(c *csi.NodeServiceCapability) bool {
			return c.GetRpc().GetType() == csi.NodeServiceCapability_RPC_GET_VOLUME_STATS
		})
	}
	return resp, err
}

// NodeGetVolumeStats implements csi.NodeServer. volume_path is the prepare_path
// of a preparation. The figures are those of the export.
func (d *Driver) NodeGetVolumeStats(ctx context.Context, req *csi.NodeGetVolumeStatsRequest) (*csi.NodeGetVolumeStatsResponse, error) {
	if d.controller == nil {
		return d.Node.NodeGetVolumeStats(ctx, req)
	}
	e, err := d.controller.Measured(req)
	if err != nil {
		return nil, err
	}
	st, err := d.statfs(ctx, "stats of "+e.Key.Volume, func() (int, error) { return d.controller.OpenVolume(e, unix.O_PATH) })
	if err != nil {
		return nil, err
	}
	return directory.Usage(st), nil
}
