package co

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// device is a loop device with an ext4, for one test.
type device struct {
	path         string
	major, minor uint32
	diskseq      uint64
}

func (r *rig) loop() *device {
	r.Helper()
	// On a disk, since loops on tmpfs have had bugs of their own.
	f, err := os.CreateTemp(os.Getenv("CO_TEST_DISK"), "co-test-image-")
	r.must(err)
	defer f.Close()
	image := f.Name()
	r.Cleanup(func() { r.must(os.Remove(image)) })
	r.must(f.Truncate(8 << 20))
	if out, err := exec.Command("mkfs.ext4", "-q", image).CombinedOutput(); err != nil {
		r.Fatalf("mkfs.ext4: %v: %s", err, out)
	}
	out, err := exec.Command("losetup", "--find", "--show", image).CombinedOutput()
	if err != nil {
		r.Fatalf("losetup: %v: %s", err, out)
	}
	d := &device{path: strings.TrimSpace(string(out))}
	r.Cleanup(func() {
		if out, err := exec.Command("losetup", "--detach", d.path).CombinedOutput(); err != nil {
			r.Errorf("losetup --detach: %v: %s", err, out)
		}
	})
	var stat unix.Stat_t
	r.must(unix.Stat(d.path, &stat))
	d.major, d.minor = unix.Major(stat.Rdev), unix.Minor(stat.Rdev)
	text, err := os.ReadFile(fmt.Sprintf("/sys/dev/block/%d:%d/diskseq", d.major, d.minor))
	r.must(err)
	d.diskseq, err = strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64)
	r.must(err)
	return d
}

// ext4 is a mount spec for the device with a sequence number.
func (d *device) ext4(diskseq uint64) *preparev1alpha1.MountSpec {
	return &preparev1alpha1.MountSpec{Kind: &preparev1alpha1.MountSpec_Filesystem{Filesystem: &preparev1alpha1.FilesystemMount{
		FsType: "ext4",
		Source: &preparev1alpha1.FilesystemMount_Device{Device: &preparev1alpha1.BlockDevice{
			Major: d.major, Minor: d.minor, Diskseq: diskseq,
		}},
	}}}
}

func (r *rig) mkdir(name string) string {
	r.Helper()
	r.must(os.MkdirAll(r.path(name), 0o755))
	return r.path(name)
}

// hang makes a directory that whoever enters it waits for, until the end of
// the test: a FUSE mount that nobody serves.
func (r *rig) hang(name string) string {
	r.Helper()
	dir := r.mkdir(name)
	fuse, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) {
		r.Skip("this kernel has no FUSE")
	}
	r.must(err)
	err = unix.Mount("hung", dir, "fuse", unix.MS_NOSUID|unix.MS_NODEV, fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", fuse))
	r.must(err)
	r.Cleanup(func() {
		_ = unix.Close(fuse)
		// Who waited in it is let go by the close, and then ends.
		err := unix.Unmount(dir, 0)
		for n := 0; err == unix.EBUSY && n < 500; n++ {
			time.Sleep(10 * time.Millisecond)
			err = unix.Unmount(dir, 0)
		}
		if err != nil {
			r.Error(err)
		}
	})
	r.before = r.table()
	return dir
}
