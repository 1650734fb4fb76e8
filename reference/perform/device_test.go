package perform

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
)

// device is a loop device that the test has for itself, with a filesystem.
type device struct {
	mountspec.BlockDevice
	file *os.File // holds it
}

// loop makes a loop device with a filesystem of the type, or none for "".
func (r *rig) loop(fstype string) *device {
	r.Helper()
	// On a disk filesystem, since loops on tmpfs have had bugs of their own.
	image, err := os.CreateTemp(r.TempDir(), "image")
	must(r, err)
	defer image.Close()
	must(r, image.Truncate(320<<20))
	if fstype != "" {
		tool, err := exec.LookPath("mkfs." + fstype)
		if err != nil {
			r.Skipf("needs mkfs.%s to make a filesystem", fstype)
		}
		if out, err := exec.Command(tool, "-q", image.Name()).CombinedOutput(); err != nil {
			r.Fatalf("%s: %v\n%s", tool, err, out)
		}
	}
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	must(r, err)
	defer control.Close()
	for range 64 {
		n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		must(r, err)
		f, err := os.OpenFile("/dev/loop"+strconv.Itoa(n), os.O_RDWR, 0)
		must(r, err)
		err = unix.IoctlLoopConfigure(int(f.Fd()), &unix.LoopConfig{
			Fd: uint32(image.Fd()), Info: unix.LoopInfo64{Flags: unix.LO_FLAGS_AUTOCLEAR},
		})
		if errors.Is(err, unix.EBUSY) { // somebody else was faster
			_ = f.Close()
			continue
		}
		must(r, err)
		r.Cleanup(func() { _ = f.Close() })
		d := &device{file: f}
		var st unix.Stat_t
		must(r, unix.Fstat(int(f.Fd()), &st))
		d.Major, d.Minor = unix.Major(st.Rdev), unix.Minor(st.Rdev)
		d.Diskseq, err = kernel.Diskseq(int(f.Fd()))
		must(r, err)
		return d
	}
	r.Fatal("no free loop device")
	return nil
}

// free sees that nothing holds the device any more.
func (d *device) free(r *rig) {
	r.Helper()
	// The last put of a superblock may come a moment after the umount.
	deadline := time.Now().Add(5 * time.Second)
	for {
		fd, err := unix.Open(d.file.Name(), unix.O_RDONLY|unix.O_EXCL|unix.O_CLOEXEC, 0)
		if err == nil {
			_ = unix.Close(fd)
			return
		}
		if time.Now().After(deadline) {
			r.Errorf("%s is still in use: %v", d.file.Name(), err)
			return
		}
		time.Sleep(time.Millisecond)
	}
}

func (d *device) spec(target, fstype string, change ...func(*mountspec.Filesystem)) mountspec.Spec {
	at := d.BlockDevice
	k := &mountspec.Filesystem{Type: fstype, Device: &at}
	for _, c := range change {
		c(k)
	}
	return mountspec.Spec{Target: target, Kind: k, IDMapSupported: true}
}

func parameter(key, text string) func(*mountspec.Filesystem) {
	return func(k *mountspec.Filesystem) {
		k.Parameters = append(k.Parameters, mountspec.Parameter{Key: key, Text: text})
	}
}

func TestFilesystemOnADevice(t *testing.T) {
	for _, fstype := range []string{"ext4", "xfs", "btrfs"} {
		for _, x := range executors {
			t.Run(fstype+"/"+x.name, func(t *testing.T) {
				inside(t, func(r *rig) {
					d := r.loop(fstype)
					fds, before := x.openFiles(r), r.table()
					p := r.perform(x.on(r), r.target("consumer/place"), []mountspec.Spec{d.spec("", fstype)}, r.options())
					r.write("consumer/place/kept", "kept")
					m, _ := r.mountOf(p.Receipts[0])
					if m.FSType != fstype || m.Attributes() != "rw,nosuid,nodev,relatime" {
						t.Errorf("got %s with %s", m, m.Attributes())
					}
					r.undo(x.on(r), p.Receipts)
					r.same(before)
					d.free(r)
					// Again, read-only as a whole.
					ro := d.spec("", fstype, func(k *mountspec.Filesystem) { k.SuperblockReadonly = true })
					p = r.perform(x.on(r), r.target("consumer/place"), []mountspec.Spec{ro}, r.options())
					if m, _ := r.mountOf(p.Receipts[0]); !m.SBReadonly {
						t.Error("the superblock is writable")
					}
					if text, err := os.ReadFile(r.path("consumer/place/kept")); err != nil || string(text) != "kept" {
						t.Errorf("got %q, %v", text, err)
					}
					r.undo(x.on(r), p.Receipts)
					r.same(before)
					d.free(r)
					if got := x.openFiles(r); got != fds {
						t.Errorf("%d files are open, %d were before", got, fds)
					}
				})
			})
		}
	}
}

// TestSecondMountOfADevice: no parameter is ever ignored in silence.
func TestSecondMountOfADevice(t *testing.T) {
	readonly := func(k *mountspec.Filesystem) { k.SuperblockReadonly = true }
	secret := func(k *mountspec.Filesystem) {
		k.Parameters = append(k.Parameters, mountspec.Parameter{Key: "errors", Secret: mountspec.NewSecret("panic")})
	}
	for _, test := range []struct {
		name          string
		first, second []func(*mountspec.Filesystem)
		refused       bool
	}{
		{name: "plain"},
		{name: "equal parameters", first: params("commit=30", "nodelalloc"), second: params("commit=30", "nodelalloc")},
		{name: "equal, in another order", first: params("commit=30", "nodelalloc"), second: params("nodelalloc", "commit=30")},
		{name: "another value", first: params("commit=30"), second: params("commit=31"), refused: true},
		{name: "one more", first: params("commit=30"), second: params("commit=30", "nodelalloc"), refused: true},
		{name: "one, where there was none", second: params("nodelalloc"), refused: true},
		{name: "one less", first: params("commit=30", "nodelalloc"), second: params("commit=30"), refused: true},
		{name: "none, where there was one", first: params("commit=30"), refused: true},
		{name: "read-only, where it is writable", second: []func(*mountspec.Filesystem){readonly}, refused: true},
		{name: "writable, where it is read-only", first: []func(*mountspec.Filesystem){readonly}, refused: true},
		{name: "a secret, which cannot be compared", second: []func(*mountspec.Filesystem){secret}, refused: true},
	} {
		t.Run(test.name, func(t *testing.T) {
			inside(t, func(r *rig) {
				d := r.loop("ext4")
				r.mkdir("consumer/second")
				before := r.table()
				p1 := r.perform(&plain, r.target("consumer/place"), []mountspec.Spec{d.spec("", "ext4", test.first...)}, r.options())
				between, fds := r.table(), openFiles(t)
				p2, err := Perform(r.ctx, r.target("consumer/second"), []mountspec.Spec{d.spec("", "ext4", test.second...)}, r.options())
				if test.refused {
					if !errors.Is(err, ErrParameters) && !errors.Is(err, unix.EBUSY) {
						t.Errorf("got %v, want ErrParameters", err)
					}
					if err != nil && strings.Contains(err.Error(), "panic") {
						t.Errorf("%q shows a secret", err)
					}
					r.same(between)
				} else {
					must(r, err)
					r.undo(&plain, p2.Receipts)
				}
				if got := openFiles(t); got != fds {
					t.Errorf("%d files are open, %d were before", got, fds)
				}
				r.undo(&plain, p1.Receipts)
				r.same(before)
				d.free(r)
			})
		})
	}
}

func TestSecondMountOfEachFilesystem(t *testing.T) {
	for _, fstype := range []string{"ext4", "xfs", "btrfs"} {
		t.Run(fstype, func(t *testing.T) {
			inside(t, func(r *rig) {
				d := r.loop(fstype)
				r.mkdir("consumer/second")
				before := r.table()
				spec := []mountspec.Spec{d.spec("", fstype)}
				first := r.perform(&plain, r.target("consumer/place"), spec, r.options())
				second := r.perform(&plain, r.target("consumer/second"), spec, r.options())
				r.write("consumer/place/shared", "shared")
				if _, err := os.Stat(r.path("consumer/second/shared")); err != nil {
					t.Error(err)
				}
				r.undo(&plain, first.Receipts)
				r.undo(&plain, second.Receipts)
				r.same(before)
				d.free(r)
			})
		})
	}
}

func params(words ...string) (all []func(*mountspec.Filesystem)) {
	for _, w := range words {
		key, text, _ := strings.Cut(w, "=")
		all = append(all, parameter(key, text))
	}
	return all
}

func TestDeviceRefused(t *testing.T) {
	inside(t, func(r *rig) {
		d := r.loop("ext4")
		executors[1].on(r) // made before the table is read
		before := r.table()
		for _, test := range []struct {
			name   string
			change func(*mountspec.BlockDevice)
			fstype string
			want   error
		}{
			{name: "another diskseq", change: func(b *mountspec.BlockDevice) { b.Diskseq++ }, want: ErrDevice},
			{name: "no such number", change: func(b *mountspec.BlockDevice) { b.Minor = 1 << 19 }, want: ErrDevice},
			{name: "a path that is not it is a hint only", change: func(b *mountspec.BlockDevice) { b.DevicePath = "/dev/null" }},
			{name: "another filesystem", fstype: "xfs", want: unix.EINVAL},
		} {
			for _, x := range executors {
				fds := x.openFiles(r)
				spec := d.spec("", "ext4")
				k := spec.Kind.(*mountspec.Filesystem)
				if test.change != nil {
					test.change(k.Device)
				}
				if test.fstype != "" {
					k.Type = test.fstype
				}
				p, err := x.on(r).Perform(r.ctx, r.target("consumer/place"), []mountspec.Spec{spec}, r.options())
				if !errors.Is(err, test.want) {
					t.Errorf("%s/%s: got %v, want %v", test.name, x.name, err, test.want)
				}
				if err == nil {
					r.undo(x.on(r), p.Receipts)
				}
				r.same(before)
				if got := x.openFiles(r); got != fds {
					t.Errorf("%d files are open, %d were before", got, fds)
				}
			}
		}
		d.free(r)
	})
}

// TestDeviceNumberGivenAgain: the number stays, the disk behind it does not.
func TestDeviceNumberGivenAgain(t *testing.T) {
	inside(t, func(r *rig) {
		d := r.loop("ext4")
		spec := d.spec("", "ext4")
		must(r, unix.IoctlSetInt(int(d.file.Fd()), unix.LOOP_CLR_FD, 0))
		must(r, d.file.Close())
		var again *device
		for range 8 { // the lowest free number is likely the same one
			if again = r.loop("ext4"); again.Minor == d.Minor {
				break
			}
		}
		if again.Minor != d.Minor {
			t.Skip("another process took the loop device")
		}
		before := r.table()
		_, err := Perform(r.ctx, r.target("consumer/place"), []mountspec.Spec{spec}, r.options())
		if !errors.Is(err, ErrDevice) {
			t.Errorf("got %v, want ErrDevice", err)
		}
		r.same(before)
	})
}

func TestBlockDevice(t *testing.T) {
	inside(t, func(r *rig) {
		d := r.loop("")
		before, fds, files := r.table(), openFiles(t), r.tree("consumer")
		o := r.options(func(o *Options) {
			o.Request.Block = true
			o.Policy.CreateTarget = true
			o.NodeUID, o.NodeGID, o.NodeMode = 12, 34, 0o640
		})
		at := d.BlockDevice
		specs := []mountspec.Spec{{Kind: &mountspec.BlockDevice{Major: at.Major, Minor: at.Minor, Diskseq: at.Diskseq}}}
		p := r.perform(&plain, r.target("consumer/dev"), specs, o)
		var st unix.Stat_t
		must(r, unix.Stat(r.path("consumer/dev"), &st))
		if st.Mode != unix.S_IFBLK|0o640 || st.Uid != 12 || st.Gid != 34 || st.Rdev != unix.Mkdev(at.Major, at.Minor) {
			t.Errorf("the node is mode %o of %d:%d, device %#x", st.Mode, st.Uid, st.Gid, st.Rdev)
		}
		want := Node{Major: at.Major, Minor: at.Minor, Path: r.path("consumer/dev")}
		if n := p.Receipts[0].Node; n == nil || *n != want {
			t.Errorf("the receipt has node %+v, want %+v", n, want)
		}
		// It is the device: bytes go through.
		w, err := os.OpenFile(r.path("consumer/dev"), os.O_WRONLY|unix.O_DIRECT, 0)
		if err == nil {
			_ = w.Close()
		}
		must(r, err)
		m, _ := r.mountOf(p.Receipts[0])
		if got := m.Attributes(); got != "rw,nosuid,relatime" {
			t.Errorf("attributes %q", got)
		}
		r.undo(&plain, p.Receipts)
		r.same(before)
		if got := r.tree("consumer"); got != files {
			t.Errorf("it left\n%s", got)
		}
		if got := openFiles(t); got != fds {
			t.Errorf("%d files are open, %d were before", got, fds)
		}
		d.free(r)

		// In a consumer with a user namespace, which could not make a node.
		there, _ := r.consumer(true)
		p, err = Perform(r.ctx, Target{Namespace: there, Path: r.path("consumer/dev")}, specs, o)
		must(r, err)
		must(r, there.Do(r.ctx, func() error {
			f, err := os.OpenFile(r.path("consumer/dev"), os.O_RDWR, 0)
			if err != nil {
				return fmt.Errorf("in the consumer: %w", err)
			}
			return f.Close()
		}))
		must(r, Undo(r.ctx, there, p.Receipts))

		stale := specs[0].Kind.(*mountspec.BlockDevice)
		stale.Diskseq++
		if _, err := Perform(r.ctx, r.target("consumer/dev"), specs, o); !errors.Is(err, ErrDevice) {
			t.Errorf("got %v, want ErrDevice", err)
		}
		r.same(before)
	})
}
