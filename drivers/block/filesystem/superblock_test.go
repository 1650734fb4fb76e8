package filesystem

import (
	"bytes"
	"encoding/binary"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// The figures of a new filesystem are those its own tools made.
func TestReadUsage(t *testing.T) {
	for _, typ := range Types {
		t.Run(string(typ), func(t *testing.T) {
			if missing := Missing(typ); missing != nil {
				t.Skipf("not installed: %q", missing)
			}
			image := filepath.Join(t.TempDir(), "image")
			const size = 320 << 20
			if err := errors.Join(os.WriteFile(image, nil, 0o600), os.Truncate(image, size)); err != nil {
				t.Fatal(err)
			}
			path, err := lookUp("mkfs." + string(typ))
			if err != nil {
				t.Fatal(err)
			}
			if out, err := exec.Command(path, "-q", image).CombinedOutput(); err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			f, err := os.Open(image)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			u, err := ReadUsage(f, typ)
			if err != nil || u.Size != size || u.Free < size/2 || u.Available > u.Free {
				t.Errorf("%+v, %v", u, err)
			}
			for _, other := range Types {
				if other == typ {
					continue
				}
				if u, err := ReadUsage(f, other); !errors.Is(err, ErrSuperblock) {
					t.Errorf("read as %s: %+v, %v", other, u, err)
				}
			}
			if grows, err := NeedsGrowth(f, typ); grows || err != nil {
				t.Errorf("NeedsGrowth: %v, %v", grows, err)
			}
			if err := os.Truncate(image, size+64<<20); err != nil {
				t.Fatal(err)
			}
			if grows, err := NeedsGrowth(f, typ); !grows || err != nil {
				t.Errorf("NeedsGrowth of a larger device: %v, %v", grows, err)
			}
		})
	}
}

// Whatever lies on a device, the figures read from it are possible ones.
func FuzzReadUsage(f *testing.F) {
	ext4 := make([]byte, 1024)
	binary.LittleEndian.PutUint16(ext4[0x38:], 0xef53)
	f.Add(append(make([]byte, 1024), ext4...))
	f.Add(append([]byte("XFSB\x00\x00\x10\x00"), make([]byte, 600)...))
	btrfs := make([]byte, 68<<10)
	copy(btrfs[64<<10+0x40:], "_BHRfS_M")
	f.Add(btrfs)
	f.Fuzz(func(t *testing.T, device []byte) {
		for _, typ := range Types {
			u, err := ReadUsage(bytes.NewReader(device), typ)
			possible := u.Total >= u.Free && u.Free >= u.Available && u.Available >= 0 && u.Files >= u.FilesFree && u.FilesFree >= 0 && u.Size > 0
			if err == nil && !possible {
				t.Errorf("%s: %+v", typ, u)
			}
		}
	})
}

func TestParseSignature(t *testing.T) {
	for text, want := range map[string]Signature{
		"DEVNAME=/proc/self/fd/3\nUUID=x\nTYPE=ext4\nUSAGE=filesystem\n": {Type: "ext4", Usage: "filesystem"},
		"PTUUID=x\nPTTYPE=gpt\n":                    {PartitionTable: "gpt"},
		"TYPE=ext4\nUSAGE=filesystem\nPTTYPE=dos\n": {Type: "ext4", Usage: "filesystem", PartitionTable: "dos"},
		"TYPE=swap\nUSAGE=other\n":                  {Type: "swap", Usage: "other"},
		"SOMETHING=new\n":                           {Type: "unknown", Usage: "unknown"},
		"":                                          {Type: "unknown", Usage: "unknown"},
		"TYPE=LVM2_member\nUSAGE=raid\nVERSION=LVM2\n": {Type: "LVM2_member", Usage: "raid"},
	} {
		got := parseSignature(text)
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%q: %s", text, diff)
		}
		_, usable := got.Filesystem()
		if usable != (want == Signature{Type: "ext4", Usage: "filesystem"}) {
			t.Errorf("%q taken for a filesystem of ours: %v", text, usable)
		}
	}
}
