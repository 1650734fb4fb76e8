package main

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"

	"github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// front is the shim before a plugin that mounts: a reference driver behind
// `prepare-shim co`, which nobody can tell from one.
type front struct {
	*rig
	shim    *exec.Cmd
	conn    *grpc.ClientConn
	prepare preparev1alpha1.NodePrepareClient
}

func newFront(t *testing.T, r *rig) *front {
	t.Helper()
	f := &front{rig: r}
	f.start()
	t.Cleanup(func() {
		r.end(f.shim)
		_ = f.conn.Close()
	})
	return f
}

func (f *front) start() {
	f.t.Helper()
	f.shim = f.program("front.log", "prepare-shim", "driver", "--endpoint", "unix://"+f.path("front.sock"),
		"--plugin", "unix://"+f.path("shim.sock"), "--state-dir", f.path("front"))
	if f.conn != nil {
		_ = f.conn.Close()
	}
	var err error
	f.conn, err = grpc.NewClient("unix://"+f.path("front.sock"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	f.must(err)
	f.prepare = preparev1alpha1.NewNodePrepareClient(f.conn)
	_, err = csi.NewIdentityClient(f.conn).Probe(f.t.Context(), &csi.ProbeRequest{}, grpc.WaitForReady(true))
	f.must(err)
}

// request is for a volume, with a prepare_path of its own.
func (f *front) request(v *csi.NodePublishVolumeRequest, kinds ...preparev1alpha1.MountKind) *preparev1alpha1.NodePrepareVolumeRequest {
	at := f.path("prepare-" + filepath.Base(filepath.Dir(v.GetTargetPath())))
	f.must(os.Mkdir(at, 0o700))
	return &preparev1alpha1.NodePrepareVolumeRequest{
		VolumeId: v.GetVolumeId(), PrepareId: "consumer", PreparePath: at, StagingTargetPath: v.GetStagingTargetPath(),
		VolumeCapability: v.GetVolumeCapability(), VolumeContext: v.GetVolumeContext(),
		Performer: &preparev1alpha1.Performer{Kernel: preparev1alpha1.Performer_NODE, Kinds: kinds},
	}
}

func (f *front) call(r *preparev1alpha1.NodePrepareVolumeRequest) (*preparev1alpha1.MountSpec, error) {
	answer, err := f.prepare.NodePrepareVolume(f.t.Context(), r)
	if err != nil {
		return nil, err
	}
	if n := len(answer.GetMountSpecs()); n != 1 {
		f.t.Fatalf("%d mount specs", n)
	}
	return answer.GetMountSpecs()[0], nil
}

// done ends a preparation, of which nothing is to be left.
func (f *front) done(r *preparev1alpha1.NodePrepareVolumeRequest) {
	f.t.Helper()
	_, err := f.prepare.NodeUnprepareVolume(context.Background(), &preparev1alpha1.NodeUnprepareVolumeRequest{ //nolint:usetesting // also in a cleanup
		VolumeId: r.GetVolumeId(), PrepareId: r.GetPrepareId(), PreparePath: r.GetPreparePath(), StagingTargetPath: r.GetStagingTargetPath(),
	})
	f.must(err)
	f.must(os.Remove(r.GetPreparePath()))
}

func TestDriverAnswersWithWhatIsPublished(t *testing.T) {
	r := newRig(t, "hostpath")
	f := newFront(t, r)
	v := r.volume(r.capability(multiWriter), 0)
	v.VolumeCapability.GetMount().MountFlags = []string{"noexec"}
	req := f.request(v, preparev1alpha1.MountKind_MOUNT_KIND_BIND)
	spec, err := f.call(req)
	r.must(err)
	b := spec.GetBind()
	if b.GetSource().GetRelative() != "target" || b.GetMountFsType() != "tmpfs" || !spec.GetAttributes().GetNoexec() {
		t.Errorf("answer %v, want a noexec bind of the tmpfs on target", spec)
	}
	again, err := f.call(req)
	if err != nil || !proto.Equal(spec, again) {
		t.Errorf("repeat: %v, %v, want %v", again, err, spec)
	}
	r.kill(f.shim)
	f.start()
	if again, err = f.call(req); err != nil || !proto.Equal(spec, again) {
		t.Errorf("repeat after a crash: %v, %v, want %v", again, err, spec)
	}
	if n := r.prepares(); n != 3 {
		t.Errorf("the plugin got %d calls, want all 3", n)
	}
	_, err = csi.NewControllerClient(f.conn).DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: v.GetVolumeId()})
	refused(t, err, codes.FailedPrecondition, "prepared")
	stats, err := csi.NewNodeClient(f.conn).NodeGetVolumeStats(t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: v.GetVolumeId(), VolumePath: req.GetPreparePath()})
	if err != nil || len(stats.GetUsage()) == 0 {
		t.Errorf("statistics by prepare_path: %v, %v", stats, err)
	}
	f.done(req)

	req = f.request(v, preparev1alpha1.MountKind_MOUNT_KIND_FILESYSTEM)
	_, err = f.call(req)
	refused(t, err, codes.FailedPrecondition, "performer.kinds")
	f.done(req)
	unheeded := proto.CloneOf(v)
	unheeded.VolumeCapability.GetMount().MountFlags = []string{"data=journal"}
	req = f.request(unheeded, preparev1alpha1.MountKind_MOUNT_KIND_BIND)
	_, err = f.call(req)
	refused(t, err, codes.InvalidArgument, `"data="`)
	f.done(req)
	r.nothingLeft()
}

func TestDriverAnswersWithADevice(t *testing.T) {
	r := newRig(t, "block")
	r.blocks = true
	f := newFront(t, r)
	v := r.volume(r.capability(multiWriter), volumeSize)
	req := f.request(v, preparev1alpha1.MountKind_MOUNT_KIND_BLOCK_DEVICE)
	spec, err := f.call(req)
	r.must(err)
	if d := spec.GetBlockDevice(); d.GetMajor() == 0 || d.GetDiskseq() == 0 {
		t.Errorf("answer %v, want a device with its diskseq", spec)
	}
	f.done(req)
	r.nothingLeft()
}

// A plugin whose mounts do not arrive is told from one that did not mount.
func TestDriverSaysThatPropagationIsMissing(t *testing.T) {
	r := newRig(t, "hostpath")
	r.end(r.shim)
	r.unshare = syscall.CLONE_NEWNS
	r.startShim()
	f := newFront(t, r)
	v := r.volume(r.capability(multiWriter), 0)
	req := f.request(v, preparev1alpha1.MountKind_MOUNT_KIND_BIND)
	_, err := f.call(req)
	refused(t, err, codes.FailedPrecondition, "propagation is missing", "tmpfs", "Bidirectional")
	f.done(req)
	r.nothingLeft()
}

// The shim ends with a plugin that it started.
func TestDriverEndsWithThePlugin(t *testing.T) {
	r := newRig(t, "hostpath")
	r.end(r.shim)
	shim := r.program("shim.log", "prepare-shim", "co", "--endpoint", "unix://"+r.path("shim.sock"),
		"--plugin", "unix://"+r.path("nobody.sock"), "--state-dir", r.path("shim"), "--", "true")
	if err := shim.Wait(); err == nil {
		t.Error("the shim ended well without its plugin")
	}
}
