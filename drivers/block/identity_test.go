package block

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	prepare "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// losetup is somebody else with a loop device, which ends with the test.
func losetup(t *testing.T, path string) (node string) {
	t.Helper()
	node = strings.TrimSpace(tool(t, "losetup", "--find", "--show", path))
	t.Cleanup(func() { tool(t, "losetup", "-d", node) })
	return node
}

// What lies at the path of a volume's file and is not that file is neither
// used nor removed.
func TestForeignFiles(t *testing.T) {
	for name, put := range map[string]func(path string) error{
		"file":      func(path string) error { return os.WriteFile(path, bytes.Repeat([]byte("x"), 8*mib), 0o600) },
		"directory": func(path string) error { return os.Mkdir(path, 0o700) },
		"link":      func(path string) error { return os.Symlink("/etc/passwd", path) },
		"link to the file": func(path string) error {
			return os.Symlink(path+".away", path)
		},
		"device": func(path string) error { return unix.Mknod(path, unix.S_IFBLK|0o600, int(unix.Mkdev(7, 0))) },
		"FIFO":   func(path string) error { return unix.Mkfifo(path, 0o600) },
	} {
		t.Run(name, func(t *testing.T) {
			s := newSite(t)
			s.start()
			id := s.create("v", 8*mib, raw())
			file := s.file(id)
			if err := os.Rename(file, file+".away"); err != nil {
				t.Fatal(err)
			}
			if err := put(file); err != nil {
				t.Fatal(err)
			}
			info, err := os.Lstat(file)
			if err != nil {
				t.Fatal(err)
			}
			s.code("NodeStageVolume", s.tryStage(id, raw()), codes.FailedPrecondition, file)
			s.code("DeleteVolume", errorOf(s.controller.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: id})), codes.FailedPrecondition, file)
			s.code("ControllerExpandVolume", errorOf(s.controller.ControllerExpandVolume(t.Context(), &csi.ControllerExpandVolumeRequest{
				VolumeId: id, CapacityRange: &csi.CapacityRange{RequiredBytes: 16 * mib},
			})), codes.FailedPrecondition, file)
			if now, err := os.Lstat(file); err != nil || !os.SameFile(info, now) || now.Size() != info.Size() {
				t.Errorf("what is not the driver's was changed: %v, %v", now, err)
			}
			if err := os.Remove(file); err != nil {
				t.Fatal(err)
			}
			if err := os.Rename(file+".away", file); err != nil {
				t.Fatal(err)
			}
			s.stage(id, raw())
			s.unstage(id)
			s.delete(id)
		})
	}
}

// A loop device that somebody else attached to the file of a volume is left
// alone, and nothing is done beside it.
func TestForeignLoop(t *testing.T) {
	s := newSite(t)
	s.start()
	id := s.create("v", 8*mib, raw())
	node := losetup(t, s.file(id))
	s.code("NodeStageVolume", s.tryStage(id, raw()), codes.FailedPrecondition, filepath.Base(node))
	s.code("DeleteVolume", errorOf(s.controller.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: id})), codes.FailedPrecondition, filepath.Base(node))
	s.code("CreateSnapshot", errorOf(s.controller.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: id})), codes.FailedPrecondition, filepath.Base(node))
	if left := loopsBelow(s.dir); len(left) != 1 {
		t.Errorf("loop devices: %q, want that of somebody else", left)
	}
}

// A device that was detached and given to another file is noticed: the next
// Prepare answers with a new one, and the other's device is not touched.
func TestRecreatedDevice(t *testing.T) {
	s := newSite(t)
	stop := s.start()
	id := s.create("v", 8*mib, raw())
	req := s.request(id, "p", raw(), false)
	other := filepath.Join(s.dir, "other")
	if err := os.WriteFile(other, bytes.Repeat([]byte("o"), 8*mib), 0o600); err != nil {
		t.Fatal(err)
	}
	first, node := s.recreated(req, other)
	otherNode := node
	t.Cleanup(func() { tool(t, "losetup", "-d", otherNode) })

	stop()
	s.start() // it notices after a restart, too
	second := s.prepare(req).GetBlockDevice()
	if second.GetMinor() == first.GetMinor() || second.GetDiskseq() == first.GetDiskseq() {
		t.Errorf("answered with %v again, which is another's", second)
	}
	s.unprepare(req)
	s.unstage(id)
	if !slices.ContainsFunc(attachedLoops(), func(l attachedLoop) bool { return l.node == node && l.file == other }) {
		t.Error("the device of somebody else is gone")
	}

	// The same file under the same number is not the same device either.
	first, node = s.recreated(req, s.file(id))
	_, err := s.tryPrepare(req)
	s.code("NodePrepareVolume beside a foreign device", err, codes.FailedPrecondition, filepath.Base(node))
	tool(t, "losetup", "-d", node)
	if second := s.prepare(req).GetBlockDevice(); second.GetDiskseq() == first.GetDiskseq() {
		t.Errorf("answered with %v again, which is gone", second)
	}
	s.unprepare(req)
	s.unstage(id)
}

// recreated stages and prepares a volume and gives the number of its device to
// another one, on a file: what it was, and the node of the number.
func (s *site) recreated(req *prepare.NodePrepareVolumeRequest, file string) (was *prepare.BlockDevice, node string) {
	s.t.Helper()
	for range 16 { // another program may be faster
		s.stage(req.GetVolumeId(), raw())
		was = s.prepare(req).GetBlockDevice()
		node = "/dev/loop" + minor(was)
		tool(s.t, "losetup", "-d", node)
		if exec.Command("losetup", node, file).Run() == nil {
			return was, node
		}
		s.unprepare(req)
		s.unstage(req.GetVolumeId())
	}
	s.t.Fatal("others take each loop device first")
	return nil, ""
}

// minor is the device's number among the loop devices.
func minor(b *prepare.BlockDevice) string {
	link, _ := os.Readlink("/sys/dev/block/7:" + strconv.FormatUint(uint64(b.GetMinor()), 10))
	return strings.TrimPrefix(filepath.Base(link), "loop")
}

// A device that a process has open is not taken from it.
func TestUnstageInUse(t *testing.T) {
	s := newSite(t)
	s.start()
	id := s.create("v", 8*mib, raw())
	s.stage(id, raw())
	req := s.request(id, "p", raw(), false)
	path, undo := s.makeNode(req, s.prepare(req))
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	s.unprepare(req)
	s.code("NodeUnstageVolume", s.tryUnstage(id), codes.FailedPrecondition, "has it open")
	if _, err := f.WriteAt([]byte("still"), 4096); err != nil {
		t.Error(err)
	}
	if err := f.Sync(); err != nil {
		t.Error(err)
	}
	f.Close()
	undo()
	if left := loopsBelow(s.dir); len(left) != 1 {
		t.Errorf("after its last user the device is gone without having been asked for: %q", left)
	}
	s.unstage(id)
	content, err := os.ReadFile(s.file(id))
	if err != nil || string(content[4096:4101]) != "still" {
		t.Errorf("what was written last is lost: %v", err)
	}
}

// A driver that is told of another boot, or has lost its records, ends the
// devices it finds to be its own, and no others.
func TestAnotherBoot(t *testing.T) {
	s := newSite(t)
	s.config.BootID = "aaaaaaaa-0000-4000-8000-000000000001"
	stop := s.start()
	id := s.create("v", 8*mib, raw())
	s.stage(id, raw())
	held := s.create("held", 8*mib, raw())
	s.stage(held, raw())
	req := s.request(held, "p", raw(), false)
	path, undo := s.makeNode(req, s.prepare(req))
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	other := filepath.Join(s.dir, "other")
	if err := os.WriteFile(other, make([]byte, mib), 0o600); err != nil {
		t.Fatal(err)
	}
	losetup(t, other)
	stop()

	s.config.BootID = "bbbbbbbb-0000-4000-8000-000000000002"
	stop = s.start()
	list, err := s.prepares.NodeListPreparedVolumes(t.Context(), &prepare.NodeListPreparedVolumesRequest{})
	if err != nil || len(list.GetEntries()) != 0 {
		t.Errorf("preparations of another boot: %v, %v", list, err)
	}
	if left := loopsBelow(s.dir); len(left) != 2 {
		t.Errorf("loop devices: %q, want that in use and that of somebody else", left)
	}
	s.stage(id, raw())
	s.unstage(id)
	s.delete(id)
	s.code("NodeStageVolume of a volume in use", s.tryStage(held, raw()), codes.FailedPrecondition, "in use")
	f.Close()
	undo()
	stop()
	s.start()
	s.delete(held)
}

// The driver needs nothing in /dev, and a restart in another one changes
// nothing.
func TestPrivateDev(t *testing.T) {
	s := newSite(t)
	for _, fsType := range []string{"ext4", "xfs", "btrfs", ""} {
		c := mountOf(fsType)
		if fsType == "" {
			c = raw()
		}
		cmd := s.command()
		cmd.Args = append([]string{"sh", "-c", `mount -t tmpfs none /dev && exec "$@"`, "sh", cmd.Path}, cmd.Args[1:]...)
		cmd.Path, _ = exec.LookPath("sh")
		cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		s.ready()
		id := s.create("v"+fsType, 320*mib, c)
		s.stage(id, c)
		req := s.request(id, "p", c, fsType == "")
		spec := s.prepare(req)
		cmd.Process.Kill()
		cmd.Wait()

		stop := s.start()
		if again := s.prepare(req); !proto.Equal(spec, again) {
			t.Errorf("another process answers with %v, not %v", again, spec)
		}
		s.unprepare(req)
		s.unstage(id)
		s.delete(id)
		stop()
	}
}

// What the operator configured and what a CO asks for.
func TestArguments(t *testing.T) {
	s := newSite(t)
	s.start()
	id := s.create("v", 8*mib, raw())
	req := s.request(id, "p", raw(), false)
	_, err := s.tryPrepare(req)
	s.code("not staged", err, codes.FailedPrecondition, "staging_target_path")
	s.stage(id, raw())
	defer s.unstage(id)
	for what, tt := range map[string]struct {
		edit  func(r *prepare.NodePrepareVolumeRequest)
		code  codes.Code
		named string
	}{
		"no staging path":    {func(r *prepare.NodePrepareVolumeRequest) { r.StagingTargetPath = "" }, codes.FailedPrecondition, "staging_target_path"},
		"staged elsewhere":   {func(r *prepare.NodePrepareVolumeRequest) { r.StagingTargetPath += "x" }, codes.FailedPrecondition, "staging_target_path"},
		"no such volume":     {func(r *prepare.NodePrepareVolumeRequest) { r.VolumeId = "none" }, codes.NotFound, "volume_id"},
		"mount of a block":   {func(r *prepare.NodePrepareVolumeRequest) { r.VolumeCapability = mountOf("") }, codes.FailedPrecondition, "access_type"},
		"many nodes":         {func(r *prepare.NodePrepareVolumeRequest) { r.VolumeCapability.AccessMode.Mode = manyWriters }, codes.FailedPrecondition, "access_mode"},
		"unknown filesystem": {func(r *prepare.NodePrepareVolumeRequest) { r.VolumeCapability = mountOf("zfs") }, codes.FailedPrecondition, "fs_type"},
		"kind not offered": {func(r *prepare.NodePrepareVolumeRequest) {
			r.Performer.Kinds = []prepare.MountKind{prepare.MountKind_MOUNT_KIND_BIND, 77}
		}, codes.FailedPrecondition, "performer.kinds"},
	} {
		r := proto.CloneOf(req)
		tt.edit(r)
		_, err := s.tryPrepare(r)
		s.code(what, err, tt.code, tt.named)
	}

	s.prepare(req)
	other := s.request(id, "other", raw(), false)
	other.Performer.Kernel = prepare.Performer_OTHER
	_, err = s.tryPrepare(other)
	s.code("two kernels", err, codes.FailedPrecondition, "performer.kernel")
	s.unprepare(req)
	s.prepare(other)
	_, err = s.tryPrepare(req)
	s.code("two kernels", err, codes.FailedPrecondition, "performer.kernel")
	s.unprepare(other)

	reader := s.request(id, "reader", raw(), false)
	reader.VolumeCapability.AccessMode.Mode = oldReader
	if spec := s.prepare(reader); !spec.GetAttributes().GetReadonly() {
		t.Error("a READER_ONLY mode is not read-only")
	}
	s.unprepare(reader)
	single := s.request(id, "single", raw(), false)
	single.VolumeCapability.AccessMode.Mode = singleWriter
	s.prepare(single)
	_, err = s.tryPrepare(req)
	s.code("single writer", err, codes.FailedPrecondition, "access_mode")
	s.unprepare(single)

	s.code("staged twice", s.tryStage(id, raw()), codes.OK)
	s.code("staged for another access type", s.tryStage(id, mountOf("")), codes.AlreadyExists)
	_, err = s.node.NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: "/other", VolumeCapability: raw()})
	s.code("staged elsewhere", err, codes.FailedPrecondition, "staging_target_path")
}
