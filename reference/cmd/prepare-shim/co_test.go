package main

import (
	"bytes"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
)

const (
	singleWriter = csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER
	multiWriter  = csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER
)

// dataOf is where a consumer writes in a volume.
func dataOf(v *csi.NodePublishVolumeRequest) string {
	if v.GetVolumeCapability().GetBlock() != nil {
		return v.GetTargetPath()
	}
	return filepath.Join(v.GetTargetPath(), "data")
}

func write(v *csi.NodePublishVolumeRequest, text string) error {
	flags := os.O_WRONLY
	if v.GetVolumeCapability().GetBlock() == nil {
		flags |= os.O_CREATE
	}
	f, err := os.OpenFile(dataOf(v), flags, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := f.WriteString(text); err != nil {
		return err
	}
	return f.Sync()
}

func holds(v *csi.NodePublishVolumeRequest, text string) bool {
	f, err := os.Open(dataOf(v))
	if err != nil {
		return false
	}
	defer f.Close()
	found := make([]byte, len(text))
	_, err = f.ReadAt(found, 0)
	return err == nil && bytes.Equal(found, []byte(text))
}

func TestCOPublishes(t *testing.T) {
	for _, c := range []struct {
		name, driver string
		blocks       bool
	}{
		{"hostpath", "hostpath", false},
		{"block, mount", "block", false},
		{"block, block", "block", true},
		{"fuse", "fuse", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t, c.driver)
			r.blocks = c.blocks
			v := r.volume(r.capability(multiWriter), volumeSize)
			for range 3 {
				r.must(r.publish(v)) // a repeat is a refresh: it reaches the plugin
			}
			if n := r.prepares(); n != 3 {
				t.Errorf("the plugin was asked %d times to prepare, want 3", n)
			}
			if n := r.optionsAt(v.GetTargetPath()); len(n) != 1 {
				t.Errorf("%d mounts at the target", len(n))
			}
			r.must(write(v, "the first consumer's"))

			second := proto.CloneOf(v)
			second.TargetPath = r.path("pods", "second", "mount")
			r.must(r.publish(second)) // as a kubelet does for two pods on a node
			if !holds(second, "the first consumer's") {
				t.Error("the second target shows other data")
			}

			readonly := proto.CloneOf(v)
			readonly.TargetPath, readonly.Readonly = r.path("pods", "readonly", "mount"), true
			r.must(r.publish(readonly))
			if err := write(readonly, "x"); err == nil {
				t.Error("what was published read-only takes writes")
			}
			if !holds(readonly, "the first consumer's") {
				t.Error("the read-only target shows other data")
			}
			path := v.GetTargetPath()
			stats, err := r.node.NodeGetVolumeStats(t.Context(), &csi.NodeGetVolumeStatsRequest{
				VolumeId: v.GetVolumeId(), VolumePath: path, StagingTargetPath: v.GetStagingTargetPath(),
			})
			if err != nil || len(stats.GetUsage()) == 0 {
				t.Errorf("statistics by target_path: %v, %v", stats, err)
			}

			for _, p := range []*csi.NodePublishVolumeRequest{readonly, second, v, v} {
				r.must(r.unpublish(p))
				if _, err := os.Lstat(p.GetTargetPath()); !os.IsNotExist(err) {
					t.Errorf("%s: %v, want it to be gone", p.GetTargetPath(), err)
				}
			}
			r.nothingLeft()
		})
	}
}

func TestCOHonoursWhatIsAsked(t *testing.T) {
	r := newRig(t, "block")
	c := r.capability(multiWriter)
	c.GetMount().FsType, c.GetMount().MountFlags = "xfs", []string{"noexec", "noatime"}
	if _, err := exec.LookPath("mkfs.xfs"); err != nil {
		c.GetMount().FsType = "ext4"
	}
	v := r.volume(c, 320<<20)
	r.must(r.publish(v))
	options := r.optionsAt(v.GetTargetPath())
	if len(options) != 1 || !strings.Contains(options[0], "noexec") || !strings.Contains(options[0], "noatime") {
		t.Errorf("options %v, want noexec and noatime", options)
	}
	var st unix.Statfs_t
	r.must(unix.Statfs(v.GetTargetPath(), &st))
	if c.GetMount().GetFsType() == "xfs" && st.Type != unix.XFS_SUPER_MAGIC {
		t.Errorf("filesystem %#x, want xfs", st.Type)
	}
	r.must(r.unpublish(v))
	r.nothingLeft()
}

func TestCORefuses(t *testing.T) {
	r := newRig(t, "hostpath")
	v := r.volume(r.capability(multiWriter), 0)
	for _, c := range []struct {
		name  string
		edit  func(*csi.NodePublishVolumeRequest)
		code  codes.Code
		words string
	}{
		{"an unknown volume", func(v *csi.NodePublishVolumeRequest) { v.VolumeId = "nobody" }, codes.NotFound, "volume"},
		{"no volume", func(v *csi.NodePublishVolumeRequest) { v.VolumeId = "" }, codes.InvalidArgument, "volume_id"},
		{"no target", func(v *csi.NodePublishVolumeRequest) { v.TargetPath = "" }, codes.InvalidArgument, "target_path"},
		{"a relative target", func(v *csi.NodePublishVolumeRequest) { v.TargetPath = "pods/x" }, codes.InvalidArgument, "target_path"},
		{"a target in /proc", func(v *csi.NodePublishVolumeRequest) { v.TargetPath = "/proc/self/x" }, codes.InvalidArgument, "target_path"},
		{"no capability", func(v *csi.NodePublishVolumeRequest) { v.VolumeCapability = nil }, codes.InvalidArgument, "volume_capability"},
		{"a mount flag that the driver cannot honour", func(v *csi.NodePublishVolumeRequest) {
			v.VolumeCapability.GetMount().MountFlags = []string{"noexec", "data=journal"}
		}, codes.InvalidArgument, `"data="`},
		{"a mount group that the driver cannot honour", func(v *csi.NodePublishVolumeRequest) {
			v.VolumeCapability.GetMount().VolumeMountGroup = "1000"
		}, codes.InvalidArgument, "volume_mount_group"},
		{"a target that is a file", func(v *csi.NodePublishVolumeRequest) { v.TargetPath = r.path("policy.yaml") }, codes.InvalidArgument, "target_path"},
	} {
		t.Run(c.name, func(t *testing.T) {
			bad := proto.CloneOf(v)
			c.edit(bad)
			refused(t, r.publish(bad), c.code, c.words)
			if bad.GetTargetPath() == v.GetTargetPath() {
				r.nothingLeft()
			}
		})
	}
	r.must(r.publish(v))
	other := proto.CloneOf(v)
	other.Readonly = true
	refused(t, r.publish(other), codes.AlreadyExists)
	r.must(write(v, "still writable"))
	f, err := os.Open(dataOf(v))
	r.must(err)
	refused(t, r.unpublish(v), codes.FailedPrecondition, "in use")
	if !holds(v, "still writable") {
		t.Error("a target in use was taken away")
	}
	_ = f.Close()
	r.must(r.unpublish(v))
	r.nothingLeft()
}

func TestCOKeepsAnExclusiveVolumeExclusive(t *testing.T) {
	r := newRig(t, "hostpath")
	v := r.volume(r.capability(singleWriter), 0)
	r.must(r.publish(v))
	second := proto.CloneOf(v)
	second.TargetPath = r.path("second")
	refused(t, r.publish(second), codes.FailedPrecondition)
	if _, err := os.Lstat(second.GetTargetPath()); !os.IsNotExist(err) {
		t.Errorf("a refused target: %v, want none", err)
	}
	r.must(r.unpublish(v))
	r.must(r.publish(second))
	r.must(r.unpublish(second))
	r.nothingLeft()
}

// Killed at any moment, the shim has each volume wholly published or can take
// it back to nothing.
func TestCOSurvivesItsDeath(t *testing.T) {
	runs := 200
	if testing.Short() {
		runs = 6
	}
	r := newRig(t, "hostpath")
	v := r.volume(r.capability(multiWriter), 0)
	r.must(r.publish(v))
	r.must(write(v, "before the crash"))
	r.kill(r.shim)
	r.startShim()
	before := r.table()
	r.must(r.publish(v))
	if now := r.table(); now != before {
		t.Errorf("a repeat after the crash changed the mounts:\n%sto\n%s", before, now)
	}
	if !holds(v, "before the crash") {
		t.Error("the data is gone")
	}
	r.must(r.unpublish(v))
	published := 0
	for range runs {
		acted := make(chan struct{})
		act := r.publish
		if rand.IntN(2) == 0 {
			r.must(r.publish(v))
			act = r.unpublish
		}
		go func() {
			defer close(acted)
			_ = act(v) // its outcome is not known
		}()
		time.Sleep(time.Duration(rand.IntN(12000)) * time.Microsecond)
		r.kill(r.shim)
		<-acted
		r.startShim()
		if len(r.optionsAt(v.GetTargetPath())) > 0 {
			published++
		}
		r.must(r.unpublish(v))
		if _, err := os.Lstat(v.GetTargetPath()); !os.IsNotExist(err) {
			t.Fatalf("target after unpublish: %v", err)
		}
	}
	t.Logf("%d kills, %d of them with the volume published", runs, published)
	r.nothingLeft()
}

// What is not the shim's own passes, and a plugin that was away is found again.
func TestCOPasses(t *testing.T) {
	r := newRig(t, "hostpath")
	info, err := csi.NewIdentityClient(r.conn).GetPluginInfo(t.Context(), &csi.GetPluginInfoRequest{})
	if err != nil || info.GetName() != "hostpath.csi-prepare.github.io" {
		t.Errorf("GetPluginInfo: %v, %v", info, err)
	}
	_, err = csi.NewGroupControllerClient(r.conn).GetVolumeGroupSnapshot(t.Context(), &csi.GetVolumeGroupSnapshotRequest{})
	refused(t, err, codes.Unimplemented) // by the plugin, in the plugin's words
	err = r.conn.Invoke(t.Context(), "/a.service.nobody/Knows", &csi.ProbeRequest{}, &csi.ProbeResponse{})
	refused(t, err, codes.Unimplemented)
	r.kill(r.plugin)
	_, err = csi.NewIdentityClient(r.conn).Probe(t.Context(), &csi.ProbeRequest{})
	refused(t, err, codes.Unavailable)
	r.startPlugin()
	r.connect("shim.sock")
}
