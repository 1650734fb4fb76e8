package sanity

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
	"github.com/csi-prepare/csi-prepare/spec/testingv1alpha1"
)

// How long attacks go on: enough to hit who checks first and mounts later.
const (
	races         = 60
	raceTime      = 1500 * time.Millisecond
	foreignMounts = 10_000
)

// attackSpecs have plugin, consumer and bystanders do what they should not,
// while the executor is at work.
func attackSpecs(s *section) {
	s.spec("no exchange of a directory for a link leads a mount out of the root", Covers(requirement.PerformTargetInRoot), func(t *trial) {
		g := t.rig()
		outside := filepath.Join(g.root, "outside")
		inside := filepath.Join(g.root, "root")
		for _, dir := range []string{outside, outside + "/target", inside, inside + "/way", inside + "/way/target"} {
			t.sysfail("making a directory", os.Mkdir(dir, 0o755))
		}
		t.sysfail("making a link", os.Symlink("../outside", inside+"/link"))
		g.whileExchanged(inside+"/way", inside+"/link", func(calmly func(func())) {
			r := g.performance(bind("", "", nil))
			r.Target.Root, r.Target.Path = inside, "/way/target"
			receipts, err := g.perform(r)
			g.want(requirement.PerformTargetInRoot, len(g.table().At(outside+"/target")) == 0, "no mount outside the root", "one is there")
			calmly(func() { g.undone(r, receipts, err) })
		})
	})
	s.spec("no exchange of a directory for a link leads a mount out of the volume", Covers(requirement.PerformNoSymlink), func(t *trial) {
		g := t.rig()
		outside := filepath.Join(g.root, "outside")
		for _, dir := range []string{outside, outside + "/inner"} {
			t.sysfail("making a directory", os.Mkdir(dir, 0o755))
		}
		link := filepath.Join(g.volume, "link")
		t.sysfail("making a link", os.Symlink(outside, link))
		g.whileExchanged(filepath.Join(g.volume, "dir"), link, func(calmly func(func())) {
			r := g.performance(bind("", "", nil), bind("dir/inner", "other", nil))
			receipts, err := g.perform(r)
			g.want(requirement.PerformNoSymlink, len(g.table().At(outside+"/inner")) == 0, "no mount where the link leads", "one is there")
			calmly(func() { g.undone(r, receipts, err) })
		})
	})
	s.spec("no exchange of a directory for a link leads to another source", Covers(requirement.BindByDescriptor, requirement.BindResolveBeneath), func(t *trial) {
		g := t.rig()
		outside := t.mkdir("outside")
		secret := filepath.Join(outside, "secret")
		t.write(secret, "not in the grant")
		t.cleanup(func() error { return os.Remove(secret) })
		link := filepath.Join(g.volume, "link")
		t.sysfail("making a link", os.Symlink(outside, link))
		g.whileExchanged(filepath.Join(g.volume, "dir"), link, func(calmly func(func())) {
			r := g.performance(bind("", "dir", nil))
			receipts, err := g.perform(r)
			g.want(requirement.BindByDescriptor, !exists(filepath.Join(g.target, "secret")), "nothing that lies outside the grant", "a file from there is at the target")
			calmly(func() { g.undone(r, receipts, err) })
		})
	})
	s.spec("hostile mount specs are refused", Covers(requirement.ValidateNothingPerformed), func(t *trial) {
		g := t.rig()
		for what, change := range hostile() {
			r := g.performance(bind("", "", nil))
			change(r)
			_, err := g.perform(r)
			g.alive(err)
			g.want(requirement.ValidateNothingPerformed, err != nil, "an error to "+what, "OK")
			g.wantNothing(requirement.ValidateNothingPerformed, "after "+what)
		}
	})
	s.spec("a mount that somebody made inside the volume is kept", Covers(requirement.UndoBystanderKept, requirement.UndoRechecked), func(t *trial) {
		g := t.rig()
		r := g.performance(bind("", "", nil), bind("other", "dir", nil))
		receipts := g.performed(r)
		ours := g.idsBelow()
		theirs := g.bystander(filepath.Join(g.target, "dir"))
		err := g.undoCall(r, receipts)
		g.alive(err)
		g.want(requirement.UndoBystanderKept, g.stillThere([]uint64{theirs}), "the mount of the bystander kept (undo: "+answered(err)+")", "it is gone")
		g.want(requirement.UndoRechecked, err != nil || !g.stillThere(ours), "the mounts gone, since undo is OK", "they are still there")
	})
	s.spec("of a list with a busy mount nothing is hidden", Covers(requirement.UndoBusyReported, requirement.UndoRechecked), func(t *trial) {
		g := t.rig()
		r := g.performance(bind("", "", nil), bind("dir", "other", nil), tmpfsOf("other", nil))
		receipts := g.performed(r)
		ours := g.idsBelow()
		g.write(filepath.Join(g.target, "other", "held"), "text")
		held, err := os.Open(filepath.Join(g.target, "other", "held"))
		t.sysfail("opening a file", err)
		t.cleanup(func() error { _ = held.Close(); return nil })
		err = g.undoCall(r, receipts)
		g.want(requirement.UndoBusyReported, err != nil, "an error while a file of one mount is open", "OK")
		g.wantBusy(requirement.UndoBusyReported, err)
		g.want(requirement.UndoBusyReported, g.stillThere(ours[len(ours)-1:]) || g.stillThere(ours), "the busy mount kept", "it is gone from the table")
		_ = held.Close()
		g.wantCode(requirement.UndoRechecked, g.undoCall(r, receipts), codes.OK)
		g.wantNothing(requirement.UndoRechecked, "after undo of what is not busy any more")
	})
	s.spec("a table of many foreign mounts is left as it was", Covers(requirement.AuditTableRestored, requirement.UndoByID), crowdSpec)
	s.spec("a step that hangs is given up, and holds up nothing else", Covers(requirement.PerformDeadline), hangSpec)
	s.spec("nothing of another boot counts", Covers(requirement.CrashCOBootID), otherBootSpec)
}

// whileExchanged runs act many times while somebody exchanges two names as fast
// as can be, and puts them back. calmly runs what is no part of the race, with
// the names as they were.
func (g *rig) whileExchanged(a, b string, act func(calmly func(func()))) {
	var mu sync.Mutex
	even := true
	calmly := func(f func()) {
		mu.Lock()
		defer mu.Unlock()
		if !even {
			g.sysfail("exchanging two names back", exchange(a, b))
			even = true
		}
		f()
	}
	g.watch(func() bool {
		mu.Lock()
		defer mu.Unlock()
		if exchange(a, b) == nil {
			even = !even
		}
		return false
	}, func() {
		begun := time.Now()
		for i := 0; i < races && (i < races/10 || time.Since(begun) < raceTime); i++ {
			act(calmly)
		}
	})
	calmly(func() {})
}

// undone undoes what was performed in a race, if it was.
func (g *rig) undone(r *performRequest, receipts []string, err error) {
	g.alive(err)
	if err != nil {
		return
	}
	g.need(requirement.UndoIdempotent, g.undoCall(r, receipts), "OK to undo")
}

// hostile is what a plugin may answer that means harm, besides violating.
func hostile() map[string]func(*performRequest) {
	all := map[string]func(*performRequest){}
	second := func(what string, change func(*mountSpec)) {
		all[what] = func(r *performRequest) { r.MountSpecs = append(r.MountSpecs, with(bind("dir", "other", nil), change)) }
	}
	filesystem := func(what string, spec *preparev1alpha1.FilesystemMount) {
		all[what] = func(r *performRequest) {
			r.Request.Performer.FsTypes = append(r.Request.Performer.FsTypes, spec.GetFsType())
			r.MountSpecs = append(r.MountSpecs, &mountSpec{Target: "dir", Kind: &preparev1alpha1.MountSpec_Filesystem{Filesystem: spec}})
		}
	}
	parameter := func(key, value string) {
		filesystem(fmt.Sprintf("the parameter %.40q with %s", key, count(len(value), "byte")), &preparev1alpha1.FilesystemMount{
			FsType: "tmpfs", Parameters: []*preparev1alpha1.FsParameter{textParameter(key, value)},
		})
	}
	for _, t := range strings.Fields("bind none autofs overlay proc sysfs cgroup cgroup2 devpts devtmpfs debugfs tracefs securityfs bpf configfs pstore efivarfs nsfs mqueue binfmt_misc fusectl ramfs hugetlbfs fuse fuseblk fuse.sshfs ../tmpfs format/ext4 tmp\x00fs") {
		filesystem("the type "+strconv.Quote(t), &preparev1alpha1.FilesystemMount{FsType: t})
	}
	for _, key := range strings.Fields("ro rw remount move shared rslave suid exec noatime rnosuid loop offset nofail x-mount.mkdir helper fd lowerdir upperdir workdir journal_dev device context fscontext uidmap gidmap credentials") {
		parameter(key, "1")
	}
	for _, value := range []string{"1m,ro", "1m\nro", "1m\x00ro", strings.Repeat("a", 256), strings.Repeat("a", 1<<20)} {
		parameter("size", value)
	}
	for _, key := range []string{"", "size=1m", "si ze", "size\x00", strings.Repeat("k", 129)} {
		parameter(key, "1")
	}
	all["parameters of more than 4095 bytes"] = func(r *performRequest) {
		var many []*preparev1alpha1.FsParameter
		for i := range 20 {
			many = append(many, textParameter("k"+itoa(i), strings.Repeat("a", 250)))
		}
		r.MountSpecs = append(r.MountSpecs, tmpfsOf("dir", nil, many...))
	}
	for _, source := range []string{"/etc/passwd", "/dev/sda", "/proc/self/root", strings.Repeat("s", 256), "a\x00b"} {
		filesystem(fmt.Sprintf("the opaque source %.40q", source), &preparev1alpha1.FilesystemMount{
			FsType: "ext4", Source: &preparev1alpha1.FilesystemMount_Opaque{Opaque: source},
		})
	}
	for _, relative := range []string{"..", "../..", "volume/../../..", "/proc/1/root", "/proc/self/fd/3", "volume//dir", "./volume", "volume/", "volume\x00", strings.Repeat("d/", 3000) + "d"} {
		second(fmt.Sprintf("the source %.40q", relative), func(s *mountSpec) { s.GetBind().Source.Relative = relative })
	}
	for _, target := range []string{"..", "dir/..", "/", "//dir", "dir//inner", "dir/", " ", strings.Repeat("d/", 3000) + "d"} {
		second(fmt.Sprintf("the target %.40q", target), func(s *mountSpec) { s.Target = target })
	}
	all["a thousand mount specs"] = func(r *performRequest) {
		for range 999 {
			r.MountSpecs = append(r.MountSpecs, bind("dir", "other", nil))
		}
	}
	all["an extension that nobody offered"] = func(r *performRequest) {
		s := &mountSpec{Target: "dir"}
		// Field 7 by its bytes: a message of a type nobody here knows.
		s.ProtoReflect().SetUnknown(protowire.AppendBytes(protowire.AppendTag(nil, 99, protowire.BytesType), []byte("command")))
		r.MountSpecs = append(r.MountSpecs, s)
	}
	for _, size := range []uint32{0, 4096, 1 << 31} {
		second(fmt.Sprintf("the device %d:0 for a directory", size), func(s *mountSpec) {
			s.Kind = &preparev1alpha1.MountSpec_BlockDevice{BlockDevice: &preparev1alpha1.BlockDevice{Major: size}}
		})
	}
	second("a handle that was never sent", func(s *mountSpec) {
		s.Kind = &preparev1alpha1.MountSpec_Handle{Handle: &preparev1alpha1.MountHandle{HandleId: "h", FsType: "tmpfs"}}
	})
	return all
}

// crowdSpec performs and undoes beside ten thousand mounts of others.
func crowdSpec(t *trial) {
	g := t.rig()
	crowd := t.tmpfs()
	place := filepath.Join(crowd, "place")
	t.sysfail("making a directory", os.Mkdir(place, 0o755))
	t.sysfail("mounting for a crowd", unix.Mount("crowd", place, "tmpfs", 0, "size=64k,nr_inodes=1k"))
	// They end with the mount they are on, in the namespace of the spec alone.
	t.cleanup(func() error { return unix.Unmount(place, unix.MNT_DETACH) })
	const dirs = 100
	for i := range dirs {
		dir := filepath.Join(place, itoa(i))
		t.sysfail("making a directory", os.Mkdir(dir, 0o755))
		for range foreignMounts / dirs {
			t.sysfail("mounting for a crowd", unix.Mount(crowd, dir, "", unix.MS_BIND, ""))
		}
	}
	before := g.table()
	for range 3 {
		r := g.performance(bind("", "", nil), tmpfsOf("dir", nil))
		receipts := g.performed(r)
		now := len(g.table().Mounts)
		g.want(requirement.AuditTableRestored, now == len(before.Mounts)+2, "two mounts more", "%s more", count(now-len(before.Mounts), "mount"))
		g.wantCode(requirement.UndoByID, g.undoCall(r, receipts), codes.OK)
		if diff := difference(before, g.table()); diff != "" {
			g.fail(requirement.AuditTableRestored, fmt.Sprintf("the %d mounts of the table as they were", len(before.Mounts)), "changed: "+diff)
		}
	}
}

// hangSpec has the way to a target lead through a filesystem that nobody
// serves: whoever looks at it waits until its connection ends.
func hangSpec(t *trial) {
	g := t.rig()
	place := filepath.Join(g.root, "hung")
	t.sysfail("making a directory", os.Mkdir(place, 0o755))
	device, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		end(couldNotRun("there is no /dev/fuse: %v", err))
	}
	ended := false
	endConnection := func() error {
		if ended {
			return nil
		}
		ended = true
		return unix.Close(device) // what waits gets ENOTCONN
	}
	t.cleanup(func() error { return unix.Unmount(place, unix.MNT_DETACH) })
	t.cleanup(endConnection)
	if err := unix.Mount("hung", place, "fuse", unix.MS_NOSUID|unix.MS_NODEV, fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", device)); err != nil {
		end(couldNotRun("mounting a filesystem that nobody serves: %v", err))
	}
	r := g.performance(bind("", "", nil))
	r.Target.Path = filepath.Join(place, "dir", "target")
	ctx, cancel := context.WithTimeout(g.ctx, time.Second)
	defer cancel()
	_, err = g.clients.performer.Perform(ctx, r)
	g.want(requirement.PerformDeadline, err != nil, "an error: the way to the target leads through a filesystem that does not answer", "OK")
	other := g.performance(bind("", "", nil))
	quick, cancelOther := context.WithTimeout(g.ctx, g.config.Timeout/2)
	defer cancelOther()
	answer, err := g.clients.performer.Perform(quick, other)
	g.want(requirement.PerformDeadline, err == nil, "OK to a performance elsewhere meanwhile", "%s", answered(err))
	g.need(requirement.UndoIdempotent, g.undoCall(other, answer.GetReceipts()), "OK to undo")
	if pid := g.pid(); pid != 0 {
		stuck := ""
		free := g.poll(g.config.Timeout, func() bool { stuck = waiting(pid); return stuck == "" })
		g.want(requirement.PerformDeadline, free, "no thread and no child of the performer that waits on, after the deadline of the call", "%s does", stuck)
	}
	g.sysfail("ending the connection", endConnection())
	_, err = g.clients.performer.Undo(g.ctx, &testingv1alpha1.UndoRequest{Id: r.GetId(), Target: r.GetTarget()})
	if code := status.Code(err); code != codes.OK && code != codes.InvalidArgument {
		g.alive(err)
	}
}

// waiting names a thread of a process, or of a child of its, that is in an
// uninterruptible or FUSE wait; "" if there is none.
func waiting(pid int) string {
	for _, process := range append([]string{itoa(pid)}, childIDs(pid)...) {
		tasks, err := os.ReadDir("/proc/" + process + "/task")
		if err != nil {
			continue
		}
		for _, task := range tasks {
			at, err := os.ReadFile("/proc/" + process + "/task/" + task.Name() + "/wchan")
			if err == nil && (strings.HasPrefix(string(at), "request_wait") || strings.HasPrefix(string(at), "fuse")) {
				return "thread " + task.Name() + " of process " + process + ", in " + string(at) + ","
			}
		}
	}
	return ""
}

func childIDs(pid int) []string {
	var ids []string
	for _, c := range children(pid) {
		id, _, _ := strings.Cut(c, " ")
		ids = append(ids, id)
	}
	return ids
}

// otherBootSpec restarts the performer in what it has to take for another
// boot, after its mount is gone as with a reboot.
func otherBootSpec(t *trial) {
	g := t.rig()
	g.mayRestart()
	r := g.performance(bind("", "", nil))
	g.performed(r)
	g.cleanup(func() error { return g.restart(g.ctx) })
	g.sysfail("unmounting what was performed", unix.Unmount(g.target, 0))
	if err := g.inAnotherBoot(func() error { return g.restart(g.ctx) }); err != nil {
		end(couldNotRun("giving the performer another boot id: %v", err))
	}
	receipts, err := g.perform(r)
	g.wantCode(requirement.CrashCOBootID, err, codes.OK)
	same, found := holds(filepath.Join(g.target, "file"), g.text)
	g.want(requirement.CrashCOBootID, same, "the volume performed anew, since what was performed ended with its boot", "%s", found)
	g.need(requirement.UndoIdempotent, g.undoCall(r, receipts), "OK to undo")
}
