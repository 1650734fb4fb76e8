package perform

import (
	"context"
	"errors"
	"os"
	"sync"
	"time"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
	"github.com/csi-prepare/csi-prepare/reference/master"
	"github.com/csi-prepare/csi-prepare/reference/mountns"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
)

// Target is the place in the consumer that the CO has chosen for a volume.
type Target struct {
	// Namespace is the mount namespace to attach in; nil is that of the
	// calling thread. Sources are always found, and mounts always made, in
	// the calling thread's own.
	Namespace *mountns.Namespace
	// Root is the consumer's root directory, an open file in Namespace; nil
	// is the root of the namespace. It stays the caller's.
	Root *os.File
	// Path is absolute in Root: what a user or an image has chosen. It has
	// no ".." component, and is not the root itself.
	Path string
}

// Options is what performing depends on besides the mount specs.
type Options struct {
	// Request is the part of the NodePrepareVolume call that the specs answer.
	Request mountspec.Request
	// Staging, Prepare and Grants are the directories that a PathRef can
	// start from, absolute paths in the calling thread's namespace: the
	// staging_target_path and prepare_path of the call, and the directory
	// behind each grant. Their last component must not be a link.
	Staging, Prepare string
	Grants           map[string]string
	// Masters are the mounts to clone for HANDLE and FUSE, by handle_id. A
	// FUSE mount is there once it is served: its ids can be mapped then, and
	// not before.
	Masters map[string]*master.Mount
	// Policy is the operator's. The zero value forces nosuid and nodev,
	// follows no link and creates nothing. Its IDMap is set by IDMap below.
	Policy mountspec.Policy
	// IDMap is the user namespace whose mapping every mount gets; nil maps
	// nothing. It must not be the initial one.
	IDMap *os.File
	// NodeUID, NodeGID and NodeMode are the owner and permission bits of
	// the node of a BLOCK_DEVICE; a zero mode is 0600. Outside the initial
	// user namespace the node is the host's and so are these; where others
	// are set, performing fails.
	NodeUID, NodeGID int
	NodeMode         os.FileMode
	// Network is the network namespace that filesystems on a network are
	// made in, the node's; nil is that of the process. The consumer's is of
	// no account: a network filesystem stays where it was made.
	Network *os.File
	// Timeout bounds each step that waits for a server or a device, and is
	// made in a child process therefore; 0 is half a minute.
	Timeout time.Duration
	// Journal, if set, is called once, in the calling goroutine, with the
	// receipts of what is about to be attached or created, and before any
	// of it is. What it has made durable when it returns is enough for
	// Undo, whatever happens to this process after. If it fails, nothing
	// becomes visible.
	Journal func([]Receipt) error
}

// Performed is a performance that is wholly visible to the consumer.
type Performed struct {
	// Receipts has one receipt for each mount spec, in order.
	Receipts []Receipt
}

// Executor performs and undoes. The zero value is ready for use and keeps
// nothing between calls; it may be used by several goroutines at once.
type Executor struct {
	features func() kernel.Features
	cache    *cache
	trash    *trash
	watches  *watches
	// patient is set in a child: it may hang.
	patient bool

	// before is called before each step of a plan and each call of an undo
	// that changes something, and fails it if it returns an error. Only
	// tests set it.
	before func(step string) error
}

var plain Executor

// Perform performs specs at t with an Executor of the zero value.
func Perform(ctx context.Context, t Target, specs []mountspec.Spec, o Options) (*Performed, error) {
	return plain.Perform(ctx, t, specs, o)
}

// Undo undoes receipts with an Executor of the zero value.
func Undo(ctx context.Context, ns *mountns.Namespace, receipts []Receipt) error {
	return plain.Undo(ctx, ns, receipts)
}

// Features returns what a plan may use of the kernel as it was probed.
func Features() mountspec.Features { return planFeatures(kernel.Probe()) }

func planFeatures(f kernel.Features) mountspec.Features {
	return mountspec.Features{
		MountAPI:        f.NewMountAPI && f.MountSetattr,
		DetachedTrees:   f.DetachedTree && f.DetachedClone,
		ExclusiveCreate: f.CreateExclusive,
		UniqueIDs:       f.UniqueID && f.Statmount && f.Listmount,
		Openat2:         f.Openat2,
	}
}

func (e *Executor) probe() mountspec.Features {
	if e.features != nil {
		return planFeatures(e.features())
	}
	return probed()
}

var probed = sync.OnceValue(Features)

func (e *Executor) step(name string) error {
	if e.before == nil {
		return nil
	}
	return e.before(name)
}

// Perform makes what specs, the answer to o.Request, describe and attaches it
// at t: all of it or nothing. Where the kernel allows it (Linux 6.15) the
// specs are put together in a tree that is in no namespace, and become visible
// by one move_mount(2). The specs are validated as a whole first. On a shared
// mount, which would keep copies for its peers, and on older kernels they are
// attached one after another, and taken back when one fails.
//
// ctx is looked at before each step; a step that waits for a device or a
// server ends with ctx as well, see the package comment.
//
// Errors are an *InvalidError, a *mountspec.UnsupportedError, or an *Error.
func (e *Executor) Perform(ctx context.Context, t Target, specs []mountspec.Spec, o Options) (*Performed, error) {
	if err := checkPath(t.Path); err != nil {
		return nil, &Error{-1, mountspec.OpenTarget.String(), err}
	}
	if broken := mountspec.Validate(specs, o.Request); broken != nil {
		return nil, &InvalidError{broken}
	}
	o.Policy.IDMap = o.IDMap != nil
	f := e.probe()
	done, err := e.perform(ctx, t, specs, &o, f)
	if errors.Is(err, errShared) {
		f.DetachedTrees = false
		done, err = e.perform(ctx, t, specs, &o, f)
	}
	return done, err
}

// perform performs with the features f of the kernel.
func (e *Executor) perform(ctx context.Context, t Target, specs []mountspec.Spec, o *Options, f mountspec.Features) (*Performed, error) {
	plan, err := mountspec.NewPlan(specs, f, o.Policy)
	if err != nil {
		return nil, err
	}
	boot, err := bootID()
	if err != nil {
		return nil, &Error{-1, "read the boot id", err}
	}
	x := performance{
		e: e, ctx: ctx, target: t, specs: specs, o: o, plan: plan, f: f,
		units: make([]unit, len(specs)),
		done:  &Performed{Receipts: make([]Receipt, len(specs))},
	}
	for i := range x.units {
		x.units[i] = closedUnit
		x.done.Receipts[i] = Receipt{
			Version: receiptVersion, BootID: boot,
			Kind: specs[i].Kind.Name(), SpecDigest: specs[i].Digest(),
		}
	}
	if err := x.run(); err != nil {
		return nil, err
	}
	return x.done, nil
}
