package co

import (
	"errors"
	"fmt"
	"os"
	"path"
	"strings"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
	"github.com/csi-prepare/csi-prepare/reference/mountns"
)

// place is where in the consumer mounts are attached: a name in a directory
// that was resolved once. It is used inside the consumer's namespace.
type place struct {
	root    int // the consumer's root directory
	parent  int // the directory the place is in
	name    string
	path    string // as asked for
	missing bool   // there is nothing of that name yet
}

func (at *place) close() {
	_ = unix.Close(at.root)
	_ = unix.Close(at.parent)
}

// find resolves the place in the consumer's root, unless the way leads through
// a filesystem that may not answer: this executor has no child that could be
// killed.
func find(t Target) (*place, error) {
	mounts, err := os.Open("/proc/thread-self/mountinfo") // of the consumer's namespace
	if err != nil {
		return nil, err
	}
	defer mounts.Close()
	at := path.Join("/", t.Root, t.Path)
	served, err := mountinfo.GetMountsFromReader(mounts, func(m *mountinfo.Info) (skip, stop bool) {
		on := mayHang(m.FSType) && strings.HasPrefix(at, strings.TrimSuffix(m.Mountpoint, "/")+"/")
		return !on, on
	})
	if err != nil {
		return nil, err
	}
	if len(served) > 0 {
		return nil, fmt.Errorf("path: leads through the %s at %s, which may not answer", served[0].FSType, served[0].Mountpoint)
	}
	return resolve(t)
}

// mayHang tells filesystems that wait for a server.
func mayHang(fsType string) bool {
	return strings.HasPrefix(fsType, "fuse") || strings.HasPrefix(fsType, "nfs") || fsType == "cifs" || fsType == "smb3" || fsType == "ceph" || fsType == "9p"
}

// resolve finds the place in the consumer's root. Links on the way are the
// image's own and stay in that root; the place itself is no link.
func resolve(t Target) (*place, error) {
	root := path.Join("/", t.Root)
	rootFD, err := unix.Open(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: root, Err: err}
	}
	at, err := findIn(rootFD, t.Path)
	if err != nil {
		_ = unix.Close(rootFD)
	}
	return at, err
}

func findIn(root int, target string) (*place, error) {
	clean := path.Join("/", target)
	if clean == "/" {
		return nil, errors.New("path: is the consumer's root itself")
	}
	parent, err := kernel.Openat2(root, path.Dir(clean), unix.OpenHow{
		Flags: unix.O_PATH | unix.O_DIRECTORY, Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS,
	})
	if err != nil {
		return nil, err
	}
	at := &place{root: root, parent: parent, name: path.Base(clean), path: clean}
	var st unix.Stat_t
	switch err := unix.Fstatat(parent, at.name, &st, unix.AT_SYMLINK_NOFOLLOW); {
	case errors.Is(err, unix.ENOENT):
		at.missing = true
	case err != nil:
		_ = unix.Close(parent)
		return nil, &os.PathError{Op: "stat", Path: clean, Err: err}
	}
	return at, nil
}

// open opens the place, after making it if it is missing.
func (at *place) open(file bool) (int, error) {
	if at.missing {
		if err := at.make(file); err != nil {
			return -1, err
		}
	}
	return kernel.OpenBeneath(at.parent, at.name, unix.O_PATH)
}

func (at *place) make(file bool) error {
	if !file {
		return unix.Mkdirat(at.parent, at.name, 0o755)
	}
	fd, err := unix.Openat(at.parent, at.name, unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o644)
	if err != nil {
		return err
	}
	return unix.Close(fd)
}

// protected are the filesystems whose files are the kernel's own interfaces.
var protected = map[int64]string{
	unix.PROC_SUPER_MAGIC:    "proc",
	unix.SYSFS_MAGIC:         "sysfs",
	unix.CGROUP_SUPER_MAGIC:  "cgroup",
	unix.CGROUP2_SUPER_MAGIC: "cgroup2",
	unix.DEVPTS_SUPER_MAGIC:  "devpts",
	unix.SECURITYFS_MAGIC:    "securityfs",
	unix.DEBUGFS_MAGIC:       "debugfs",
	unix.TRACEFS_MAGIC:       "tracefs",
	unix.BPF_FS_MAGIC:        "bpf",
	unix.SELINUX_MAGIC:       "selinuxfs",
	unix.NSFS_MAGIC:          "nsfs",
	unix.BINFMTFS_MAGIC:      "binfmt_misc",
	unix.EFIVARFS_MAGIC:      "efivarfs",
	unix.PSTOREFS_MAGIC:      "pstore",
}

// checkPlace sees that a place may be mounted on, by a file or a directory.
func checkPlace(fd int, file bool) error {
	if err := checkProtected(fd); err != nil {
		return err
	}
	return checkKind(fd, file)
}

func checkProtected(fd int) error {
	var fs unix.Statfs_t
	if err := unix.Fstatfs(fd, &fs); err != nil {
		return os.NewSyscallError("fstatfs", err)
	}
	if name := protected[fs.Type]; name != "" {
		return fmt.Errorf("lies in %s, which is the kernel's", name)
	}
	return nil
}

func checkKind(fd int, file bool) error {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return os.NewSyscallError("fstat", err)
	}
	switch kind := st.Mode & unix.S_IFMT; {
	case file && kind != unix.S_IFREG:
		return errors.New("is no regular file, and what is to be attached is a file")
	case !file && kind != unix.S_IFDIR:
		return errors.New("is no directory, and what is to be attached is one")
	}
	return nil
}

// assemble attaches the later mounts inside the first, which is attached
// nowhere: the whole list becomes visible in one step, or not at all.
func assemble(p *Plain, all []made) error {
	for i := 1; i < len(all); i++ {
		if err := nest(p, all[0].fd, &all[i]); err != nil {
			return fmt.Errorf("mount_specs[%d]: %w", i, err)
		}
	}
	return nil
}

func nest(p *Plain, root int, m *made) error {
	target, err := p.below(root, m.spec.Target, m.file)
	if err != nil {
		return &StateError{"target", err}
	}
	defer unix.Close(target)
	if err := p.checkPlace(target, m.file); err != nil {
		return &StateError{"target", err}
	}
	return kernel.MoveMount(m.fd, target, 0)
}

func below(root int, target string, _ bool) (int, error) {
	return kernel.OpenBeneath(root, target, unix.O_PATH)
}

// attach makes the assembled mounts visible at the place.
func attach(p *Plain, at *place, all []made, undo func() error) error {
	err := put(p, at, all[0])
	if err == nil {
		err = verify(p, all)
	}
	if err != nil {
		return errors.Join(err, undo())
	}
	return nil
}

func put(p *Plain, at *place, m made) error {
	target, err := at.open(m.file)
	if err != nil {
		return &StateError{"target", err}
	}
	defer unix.Close(target)
	if err := p.checkPlace(target, m.file); err != nil {
		return &StateError{"target", err}
	}
	if err := kernel.MoveMount(m.fd, target, 0); err != nil {
		return err
	}
	// Below a shared parent a mount becomes shared, whatever it was.
	return p.private(m.fd)
}

// verify compares what is attached with what was to be.
func verify(p *Plain, all []made) error {
	for i, m := range all {
		stat, err := kernel.StatMount(0, m.id, kernel.StatBasic)
		if err != nil {
			return fmt.Errorf("mount_specs[%d]: %w", i, err)
		}
		if set, _ := p.policy.Effective(m.spec); stat.Attr&uint64(set) != uint64(set) {
			return fmt.Errorf("mount_specs[%d]: has attributes %#x, lacks some of %s", i, stat.Attr, set)
		}
	}
	return nil
}

// rmdir removes what make made; that it is gone is no error.
func (at *place) rmdir(name string, file bool) error {
	flags := unix.AT_REMOVEDIR
	if file {
		flags = 0
	}
	err := unix.Unlinkat(at.parent, name, flags)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}

// receiptsOf records the mounts, and with the first what is made for it.
func receiptsOf(boot string, ns *mountns.Namespace, at *place, all []made) []receipt {
	var receipts []receipt
	for _, m := range all {
		receipts = append(receipts, receipt{
			Version: 1, BootID: boot, NSID: ns.ID(), MountID: m.id,
			Kind: string(m.spec.Kind.Name()), Target: path.Join(at.path, m.spec.Target), Created: []string{},
			TreeEnd: m.end,
		})
	}
	if at.missing {
		receipts[0].Created = []string{at.path}
	}
	return receipts
}
