// Package containerd converts mount specs to the mounts that containerd's
// mount package and mount manager take (containerd.types.Mount).
//
// What that package does with them was read in containerd 2.4: it knows no
// propagation and no attributes of a whole tree; a bind that is not read-only
// keeps the attributes of its source, whatever its options say; and of a
// read-only bind it drops an ID mapping. The conversion fails, with a
// [mountspec.ConsumerError], wherever that would lose something; the CO then
// performs the spec itself and converts again with
// [mountspec.Place.Performed] set.
package containerd

import (
	"slices"
	"strings"

	"github.com/containerd/containerd/api/types"

	"github.com/csi-prepare/csi-prepare/reference/mountspec"
	"github.com/csi-prepare/csi-prepare/reference/mountspec/internal/entry"
)

const consumer entry.Consumer = "containerd"

// Options is what the CO has decided and knows.
type Options struct {
	Policy mountspec.Policy
	// PrivateParent is true if the place the mounts go to is on a mount that
	// is private in propagation. Without it nothing is converted: what is
	// attached below a shared mount becomes shared, and there is no option
	// to say otherwise.
	PrivateParent bool
}

// Convert converts specs that [mountspec.Validate] accepts; places[i] is of
// specs[i]. The targets are relative to the parent that containerd is given,
// where those after the first have to exist. The mounts are made on the node,
// in its network namespace.
func Convert(list []mountspec.Spec, places []mountspec.Place, o Options) ([]*types.Mount, error) {
	if err := consumer.Places(list, places); err != nil {
		return nil, err
	}
	out := make([]*types.Mount, 0, len(list))
	for i := range list {
		m, err := convert(i, &list[i], places[i], &o)
		if err != nil {
			return nil, err
		}
		m.Target = list[i].Target
		// The mount manager takes these for templates.
		for _, text := range append([]string{m.Source, m.Target}, m.Options...) {
			if strings.Contains(text, "{{") {
				return nil, consumer.Refuse(i, entry.Name(list[i].Kind), `holds "{{", which begins a template: perform it first`) //nolint:gosec // one entry for each of list
			}
		}
		out = append(out, m)
	}
	return out, nil
}

func convert(i int, s *mountspec.Spec, p mountspec.Place, o *Options) (*types.Mount, error) {
	switch k := s.Kind.(type) {
	case nil:
		return nil, consumer.Refuse(i, "kind", "none is set")
	case *mountspec.BlockDevice:
		return nil, consumer.Refuse(i, "block_device", "a mount cannot be a device: use the container's spec")
	case *mountspec.Extension:
		return nil, consumer.Refuse(i, "extension", "a kind only the CO knows: perform it first")
	case *mountspec.Filesystem:
		if !o.PrivateParent {
			return nil, notPrivate(i, s)
		}
		if p.Performed == "" {
			return filesystem(i, s, k, p, o)
		}
	}
	if !o.PrivateParent || !p.Private {
		return nil, notPrivate(i, s)
	}
	return bind(i, s, p, o)
}

func notPrivate(i int, s *mountspec.Spec) error {
	return consumer.Refuse(i, entry.Name(s.Kind), "propagation has no option and the mount would not be private: "+
		"make the parent, and what is bound, private first")
}

func filesystem(
	i int, s *mountspec.Spec, k *mountspec.Filesystem, p mountspec.Place, o *Options,
) (*types.Mount, error) {
	if o.Policy.IDMap {
		return nil, consumer.Refuse(i, "idmap_supported", "not every version maps: perform it first")
	}
	if err := consumer.Label(i, k, o.Policy); err != nil {
		return nil, err
	}
	source, err := consumer.Source(i, k, p)
	if err != nil {
		return nil, err
	}
	set, _ := o.Policy.Effective(*s)
	if err := consumer.Readonly(i, k, set); err != nil {
		return nil, err
	}
	parameters, err := consumer.Parameters(i, k)
	if err != nil {
		return nil, err
	}
	options, err := words(i, entry.Words(set, s))
	if err != nil {
		return nil, err
	}
	return &types.Mount{Type: k.Type, Source: source, Options: append(options, parameters...)}, nil
}

func bind(i int, s *mountspec.Spec, p mountspec.Place, o *Options) (*types.Mount, error) {
	source, err := consumer.Bound(i, s, p, true)
	if err != nil {
		return nil, err
	}
	if o.Policy.IDMap && p.Performed == "" {
		return nil, consumer.Refuse(i, "idmap_supported",
			"dropped from a read-only bind, and by older versions from all: perform it first")
	}
	set := entry.Effective(s, p, o.Policy)
	word, tree := "bind", false
	if b, ok := s.Kind.(*mountspec.Bind); ok && b.Recursive {
		word, tree = "rbind", p.Performed == ""
	}
	all := entry.Words(set, s)
	if tree && len(all) > 0 {
		return nil, consumer.Refuse(i, "bind.recursive",
			"attributes of the mounts below the source would not be set: perform it first")
	}
	if set&mountspec.AttrReadonly == 0 {
		// There is no second call, so the bind has what its source has.
		for _, w := range all {
			if !has(p, w.Text) {
				return nil, consumer.Refuse(i, w.Field,
					"dropped from a bind that is not read-only, and the source does not have it: perform it first")
			}
		}
		all = slices.DeleteFunc(all, func(w entry.Word) bool { return w.Text == noOption })
	}
	options, err := words(i, all)
	if err != nil {
		return nil, err
	}
	return &types.Mount{Type: "bind", Source: source, Options: append([]string{word}, options...)}, nil
}

// has reports whether the mount at p has the attribute that word is for.
func has(p mountspec.Place, word string) bool {
	if word == "relatime" {
		return p.Attributes&mountspec.AttrAtimeMask == 0
	}
	for _, w := range entry.Words(p.Attributes, &mountspec.Spec{}) {
		if w.Text == word {
			return true
		}
	}
	return false
}

// noOption is the one attribute that containerd's table of flags does not
// have: the word would reach the filesystem as a parameter.
const noOption = "nosymfollow"

func words(i int, all []entry.Word) ([]string, error) {
	options := make([]string, 0, len(all)+1)
	for _, w := range all {
		if w.Text == noOption {
			return nil, consumer.Refuse(i, w.Field, "there is no option for it: attach it without containerd")
		}
		options = append(options, w.Text)
	}
	return options, nil
}
