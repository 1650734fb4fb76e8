package co

import (
	"errors"
	"fmt"
	"os"
	"path"
	"slices"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/fakes/mutant"
	"github.com/csi-prepare/csi-prepare/reference/kernel"
	"github.com/csi-prepare/csi-prepare/reference/mountns"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// Mutants returns every wrong executor there is.
func Mutants() []Mutant {
	return slices.Concat(attributeMutants, performMutants, sourceMutants, refusalMutants, undoMutants, lifeMutants)
}

// Attributes that are asked for and not in force.
var attributeMutants = []Mutant{
	seat("one-call-readonly-bind", mutant.Attributes, requirement.AttributesLowerBound,
		"a bind is made read-only in the call that makes it, as MS_BIND|MS_RDONLY: the kernel says OK and leaves it writable",
		narrowing(func(m *made, set mountspec.Attr) mountspec.Attr {
			if _, bind := m.spec.Kind.(*mountspec.Bind); bind {
				return set &^ mountspec.AttrReadonly
			}
			return set
		})),
	seat("drops-attributes", mutant.Attributes, requirement.AttributesLowerBound,
		"of the attributes readonly alone is applied: noexec and nosymfollow are lost on the way, as in a list of option strings",
		narrowing(func(_ *made, set mountspec.Attr) mountspec.Attr {
			return set & (mountspec.AttrReadonly | mountspec.AttrNosuid | mountspec.AttrNodev)
		})),
	seat("drops-atime", mutant.Attributes, requirement.AttributesLowerBound,
		"the access time mode is left as the kernel has it",
		narrowing(func(_ *made, set mountspec.Attr) mountspec.Attr {
			return set &^ (mountspec.AttrAtimeMask | mountspec.AttrNodiratime)
		})),
	seat("allows-suid-and-devices", mutant.Attributes, requirement.AttributesNosuidNodev,
		"nosuid and nodev are added only where the plugin asks for them: a device node in a volume opens the host's disk",
		plain(func(p *Plain) { p.policy = mountspec.Policy{AllowSuid: true, AllowDev: true}; p.unverified() })),
	seat("narrows-the-top-only", mutant.Attributes, requirement.AttributesRecursive,
		"recursive attributes reach the top mount alone: below it everything stays writable",
		plain(func(p *Plain) {
			p.narrow = func(m *made, set, unset mountspec.Attr) error {
				top := *m
				top.spec.Attributes.Recursive = false
				return narrow(&top, set, unset)
			}
		})),
	seat("narrows-when-visible", mutant.Attributes, requirement.AttributesBeforeVisible,
		"a mount is attached first and narrowed afterwards: for a moment a consumer that waits for it can write",
		plain(func(p *Plain) {
			p.narrow = func(*made, mountspec.Attr, mountspec.Attr) error { return nil }
			p.attach = func(p *Plain, at *place, all []made, undo func() error) error {
				if err := put(p, at, all[0]); err != nil {
					return errors.Join(err, undo())
				}
				time.Sleep(100 * time.Millisecond)
				for i := range all {
					set, unset := p.policy.Effective(all[i].spec)
					if err := narrow(&all[i], set, unset); err != nil {
						return errors.Join(err, undo())
					}
				}
				return verify(p, all)
			}
		})),
	seat("keeps-propagation", mutant.Attributes, requirement.AttributesPrivate,
		"a clone of a shared mount stays its peer: what is mounted later in the volume appears in the consumer, and the reverse",
		plain(func(p *Plain) { p.private = func(int) error { return nil } })),
}

// Performing too much, too little or elsewhere.
var performMutants = []Mutant{
	seat("stacks-on-retry", mutant.Repeats, requirement.PerformOnce,
		"a repeated performance performs again: one mount more with every retry, and one undo too few",
		func(_ *Plain, s *Server) { s.once = func(record) bool { return false } }),
	seat("leaves-half-a-list", mutant.Leaks, requirement.PerformAllOrNothing,
		"mount specs are attached one by one, and a failure stops in the middle: the consumer finds half a volume",
		plain(func(p *Plain) {
			p.assemble = func(*Plain, []made) error { return nil }
			p.attach = func(p *Plain, at *place, all []made, _ func() error) error {
				if err := put(p, at, all[0]); err != nil {
					return err
				}
				for i := 1; i < len(all); i++ {
					if err := nest(p, all[0].fd, &all[i]); err != nil {
						return fmt.Errorf("mount_specs[%d]: %w", i, err)
					}
				}
				return verify(p, all)
			}
		})),
	seat("performs-in-reverse", mutant.Repeats, requirement.PerformInOrder,
		"the later mount specs are performed last to first: what belongs into another is attached beside it, or not at all",
		plain(func(p *Plain) {
			p.assemble = func(p *Plain, all []made) error {
				reversed := slices.Clone(all)
				slices.Reverse(reversed[1:])
				return assemble(p, reversed)
			}
		})),
	seat("target-in-own-root", mutant.Escape, requirement.PerformTargetInRoot,
		"the target is resolved from the root of the namespace instead of the consumer's: an absolute link in the image leads out",
		plain(func(p *Plain) {
			p.find = func(t Target) (*place, error) { return find(Target{Path: path.Join(t.Root, t.Path)}) }
		})),
	seat("follows-links", mutant.Escape, requirement.PerformNoSymlink,
		"a link in the volume leads the target of a later mount spec elsewhere",
		plain(func(p *Plain) {
			p.below = func(root int, target string, _ bool) (int, error) {
				return kernel.Openat2(root, target, unix.OpenHow{Flags: unix.O_PATH, Resolve: unix.RESOLVE_IN_ROOT})
			}
		})),
	seat("makes-dirs-in-volume", mutant.Data, requirement.PerformNoVolumeDirs,
		"a target that is missing in the volume is made there, and stays in the user's data for ever",
		plain(func(p *Plain) {
			p.below = func(root int, target string, _ bool) (int, error) {
				if err := unix.Mkdirat(root, target, 0o755); err != nil && !errors.Is(err, unix.EEXIST) {
					return -1, err
				}
				return below(root, target, false)
			}
		})),
	seat("mounts-over-proc", mutant.Escape, requirement.PerformProtectedTarget,
		"a target in procfs is mounted on like any other: the consumer chooses what the kernel seems to say",
		plain(func(p *Plain) { p.checkPlace = checkKind })),
	seat("mounts-file-on-anything", mutant.Escape, requirement.PerformTargetType,
		"a file is attached onto whatever is no directory: a socket or a pipe of the consumer is replaced",
		plain(func(p *Plain) {
			p.checkPlace = func(fd int, file bool) error {
				if file {
					return checkProtected(fd)
				}
				return checkPlace(fd, file)
			}
		})),
	seat("forgets-receipts", mutant.Leaks, requirement.PerformReceipt,
		"receipts tell a path and no mount id: whatever lies there later is taken for ours",
		around(func(_ *performRequest, next func() (*performResponse, error)) (*performResponse, error) {
			answer, err := next()
			if err == nil {
				answer.Receipts = make([]string, len(answer.Receipts))
				for i := range answer.Receipts {
					answer.Receipts[i] = "{}"
				}
			}
			return answer, err
		})),
}

// Sources that are not what the plugin named.
var sourceMutants = []Mutant{
	seat("source-follows-links", mutant.Escape, requirement.BindResolveBeneath,
		"a link in a granted directory leads a source out of it: a plugin reads any directory of the node",
		plain(func(p *Plain) {
			p.locate = func(directory, relative string) (int, error) {
				return unix.Open(path.Join(directory, relative), unix.O_PATH|unix.O_CLOEXEC, 0)
			}
		})),
	seat("source-resolved-twice", mutant.Escape, requirement.BindByDescriptor,
		"a source is resolved for the check and again for the bind: what the plugin exchanges in between is bound",
		plain(func(p *Plain) {
			p.locate = func(directory, relative string) (int, error) {
				fd, err := locate(directory, relative)
				if err != nil {
					return -1, err
				}
				_ = unix.Close(fd)
				time.Sleep(time.Millisecond)
				return unix.Open(path.Join(directory, relative), unix.O_PATH|unix.O_CLOEXEC, 0)
			}
		})),
	seat("source-of-any-type", mutant.Validation, requirement.BindTypeMatches,
		"a file is bound where a directory was announced, and the reverse",
		plain(func(p *Plain) {
			p.checkSource = checkMount
			p.checkPlace = func(fd int, _ bool) error { return checkProtected(fd) }
		})),
	seat("source-without-its-mount", mutant.Data, requirement.BindMountFSType,
		"mount_fs_type is not looked at: when the plugin's mount is gone, the empty directory under it is bound",
		plain(func(p *Plain) {
			p.checkSource = func(fd int, _ string, b *mountspec.Bind) error { return checkType(fd, b) }
		})),
	seat("adopts-superblock", mutant.Data, requirement.FilesystemExclusiveFirst,
		"a device is mounted without asking whether it is mounted already: the parameters are ignored in silence",
		plain(func(p *Plain) {
			p.create = func(_ *Plain, c *kernel.FSContext, _ *mountspec.Filesystem) error { return c.Create() }
		})),
}

// Responses that have to be refused.
var refusalMutants = []Mutant{
	seat("validates-nothing", mutant.Validation, requirement.ValidateNothingPerformed,
		"mount specs are performed as they come: a read-only request is mounted writable because the plugin said so",
		plain(func(p *Plain) {
			p.validate = func([]mountspec.Spec, mountspec.Request) []mountspec.Violation { return nil }
		})),
	seat("validates-the-first-only", mutant.Validation, requirement.ValidateNothingPerformed,
		"only the first mount spec is looked at",
		plain(func(p *Plain) {
			p.validate = func(s []mountspec.Spec, r mountspec.Request) []mountspec.Violation {
				return slices.DeleteFunc(mountspec.Validate(s, r), func(v mountspec.Violation) bool { return v.Index > 0 })
			}
		})),
	seat("touches-before-validating", mutant.Validation, requirement.ValidateWholeFirst,
		"mount specs are judged one by one while they are performed: of a response with a fault at its end the beginning is there already",
		plain(func(p *Plain) {
			var rest []mountspec.Violation
			p.validate = func(s []mountspec.Spec, r mountspec.Request) []mountspec.Violation {
				all := mountspec.Validate(s, r)
				rest = slices.DeleteFunc(slices.Clone(all), func(v mountspec.Violation) bool { return v.Index <= 0 })
				return slices.DeleteFunc(all, func(v mountspec.Violation) bool { return v.Index > 0 })
			}
			p.assemble = func(*Plain, []made) error { return nil }
			p.attach = func(p *Plain, at *place, all []made, undo func() error) error {
				if err := put(p, at, all[0]); err != nil || len(rest) > 0 {
					return errors.Join(err, &RefusedError{Violations: rest})
				}
				for i := 1; i < len(all); i++ {
					if err := nest(p, all[0].fd, &all[i]); err != nil {
						return errors.Join(err, undo())
					}
				}
				return verify(p, all)
			}
		})),
}

// Undoing too much, too little, or too quietly.
var undoMutants = []Mutant{
	seat("undo-in-list-order", mutant.Undoing, requirement.UndoReverseOrder,
		"the first mount is undone first: it is busy with the later ones inside, for ever",
		plain(func(p *Plain) {
			p.order = func(n int) []int { order := reverse(n); slices.Reverse(order); return order }
		})),
	seat("single-umount", mutant.Undoing, requirement.UndoRechecked,
		"undo is one umount of the path, and success: if somebody mounted over it, that one is gone and ours is not",
		plain(func(p *Plain) { p.unmount = func(at *place, _ receipt) error { return ignoreGone(at.umount(0)) } })),
	seat("ignores-umount-error", mutant.Undoing, requirement.UndoRechecked,
		"what umount says is not listened to: a busy mount is reported undone",
		plain(func(p *Plain) { p.unmount = func(at *place, r receipt) error { _ = unmount(at, r); return nil } })),
	seat("lazy-undo", mutant.Undoing, requirement.UndoBusyReported,
		"a busy mount is detached lazily: the table is clean while files in it are still written",
		plain(func(p *Plain) {
			p.unmount = func(at *place, r receipt) error {
				err := unmount(at, r)
				if errors.Is(err, unix.EBUSY) {
					return at.umount(unix.MNT_DETACH)
				}
				return err
			}
		})),
	seat("undo-pops-bystander", mutant.Undoing, requirement.UndoBystanderKept,
		"undo unmounts the path until its own mount is gone: what somebody else had mounted over it goes too",
		plain(func(p *Plain) {
			p.unmount = func(at *place, r receipt) error {
				for {
					if gone, err := isGone(r.MountID); gone || err != nil {
						return err
					}
					if err := at.umount(0); err != nil {
						return &StateError{r.Target, err}
					}
				}
			}
		})),
	seat("undo-by-path", mutant.Undoing, requirement.UndoByID,
		"undo unmounts what lies at the path now, whoever made it, when its own mount is long gone",
		plain(func(p *Plain) {
			p.unmount = func(at *place, r receipt) error {
				if gone, err := isGone(r.MountID); err != nil || !gone {
					return unmount(at, r)
				}
				return ignoreGone(at.umount(0))
			}
		})),
	seat("undo-once", mutant.Repeats, requirement.UndoIdempotent,
		"undoing again what is undone is an error: a CO that lost the answer never gets past it",
		around(func(r *undoRequest, next func() (*undoResponse, error)) (*undoResponse, error) {
			if len(r.GetReceipts()) > 0 && allGone(r.GetReceipts(), r.GetTarget().GetNamespace()) {
				return nil, status.Error(codes.Internal, "umount: invalid argument")
			}
			return next()
		})),
	seat("keeps-created-target", mutant.Leaks, requirement.UndoCreatedRemoved,
		"the target it created stays when the mount is gone: scripts take the empty directory for a volume",
		plain(func(p *Plain) { p.remove = func(*place, receipt) error { return nil } })),
	seat("removes-found-target", mutant.Leaks, requirement.UndoCreatedRemoved,
		"the target is removed although it was there before",
		plain(func(p *Plain) {
			p.remove = func(at *place, r receipt) error {
				_ = at.rmdir(at.name, false)
				return remove(at, r)
			}
		})),
	seat("removes-recursively", mutant.Data, requirement.UndoNoRecursiveRemove,
		"what lies at the target after undo is removed, with all that is in it",
		plain(func(p *Plain) {
			p.remove = func(at *place, _ receipt) error {
				return os.RemoveAll(fmt.Sprintf("/proc/self/fd/%d/%s", at.parent, at.name))
			}
		})),
	seat("looks-below-target", mutant.Undoing, requirement.UndoNoPathAccess,
		"undo reads the directory it is about to unmount: with a dead server it hangs, and the mount stays",
		plain(func(p *Plain) {
			p.unmount = func(at *place, r receipt) error {
				if fd, err := unix.Openat(at.parent, at.name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0); err == nil {
					_, _ = unix.ReadDirent(fd, make([]byte, 4096))
					_ = unix.Close(fd)
				}
				return unmount(at, r)
			}
		})),
	seat("leaks-intermediate", mutant.Leaks, requirement.AuditTableRestored,
		"a copy of the mount in the consumer's namespace, made on the way, stays: the device is never free again",
		plain(func(p *Plain) {
			p.remove = func(at *place, r receipt) error {
				if err := remove(at, r); err != nil {
					return err
				}
				// It lies where nobody looks, over the root of the consumer.
				c, err := kernel.OpenFS("tmpfs")
				if err != nil {
					return err
				}
				defer c.Close()
				if err := c.Create(); err != nil {
					return err
				}
				fd, err := c.Mount(0)
				if err != nil {
					return err
				}
				defer unix.Close(fd)
				return kernel.MoveMount(fd, at.parent, 0)
			}
		})),
}

// A crash in the middle, and what may not be shown.
var lifeMutants = []Mutant{
	seat("recovers-nothing", mutant.Restart, requirement.CrashRecovered,
		"what a killed predecessor left is not known: recovery finds nothing to do",
		around(func(_ *recoverRequest, _ func() (*recoverResponse, error)) (*recoverResponse, error) {
			return new(recoverResponse), nil
		})),
	seat("receipts-in-memory", mutant.Restart, requirement.CrashReceiptDurable,
		"receipts are kept in memory alone: after a crash nobody knows what was performed",
		func(_ *Plain, s *Server) { s.ledger.directory = "" }),
	seat("secret-in-perform-error", mutant.Secrets, requirement.SecuritySecretsCO,
		"an error repeats the superblock parameters, the password among them",
		around(func(r *performRequest, next func() (*performResponse, error)) (*performResponse, error) {
			answer, err := next()
			if err != nil {
				var secrets []string
				for _, m := range r.GetMountSpecs() {
					for _, q := range m.GetFilesystem().GetParameters() {
						secrets = append(secrets, q.GetSecret())
					}
				}
				return nil, status.Errorf(status.Code(err), "%s: %q", status.Convert(err).Message(), secrets)
			}
			return answer, nil
		})),
}

// narrowing changes the attributes that are set, and does not notice.
func narrowing(change func(m *made, set mountspec.Attr) mountspec.Attr) fault {
	return plain(func(p *Plain) {
		p.narrow = func(m *made, set, unset mountspec.Attr) error { return narrow(m, change(m, set), unset) }
		p.unverified()
	})
}

// unverified makes p trust its own work.
func (p *Plain) unverified() {
	p.attach = func(p *Plain, at *place, all []made, undo func() error) error {
		if err := put(p, at, all[0]); err != nil {
			return errors.Join(err, undo())
		}
		return nil
	}
}

// ignoreGone is nil for the errors that say that nothing is mounted.
func ignoreGone(err error) error {
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}

// allGone reports whether no mount of the receipts is there any more.
func allGone(texts []string, namespace string) bool {
	receipts, err := decode(texts)
	if err != nil {
		return false
	}
	ns, err := mountns.OpenPath(namespace)
	if err != nil {
		return false
	}
	defer ns.Close()
	for _, r := range receipts {
		if _, err := kernel.StatMount(ns.ID(), r.MountID, kernel.StatBasic); err == nil {
			return false
		}
	}
	return true
}
