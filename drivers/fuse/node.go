package fuse

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/drivers/directory"
	"github.com/csi-prepare/csi-prepare/drivers/server"
	"github.com/csi-prepare/csi-prepare/drivers/tree"
	prepare "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// NodeGetVolumeStats implements csi.NodeServer. volume_path is the
// prepare_path of a preparation. The figures are those of the filesystem the
// volume lies on, as df shows them in a consumer. No serving process is asked:
// of a volume that a program serves there are none.
func (d *Driver) NodeGetVolumeStats(_ context.Context, req *csi.NodeGetVolumeStatsRequest) (*csi.NodeGetVolumeStatsResponse, error) {
	e, err := d.Measured(req)
	if err != nil {
		return nil, err
	}
	if e.Value.Home == program {
		return &csi.NodeGetVolumeStatsResponse{}, nil
	}
	volumes, err := d.open(e.Value.Home)
	if err != nil {
		return nil, server.Status(err)
	}
	defer volumes.Close()
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(volumes.Fd()), &st); err != nil {
		return nil, server.Status(err)
	}
	return directory.Usage(&st), nil
}

// Check implements server.Driver.
func (d *Driver) Check(_ context.Context, req *prepare.NodePrepareVolumeRequest) error {
	e, err := d.Controller.Check(req)
	if err != nil {
		return err
	}
	if _, err := d.programOf(e.Value.Traits, req); err != nil {
		return err
	}
	performer := req.GetPerformer()
	switch {
	case performer.GetKernel() != prepare.Performer_NODE:
		return status.Error(codes.FailedPrecondition, "performer.kernel: a FUSE mount is of the node's kernel; prepare for NODE")
	case d.config.Classic:
		if !slices.Contains(performer.GetKinds(), prepare.MountKind_MOUNT_KIND_BIND) {
			return status.Error(codes.FailedPrecondition, "performer.kinds: this plugin was started to mount by itself and returns MOUNT_KIND_BIND alone; offer it")
		}
	case !slices.Contains(performer.GetKinds(), prepare.MountKind_MOUNT_KIND_FUSE):
		return status.Error(codes.FailedPrecondition, "performer.kinds: this plugin returns MOUNT_KIND_FUSE alone; offer it")
	case req.GetHandleSocket() == "":
		return status.Error(codes.FailedPrecondition, "handle_socket: is not set, and MOUNT_KIND_FUSE needs it; listen and set it")
	}
	return nil
}

// Specs implements server.Driver: it sees to it that a process serves the
// preparation and that the CO has what it needs of it.
func (d *Driver) Specs(ctx context.Context, req *prepare.NodePrepareVolumeRequest) ([]*prepare.MountSpec, error) {
	e, err := d.Usable(req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	a, err := directory.Attributes("volume_capability", req.GetVolumeCapability(), req.GetReadonly())
	if err != nil {
		return nil, err
	}
	a.Nosuid, a.Nodev = true, true // a FUSE mount has both in any case
	o, err := d.order(e, req)
	if err != nil {
		return nil, err
	}
	if d.config.Classic {
		if err := d.servers.serveAt(ctx, o); err != nil {
			return nil, err
		}
		return []*prepare.MountSpec{{
			Kind: &prepare.MountSpec_Bind{Bind: &prepare.BindMount{
				Source:      &prepare.PathRef{Base: prepare.PathRef_PREPARE, Relative: mountDir},
				MountFsType: fsType,
			}},
			Attributes:     a,
			IdmapSupported: true,
		}}, nil
	}
	handle, err := d.servers.serve(ctx, o, req.GetHeldHandles())
	if err != nil {
		return nil, server.HandoffStatus(err)
	}
	ours := len(o.Program) == 0 // what another's program can do is not known
	return []*prepare.MountSpec{{
		Kind:           &prepare.MountSpec_Fuse{Fuse: &prepare.FuseMount{HandleId: handle, Resumable: ours}},
		Attributes:     a,
		IdmapSupported: ours,
	}}, nil
}

// programOf is the program that serves a volume, nil if none does.
func (d *Driver) programOf(t traits, req *prepare.NodePrepareVolumeRequest) (Program, error) {
	if t.Program == "" {
		return nil, nil
	}
	p := d.config.Programs[t.Program]
	if p == nil {
		return nil, status.Errorf(codes.FailedPrecondition, "volume_id: the volume is served by the program %s, and this plugin was started without it; start it with --program", t.Program)
	}
	for _, key := range p.secrets() {
		if _, given := req.GetSecrets()[key]; !given {
			return nil, server.Invalid("secrets", fmt.Sprintf("hold no %q, which the program of the volume wants", key), "set it")
		}
	}
	return p, nil
}

// order says what is to be served for a request.
func (d *Driver) order(e directory.Entry[traits], req *prepare.NodePrepareVolumeRequest) (order, error) {
	t := e.Value.Traits
	o := order{
		Socket: req.GetHandleSocket(), Token: req.GetHandoffToken(),
		Volume: req.GetVolumeId(), Prepare: req.GetPrepareId(),
		UID: t.UID, GID: t.GID,
		// Who comes with secrets may be somebody else than who came before.
		Share: t.Share && len(req.GetSecrets()) == 0 && !d.config.Classic,
	}
	if d.config.Classic {
		o.Target = filepath.Join(req.GetPreparePath(), mountDir)
	}
	p, err := d.programOf(t, req)
	if err != nil {
		return order{}, err
	}
	if p != nil {
		o.Program, o.Source, o.Secrets = p, t.Source, map[string][]byte{}
		for _, key := range p.secrets() {
			o.Secrets[key] = []byte(req.GetSecrets()[key])
		}
		return o, nil
	}
	home, err := d.home(e.Value.Home)
	if err != nil {
		return order{}, status.Error(codes.FailedPrecondition, err.Error())
	}
	volumes, err := d.open(e.Value.Home)
	if err != nil {
		return order{}, err
	}
	defer volumes.Close()
	orphans, err := makeOrphans(volumes, e.Key.Volume, o.server())
	if err != nil {
		return order{}, err
	}
	o.Data, o.Orphans = home+"/"+e.Key.Volume+"/"+dataDir, home+"/"+orphans
	return o, nil
}

// makeOrphans makes the directory of a server's orphans, and names it from the
// directory of all volumes.
func makeOrphans(volumes interface{ Fd() uintptr }, id, server string) (string, error) {
	fd, err := tree.Open(int(volumes.Fd()), id, unix.O_PATH)
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP), errors.Is(err, unix.EXDEV):
		return "", status.Errorf(codes.FailedPrecondition, "volume_id: the directory of the volume cannot be reached: %v; is its filesystem mounted?", err)
	case err != nil:
		return "", err
	}
	defer unix.Close(fd)
	name := orphansDir + "/" + server
	if err := unix.Mkdirat(fd, name, 0o700); err != nil && !errors.Is(err, unix.EEXIST) {
		return "", err
	}
	return id + "/" + name, nil
}

// release lets go of what Specs made: it is OK once no process serves.
func (d *Driver) release(ctx context.Context, volumeID, prepareID string) error {
	own := nameOf(volumeID, prepareID)
	if err := d.servers.end(ctx, own); err != nil {
		return err
	}
	servers := []string{own}
	inUse, err := d.sharedBeside(volumeID, prepareID)
	if err != nil {
		return err
	}
	if shared := sharedName(volumeID); !inUse {
		if err := d.servers.end(ctx, shared); err != nil {
			return err
		}
		servers = append(servers, shared)
	}
	e, _, err := d.Find(volumeID)
	if err != nil || e.Key.Volume == "" {
		return err
	}
	volumes, err := d.open(e.Value.Home)
	if err != nil {
		return err
	}
	defer volumes.Close()
	fd, err := tree.Open(int(volumes.Fd()), e.Key.Volume+"/"+orphansDir, unix.O_RDONLY)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	for _, server := range servers {
		if err := tree.Remove(ctx, fd, server); err != nil {
			return err
		}
	}
	return nil
}

// sharedBeside tells whether a preparation other than the one given has the
// server that preparations of the volume share.
func (d *Driver) sharedBeside(volumeID, prepareID string) (bool, error) {
	all, err := d.preparations.PrepareIDs(volumeID)
	if err != nil {
		return false, err
	}
	for _, id := range all {
		if id != prepareID && !d.servers.has(nameOf(volumeID, id)) {
			return true, nil
		}
	}
	return false, nil
}
