package co

import (
	"errors"
	"fmt"
	"path"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/fakes/mutant"
	"github.com/csi-prepare/csi-prepare/reference/kernel"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

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
	seat("drops-the-last-of-many", mutant.Attributes, requirement.AttributesFullSet,
		"attributes travel in a list that has no room for all: of a full one nosymfollow does not arrive",
		narrowing(func(_ *made, set mountspec.Attr) mountspec.Attr {
			const full = mountspec.AttrReadonly | mountspec.AttrNoexec | mountspec.AttrNosymfollow | mountspec.AttrNodiratime
			if set&full == full {
				return set &^ mountspec.AttrNosymfollow
			}
			return set
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
				return oneByOne(func() {})(p, at, all, func() error { return nil })
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
			p.find = func(t Target) (*place, error) {
				at, err := find(Target{Path: path.Join(t.Root, t.Path)})
				if err == nil {
					at.path = path.Join("/", t.Path)
				}
				return at, err
			}
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
				if len(rest) == 0 {
					return oneByOne(func() {})(p, at, all, undo)
				}
				return errors.Join(put(p, at, all[0]), &RefusedError{Violations: rest})
			}
		})),
}

// narrowing changes the attributes that are set, and does not notice.
func narrowing(change func(m *made, set mountspec.Attr) mountspec.Attr) fault {
	return plain(func(p *Plain) {
		p.narrow = func(m *made, set, unset mountspec.Attr) error { return narrow(m, change(m, set), unset) }
		p.unverified()
	})
}

// oneByOne attaches each mount where it is seen at once, with a pause between
// them. It is right as long as undo takes back what is there of a list that
// fails, and recovery what is there of one that is cut short.
func oneByOne(pause func()) func(p *Plain, at *place, all []made, undo func() error) error {
	return func(p *Plain, at *place, all []made, undo func() error) error {
		err := put(p, at, all[0])
		for i := 1; err == nil && i < len(all); i++ {
			pause()
			if err = nest(p, all[0].fd, &all[i]); err != nil {
				err = fmt.Errorf("mount_specs[%d]: %w", i, err)
			}
		}
		if err == nil {
			err = verify(p, all)
		}
		if err != nil {
			return errors.Join(err, undo())
		}
		return nil
	}
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
