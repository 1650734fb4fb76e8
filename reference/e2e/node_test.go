package e2e

import (
	"context"
	"crypto/rand"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/fusemount"
	"github.com/csi-prepare/csi-prepare/reference/handoff"
	"github.com/csi-prepare/csi-prepare/reference/kernel"
	"github.com/csi-prepare/csi-prepare/reference/master"
	"github.com/csi-prepare/csi-prepare/reference/mountns"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
	"github.com/csi-prepare/csi-prepare/reference/perform"
)

// node is what a CO and the plugins have on the node for one test.
type node struct {
	*testing.T
	dir     string
	masters map[string]*master.Mount
	// lacking says what of the machine the test could not do without.
	lacking string
}

// cannot ends a test that this machine cannot run.
func (n *node) cannot(format string, args ...any) {
	n.Helper()
	n.lacking = fmt.Sprintf(format, args...)
	n.Skip(n.lacking)
}

var nodes atomic.Int32

func newNode(t *testing.T) *node {
	t.Helper()
	n := &node{T: t, dir: filepath.Join(base, fmt.Sprintf("node-%d", nodes.Add(1))), masters: map[string]*master.Mount{}}
	must(t, os.MkdirAll(filepath.Join(n.dir, "pool"), 0o755))
	return n
}

// volume is a volume with the mount specs that a plugin answers, and a word
// that was written to it from the backend's side.
type volume struct {
	specs []mountspec.Spec
	word  string
	// found is the path a bind has, or the node of a device.
	found string
	// answered reads what a consumer has written, from the backend's side.
	answered func() string
	// made is the mount the CO has made with fsmount(2), nil if none.
	made func(attr mountspec.Attr) *os.File
}

// volumes are the volumes of the tests, by name.
var volumes = []struct {
	name string
	make func(n *node) *volume
}{
	{"bind", (*node).bind},
	{"read-only tree", (*node).tree},
	{"ext4", (*node).ext4},
	{"FUSE", (*node).fuse},
	{"handle", (*node).handle},
}

func read(path string) string {
	text, _ := os.ReadFile(path)
	return strings.TrimSpace(string(text))
}

// directory makes a directory with a word in it.
func (n *node) directory(name string) (dir, word string) {
	n.Helper()
	dir, word = filepath.Join(n.dir, name), rand.Text()
	must(n.T, os.MkdirAll(dir, 0o755))
	must(n.T, os.WriteFile(filepath.Join(dir, "word"), []byte(word), 0o644))
	return dir, word
}

func granted(relative string) *mountspec.Bind {
	return &mountspec.Bind{Source: mountspec.PathRef{Base: mountspec.BaseGranted, Grant: "pool", Relative: relative}}
}

// bind is of a granted directory, with attributes its mount does not have.
func (n *node) bind() *volume {
	dir, word := n.directory("pool/v")
	return &volume{
		specs: []mountspec.Spec{{
			Kind:           granted("v"),
			Attributes:     mountspec.Attributes{Noexec: true, Atime: mountspec.Noatime, Nodiratime: true},
			IDMapSupported: true,
		}},
		word: word, found: dir, answered: func() string { return read(dir + "/answer") },
	}
}

// tree has a mount below its top.
func (n *node) tree() *volume {
	dir, word := n.directory("pool/tree")
	below := filepath.Join(dir, "below")
	must(n.T, os.Mkdir(below, 0o755))
	must(n.T, unix.Mount("tmpfs", below, "tmpfs", 0, "mode=755"))
	n.Cleanup(func() { must(n.T, unix.Unmount(below, 0)) })
	must(n.T, os.WriteFile(below+"/word", []byte(word), 0o644))
	b := granted("tree")
	b.Recursive = true
	return &volume{
		specs: []mountspec.Spec{{Kind: b, Attributes: mountspec.Attributes{Readonly: true, Recursive: true}}},
		word:  word, found: dir, answered: func() string { return read(dir+"/answer") + read(below+"/answer") },
	}
}

// loop makes a file of a volume's data and returns a loop device on it.
func (n *node) loop(args ...string) (node string, major, minor uint32, sequence uint64) {
	n.Helper()
	f, err := os.CreateTemp(n.dir, "image")
	must(n.T, err)
	defer f.Close()
	must(n.T, f.Truncate(16<<20))
	if len(args) > 0 {
		_, err := command(n.T, args[0], append(args[1:], f.Name())...)
		must(n.T, err)
	}
	out, err := command(n.T, "losetup", "--find", "--show", f.Name())
	must(n.T, err)
	node = strings.TrimSpace(out)
	n.Cleanup(func() { _, err := command(n.T, "losetup", "-d", node); must(n.T, err) })
	d, err := os.Open(node)
	must(n.T, err)
	defer d.Close()
	var st unix.Stat_t
	must(n.T, unix.Fstat(int(d.Fd()), &st))
	sequence, err = kernel.Diskseq(int(d.Fd()))
	must(n.T, err)
	return node, unix.Major(st.Rdev), unix.Minor(st.Rdev), sequence
}

func (n *node) ext4() *volume {
	for _, program := range []string{"mkfs.ext4", "losetup"} {
		if _, err := exec.LookPath(program); err != nil {
			n.cannot("no %s (Debian: e2fsprogs, util-linux)", program)
		}
	}
	dir, word := n.directory("content")
	device, major, minor, sequence := n.loop("mkfs.ext4", "-q", "-d", dir)
	mount := func(attr int) *os.File {
		fs, err := kernel.OpenFS("ext4")
		must(n.T, err)
		defer fs.Close()
		must(n.T, fs.SetString("source", device))
		must(n.T, fs.Create())
		fd, err := fs.Mount(attr)
		must(n.T, err)
		return os.NewFile(uintptr(fd), "ext4")
	}
	return &volume{
		specs: []mountspec.Spec{{Kind: &mountspec.Filesystem{
			Type:   "ext4",
			Device: &mountspec.BlockDevice{Major: major, Minor: minor, Diskseq: sequence},
			Parameters: []mountspec.Parameter{
				{Key: "errors", Text: "remount-ro"},
			},
		}, IDMapSupported: true}},
		word: word, found: device,
		answered: func() string {
			m := mount(0)
			defer m.Close()
			return readAt(m, "answer")
		},
		made: func(attr mountspec.Attr) *os.File { return mount(int(attr)) },
	}
}

// readAt reads a file of a mount that is in no namespace.
func readAt(mount *os.File, name string) string {
	fd, err := unix.Openat(int(mount.Fd()), name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return ""
	}
	defer unix.Close(fd)
	text := make([]byte, 256)
	c, _ := unix.Read(fd, text)
	return strings.TrimSpace(string(text[:max(c, 0)]))
}

// fuse is served by a process of its own, which has the mount from the CO.
func (n *node) fuse() *volume {
	dir, word := n.directory("served")
	device, mount, err := fusemount.Policy{}.Mount(n.Context(), handoff.Key{}, handoff.FUSERequest{
		Subtype: "e2e", RootMode: unix.S_IFDIR | 0o755,
	})
	if err != nil {
		n.cannot("no FUSE: %v", err)
	}
	r, w, err := os.Pipe()
	must(n.T, err)
	server := exec.Command("/proc/self/exe")
	server.Env = append(os.Environ(), roleVariable+"=serve "+dir)
	server.Stdout, server.Stderr, server.ExtraFiles = w, os.Stderr, []*os.File{device}
	must(n.T, server.Start())
	w.Close()
	device.Close()
	n.Cleanup(func() {
		// Whoever waits for the server is let go first.
		must(n.T, fusemount.Abort(context.Background(), mount))
		_ = server.Process.Kill()
		_ = server.Wait()
		mount.Close()
		r.Close()
	})
	must(n.T, waitLine(r))
	n.masters["f"] = master.Made(mount)
	return &volume{
		specs: []mountspec.Spec{{Kind: &mountspec.FUSE{ID: "f"}, IDMapSupported: true}},
		word:  word, answered: func() string { return read(dir + "/answer") },
		made: func(attr mountspec.Attr) *os.File {
			must(n.T, kernel.MountSetattr(int(mount.Fd()), &unix.MountAttr{Attr_set: uint64(attr)}, false))
			again, err := unix.FcntlInt(mount.Fd(), unix.F_DUPFD_CLOEXEC, 0)
			must(n.T, err)
			return os.NewFile(uintptr(again), "FUSE")
		},
	}
}

// handle is a mount a plugin has made where nobody sees it, and sent.
func (n *node) handle() *volume {
	fs, err := kernel.OpenFS("tmpfs")
	must(n.T, err)
	defer fs.Close()
	must(n.T, fs.SetString("mode", "755"))
	must(n.T, fs.Create())
	fd, err := fs.Mount(0)
	must(n.T, err)
	sent := os.NewFile(uintptr(fd), "sent")
	word := rand.Text()
	f, err := unix.Openat(fd, "word", unix.O_CREAT|unix.O_WRONLY|unix.O_CLOEXEC, 0o644)
	must(n.T, err)
	_, err = unix.Write(f, []byte(word))
	must(n.T, err)
	unix.Close(f)
	received, err := master.Receive(n.Context(), sent, master.Expected{FSType: "tmpfs"})
	must(n.T, err)
	n.Cleanup(func() { received.Close(); sent.Close() })
	n.masters["h"] = received
	return &volume{
		specs: []mountspec.Spec{{Kind: &mountspec.Handle{ID: "h", FSType: "tmpfs"}, IDMapSupported: true}},
		word:  word, answered: func() string { return readAt(sent, "answer") },
	}
}

// options are the CO's for a volume.
func (n *node) options(v *volume) perform.Options {
	_, block := v.specs[0].Kind.(*mountspec.BlockDevice)
	return perform.Options{
		Request: mountspec.Request{Block: block, Performer: mountspec.Performer{
			Kinds: mountspec.PerformedKinds(), FSTypes: []string{"ext4", "tmpfs"}, Grants: []string{"pool"}, IDMap: true,
		}},
		Grants:  map[string]string{"pool": filepath.Join(n.dir, "pool")},
		Masters: n.masters,
	}
}

// perform performs the volume, and undoes it when the test ends, if that has
// not been done.
func (n *node) perform(v *volume, t perform.Target, change ...func(*perform.Options)) (undo func()) {
	n.Helper()
	o := n.options(v)
	for _, c := range change {
		c(&o)
	}
	done, err := perform.Perform(n.Context(), t, v.specs, o)
	must(n.T, err)
	over := false
	undo = func() {
		if over {
			return
		}
		over = true
		if err := perform.Undo(context.Background(), t.Namespace, done.Receipts); err != nil {
			n.Errorf("undo: %v", err)
		}
	}
	n.Cleanup(undo)
	return undo
}

// place performs the volume in a directory of the CO's own.
func (n *node) place(v *volume, change ...func(*perform.Options)) mountspec.Place {
	n.Helper()
	dir := filepath.Join(n.dir, "private")
	must(n.T, os.MkdirAll(dir, 0o755))
	n.perform(v, perform.Target{Path: dir}, change...)
	m, found := n.table().Top(dir)
	if !found {
		n.Fatalf("nothing is mounted at %s", dir)
	}
	return mountspec.Place{
		Performed: dir, Attributes: mountspec.Attr(m.Attr), Private: m.Propagation == mountns.Private,
	}
}

func (n *node) table() *mountns.Table {
	n.Helper()
	own, err := mountns.Own()
	must(n.T, err)
	defer own.Close()
	t, err := own.Table(n.Context())
	must(n.T, err)
	return t
}
