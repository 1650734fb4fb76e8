package sanity

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// The access type of the volumes of a run is the choice of the user and no
// claim of the plugin's, but a spec may need it like one.
const (
	accessMount Feature = "access.mount"
	accessBlock Feature = "access.block"
)

// chosen adds the access type of the run to what the plugin claims.
func (f features) chosen(block bool) {
	if block {
		f[accessBlock] = true
	} else {
		f[accessMount] = true
	}
}

// lacking says why a spec that needs f does not run.
func lacking(f Feature) string {
	if kind, is := strings.CutPrefix(string(f), "access."); is {
		return fmt.Sprintf("it is about volumes of the access type %s; --csi.testvolumeaccesstype %s tests those", kind, kind)
	}
	if f == Orchestrate {
		return "it is about a whole CO, and csi.prepare.testing.v1alpha1.Orchestrator is not served"
	}
	return fmt.Sprintf("the plugin does not claim %s", f)
}

// capability is that of the run's access type.
func (t *trial) capability(mode accessMode) *csi.VolumeCapability {
	if t.config.Block {
		return blockCapability(mode)
	}
	return mountCapability(mode)
}

// otherCapability is that of the access type the run does not have.
func (t *trial) otherCapability(mode accessMode) *csi.VolumeCapability {
	if t.config.Block {
		return mountCapability(mode)
	}
	return blockCapability(mode)
}

// The suite writes to one stretch of a device, and puts back what was there.
const (
	stretchStart = 64 << 10
	stretchSize  = 4 << 10
)

// put writes a text into the volume at c; a volume that cannot be written to,
// though nothing said so, is not the one that was asked for.
func (t *trial) put(c *consumer, text string) {
	if err := t.tryPut(c, text); err != nil {
		t.kernel = errnoName(err)
		t.fail(requirement.PrepareVolumeData, "a volume that can be written to", "writing into it fails")
	}
}

// shows reports whether the volume at c has exactly this text where put
// writes, and what it has else.
func (t *trial) shows(c *consumer, text string) (bool, string) {
	if !t.config.Block {
		return holds(c.file(t), text)
	}
	got, err := readStretch(c.target)
	switch {
	case err != nil:
		return false, errnoName(err)
	case string(got) != string(stretchOf(text)):
		return false, fmt.Sprintf("it holds %q", clip(strings.TrimRight(string(got), "\x00")))
	}
	return true, ""
}

// clear takes away what put wrote. The consumer that is cleared need not be
// the one that wrote.
func (t *trial) clear(c *consumer) {
	if !t.config.Block {
		t.sysfail("removing the file", os.Remove(c.file(t)))
		return
	}
	t.sysfail("putting back what the device held", writeAt(c.target, stretchStart, stretchOf(string(t.stretches[c.volume]))))
}

// covered reports whether the volume covers what lay at the target before.
func (t *trial) covered(c *consumer) bool {
	if t.config.Block {
		info, err := os.Lstat(c.target)
		return err == nil && !info.Mode().IsRegular()
	}
	seen, err := os.ReadFile(filepath.Join(c.target, "sentinel"))
	return err != nil || string(seen) != sentinel
}

// refusesWrites wants a read-only volume to take no change. It holds text.
func (t *trial) refusesWrites(id requirement.ID, c *consumer, text string) {
	same, found := t.shows(c, text)
	if !same {
		end(couldNotRun("the volume does not show what was written to it (%s), which breaks %s", found, requirement.PrepareVolumeData))
	}
	if t.config.Block {
		t.want(id, errors.Is(overwriteStretch(c.target), errRefused), "an error to every write to the device", "it took a write")
	} else if what, err := writable(c.file(t)); what != "" {
		t.kernel = errnoName(err)
		t.fail(id, "EROFS for "+what, errnoName(err))
	}
	same, found = t.shows(c, text)
	t.want(id, same, "the volume as it was", "%s", found)
}

// errRefused says that a device took no write.
var errRefused = errors.New("the device refuses writes")

func stretchOf(text string) []byte {
	b := make([]byte, stretchSize)
	copy(b, text)
	return b
}

// openDevice opens a device past the page cache: two devices over one file do
// not see each other's.
func openDevice(path string, flags int) (*os.File, error) {
	f, err := os.OpenFile(path, flags|unix.O_DIRECT|unix.O_SYNC|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	if info, err := f.Stat(); err != nil || info.Mode().Type()&os.ModeDevice == 0 || info.Mode().Type()&os.ModeCharDevice != 0 {
		return nil, errors.Join(err, fmt.Errorf("%s is no block device", path), f.Close())
	}
	return f, nil
}

// aligned calls f with memory that O_DIRECT takes.
func aligned(f func([]byte) error) error {
	b, err := unix.Mmap(-1, 0, stretchSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return err
	}
	return errors.Join(f(b), unix.Munmap(b))
}

func readAt(path string, offset int64) (got []byte, err error) {
	f, err := openDevice(path, os.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	err = aligned(func(b []byte) error {
		_, err := f.ReadAt(b, offset)
		got = bytes.Clone(b)
		return err
	})
	return got, err
}

func writeAt(path string, offset int64, data []byte) error {
	f, err := openDevice(path, os.O_RDWR)
	if err != nil {
		return err
	}
	err = aligned(func(b []byte) error {
		copy(b, data)
		_, err := f.WriteAt(b, offset)
		return err
	})
	return errors.Join(err, f.Close())
}

func readStretch(path string) ([]byte, error) { return readAt(path, stretchStart) }

// writeStretch keeps what was there, of the first time in the spec.
func (t *trial) writeStretch(c *consumer, text string) error {
	was, err := readStretch(c.target)
	if err != nil {
		return err
	}
	if t.stretches == nil {
		t.stretches = map[string][]byte{}
	}
	if _, kept := t.stretches[c.volume]; !kept {
		t.stretches[c.volume] = was
	}
	return writeAt(c.target, stretchStart, stretchOf(text))
}

// overwriteStretch tries to write, and writes what is there.
func overwriteStretch(path string) error {
	was, err := readStretch(path)
	if err != nil {
		return err
	}
	if err := writeAt(path, stretchStart, was); err != nil {
		return fmt.Errorf("%w: %w", errRefused, err)
	}
	return nil
}
