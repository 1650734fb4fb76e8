package mountspec

import (
	"fmt"
	"slices"

	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// whole is the index of a violation of the response as a whole.
const whole = -1

// Validate returns every rule of the contract that specs, the answer to req,
// break: the response as a whole first, then spec by spec in order. It
// returns nil if and only if the list may be performed as far as text can
// tell; what only the kernel or sysfs knows (what a path leads to, whose a
// device number is) remains to be checked by who performs.
//
// Each rule is judged on its own, so one fault may break several. A field
// that is empty although it is REQUIRED breaks only the rule that requires
// it. Of a list over a limit only as many elements are examined as the limit
// allows, so that a hostile Plugin cannot make the CO work, or remember, in
// proportion to what it sends.
//
// A detail says what was found and what to do. It never holds the value of
// a parameter, secret or not, and of a key only what precedes '='.
//
// Without a violation Validate allocates nothing.
func Validate(specs []Spec, req Request) []Violation {
	c := check{req: req, index: whole}
	c.count(len(specs))
	c.specs = specs[:min(len(specs), MaxSpecs)]
	for c.index = range c.specs {
		c.target()
		c.kind()
		c.attributes()
	}
	return c.found
}

// check is one run of Validate. Its methods, a file for each topic, judge
// the spec at index.
type check struct {
	req   Request
	specs []Spec
	index int
	found []Violation
}

func (c *check) spec() *Spec { return &c.specs[c.index] }

func (c *check) add(id requirement.ID, field, format string, args ...any) {
	c.found = append(c.found, Violation{
		Index:       c.index,
		Requirement: id,
		Field:       field,
		Detail:      fmt.Sprintf(format, args...),
	})
}

func (c *check) count(n int) {
	switch {
	case n == 0:
		c.add(requirement.SpecCount, "", "no mount spec: return 1 to %d", MaxSpecs)
	case n > MaxSpecs:
		c.add(requirement.SpecCount, "", "%d mount specs: return 1 to %d", n, MaxSpecs)
	}
	if c.req.Block && n > 1 {
		c.add(requirement.SpecBlockVolume, "",
			"%d mount specs for a block volume: return one, of kind block_device", n)
	}
}

// arms are the names of the kinds' fields in MountSpec.
var arms = map[KindName]string{
	KindFilesystem:  "filesystem",
	KindBind:        "bind",
	KindBlockDevice: "block_device",
	KindHandle:      "handle",
	KindFUSE:        "fuse",
	KindExtension:   "extension",
}

// kind judges that there is a kind, that it suits the request, and then what
// is in it.
func (c *check) kind() {
	s := c.spec()
	if !kindSet(s.Kind) {
		c.add(requirement.SpecKindSet, "",
			"no kind that this version knows: set exactly one, of performer.kinds")
		return
	}
	name := s.Kind.Name()
	field := arms[name]
	if !slices.Contains(c.req.Performer.Kinds, name) {
		c.add(requirement.PrepareKindOffered, field,
			"performer.kinds does not offer %s: return what it offers, or FAILED_PRECONDITION", name)
	}
	device, isDevice := s.Kind.(*BlockDevice)
	if c.req.Block && !isDevice {
		c.add(requirement.SpecBlockVolume, field,
			"%s for a block volume: return one spec, of kind block_device", name)
	}
	if !c.req.Block && isDevice {
		c.add(requirement.SpecMountVolume, field,
			"a device for a volume of mount access type: return a mount of what is on it")
	}
	if c.req.Performer.OtherKernel && !forOtherKernel(s.Kind) {
		c.add(requirement.PrepareOtherKernel, field,
			"the consumer has a kernel of its own, which this cannot reach: "+
				"return a filesystem with a device, a block_device, or FAILED_PRECONDITION")
	}

	switch k := s.Kind.(type) {
	case *Filesystem:
		c.filesystem(k)
	case *Bind:
		c.bind(k)
	case *BlockDevice:
		c.device("block_device", device)
	case *Handle:
		c.handle(k)
	case *FUSE:
		c.fuse(k)
	case *Extension:
		c.extension(k)
	}
}

// kindSet is false also for an interface that holds a nil pointer.
func kindSet(k Kind) bool {
	switch k := k.(type) {
	case *Filesystem:
		return k != nil
	case *Bind:
		return k != nil
	case *BlockDevice:
		return k != nil
	case *Handle:
		return k != nil
	case *FUSE:
		return k != nil
	case *Extension:
		return k != nil
	default:
		return false
	}
}

// forOtherKernel reports whether another kernel, which shares neither page
// cache nor superblock with the node, is able to perform k.
func forOtherKernel(k Kind) bool {
	switch k := k.(type) {
	case *Filesystem:
		return k.Device != nil
	case *BlockDevice:
		return true
	default:
		return false
	}
}

func (c *check) attributes() {
	s := c.spec()
	a := &s.Attributes
	if c.req.Readonly && !a.Readonly {
		c.add(requirement.PrepareReadonly, "attributes.readonly",
			"not set though the request is read-only: set it in every mount spec")
	}
	if a.Atime > Strictatime {
		c.add(requirement.SpecNoUnknownFields, "attributes.atime",
			"value %d is not defined: use ATIME_UNSPECIFIED, RELATIME, NOATIME or STRICTATIME", a.Atime)
	}
	if _, isDevice := s.Kind.(*BlockDevice); !isDevice {
		return
	}
	for _, set := range [...]struct {
		field string
		on    bool
	}{
		{"attributes.nosuid", a.Nosuid},
		{"attributes.nodev", a.Nodev},
		{"attributes.noexec", a.Noexec},
		{"attributes.nosymfollow", a.Nosymfollow},
		{"attributes.atime", a.Atime != AtimeUnspecified},
		{"attributes.nodiratime", a.Nodiratime},
		{"attributes.recursive", a.Recursive},
	} {
		if set.on {
			c.add(requirement.BlockAttributes, set.field,
				"has no meaning for a block device: readonly is the only attribute of one")
		}
	}
}
