package sanity

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

func filesystemSpecs(s *section) {
	s.spec("a filesystem is made with its parameters", Covers(requirement.PerformVerified), func(t *trial) {
		g := t.rig()
		g.performed(g.performance(tmpfsOf("", nil, textParameter("mode", "0750"))))
		m := g.only(requirement.PerformVerified, g.target)
		g.want(requirement.PerformVerified, m.FSType == "tmpfs", "a tmpfs", "%s", m.FSType)
		for _, option := range []string{"size=1024k", "mode=750"} {
			g.want(requirement.PerformVerified, strings.Contains(m.SBOptions, option), option+" among the options of the superblock", "%s", m.SBOptions)
		}
		g.write(filepath.Join(g.target, "file"), g.text)
		g.want(requirement.PerformVerified, !exists(filepath.Join(g.target, "sentinel")), "a new filesystem", "what lay below is still visible")
	})
	s.spec("a device that is mounted with other parameters is refused", Covers(requirement.FilesystemExclusiveFirst), func(t *trial) {
		g := t.rig()
		device, major, minor := t.loopWithExt4()
		other := g.root + "/other"
		t.sysfail("making a directory", os.Mkdir(other, 0o755))
		t.sysfail("mounting the device", unix.Mount(device, other, "ext4", 0, "commit=17"))
		t.cleanup(func() error { return unix.Unmount(other, 0) })
		spec := &mountSpec{Kind: &preparev1alpha1.MountSpec_Filesystem{Filesystem: &preparev1alpha1.FilesystemMount{
			FsType:     "ext4",
			Source:     &preparev1alpha1.FilesystemMount_Device{Device: &preparev1alpha1.BlockDevice{Major: major, Minor: minor, DevicePath: device}},
			Parameters: []*preparev1alpha1.FsParameter{textParameter("commit", "23")},
		}}}
		if _, err := g.perform(g.performance(spec)); err != nil {
			g.alive(err)
			g.wantNothing(requirement.FilesystemExclusiveFirst, "after the refusal")
			return
		}
		m := g.only(requirement.FilesystemExclusiveFirst, g.target)
		g.want(requirement.FilesystemExclusiveFirst, strings.Contains(m.SBOptions, "commit=23"), "a superblock with commit=23, or an error", "a superblock with %s", m.SBOptions)
	})
}

// loopWithExt4 makes a small ext4 on a loop device, which goes with the spec.
func (t *trial) loopWithExt4() (device string, major, minor uint32) {
	mkfs, err := exec.LookPath("mkfs.ext4")
	if err != nil {
		mkfs = "/usr/sbin/mkfs.ext4"
	}
	image := filepath.Join(t.mkdir("image"), "image")
	t.write(image, "")
	t.cleanup(func() error { return os.Remove(image) })
	t.sysfail("making an image", os.Truncate(image, 8<<20))
	if text, err := exec.CommandContext(t.ctx, mkfs, "-q", "-F", image).CombinedOutput(); err != nil {
		end(couldNotRun("making a filesystem with mkfs.ext4: %v %s", err, text))
	}
	return t.attachLoop(image, 0)
}

// attachLoop makes a loop device of a file, until the spec ends.
func (t *trial) attachLoop(image string, flags uint32) (device string, major, minor uint32) {
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	t.sysfail("opening /dev/loop-control", err)
	defer control.Close()
	file, err := os.OpenFile(image, os.O_RDWR, 0)
	t.sysfail("opening the image", err)
	defer file.Close()
	for range 16 { // another process may take the free one first
		n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		t.sysfail("asking for a loop device", err)
		device = fmt.Sprintf("/dev/loop%d", n)
		loop, err := os.OpenFile(device, os.O_RDWR, 0)
		t.sysfail("opening a loop device", err)
		err = unix.IoctlLoopConfigure(int(loop.Fd()), &unix.LoopConfig{
			Fd: uint32(file.Fd()), Info: unix.LoopInfo64{Flags: unix.LO_FLAGS_AUTOCLEAR | flags},
		})
		if err != nil {
			_ = loop.Close()
			continue
		}
		// The device clears itself when nothing has it open any more.
		t.cleanup(loop.Close)
		var st unix.Stat_t
		t.sysfail("reading the number of a loop device", unix.Stat(device, &st))
		return device, unix.Major(st.Rdev), unix.Minor(st.Rdev)
	}
	end(couldNotRun("no loop device is to be had"))
	return "", 0, 0
}
