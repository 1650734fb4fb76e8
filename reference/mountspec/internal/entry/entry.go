// Package entry holds what the converters to container runtimes share: how a
// mount spec becomes one entry of a list of mounts with options that are
// text, and what such an entry cannot hold.
package entry

import (
	"fmt"
	"path"
	"regexp"
	"strings"

	"github.com/csi-prepare/csi-prepare/reference/mountspec"
)

// Consumer is the name of a kind of consumer, for errors.
type Consumer string

// Refuse returns the error for a field of the mount spec at index.
func (c Consumer) Refuse(index int, field, format string, args ...any) error {
	return &mountspec.ConsumerError{
		Index: index, Field: field, Consumer: string(c), Reason: fmt.Sprintf(format, args...),
	}
}

// Places returns an error unless there is a place for each spec.
func (c Consumer) Places(specs []mountspec.Spec, places []mountspec.Place) error {
	if len(specs) != len(places) {
		return fmt.Errorf("%s: %d places for %d mount specs", c, len(places), len(specs))
	}
	return nil
}

// Name returns the name of a kind's field in MountSpec.
func Name(k mountspec.Kind) string { return strings.ToLower(string(k.Name())) }

// Destination joins a target to the place the CO has chosen.
func (c Consumer) Destination(index int, chosen, target string) (string, error) {
	if fault := pathFault(chosen); fault != "" {
		return "", c.Refuse(index, "target", "the chosen place %q %s", chosen, fault)
	}
	return path.Join(chosen, target), nil
}

var ofDescriptor = regexp.MustCompile(`^/proc/[1-9][0-9]*/fd/[0-9]+$`)

// OfDescriptor reports whether p is the path of a descriptor.
func OfDescriptor(p string) bool { return ofDescriptor.MatchString(p) }

// Bound judges the path at which a consumer binds the spec. descriptors is
// true if the consumer takes the path of a descriptor.
func (c Consumer) Bound(index int, s *mountspec.Spec, p mountspec.Place, descriptors bool) (string, error) {
	field, at := "performed", p.Performed
	_, isBind := s.Kind.(*mountspec.Bind)
	if at == "" {
		if !isBind {
			return "", c.Refuse(index, Name(s.Kind), "only a bind has a source to attach: perform it first")
		}
		field, at = "found", p.Found
	}
	switch {
	case at == "":
		return "", c.Refuse(index, field, "empty: resolve the source, or perform the spec")
	case !OfDescriptor(at):
		if fault := pathFault(at); fault != "" {
			return "", c.Refuse(index, field, "%q %s", at, fault)
		}
		if at == "/proc" || strings.HasPrefix(at, "/proc/") || strings.HasPrefix(at, "/dev/fd/") {
			return "", c.Refuse(index, field, "%q leads where the one who resolves it stands: "+
				"give a path of a file system, or /proc/PID/fd/N", at)
		}
	case !descriptors:
		return "", c.Refuse(index, field, "%q would be resolved to the root of the node: "+
			"perform the spec in a directory", at)
	}
	if !OfDescriptor(at) {
		return at, nil
	}
	switch s.Kind.(type) {
	case *mountspec.Filesystem, *mountspec.FUSE:
		return at, nil // made with fsmount(2)
	default:
		return "", c.Refuse(index, field, "a clone cannot be bound from another mount namespace: "+
			"perform the spec in a directory")
	}
}

func pathFault(p string) string {
	switch {
	case strings.IndexByte(p, 0) >= 0:
		return "holds a NUL byte"
	case !path.IsAbs(p):
		return "is not absolute"
	case p == "/":
		return "is the root"
	case path.Clean(p) != p:
		return "is not in its shortest form"
	default:
		return ""
	}
}

// maxData is what mount(2) takes of its data; it cuts the rest in silence.
const maxData = 4095

// Parameters renders the superblock parameters of a filesystem as options
// that mount(2) gets as data, and refuses what has no place there.
func (c Consumer) Parameters(index int, f *mountspec.Filesystem) ([]string, error) {
	words := make([]string, 0, len(f.Parameters))
	for i, p := range f.Parameters {
		field := fmt.Sprintf("filesystem.parameters[%d]", i)
		if !p.Secret.IsZero() {
			return nil, c.Refuse(index, field+".secret",
				"%s would stand in a file or a log: perform it first", p.Key)
		}
		word := p.Key
		if p.Text != "" {
			word += "=" + p.Text
		}
		if strings.ContainsAny(word, ",\n\x00") {
			return nil, c.Refuse(index, field,
				"a comma, newline or NUL byte cannot be quoted in an option: perform it first")
		}
		words = append(words, word)
	}
	if n := len(strings.Join(words, ",")); n > maxData {
		return nil, c.Refuse(index, "filesystem.parameters",
			"%d bytes of options, of which mount(2) takes %d: perform it first", n, maxData)
	}
	return words, nil
}

// Readonly refuses a new filesystem for which the one word "ro", read-only
// mount and superblock both, says too much or too little.
func (c Consumer) Readonly(index int, f *mountspec.Filesystem, set mountspec.Attr) error {
	if f.SuperblockReadonly == (set&mountspec.AttrReadonly != 0) {
		return nil
	}
	return c.Refuse(index, "filesystem.superblock_readonly",
		`"ro" is for superblock and mount both, and one of them is asked for: perform it first`)
}

// Label refuses a filesystem the policy wants a label on.
func (c Consumer) Label(index int, f *mountspec.Filesystem, p mountspec.Policy) error {
	if p.LSMContext == "" || !f.LSMContextSupported {
		return nil
	}
	return c.Refuse(index, "filesystem.lsm_context_supported",
		"the label of one mount has no place in an entry: perform it first")
}

// Source returns the source of a new filesystem: its text, or the node of its
// device.
func (c Consumer) Source(index int, f *mountspec.Filesystem, p mountspec.Place) (string, error) {
	if f.Device == nil {
		return f.Source, nil
	}
	return c.Node(index, p)
}

// Node returns the path of a device's node.
func (c Consumer) Node(index int, p mountspec.Place) (string, error) {
	if p.Found == "" {
		return "", c.Refuse(index, "found", "empty: find the node of the device and compare its number")
	}
	if fault := pathFault(p.Found); fault != "" {
		return "", c.Refuse(index, "found", "%q %s", p.Found, fault)
	}
	return p.Found, nil
}

// Effective is the complete set of attributes for a mount that a consumer
// binds at p: what the spec and the policy want, and what is there already.
func Effective(s *mountspec.Spec, p mountspec.Place, policy mountspec.Policy) mountspec.Attr {
	set, replaced := policy.Effective(*s)
	return (set | p.Attributes&^replaced) &^ mountspec.AttrIDMap
}

// Word is an attribute in the words of mount(8) and the field that asks for
// it.
type Word struct {
	Text  string
	Field string
}

var attributeWords = []struct {
	attr mountspec.Attr
	word Word
}{
	{mountspec.AttrReadonly, Word{"ro", "attributes.readonly"}},
	{mountspec.AttrNosuid, Word{"nosuid", "attributes.nosuid"}},
	{mountspec.AttrNodev, Word{"nodev", "attributes.nodev"}},
	{mountspec.AttrNoexec, Word{"noexec", "attributes.noexec"}},
	{mountspec.AttrNosymfollow, Word{"nosymfollow", "attributes.nosymfollow"}},
	{mountspec.AttrNoatime, Word{"noatime", "attributes.atime"}},
	{mountspec.AttrStrictatime, Word{"strictatime", "attributes.atime"}},
	{mountspec.AttrNodiratime, Word{"nodiratime", "attributes.nodiratime"}},
}

// Words returns the words of set, and "relatime", which has no bit, where the
// spec asks for it.
func Words(set mountspec.Attr, s *mountspec.Spec) []Word {
	var words []Word
	for _, a := range attributeWords {
		if set&a.attr != 0 {
			words = append(words, a.word)
		}
	}
	if s.Attributes.Atime == mountspec.Relatime {
		words = append(words, Word{"relatime", "attributes.atime"})
	}
	return words
}
