// Package oci converts mount specs to what the configuration of an OCI
// runtime (runtime-spec 1.3) holds: mounts, devices and device rules.
//
// The configuration is a file on disk, its options are text without a way to
// quote, and runtimes differ in what they silently leave out. The conversion
// therefore fails, with a [mountspec.ConsumerError], wherever something would
// be lost; the CO then performs the spec itself and converts again with
// [mountspec.Place.Performed] set. Afterwards it still compares the mount
// table with the specs: not every loss can be foreseen.
package oci

import (
	"os"
	"slices"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
	"github.com/opencontainers/runtime-spec/specs-go/features"

	"github.com/csi-prepare/csi-prepare/reference/mountspec"
	"github.com/csi-prepare/csi-prepare/reference/mountspec/internal/entry"
)

const consumer entry.Consumer = "OCI"

// Options is what the CO has decided about the container.
type Options struct {
	// Destination is the place in the container the CO has chosen.
	Destination string
	Policy      mountspec.Policy
	// Features is what the runtime answers to "features". Nil, for a runtime
	// without that command, means no more than every runtime has to have: no
	// attributes of whole trees, no nosymfollow, no ID mapping.
	Features *features.Features
	// UserNamespace is true if the container has a user namespace that is
	// not the node's.
	UserNamespace bool
	// Locked is true if what is performed keeps its attributes against root
	// of that user namespace: the runtime binds it in a mount namespace that
	// was copied from the node's for it, as runc does. A runtime that clones
	// it on the node and moves the clone in, as crun does, brings a mount
	// whose attributes that root can clear. Without Locked, specs that ask
	// for a restriction are refused; nosuid and nodev of the policy alone are
	// set and hold against everybody else.
	Locked bool
	// NodeNetwork is true if the container is in the node's network
	// namespace. A runtime makes a network filesystem in the container's.
	NodeNetwork bool
	// UIDMappings and GIDMappings are given to every bind if Policy.IDMap is
	// set, places that are already performed excepted.
	UIDMappings, GIDMappings []specs.LinuxIDMapping
	// FileMode, UID and GID are of the node of a block device. No file mode
	// means 0600.
	FileMode os.FileMode
	UID, GID uint32
}

// Entries is what to append to a configuration, in order.
type Entries struct {
	Mounts      []specs.Mount             // to mounts
	Devices     []specs.LinuxDevice       // to linux.devices
	DeviceRules []specs.LinuxDeviceCgroup // to linux.resources.devices
}

// Convert converts specs that [mountspec.Validate] accepts; places[i] is of
// specs[i]. A runtime makes a destination that is missing, so the targets of
// the specs after the first have to be there already.
func Convert(list []mountspec.Spec, places []mountspec.Place, o Options) (Entries, error) {
	if err := consumer.Places(list, places); err != nil {
		return Entries{}, err
	}
	var out Entries
	for i := range list {
		if err := out.add(i, &list[i], places[i], &o); err != nil {
			return Entries{}, err
		}
	}
	return out, nil
}

func (e *Entries) add(i int, s *mountspec.Spec, p mountspec.Place, o *Options) error {
	if s.Kind == nil {
		return consumer.Refuse(i, "kind", "none is set")
	}
	destination, err := consumer.Destination(i, o.Destination, s.Target)
	if err != nil {
		return err
	}
	switch k := s.Kind.(type) {
	case *mountspec.BlockDevice:
		return e.device(i, s, k, destination, o)
	case *mountspec.Extension:
		return consumer.Refuse(i, "extension", "a kind only the CO knows: perform it first")
	case *mountspec.Filesystem:
		if p.Performed == "" {
			return e.filesystem(i, s, k, p, destination, o)
		}
	}
	return e.bind(i, s, p, destination, o)
}

func (e *Entries) filesystem(
	i int, s *mountspec.Spec, k *mountspec.Filesystem, p mountspec.Place, destination string, o *Options,
) error {
	switch {
	case o.UserNamespace:
		// Block filesystems fail there, and attributes of a mount made there
		// can be cleared by the container's root.
		return consumer.Refuse(i, "filesystem", "would be made in the container's user namespace: perform it first")
	case o.Policy.IDMap:
		return consumer.Refuse(i, "idmap_supported", "runtimes map binds only: perform it first")
	case k.Device == nil && k.Type != "tmpfs" && !o.NodeNetwork:
		return consumer.Refuse(i, "filesystem.opaque",
			"would be reached from the container's network namespace: perform it first")
	}
	if err := consumer.Label(i, k, o.Policy); err != nil {
		return err
	}
	source, err := consumer.Source(i, k, p)
	if err != nil {
		return err
	}
	set, _ := o.Policy.Effective(*s)
	if err := consumer.Readonly(i, k, set); err != nil {
		return err
	}
	parameters, err := consumer.Parameters(i, k)
	if err != nil {
		return err
	}
	for n, word := range parameters {
		if o.takes(word) {
			return consumer.Refuse(i, "filesystem.parameters", "the runtime has a meaning of its own for %s: "+
				"perform it first", k.Parameters[n].Key)
		}
	}
	options, err := o.words(i, entry.Words(set, s), false)
	if err != nil {
		return err
	}
	options = append(append(options, "private"), parameters...)
	e.Mounts = append(e.Mounts, specs.Mount{
		Destination: destination, Type: k.Type, Source: source, Options: options,
	})
	return nil
}

func (e *Entries) bind(i int, s *mountspec.Spec, p mountspec.Place, destination string, o *Options) error {
	source, err := consumer.Bound(i, s, p, true)
	if err != nil {
		return err
	}
	mapped := o.Policy.IDMap && p.Performed == ""
	if entry.OfDescriptor(source) && (o.UserNamespace || o.Policy.IDMap) {
		return consumer.Refuse(i, "performed", "the descriptor of a mount cannot be reached from a user namespace, "+
			"nor bound when it is mapped: perform the spec in a directory")
	}
	set := entry.Effective(s, p, o.Policy)
	if o.UserNamespace && p.Performed == "" && set&^p.Attributes != 0 {
		return consumer.Refuse(i, "attributes", "would be set in the container's user namespace, whose root "+
			"can clear them: perform it first")
	}

	if field := restriction(s); field != "" && o.UserNamespace && !o.Locked {
		return consumer.Refuse(i, field, "the runtime is not known to lock it, and the root of the container's user "+
			"namespace could clear it: use a runtime that does, or have the superblock, the server or the device refuse")
	}

	bind, tree := "bind", false
	if b, ok := s.Kind.(*mountspec.Bind); ok && b.Recursive {
		// A tree that is performed has its attributes at every mount of it.
		bind, tree = "rbind", p.Performed == ""
	}
	options, err := o.words(i, entry.Words(set, s), tree)
	if err != nil {
		return err
	}
	m := specs.Mount{
		Destination: destination, Type: "bind", Source: source,
		Options: append(append([]string{bind}, options...), "rprivate"),
	}
	if mapped {
		word := "idmap"
		if tree {
			word = "ridmap"
		}
		if err := o.mapping(i, s, word); err != nil {
			return err
		}
		m.Options = append(m.Options, word)
		m.UIDMappings, m.GIDMappings = o.UIDMappings, o.GIDMappings
	}
	e.Mounts = append(e.Mounts, m)
	return nil
}

// restriction names an attribute the spec asks for that keeps a consumer from
// something, "" if it asks for none. A superblock that is read-only needs no
// attribute for that.
func restriction(s *mountspec.Spec) string {
	fs, _ := s.Kind.(*mountspec.Filesystem)
	for _, a := range [...]struct {
		on   bool
		name string
	}{
		{s.Attributes.Readonly && (fs == nil || !fs.SuperblockReadonly), "readonly"},
		{s.Attributes.Nosuid, "nosuid"},
		{s.Attributes.Nodev, "nodev"},
		{s.Attributes.Noexec, "noexec"},
		{s.Attributes.Nosymfollow, "nosymfollow"},
	} {
		if a.on {
			return "attributes." + a.name
		}
	}
	return ""
}

// words renders attributes, of a whole tree with the words for that, as far as
// the runtime knows them. One that does not takes a word for a parameter, which
// a bind ignores.
func (o *Options) words(i int, words []entry.Word, tree bool) ([]string, error) {
	options := make([]string, 0, len(words)+2)
	for _, w := range words {
		text := w.Text
		if tree {
			text = "r" + text
		}
		if !o.knows(text) {
			return nil, consumer.Refuse(i, w.Field, "the runtime is not known to have %q: perform it first", text)
		}
		options = append(options, text)
	}
	return options, nil
}

// mandatory are the options used here that every runtime has to have
// (config.md, "Linux mount options").
var mandatory = []string{"ro", "nosuid", "nodev", "noexec", "noatime", "relatime", "strictatime", "nodiratime"}

func (o *Options) knows(word string) bool {
	if o.Features == nil || o.Features.MountOptions == nil {
		return slices.Contains(mandatory, word)
	}
	return slices.Contains(o.Features.MountOptions, word)
}

// superblockWords are options of the runtime that come to the same as a
// parameter of the name.
var superblockWords = []string{"sync", "async", "dirsync", "lazytime", "nolazytime", "iversion", "noiversion"}

// takes reports whether the runtime would keep a parameter for itself.
func (o *Options) takes(word string) bool {
	if o.Features == nil || slices.Contains(superblockWords, word) {
		return false
	}
	key, _, _ := strings.Cut(word, "=")
	return slices.Contains(o.Features.MountOptions, word) || slices.Contains(o.Features.MountOptions, key)
}

// mapping refuses an ID mapping that the runtime would leave out: one that
// does not know it ignores uidMappings without an error.
func (o *Options) mapping(i int, s *mountspec.Spec, word string) error {
	const field = "idmap_supported"
	switch f := o.Features; {
	case !s.IDMapSupported:
		return consumer.Refuse(i, field, "not set, and the mount is to be mapped")
	case len(o.UIDMappings) == 0 || len(o.GIDMappings) == 0:
		return consumer.Refuse(i, field, "the mount is to be mapped, and there are no mappings")
	case f == nil || f.Linux == nil || f.Linux.MountExtensions == nil || f.Linux.MountExtensions.IDMap == nil ||
		f.Linux.MountExtensions.IDMap.Enabled == nil || !*f.Linux.MountExtensions.IDMap.Enabled || !o.knows(word):
		return consumer.Refuse(i, field, "the runtime is not known to map (linux.mountExtensions.idmap, %q): "+
			"perform it first", word)
	default:
		return nil
	}
}

func (e *Entries) device(
	i int, s *mountspec.Spec, k *mountspec.BlockDevice, destination string, o *Options,
) error {
	if o.UserNamespace {
		// There runtimes bind the node's device of the same path and do not
		// look at the number.
		return consumer.Refuse(i, "block_device", "would be another device in a user namespace: "+
			"bind a node of the CO's own")
	}
	if !strings.HasPrefix(destination, "/dev/") {
		return consumer.Refuse(i, "target", "the node %q would stay in the image: choose a place below /dev", destination)
	}
	access, mode := "rw", o.FileMode
	if s.Attributes.Readonly {
		access = "r"
	}
	if mode == 0 {
		mode = 0o600
	}
	major, minor := int64(k.Major), int64(k.Minor)
	uid, gid := o.UID, o.GID
	e.Devices = append(e.Devices, specs.LinuxDevice{
		Path: destination, Type: "b", Major: major, Minor: minor, FileMode: &mode, UID: &uid, GID: &gid,
	})
	e.DeviceRules = append(e.DeviceRules, specs.LinuxDeviceCgroup{
		Allow: true, Type: "b", Major: &major, Minor: &minor, Access: access,
	})
	return nil
}
