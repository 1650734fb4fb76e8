package co

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
	"github.com/csi-prepare/csi-prepare/reference/mountns"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
)

// Plain is an executor in straight lines: make each mount detached, narrow
// it, assemble them in private, attach once; undo by unique id. It knows
// FILESYSTEM, BIND and BLOCK_DEVICE, needs Linux 6.15, and has no fallback for anything.
//
// Its steps are fields, so that a mutant is Plain with one step replaced.
type Plain struct{ steps }

// steps are what performing and undoing come to.
type steps struct {
	// validate returns every rule the specs break.
	validate func([]mountspec.Spec, mountspec.Request) []mountspec.Violation
	// policy is the operator's.
	policy mountspec.Policy
	// locate opens a source beneath a directory.
	locate func(directory, relative string) (fd int, err error)
	// checkSource looks at a source before it is cloned.
	checkSource func(fd int, base string, b *mountspec.Bind) error
	// create makes the superblock of a filesystem.
	create func(p *Plain, c *kernel.FSContext, f *mountspec.Filesystem) error
	// open opens the device that a spec names, and no other.
	open func(d *mountspec.BlockDevice, readonly bool) (*os.File, error)
	// refusesWrites sees that a device is read-only in itself.
	refusesWrites func(*os.File) error
	// node makes the node of a device.
	node func(*mountspec.BlockDevice) (fd int, err error)
	// programs are those an extension may name, none by default.
	programs map[string]string
	// run runs one, and returns the filesystem that it filled.
	run func(ctx context.Context, path string, arguments []string) (fd int, err error)
	// strictExtension refuses what it does not know in an extension.
	strictExtension bool
	// narrow sets the attributes of a mount nobody can see yet.
	narrow func(m *made, set, unset mountspec.Attr) error
	// private cuts a mount off from its peers.
	private func(fd int) error
	// assemble attaches the later mounts inside the first.
	assemble func(p *Plain, all []made) error
	// below opens the target of a later mount inside the first.
	below func(root int, target string, file bool) (fd int, err error)
	// find opens the place in the consumer.
	find func(t Target) (*place, error)
	// checkPlace looks at that place before anything is attached to it.
	checkPlace func(fd int, file bool) error
	// attach makes the assembled mounts visible and verifies them, or leaves
	// nothing.
	attach func(p *Plain, at *place, all []made, undo func() error) error
	// receipts is what is recorded of them.
	receipts func(boot string, ns *mountns.Namespace, at *place, all []made) []receipt

	// order is that in which n mounts are undone.
	order func(n int) []int
	// unmount takes one mount away.
	unmount func(at *place, r receipt) error
	// remove takes what was created for the target away.
	remove func(at *place, r receipt) error
}

// NewPlain returns the conformant Plain.
func NewPlain() *Plain {
	return &Plain{steps{
		validate:      mountspec.Validate,
		locate:        locate,
		checkSource:   checkSource,
		create:        createExclusive(),
		open:          openDevice,
		refusesWrites: refusesWrites,
		node:          node,
		run:           sandboxed,
		narrow:        narrow,
		private:       private,
		assemble:      assemble,
		below:         below,
		find:          find,
		checkPlace:    checkPlace,
		attach:        attach,
		receipts:      receiptsOf,
		order:         reverse,
		unmount:       unmount,
		remove:        remove,

		strictExtension: true,
	}}
}

// made is one mount that is attached nowhere, or not yet where it goes.
type made struct {
	spec mountspec.Spec
	fd   int
	id   uint64
	end  uint64 // the mounts that came along with it have ids up to this one
	file bool   // not a directory
}

// receipt is version 1 of the record of one mount.
type receipt struct {
	Version  int      `json:"version"`
	BootID   string   `json:"boot_id"`
	NSID     uint64   `json:"mntns_id"`
	MountID  uint64   `json:"mount_id"`
	ParentID uint64   `json:"parent_id"`
	Kind     string   `json:"kind"`
	Target   string   `json:"target"`
	Created  []string `json:"created"`
	// TreeEnd is above the ids of the mounts that came along with a
	// recursive bind, which are above MountID.
	TreeEnd uint64 `json:"tree_end,omitempty"`
}

// Perform implements [Executor].
func (p *Plain) Perform(ctx context.Context, q Performance, journal func([]string) error) ([]string, error) {
	if v := p.validate(q.Specs, q.Request); len(v) > 0 {
		return nil, &RefusedError{Violations: v}
	}
	boot, err := bootID()
	if err != nil {
		return nil, err
	}
	ns, err := open(q.Target.Namespace)
	if err != nil {
		return nil, &StateError{"target.namespace", err}
	}
	defer ns.Close()
	var all []made
	defer func() {
		for _, m := range all {
			_ = unix.Close(m.fd)
		}
	}()
	for i, s := range q.Specs {
		m, err := p.make(ctx, q, s)
		if err != nil {
			return nil, fmt.Errorf("mount_specs[%d]: %w", i, err)
		}
		all = append(all, m)
	}
	if err := p.assemble(p, all); err != nil {
		return nil, err
	}
	var receipts []string
	err = ns.Do(ctx, func() error {
		at, err := p.find(q.Target)
		if err != nil {
			return &StateError{"target", err}
		}
		defer at.close()
		records := p.receipts(boot, ns, at, all)
		if receipts, err = encode(records); err != nil {
			return err
		}
		if err := journal(receipts); err != nil {
			return err
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		return p.attach(p, at, all, func() error { return p.undo(q.Target, records) })
	})
	if err != nil {
		return nil, err
	}
	return receipts, nil
}

// make makes the mount of one spec, with its attributes, detached.
func (p *Plain) make(ctx context.Context, q Performance, s mountspec.Spec) (m made, err error) {
	m = made{spec: s, fd: -1}
	switch k := s.Kind.(type) {
	case *mountspec.Filesystem:
		m.fd, err = p.filesystem(k)
	case *mountspec.Bind:
		m.fd, m.file, err = p.bind(q, k)
	case *mountspec.BlockDevice:
		m.file = true
		m.fd, err = p.device(s)
	case *mountspec.Extension:
		m.fd, err = p.extension(ctx, k)
	default:
		err = &StateError{"kind", errors.New("this executor performs FILESYSTEM, BIND, BLOCK_DEVICE and one extension")}
	}
	if err != nil {
		return m, err
	}
	if m.id, err = kernel.UniqueID(m.fd, ""); err == nil {
		m.end, err = nextID()
	}
	if err == nil {
		err = p.private(m.fd)
	}
	if err == nil {
		set, unset := p.policy.Effective(s)
		err = p.narrow(&m, set, unset)
	}
	if err != nil {
		_ = unix.Close(m.fd)
	}
	return m, err
}

// bind clones the source of a bind.
func (p *Plain) bind(q Performance, b *mountspec.Bind) (fd int, file bool, err error) {
	base := map[mountspec.Base]string{
		mountspec.BaseStaging: q.Staging,
		mountspec.BasePrepare: q.Prepare,
		mountspec.BaseGranted: q.Grants[b.Source.Grant],
	}[b.Source.Base]
	if base == "" {
		return -1, false, &StateError{"bind.source", fmt.Errorf("no directory is known for %s %s", b.Source.Base, b.Source.Grant)}
	}
	source, err := p.locate(base, b.Source.Relative)
	if err != nil {
		return -1, false, &StateError{"bind.source", err}
	}
	defer unix.Close(source)
	if err := p.checkSource(source, base, b); err != nil {
		return -1, false, &StateError{"bind.source", err}
	}
	flags := uint(unix.OPEN_TREE_CLONE)
	if b.Recursive {
		flags |= unix.AT_RECURSIVE
	}
	fd, err = kernel.OpenTree(source, "", flags)
	return fd, b.IsFile, err
}

// nextID returns an id above those of all mounts there are: ids count up.
func nextID() (uint64, error) {
	fd, err := kernel.OpenTree(unix.AT_FDCWD, "/", unix.OPEN_TREE_CLONE)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	return kernel.UniqueID(fd, "")
}

// locate opens relative beneath directory and follows no link there.
func locate(directory, relative string) (int, error) {
	base, err := unix.Open(directory, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, &os.PathError{Op: "open", Path: directory, Err: err}
	}
	defer unix.Close(base)
	return kernel.OpenBeneath(base, path.Join(".", relative), unix.O_PATH)
}

// checkSource compares a source with what its spec says of it.
func checkSource(fd int, base string, b *mountspec.Bind) error {
	if err := checkType(fd, b); err != nil {
		return err
	}
	return checkMount(fd, base, b)
}

func checkType(fd int, b *mountspec.Bind) error {
	switch directory, err := isDirectory(fd); {
	case err != nil:
		return err
	case directory && b.IsFile:
		return errors.New("is a directory, and is_file is set")
	case !directory && !b.IsFile:
		return errors.New("is no directory, and is_file is not set")
	}
	return nil
}

// checkMount sees that a mount of the given type covers the source, at or
// below the base: the directory under a mount that is missing is not bound.
func checkMount(fd int, base string, b *mountspec.Bind) error {
	if b.MountFSType == "" {
		return nil
	}
	id, err := kernel.UniqueID(fd, "")
	if err != nil {
		return err
	}
	root, err := unix.Open(base, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: base, Err: err}
	}
	defer unix.Close(root)
	above, atBase, err := kernel.MountRootID(root, "")
	if err != nil {
		return err
	}
	// The mount the base is in covers the source only if the base is its root.
	if id == above && !atBase {
		return errors.New("no mount covers it at or below its base")
	}
	stat, err := kernel.StatMount(0, id, kernel.StatFSType|kernel.StatSubtype)
	if err != nil {
		return err
	}
	kind := stat.FSType
	if stat.Subtype != "" {
		kind += "." + stat.Subtype
	}
	if kind != b.MountFSType {
		return fmt.Errorf("is covered by a mount of type %s, not %s", kind, b.MountFSType)
	}
	return nil
}

func isDirectory(fd int) (bool, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return false, os.NewSyscallError("fstat", err)
	}
	return st.Mode&unix.S_IFMT == unix.S_IFDIR, nil
}

// narrow sets the attributes, of the whole tree where the spec says so.
func narrow(m *made, set, unset mountspec.Attr) error {
	return kernel.MountSetattr(m.fd, &unix.MountAttr{Attr_set: uint64(set), Attr_clr: uint64(unset)}, m.spec.Attributes.Recursive)
}

func private(fd int) error {
	return kernel.MountSetattr(fd, &unix.MountAttr{Propagation: unix.MS_PRIVATE}, true)
}

// open opens the namespace of a target.
func open(name string) (*mountns.Namespace, error) {
	if name == "" {
		return mountns.Own()
	}
	return mountns.OpenPath(name)
}

func encode(receipts []receipt) ([]string, error) {
	var texts []string
	for _, r := range receipts {
		data, err := json.Marshal(r)
		if err != nil {
			return nil, err
		}
		texts = append(texts, string(data))
	}
	return texts, nil
}
