package block

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"unsafe"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/csi-prepare/csi-prepare/drivers/block/filesystem"
	prepare "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// pattern is content that depends on a word.
func pattern(word string, size int) []byte {
	return bytes.Repeat([]byte(word+"\n"), size/(len(word)+1)+1)[:size]
}

// readDirect reads past the page cache.
func readDirect(t *testing.T, path string, offset int64, size int) []byte {
	t.Helper()
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECT|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	buf := make([]byte, size+4096)
	skew := int(-uintptr(unsafe.Pointer(&buf[0])) & 4095)
	buf = buf[skew : skew+size]
	if n, err := unix.Pread(fd, buf, offset); err != nil || n != size {
		t.Fatalf("read %s: %d, %v", path, n, err)
	}
	return buf
}

func writeAt(t *testing.T, path string, offset int64, data []byte) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt(data, offset); err != nil {
		t.Fatal(err)
	}
	if err := f.Sync(); err != nil {
		t.Fatal(err)
	}
}

// A block volume is a device: writable for one preparation, refusing writes in
// another at the same time, and in the end all that was written is in the file.
func TestBlockVolume(t *testing.T) {
	s := newSite(t)
	s.start()
	before := mounts(t)
	id := s.create("v", 16*mib, raw())
	s.stage(id, raw())
	req := s.request(id, "writer", raw(), false)
	spec := s.prepare(req)
	if again := s.prepare(req); !proto.Equal(spec, again) {
		t.Errorf("a repeat is answered with %v, the first with %v", again, spec)
	}
	writer, undoWriter := s.perform(req, spec)
	data := pattern("written", mib)
	writeAt(t, writer, 5*mib, data)

	readReq := s.request(id, "reader", raw(), true)
	readSpec := s.prepare(readReq)
	if !readSpec.GetAttributes().GetReadonly() {
		t.Error("the read-only spec has no attributes.readonly")
	}
	if proto.Equal(spec.GetBlockDevice(), readSpec.GetBlockDevice()) {
		t.Error("reader and writer share a device")
	}
	reader, undoReader := s.makeNode(readReq, readSpec)
	if got := readDirect(t, reader, 5*mib, mib); !bytes.Equal(got, data) {
		t.Error("the reader reads something else")
	}
	refusesWrites(t, reader)

	s.code("DeleteVolume", errorOf(s.controller.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: id})), codes.FailedPrecondition, "prepared")
	s.code("NodeUnstageVolume", s.tryUnstage(id), codes.FailedPrecondition, "prepared")
	undoReader()
	s.unprepare(readReq)
	if left := loopsBelow(s.config.Dir); len(left) != 1 {
		t.Errorf("after the reader: %q, want one device", left)
	}
	undoWriter()
	s.unprepare(req)
	if after := mounts(t); !slices.Equal(before, after) {
		t.Errorf("mounts changed\n%s", strings.Join(after, "\n"))
	}
	s.code("DeleteVolume", errorOf(s.controller.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: id})), codes.FailedPrecondition, "staged")
	s.unstage(id)
	s.unstage(id)
	content, err := os.ReadFile(s.file(id))
	if err != nil || len(content) != 16*mib || !bytes.Equal(content[5*mib:6*mib], data) {
		t.Errorf("the file has %d bytes and not what was written: %v", len(content), err)
	}
	s.delete(id)
	s.delete(id)
	if exists(s.file(id)) {
		t.Error("the file of a deleted volume is there")
	}
}

// makeNode makes the node of a device by mknod(2): the test's files may lie on a
// filesystem mounted nodev, so it is made in one of its own.
func (s *site) makeNode(req *prepare.NodePrepareVolumeRequest, spec *prepare.MountSpec) (path string, undo func()) {
	s.t.Helper()
	dir := s.mkdir("node-" + req.GetVolumeId()[:8] + "-" + req.GetPrepareId())
	if err := unix.Mount("test", dir, "tmpfs", 0, ""); err != nil {
		s.t.Fatal(err)
	}
	undo = sync.OnceFunc(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			s.t.Errorf("unmount the node: %v", err)
		}
	})
	s.t.Cleanup(undo)
	path = filepath.Join(dir, "node")
	b := spec.GetBlockDevice()
	if err := unix.Mknod(path, unix.S_IFBLK|0o600, int(unix.Mkdev(b.GetMajor(), b.GetMinor()))); err != nil {
		s.t.Fatal(err)
	}
	return path, undo
}

func errorOf(_ any, err error) error { return err }

// refusesWrites wants a device on which nothing can be written, nor writing be
// allowed.
func refusesWrites(t *testing.T, path string) {
	t.Helper()
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	unix.IoctlSetPointerInt(fd, unix.BLKROSET, 0)
	rw, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.EACCES) || errors.Is(err, unix.EROFS) || errors.Is(err, unix.EPERM) {
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(rw)
	if _, err := unix.Pwrite(rw, make([]byte, 4096), 0); err == nil {
		err = unix.Fsync(rw)
		if err == nil {
			t.Errorf("%s takes writes", path)
		}
	}
	if err := unix.Fallocate(rw, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, 4096); err == nil {
		t.Errorf("%s can be discarded", path)
	}
}

// eachType runs a test for each filesystem type, none of which may be missing.
func eachType(t *testing.T, test func(t *testing.T, fsType string)) {
	for _, fsType := range filesystem.Types {
		t.Run(string(fsType), func(t *testing.T) {
			if missing := filesystem.Missing(fsType); missing != nil {
				t.Skipf("not installed: %q", missing)
			}
			test(t, string(fsType))
		})
	}
}

// A mount volume has a filesystem; readers and writers share it, it grows
// while it is used, and its content is there when it is staged again.
func TestMountVolume(t *testing.T) {
	eachType(t, func(t *testing.T, fsType string) {
		s := newSite(t)
		stop := s.start()
		before := mounts(t)
		c := mountOf(fsType)
		id := s.create("v", 320*mib, c)
		s.stage(id, c)
		if after := mounts(t); !slices.Equal(before, after) {
			t.Errorf("the driver's mount is visible\n%s", strings.Join(after, "\n"))
		}
		s.stats(id, s.staging(id), 250*mib, 320*mib) // not mounted yet
		req := s.request(id, "writer", c, false)
		spec := s.prepare(req)
		if fs := spec.GetFilesystem(); fs.GetFsType() != fsType || fs.GetDevice().GetDiskseq() == 0 || fs.GetSuperblockReadonly() {
			t.Errorf("spec: %v", spec)
		}
		writer, undoWriter := s.perform(req, spec)
		data := pattern("written to "+fsType, 3*mib)
		if err := os.WriteFile(filepath.Join(writer, "file"), data, 0o600); err != nil {
			t.Fatal(err)
		}
		s.stats(id, req.GetPreparePath(), 250*mib, 320*mib)

		stop() // what was staged and prepared outlives the driver
		s.start()
		readReq := s.request(id, "reader", c, true)
		reader, undoReader := s.perform(readReq, s.prepare(readReq))
		got, err := os.ReadFile(filepath.Join(reader, "file"))
		if err != nil || !bytes.Equal(got, data) {
			t.Errorf("the reader reads something else: %v", err)
		}
		if err := os.WriteFile(filepath.Join(reader, "more"), data, 0o600); !errors.Is(err, unix.EROFS) {
			t.Errorf("the reader writes: %v", err)
		}

		if fsType == "ext4" && !maySetResources(t) {
			t.Log("the kernel grows a mounted ext4 for CAP_SYS_RESOURCE alone, which is lacking here")
			s.growsLater(id, s.staging(id), 600*mib)
		} else {
			s.expand(id, s.staging(id), 600*mib)
			s.stats(id, s.staging(id), 500*mib, 600*mib)
			if err := os.WriteFile(filepath.Join(writer, "large"), pattern("large", 400*mib), 0o600); err != nil {
				t.Errorf("write what only fits after the expansion: %v", err)
			}
		}
		s.code("NodeUnstageVolume", s.tryUnstage(id), codes.FailedPrecondition)
		undoReader()
		s.unprepare(readReq)
		s.unprepare(req) // though the mount is there: nothing of the driver's is in it
		s.code("NodeUnstageVolume of a mounted device", s.tryUnstage(id), codes.FailedPrecondition, "in use")
		undoWriter()
		s.unstage(id)

		again, end := s.use(id, "again", mountOf(""))
		s.stats(id, s.staging(id), 500*mib, 600*mib)
		got, err = os.ReadFile(filepath.Join(again, "file"))
		if err != nil || !bytes.Equal(got, data) {
			t.Errorf("staged again, the volume holds something else: %v", err)
		}
		end()
		if after := mounts(t); !slices.Equal(before, after) {
			t.Errorf("mounts changed\n%s", strings.Join(after, "\n"))
		}
		s.delete(id)
	})
}

// stats wants a size between two.
func (s *site) stats(id, path string, least, most int64) {
	s.t.Helper()
	resp, err := s.node.NodeGetVolumeStats(s.t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: id, VolumePath: path})
	if err != nil {
		s.t.Errorf("NodeGetVolumeStats: %v", err)
		return
	}
	u := resp.GetUsage()[0]
	if u.GetTotal() < least || u.GetTotal() > most || u.GetUnit() != csi.VolumeUsage_BYTES || u.GetAvailable() > u.GetTotal() {
		s.t.Errorf("stats: %v, want a total of %d to %d", resp.GetUsage(), least, most)
	}
}

func (s *site) expand(id, path string, size int64) {
	s.t.Helper()
	r := &csi.CapacityRange{RequiredBytes: size}
	_, err := s.node.NodeExpandVolume(s.t.Context(), &csi.NodeExpandVolumeRequest{VolumeId: id, VolumePath: path, CapacityRange: r})
	s.code("NodeExpandVolume before the controller", err, codes.OutOfRange, "ControllerExpandVolume")
	resp, err := s.controller.ControllerExpandVolume(s.t.Context(), &csi.ControllerExpandVolumeRequest{VolumeId: id, CapacityRange: r})
	if err != nil || resp.GetCapacityBytes() != size || !resp.GetNodeExpansionRequired() {
		s.t.Errorf("ControllerExpandVolume: %v, %v", resp, err)
	}
	for range 2 {
		node, err := s.node.NodeExpandVolume(s.t.Context(), &csi.NodeExpandVolumeRequest{VolumeId: id, VolumePath: path, CapacityRange: r})
		if err != nil || node.GetCapacityBytes() != size {
			s.t.Errorf("NodeExpandVolume: %v, %v", node, err)
		}
	}
}

// maySetResources tells whether this process has CAP_SYS_RESOURCE.
func maySetResources(t *testing.T) bool {
	t.Helper()
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		t.Fatal(err)
	}
	return data[0].Effective&(1<<unix.CAP_SYS_RESOURCE) != 0
}

// growsLater wants an expansion whose last step is refused with the reason.
func (s *site) growsLater(id, path string, size int64) {
	s.t.Helper()
	r := &csi.CapacityRange{RequiredBytes: size}
	if _, err := s.controller.ControllerExpandVolume(s.t.Context(), &csi.ControllerExpandVolumeRequest{VolumeId: id, CapacityRange: r}); err != nil {
		s.t.Errorf("ControllerExpandVolume: %v", err)
	}
	_, err := s.node.NodeExpandVolume(s.t.Context(), &csi.NodeExpandVolumeRequest{VolumeId: id, VolumePath: path, CapacityRange: r})
	s.code("NodeExpandVolume", err, codes.FailedPrecondition, "CAP_SYS_RESOURCE")
}

// A raw device takes the size of its file while a consumer has it open, and so
// does the reader's.
func TestExpandBlockVolume(t *testing.T) {
	s := newSite(t)
	s.start()
	id := s.create("v", 8*mib, raw())
	s.stage(id, raw())
	var ends []func()
	var open []*os.File
	for _, readonly := range []bool{false, true} {
		req := s.request(id, fmt.Sprint(readonly), raw(), readonly)
		path, undo := s.makeNode(req, s.prepare(req))
		f, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		open = append(open, f)
		ends = append(ends, func() { f.Close(); undo(); s.unprepare(req) })
	}
	s.expand(id, s.staging(id), 32*mib)
	for _, f := range open {
		if size, err := f.Seek(0, 2); size != 32*mib || err != nil {
			t.Errorf("%s has %d bytes, %v", f.Name(), size, err)
		}
	}
	for _, end := range ends {
		end()
	}
	s.unstage(id)
}

// Copies of a volume hold what it held, keep it when it changes, and can be
// used beside it: by copying bytes and by sharing blocks.
func TestSnapshotAndClone(t *testing.T) {
	for _, store := range []string{"", "xfs", "btrfs"} {
		t.Run("store "+store, func(t *testing.T) {
			eachType(t, func(t *testing.T, fsType string) {
				s := newSite(t)
				reflinks := store != ""
				if reflinks {
					onFilesystem(t, s.config.Dir, store)
				}
				s.start()
				c := mountOf(fsType)
				id := s.create("origin", 320*mib, c)
				origin, end := s.use(id, "p", c)
				first, second := pattern("first", mib), pattern("second", mib)
				if err := os.WriteFile(filepath.Join(origin, "file"), first, 0o600); err != nil {
					t.Fatal(err)
				}
				if !reflinks {
					_, err := s.controller.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: id})
					s.code("CreateSnapshot of a volume in use", err, codes.FailedPrecondition, "share blocks")
					end()
				}
				snap, err := s.controller.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: id})
				if err != nil || snap.GetSnapshot().GetSizeBytes() != 320*mib || !snap.GetSnapshot().GetReadyToUse() {
					t.Fatalf("CreateSnapshot: %v, %v", snap, err)
				}
				if !reflinks {
					origin, end = s.use(id, "p", c)
				}
				if err := os.WriteFile(filepath.Join(origin, "file"), second, 0o600); err != nil {
					t.Fatal(err)
				}
				restored := s.copy("restored", source{Snapshot: snap.GetSnapshot().GetSnapshotId()}, 400*mib, c)
				path, endRestored := s.use(restored, "p", c)
				holds(t, path, first)
				s.stats(restored, s.staging(restored), 330*mib, 400*mib) // grown at stage
				if reflinks {
					clone := s.copy("clone", source{Volume: id}, 0, c)
					clonePath, endClone := s.use(clone, "p", c)
					holds(t, clonePath, second)
					endClone()
					s.delete(clone)
				}
				if err := os.WriteFile(filepath.Join(path, "file"), second[1:], 0o600); err != nil {
					t.Fatal(err)
				}
				holds(t, origin, second)
				endRestored()
				end()
				for range 2 {
					if _, err := s.controller.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: snap.GetSnapshot().GetSnapshotId()}); err != nil {
						t.Errorf("DeleteSnapshot: %v", err)
					}
				}
				path, endRestored = s.use(restored, "p", mountOf(""))
				holds(t, path, second[1:])
				endRestored()
				s.delete(restored)
				s.delete(id)
			})
		})
	}
}

func holds(t *testing.T, dir string, want []byte) {
	t.Helper()
	got, err := os.ReadFile(filepath.Join(dir, "file"))
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("%s holds %.20q…, want %.20q…: %v", dir, got, want, err)
	}
}

// onFilesystem mounts a filesystem of a type at a directory, on a loop device
// that ends with the mount.
func onFilesystem(t *testing.T, dir, fsType string) {
	t.Helper()
	if missing := filesystem.Missing(filesystem.Type(fsType)); missing != nil {
		t.Skipf("not installed: %q", missing)
	}
	image := dir + ".img"
	if err := os.WriteFile(image, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(image, 4<<30); err != nil {
		t.Fatal(err)
	}
	tool(t, "mkfs."+fsType, "-q", image)
	tool(t, "mount", "-o", "loop", image, dir)
	t.Cleanup(func() {
		tool(t, "umount", dir)
		eventually(t, "the loop device of the store is gone", func() bool {
			return !slices.ContainsFunc(attachedLoops(), func(l attachedLoop) bool { return l.file == image })
		})
	})
}

// What a volume is asked to be, and cannot.
func TestRefusedFlags(t *testing.T) {
	s := newSite(t)
	s.start()
	id := s.create("v", 320*mib, mountOf("ext4"))
	s.stage(id, mountOf("ext4"))
	defer s.unstage(id)
	for flag, named := range map[string]string{
		"errors=panic": `"errors="`, "journal_dev=7": `"journal_dev="`, "nobarrier": "nobarrier", "compress": "compress",
		"discard=async": `"discard="`, "suid": "suid", "": `""`, "commit": "commit", "password=geheim": `"password="`, "loop": "loop", "uid=0": `"uid="`,
	} {
		_, err := s.tryPrepare(s.request(id, "p", mountOf("ext4", flag), false))
		s.code(fmt.Sprintf("flag %q", flag), err, codes.InvalidArgument, named)
		if err != nil && strings.Contains(err.Error(), "geheim") {
			t.Errorf("the value of a flag is in %v", err)
		}
		s.code(fmt.Sprintf("CreateVolume with flag %q", flag), errorOf(s.controller.CreateVolume(t.Context(), s.createRequest("f", 320*mib, mountOf("ext4", flag)))), codes.InvalidArgument, named)
	}
	for _, flags := range [][]string{{"noatime", "relatime"}, {"ro", "rw"}, {"discard", "nodiscard"}, {"commit=1", "commit=2"}} {
		_, err := s.tryPrepare(s.request(id, "p", mountOf("ext4", flags...), false))
		s.code(fmt.Sprintf("flags %q", flags), err, codes.InvalidArgument, strings.SplitN(flags[1], "=", 2)[0])
	}
	group := mountOf("ext4")
	group.GetMount().VolumeMountGroup = "100"
	_, err := s.tryPrepare(s.request(id, "p", group, false))
	s.code("volume_mount_group", err, codes.InvalidArgument, "volume_mount_group")

	c := mountOf("ext4", "noatime", "noexec", "commit=7", "errors=remount-ro", "discard")
	req := s.request(id, "p", c, false)
	path, undo := s.perform(req, s.prepare(req))
	line := tool(t, "findmnt", "-no", "OPTIONS", path)
	for _, want := range []string{"noatime", "noexec", "commit=7", "errors=remount-ro", "discard"} {
		if !strings.Contains(line, want) {
			t.Errorf("mounted with %s, which lacks %s", line, want)
		}
	}
	_, err = s.tryPrepare(s.request(id, "q", mountOf("ext4", "commit=9"), false))
	s.code("other parameters", err, codes.FailedPrecondition, "mount_flags", "commit=7")
	undo()
	s.unprepare(req)
}
