package mountspec

import (
	"fmt"
	"slices"
)

// Plan is the system calls that performing a list of mount specs comes to,
// in order. It is data: whoever performs interprets the same steps that
// String prints.
type Plan struct {
	Steps []Step
	// Specs is the number of mount specs the plan performs.
	Specs int
	// Detached is true if the specs are assembled in a detached tree and
	// become visible by the one Attach step of spec 0.
	Detached bool
}

// Step is one system call of a plan. Which fields are set depends on Call.
type Step struct {
	Call Call
	// Spec is the index of the mount spec the step serves.
	Spec int
	// Base is the index of the spec whose OpenBase the step goes by: specs
	// with sources below one base share it.
	Base int
	// Key is the key of a superblock parameter, or the filesystem type.
	Key string
	// Text is a parameter's value, or a path.
	Text string
	// Secret is a parameter's value that must not be shown.
	Secret Secret
	// Parameters are all those of a MountNew.
	Parameters []Parameter
	// Set and Clear are the attributes to give and the bits to drop first.
	Set, Clear Attr
	// Recursive is true if the step acts on a whole tree.
	Recursive bool
}

// UnsupportedError says that a mount spec keeps every rule and still cannot
// be performed: its kind is not known to this executor, or the kernel lacks
// what the spec needs.
type UnsupportedError struct {
	Index  int // of the mount spec
	Kind   KindName
	Reason string
}

// Error implements error.
func (e *UnsupportedError) Error() string {
	return fmt.Sprintf("mount_specs[%d]: %s: %s", e.Index, e.Kind, e.Reason)
}

// PerformedKinds are the kinds NewPlan makes plans for.
func PerformedKinds() []KindName {
	return []KindName{KindFilesystem, KindBind, KindBlockDevice, KindHandle, KindFUSE}
}

// NewPlan plans how a kernel with the features f performs specs under the
// policy p. It is pure; the specs must have passed Validate. It fails with an
// *UnsupportedError where the kernel or the executor cannot keep what a spec
// asks for: nothing is dropped and nothing approximated.
func NewPlan(specs []Spec, f Features, p Policy) (Plan, error) {
	b := planner{f: f, p: p}
	b.plan.Specs = len(specs)
	b.plan.Detached = f.MountAPI && (f.DetachedTrees && !isHandle(&specs[0]) || len(specs) == 1)
	size := 8
	for i := range specs {
		size += 14
		if fs, ok := specs[i].Kind.(*Filesystem); ok {
			size += len(fs.Parameters)
		}
	}
	b.plan.Steps = make([]Step, 0, size)
	if !f.MountAPI {
		return b.legacy(specs)
	}
	for i := range specs {
		if err := b.make(i, &specs[i]); err != nil {
			return Plan{}, err
		}
	}
	if b.plan.Detached {
		for i := 1; i < len(specs); i++ {
			b.inner(i, &specs[i])
			b.step(Step{Call: Attach, Spec: i})
		}
	}
	b.target()
	b.step(Step{Call: Attach, Recursive: anyRecursive(specs)})
	for i := range specs {
		if i > 0 && !b.plan.Detached {
			b.inner(i, &specs[i])
			b.step(Step{Call: Attach, Spec: i})
		}
		set, clear := p.Effective(specs[i])
		b.step(Step{Call: Verify, Spec: i, Set: set, Clear: clear})
	}
	return b.plan, nil
}

// isHandle says so of a spec whose mount is cloned in a namespace of its own:
// the kernel attaches nothing inside such a clone before it is attached itself.
func isHandle(s *Spec) bool {
	_, is := s.Kind.(*Handle)
	return is
}

type planner struct {
	f    Features
	p    Policy
	plan Plan
}

func (b *planner) step(s Step) { b.plan.Steps = append(b.plan.Steps, s) }

// target plans to find the place the CO has chosen in the consumer.
func (b *planner) target() {
	b.step(Step{Call: OpenTarget})
	if b.p.CreateTarget {
		b.step(Step{Call: CreateTarget})
	}
	b.step(Step{Call: CheckTarget})
}

// inner plans to find a spec's own target beneath what spec 0 attached.
func (b *planner) inner(i int, s *Spec) {
	b.step(Step{Call: OpenInner, Spec: i, Text: s.Target})
	b.step(Step{Call: CheckInner, Spec: i})
}

// make plans a detached, narrowed, private mount for one spec.
func (b *planner) make(i int, s *Spec) error {
	unsupported := func(reason string) error { return &UnsupportedError{i, kindName(s), reason} }
	if b.p.IDMap && !s.IDMapSupported {
		return unsupported("the plugin does not say that ids may be mapped, and the consumer needs it")
	}
	set, clear := b.p.Effective(*s)
	recursive := false
	switch k := s.Kind.(type) {
	case *Bind:
		recursive = k.Recursive
		b.step(Step{
			Call: Clone, Spec: i, Base: b.source(i, k),
			Text: k.Source.Relative, Recursive: recursive,
		})
	case *Filesystem:
		b.filesystem(i, k)
		b.step(Step{Call: Fsmount, Spec: i, Set: set &^ AttrIDMap})
	case *BlockDevice:
		if !b.f.DetachedTrees {
			return unsupported("a device node made in private needs a kernel that clones from detached mounts")
		}
		b.step(Step{Call: OpenDevice, Spec: i, Text: deviceName(k)})
		if s.Attributes.Readonly {
			// No mount attribute makes a device read-only: it has to be so.
			b.step(Step{Call: CheckReadonly, Spec: i, Text: deviceName(k)})
		}
		b.step(Step{Call: Fsopen, Spec: i, Key: "tmpfs"})
		b.step(Step{Call: SetString, Spec: i, Key: "source", Text: "csi-prepare-node"})
		b.step(Step{Call: Create, Spec: i})
		b.step(Step{Call: Fsmount, Spec: i})
		b.step(Step{Call: Mknod, Spec: i, Text: deviceName(k)})
		b.step(Step{Call: CloneNode, Spec: i})
	case *Handle:
		recursive = s.Attributes.Recursive
		b.step(Step{Call: CloneMaster, Spec: i, Text: k.ID, Recursive: recursive})
	case *FUSE:
		b.step(Step{Call: CloneMaster, Spec: i, Text: k.ID})
	default:
		return unsupported("this executor does not perform the kind")
	}
	b.step(Step{Call: Setattr, Spec: i, Set: set, Clear: clear, Recursive: recursive})
	b.step(Step{Call: Identify, Spec: i})
	return nil
}

// source plans to find what a bind is of, and returns the index of its base.
func (b *planner) source(i int, k *Bind) (base int) {
	base = b.base(i, k.Source.baseName())
	if k.Source.Relative != "" {
		b.step(Step{Call: OpenSource, Spec: i, Base: base, Text: k.Source.Relative})
	}
	if k.MountFSType != "" {
		b.step(Step{Call: CheckSource, Spec: i, Base: base, Key: k.MountFSType, Text: k.Source.Relative})
	}
	return base
}

// base opens a base unless an earlier spec has.
func (b *planner) base(i int, name string) int {
	for _, s := range b.plan.Steps {
		if s.Call == OpenBase && s.Text == name {
			return s.Spec
		}
	}
	b.step(Step{Call: OpenBase, Spec: i, Base: i, Text: name})
	return i
}

func (b *planner) filesystem(i int, k *Filesystem) {
	source := k.Source
	if k.Device != nil {
		b.step(Step{Call: OpenDevice, Spec: i, Text: deviceName(k.Device)})
		source = fmt.Sprintf("/proc/self/fd/{device%d}", i)
	}
	b.step(Step{Call: Fsopen, Spec: i, Key: k.Type})
	if source != "" {
		b.step(Step{Call: SetString, Spec: i, Key: "source", Text: source})
	}
	for _, p := range b.p.parameters(k) {
		call := SetString
		if p.Text == "" && p.Secret.IsZero() {
			call = SetFlag
		}
		b.step(Step{Call: call, Spec: i, Key: p.Key, Text: p.Text, Secret: p.Secret})
	}
	if k.SuperblockReadonly {
		b.step(Step{Call: SetFlag, Spec: i, Key: "ro"})
	}
	create := Create
	if k.Device != nil && b.f.ExclusiveCreate {
		create = CreateExclusive
	}
	b.step(Step{Call: create, Spec: i})
}

func kindName(s *Spec) KindName {
	if s.Kind == nil {
		return "KIND_UNKNOWN"
	}
	return s.Kind.Name()
}

func deviceName(d *BlockDevice) string {
	return fmt.Sprintf("%d:%d", d.Major, d.Minor)
}

func (r PathRef) baseName() string {
	if r.Base == BaseGranted {
		return "GRANTED:" + r.Grant
	}
	return r.Base.String()
}

func anyRecursive(specs []Spec) bool {
	if len(specs) > 1 {
		return true
	}
	b, ok := specs[0].Kind.(*Bind)
	return ok && b.Recursive
}

// legacy plans for a kernel with mount(2) alone. Each mount is visible before
// it is narrowed, so what cannot be narrowed in one further call is refused.
func (b *planner) legacy(specs []Spec) (Plan, error) {
	for i := range specs {
		s := &specs[i]
		unsupported := func(reason string) error {
			return &UnsupportedError{i, kindName(s), reason}
		}
		if b.p.IDMap {
			return Plan{}, unsupported("mount(2) cannot map ids")
		}
		set, clear := b.p.Effective(*s)
		if i == 0 {
			b.target()
		} else {
			b.inner(i, s)
		}
		switch k := s.Kind.(type) {
		case *Bind:
			if k.Recursive && set|clear != 0 {
				return Plan{}, unsupported("mount(2) cannot narrow the mounts below a recursive bind")
			}
			b.step(Step{
				Call: MountBind, Spec: i, Base: b.source(i, k),
				Text: k.Source.Relative, Recursive: k.Recursive,
			})
			b.step(Step{Call: OpenMounted, Spec: i, Text: s.Target})
			b.step(Step{Call: Remount, Spec: i, Set: set, Clear: clear})
			b.step(Step{Call: MountPrivate, Spec: i, Recursive: k.Recursive})
		case *Filesystem:
			first := set &^ AttrReadonly
			if k.SuperblockReadonly {
				first |= AttrReadonly // MS_RDONLY of a new mount is for both
			}
			if k.Device != nil {
				b.step(Step{Call: OpenDeviceExclusive, Spec: i, Text: deviceName(k.Device)})
			}
			b.step(Step{
				Call: MountNew, Spec: i, Key: k.Type, Text: k.Source,
				Parameters: b.p.parameters(k), Set: first, Clear: clear,
			})
			b.step(Step{Call: OpenMounted, Spec: i, Text: s.Target})
			b.step(Step{Call: Remount, Spec: i, Set: set, Clear: clear})
			b.step(Step{Call: MountPrivate, Spec: i})
		default:
			return Plan{}, unsupported("this executor does not perform the kind with mount(2)")
		}
		b.step(Step{Call: Verify, Spec: i, Set: set, Clear: clear})
	}
	return b.plan, nil
}

// parameters returns what goes to the superblock of k: its own parameters and
// the label the policy adds.
func (p Policy) parameters(k *Filesystem) []Parameter {
	if p.LSMContext == "" || !k.LSMContextSupported {
		return k.Parameters
	}
	return append(slices.Clone(k.Parameters), Parameter{Key: "context", Text: p.LSMContext})
}
