package sanity

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// blockSpecs are about devices: that the right one is answered at each call,
// and that what is on one is never written over.
func blockSpecs(s *section) {
	s.spec("the device is the one the volume has now", Covers(requirement.BlockCurrent), func(t *trial) {
		v := t.bareVolume(t.capability(t.defaultMode()))
		t.publish(v)
		for range 3 {
			t.stage(v)
			r := t.request(v)
			t.currentDevices(t.prepared(r))
			t.currentDevices(t.prepared(clone(r)))
			t.unprepared(r)
			if v.staging != "" {
				t.need(requirement.PrepareAnswered, t.unstage(v), "OK to NodeUnstageVolume")
			}
		}
	})
	s.spec("a device that is gone is not answered again", Covers(requirement.BlockCurrent, requirement.PrepareVolumeData), deviceGoneSpec, accessBlock, KindBlockDevice)
	s.spec("a device is as large as its volume", Covers(requirement.BlockSize), func(t *trial) {
		v := t.volume()
		t.wantSize(v)
		if !t.features[ExpandVolume] {
			return
		}
		answer, err := t.clients.controller.ControllerExpandVolume(t.ctx, &csi.ControllerExpandVolumeRequest{
			VolumeId: v.id, CapacityRange: &csi.CapacityRange{RequiredBytes: v.capacity + 1<<20},
			VolumeCapability: v.capability, Secrets: t.config.secrets("ControllerExpandVolume"),
		})
		if err != nil {
			t.alive(err)
			end(couldNotRun("ControllerExpandVolume failed: %s", answered(err)))
		}
		v.capacity = answer.GetCapacityBytes()
		if answer.GetNodeExpansionRequired() && !t.features[NodeExpandVolume] {
			return
		}
		if answer.GetNodeExpansionRequired() {
			t.expandOnNode(v)
		}
		t.wantSize(v)
	}, accessBlock, KindBlockDevice, CreateDeleteVolume)
	for _, content := range foreignContent {
		s.spec("no filesystem is made over "+content.what, Covers(requirement.FilesystemBlankDevice), func(t *trial) {
			t.keepsContent(content.write)
		}, accessBlock, KindBlockDevice, KindFilesystem)
	}
	s.spec("a filesystem is made once", Covers(requirement.FilesystemBlankDevice), func(t *trial) {
		v := t.volume()
		text := t.nonce()
		t.withVolume(v, false, func(c *consumer) { t.put(c, text) })
		for range 2 {
			t.need(requirement.PrepareAnswered, t.unstage(v), "OK to NodeUnstageVolume")
			t.stage(v)
			t.withVolume(v, true, func(c *consumer) {
				same, found := t.shows(c, text)
				t.want(requirement.FilesystemBlankDevice, same, "the file that was written before the volume was staged again", "%s", found)
			})
		}
		t.withVolume(v, false, func(c *consumer) { t.clear(c) })
	}, accessMount, KindFilesystem, StageVolume)
	s.spec("a mount flag that was accepted shows in the answer", Covers(requirement.PrepareMountFlagRefused), func(t *trial) {
		v := t.sharedVolume()
		for _, flag := range []string{"commit=17", "discard", "nodiscard", "data=ordered", "logbufs=4", "compress=lzo"} {
			r := t.request(v)
			r.VolumeCapability = t.withFlags(r, flag)
			answer, err := t.prepare(r)
			if err != nil {
				t.wantCode(requirement.PrepareMountFlagRefused, err, codes.InvalidArgument)
				continue
			}
			t.want(requirement.PrepareMountFlagRefused, showsFlag(answer, flag), "a parameter "+flag+", or INVALID_ARGUMENT", "OK with %s", specText(answer, -1))
			t.unprepared(r)
		}
	}, accessMount, KindFilesystem)
	s.spec("parameters of a second mount are not ignored", Covers(requirement.FilesystemParametersAgree), func(t *trial) {
		v := t.sharedVolume()
		var one *prepareResponse
		for _, flag := range []string{"commit=17", "logbufs=4", "discard"} {
			r := t.request(v)
			r.VolumeCapability = t.withFlags(r, flag)
			if answer, err := t.prepare(r); err == nil && showsFlag(answer, flag) {
				one = answer
				break
			}
		}
		if one == nil {
			t.unsupported("no mount flag the suite knows becomes a parameter of a filesystem")
		}
		second := t.request(v)
		two, err := t.prepare(second)
		if err != nil {
			t.wantCode(requirement.FilesystemParametersAgree, err, codes.FailedPrecondition)
			return
		}
		t.want(requirement.FilesystemParametersAgree, parameters(one) == parameters(two),
			"FAILED_PRECONDITION, or the parameters of the living preparation: "+parameters(one), "OK with %q", parameters(two))
	}, accessMount, KindFilesystem)
}

// devices are the block devices of an answer, as devices and as sources.
func devices(answer *prepareResponse) []*preparev1alpha1.BlockDevice {
	var all []*preparev1alpha1.BlockDevice
	for _, spec := range answer.GetMountSpecs() {
		if d := spec.GetBlockDevice(); d != nil {
			all = append(all, d)
		}
		if d := spec.GetFilesystem().GetDevice(); d != nil {
			all = append(all, d)
		}
	}
	return all
}

// currentDevices wants every device of an answer to be there, under the
// sequence number it has now.
func (t *trial) currentDevices(answer *prepareResponse) {
	all := devices(answer)
	if len(all) == 0 {
		t.unsupported("no mount spec of the plugin names a device")
	}
	for _, d := range all {
		name := fmt.Sprintf("%d:%d", d.GetMajor(), d.GetMinor())
		dir := filepath.Join("/sys/dev/block", name)
		t.want(requirement.BlockCurrent, exists(dir), "a device that this node has", "%s is not in /sys/dev/block", name)
		text, err := os.ReadFile(filepath.Join(dir, "diskseq"))
		if os.IsNotExist(err) || d.GetDiskseq() == 0 {
			continue // a kernel, or a plugin, that does not know it
		}
		t.sysfail("reading the diskseq of a device", err)
		now := strings.TrimSpace(string(text))
		t.want(requirement.BlockCurrent, now == strconv.FormatUint(d.GetDiskseq(), 10), "diskseq "+now+", which "+name+" has now", "diskseq %d", d.GetDiskseq())
	}
}

// loopMajor is the major number of loop devices.
const loopMajor = 7

// deviceGoneSpec detaches the loop device of a volume behind the plugin's
// back, as an operator's mistake would.
func deviceGoneSpec(t *trial) {
	if t.process == nil {
		end(couldNotRun("the spec detaches a loop device of the plugin, which is not the suite's; --exec 'CMD …' lets the suite start it"))
	}
	v := t.volume()
	text := t.nonce()
	t.withVolume(v, false, func(c *consumer) { t.put(c, text) })
	r := t.request(v)
	d := devices(t.prepared(r))
	if len(d) == 0 || d[0].GetMajor() != loopMajor {
		t.unsupported("the devices of the plugin are no loop devices, which the suite could detach")
	}
	t.detach(d[0])
	again, err := t.prepare(clone(r))
	if err != nil {
		t.alive(err)
		return // it noticed
	}
	t.currentDevices(again)
	c := t.consumer()
	t.perform(c, r, again)
	same, found := t.shows(c, text)
	t.want(requirement.PrepareVolumeData, same, "what was written before the device was detached", "%s", found)
	t.clear(c)
}

// detach ends a loop device whose file the plugin of this run has made.
func (t *trial) detach(d *preparev1alpha1.BlockDevice) {
	link, err := os.Readlink(fmt.Sprintf("/sys/dev/block/%d:%d", d.GetMajor(), d.GetMinor()))
	t.sysfail("finding a loop device", err)
	name := filepath.Base(link)
	file := loops()[name]
	if seen := deviceSeq(name); seen != d.GetDiskseq() || file == "" || !t.ownLoop(name) {
		end(couldNotRun("whether /dev/%s (%s) is of this run is not certain, so it is left alone", name, file))
	}
	f, err := os.OpenFile("/dev/"+name, os.O_RDONLY, 0)
	t.sysfail("opening a loop device", err)
	_, err = unix.IoctlRetInt(int(f.Fd()), unix.LOOP_CLR_FD)
	_ = f.Close()
	t.sysfail("detaching a loop device", err)
	if !t.poll(t.config.Timeout, func() bool { return loops()[name] == "" || deviceSeq(name) != d.GetDiskseq() }) {
		end(couldNotRun("/dev/%s stays attached, somebody has it open", name))
	}
}

// ownLoop reports whether the device was not attached when the run began.
func (s *Suite) ownLoop(name string) bool {
	was, there := s.loopsBefore[name]
	return !there || was != deviceSeq(name)
}

// ownLoops are the attached loop devices on files of the run, or all if it is
// not known where the plugin has its files.
func (s *Suite) ownLoops() map[string]string {
	all := loops()
	if s.config.StateDir == "" && len(s.config.DataDirs) == 0 && len(s.config.Grants) == 0 {
		return all
	}
	maps.DeleteFunc(all, func(_, file string) bool { return !s.mentions(file) })
	return all
}

// deviceSeq is the sequence number of a device, 0 if it has none.
func deviceSeq(name string) uint64 {
	text, err := os.ReadFile("/sys/block/" + name + "/diskseq")
	if err != nil {
		return 0
	}
	seq, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64)
	if err != nil {
		return 0
	}
	return seq
}

// loopSequences are the attached loop devices with their sequence numbers.
func loopSequences() map[string]uint64 {
	found := map[string]uint64{}
	for name := range loops() {
		found[name] = deviceSeq(name)
	}
	return found
}

// wantSize performs a volume and wants its device to have its capacity.
func (t *trial) wantSize(v *volume) {
	if v.capacity == 0 {
		t.unsupported("the plugin promises no capacity_bytes")
	}
	t.withVolume(v, false, func(c *consumer) {
		f, err := os.Open(c.target)
		t.sysfail("opening the device", err)
		size, err := unix.IoctlGetInt(int(f.Fd()), unix.BLKGETSIZE64)
		_ = f.Close()
		t.sysfail("reading the size of the device", err)
		t.want(requirement.BlockSize, int64(size) >= v.capacity, fmt.Sprintf("at least the %d bytes of the volume", v.capacity), "a device of %d bytes", size)
	})
}

// expandOnNode lets the device of a volume that is in use take its new size.
func (t *trial) expandOnNode(v *volume) {
	r := t.request(v)
	t.prepared(r)
	path := r.GetPreparePath()
	if t.features[StageVolume] {
		path = v.staging
	}
	_, err := t.clients.node.NodeExpandVolume(t.ctx, &csi.NodeExpandVolumeRequest{
		VolumeId: v.id, VolumePath: path, StagingTargetPath: v.staging, VolumeCapability: v.capability,
		CapacityRange: &csi.CapacityRange{RequiredBytes: v.capacity}, Secrets: t.config.secrets("NodeExpandVolume"),
	})
	if err != nil {
		t.alive(err)
		end(couldNotRun("NodeExpandVolume failed: %s", answered(err)))
	}
	t.unprepared(r)
}

// foreignContent is what a volume may hold besides a filesystem of the
// plugin's: each was taken for an empty disk by somebody.
var foreignContent = []struct {
	what  string
	write map[int64][]byte
}{
	{"data of no known kind", map[int64][]byte{0: bytes.Repeat([]byte("data"), 128)}},
	{"data that begins far from the start", map[int64][]byte{32 << 20: bytes.Repeat([]byte("data"), 128)}},
	{"a partition table", map[int64][]byte{0: partitionTable()}},
	{"a swap area", map[int64][]byte{4096: at(4096-10, "SWAPSPACE2"), 0: at(1024, "\x01\x00\x00\x00")}},
	{"the superblock of another filesystem", map[int64][]byte{64 << 10: at(0x40, "_BHRfS_M"), 32 << 10: at(1, "CD001")}},
}

// at is a block with a text at an offset.
func at(offset int, text string) []byte {
	b := make([]byte, stretchSize)
	copy(b[offset:], text)
	return b
}

// partitionTable is a master boot record with one partition.
func partitionTable() []byte {
	b := at(510, "\x55\xaa")
	copy(b[446:], []byte{0, 0, 2, 0, 0x83, 0, 0, 0, 0, 8, 0, 0, 0, 8, 0, 0})
	return b
}

// keepsContent writes to a device, lets the plugin mount the volume if it
// will, and wants what was written to be there still.
func (t *trial) keepsContent(content map[int64][]byte) {
	v := t.bareVolume(t.capability(t.defaultMode()))
	if v.capacity != 0 && v.capacity < 33<<20 {
		end(couldNotRun("the volume has %d bytes, and the spec needs 33 MiB; --csi.testvolumesize asks for more", v.capacity))
	}
	if !v.createdNow {
		end(couldNotRun("the spec writes over a whole volume, and the plugin can create none"))
	}
	t.publish(v)
	t.stage(v)
	t.withVolume(v, false, func(c *consumer) {
		for offset, data := range content {
			t.sysfail("writing to the device", writeAt(c.target, offset, data))
		}
	})
	t.tryToMount(v)
	t.stage(v)
	t.withVolume(v, true, func(c *consumer) {
		for offset, data := range content {
			got, err := readAt(c.target, offset)
			t.sysfail("reading the device", err)
			t.want(requirement.FilesystemBlankDevice, bytes.HasPrefix(got, data), "what the consumer wrote to the device", "at byte %d it holds %q", offset, clip(strings.Trim(string(got), "\x00")))
		}
	})
}

// tryToMount asks for the volume as a filesystem. Whether the plugin refuses
// is its own business.
func (t *trial) tryToMount(v *volume) {
	asBlock := v.capability
	v.capability = t.otherCapability(t.defaultMode())
	defer func() { v.capability = asBlock }()
	if t.features[StageVolume] {
		t.need(requirement.PrepareAnswered, t.unstage(v), "OK to NodeUnstageVolume")
		v.staging = t.mkdir("staging")
		_, err := t.clients.node.NodeStageVolume(t.ctx, &csi.NodeStageVolumeRequest{
			VolumeId: v.id, PublishContext: v.published, StagingTargetPath: v.staging,
			VolumeCapability: v.capability, VolumeContext: v.context, Secrets: t.config.secrets("NodeStageVolume"),
		})
		t.alive(err)
	}
	r := t.request(v)
	if _, err := t.prepare(r); err == nil {
		t.unprepared(r)
	} else {
		t.alive(err)
	}
	if t.features[StageVolume] {
		// It may have been staged in spite of an error.
		if err := t.unstage(v); err != nil {
			t.alive(err)
		}
	}
}

// showsFlag reports whether a flag became a parameter of the superblock.
func showsFlag(answer *prepareResponse, flag string) bool {
	return slices.Contains(strings.Split(parameters(answer), ","), flag)
}

// parameters renders those of the first mount spec.
func parameters(answer *prepareResponse) string {
	var words []string
	for _, p := range answer.GetMountSpecs()[0].GetFilesystem().GetParameters() {
		word := p.GetKey()
		if p.GetText() != "" {
			word += "=" + p.GetText()
		}
		words = append(words, word)
	}
	slices.Sort(words)
	return strings.Join(words, ",")
}
