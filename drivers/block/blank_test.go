package block

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/csi-prepare/csi-prepare/drivers/block/filesystem"
)

// notBlank is what may lie on a device, and what the refusal names.
var notBlank = []struct {
	name, named string
	put         func(t *testing.T, path string)
}{
	{"gpt", "partition table (gpt)", partitions("gpt")},
	{"dos", "partition table (dos)", partitions("dos")},
	{"swap", "swap", func(t *testing.T, path string) { tool(t, "mkswap", path) }},
	{"ext2", "ext2", func(t *testing.T, path string) { tool(t, "mkfs.ext2", "-q", path) }},
	{"vfat magic", "vfat", func(t *testing.T, path string) {
		boot := make([]byte, 512)
		copy(boot, "\xeb\x3c\x90mkfs.fat\x00\x02\x04\x04\x00\x02\x00\x02\x00\x80\xf8\x20\x00\x20\x00\x02\x00\x00\x00\x00\x00\x00\x00\x80\x00\x29\x12\x34\x56\x78NO NAME    FAT16   ")
		copy(boot[510:], "\x55\xaa")
		write(t, path, 0, boot)
	}},
	{"LUKS", "crypto_LUKS", func(t *testing.T, path string) {
		if _, err := exec.LookPath("cryptsetup"); err == nil {
			cmd := exec.Command("cryptsetup", "luksFormat", "-q", "--type", "luks1", "--pbkdf-force-iterations", "1000", "--key-file", "-", path)
			cmd.Stdin = strings.NewReader("key")
			if cmd.Run() == nil {
				return
			}
		}
		header := make([]byte, 1024)
		copy(header, "LUKS\xba\xbe\x00\x01aes\x00")
		copy(header[168:], "2b2a2f9e-6b52-4a4a-b3a3-4ba4ac0e8f07")
		write(t, path, 0, header)
	}},
	{"LVM", "LVM2_member", func(t *testing.T, path string) {
		label := make([]byte, 512)
		copy(label, "LABELONE\x01\x00\x00\x00\x00\x00\x00\x00")
		copy(label[20:], "\x20\x00\x00\x00LVM2 001")
		copy(label[32:], "abcdefghijklmnopqrstuvwxyz012345")
		write(t, path, 512, withLVMChecksum(label))
	}},
	{"data at the beginning", "data of no known kind at byte 0", func(t *testing.T, path string) { write(t, path, 0, []byte("a database")) }},
	{"data in the middle", "data of no known kind", func(t *testing.T, path string) { write(t, path, 20*mib+5, []byte("a database")) }},
	{"data at the end", "data of no known kind", func(t *testing.T, path string) { write(t, path, 48*mib-1, []byte("x")) }},
	{"two signatures", "", func(t *testing.T, path string) {
		tool(t, "mkfs.ext2", "-q", path)
		swap := make([]byte, 10)
		copy(swap, "SWAPSPACE2")
		write(t, path, 4096-10, swap)
		write(t, path, 1024, []byte{1, 0, 0, 0, 255, 0, 0, 0})
	}},
}

// withLVMChecksum fills in the checksum of a label sector (lib/misc/crc.c).
func withLVMChecksum(label []byte) []byte {
	crc := uint32(0xf597a6cf)
	for _, b := range label[20:] {
		crc ^= uint32(b)
		for range 8 {
			if crc&1 != 0 {
				crc = crc>>1 ^ 0xedb88320
			} else {
				crc >>= 1
			}
		}
	}
	label[16], label[17], label[18], label[19] = byte(crc), byte(crc>>8), byte(crc>>16), byte(crc>>24)
	return label
}

func partitions(kind string) func(*testing.T, string) {
	return func(t *testing.T, path string) {
		cmd := exec.Command("sfdisk", "-q", path)
		cmd.Stdin = strings.NewReader("label: " + kind + "\n,10M\n")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("sfdisk: %v\n%s", err, out)
		}
	}
}

func write(t *testing.T, path string, offset int64, data []byte) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt(data, offset); err != nil {
		t.Fatal(err)
	}
}

func sum(t *testing.T, path string) [32]byte {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		t.Fatal(err)
	}
	return [32]byte(h.Sum(nil))
}

// A filesystem is made on nothing but a blank device: whatever else there is
// is named, and not a byte of it changes.
func TestNotBlank(t *testing.T) {
	s := newSite(t)
	s.start()
	for _, tt := range notBlank {
		t.Run(tt.name, func(t *testing.T) {
			s := *s
			s.t = t
			id := s.create(tt.name, 48*mib, mountOf(""))
			tt.put(t, s.file(id))
			was := sum(t, s.file(id))
			for _, c := range []string{"xfs", ""} {
				s.code("NodeStageVolume "+c, s.tryStage(id, mountOf(c)), codes.FailedPrecondition, "not blank", tt.named)
			}
			if sum(t, s.file(id)) != was {
				t.Error("the content changed")
			}
			if left := loopsBelow(s.dir); left != nil {
				t.Errorf("a refused stage leaves %q", left)
			}
			s.stage(id, raw()) // as a block volume it is as good as any
			s.unstage(id)
			if sum(t, s.file(id)) != was {
				t.Error("the content changed")
			}
			s.delete(id)
		})
	}
}

// A device that cannot be read is not blank, whatever blkid says: its exit
// status for "nothing found" is that for "cannot read", too.
func TestUnreadable(t *testing.T) {
	s := newSite(t)
	s.start()
	id := s.create("v", 64*mib, mountOf("ext4"))
	tool(t, "mkfs.ext4", "-q", s.file(id))
	s.stage(id, raw())
	req := s.request(id, "p", raw(), false)
	path, undo := s.makeNode(req, s.prepare(req))
	// The device keeps its size; reading what the file lacks is an I/O error.
	if err := os.Truncate(s.file(id), 0); err != nil {
		t.Fatal(err)
	}
	dev, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	found, err := filesystem.Probe(t.Context(), dev)
	if err == nil {
		t.Errorf("Probe of a device that cannot be read: %v", found)
	}
	var blank *filesystem.NotBlankError
	if err := filesystem.ProveBlank(t.Context(), dev, nil); err == nil || errors.As(err, &blank) {
		t.Errorf("ProveBlank of a device that cannot be read: %v", err)
	}
	dev.Close()
	undo()
	if err := os.Truncate(s.file(id), 64*mib); err != nil {
		t.Fatal(err)
	}
	s.unprepare(req)
	s.unstage(id)
}

// A filesystem that was made once and is gone is not made again.
func TestLostFilesystem(t *testing.T) {
	s := newSite(t)
	s.start()
	c := mountOf("ext4")
	id := s.create("v", 64*mib, c)
	s.stage(id, c)
	s.unstage(id)
	clean := sum(t, s.file(id))
	s.stage(id, c)
	s.unstage(id)
	if sum(t, s.file(id)) != clean {
		t.Error("staging a clean filesystem writes to it")
	}
	s.code("another type", s.tryStage(id, mountOf("xfs")), codes.FailedPrecondition, "fs_type", "ext4")
	if err := errors.Join(os.Truncate(s.file(id), 0), os.Truncate(s.file(id), 64*mib)); err != nil {
		t.Fatal(err)
	}
	s.code("NodeStageVolume", s.tryStage(id, c), codes.FailedPrecondition, "not there any more")
	if content, err := os.ReadFile(s.file(id)); err != nil || len(bytes.Trim(content, "\x00")) != 0 {
		t.Errorf("something was written: %v", err)
	}
	// A consumer of the device may do what it likes with it.
	s.stage(id, raw())
	s.unstage(id)
	s.stage(id, c)
	s.unstage(id)
}
