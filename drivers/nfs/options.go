package nfs

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/csi-prepare/csi-prepare/drivers/directory"
	"github.com/csi-prepare/csi-prepare/drivers/server"
	prepare "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// version of the protocol.
type version string

const defaultVersion version = "4.2"

// versions by what mount_flags may call them. "4" is refused: it leaves the
// choice to the kernel, which takes 4.0.
var versions = map[string]version{"3": "3", "4.0": "4.0", "4.1": "4.1", "4.2": "4.2"}

const versionRule = "use 3, 4.0, 4.1 or 4.2"

// options are what the mount_flags and the parameters of a volume come to.
type options struct {
	version    version
	attributes *prepare.MountAttributes
	// set are the parameters of the kernel's filesystem, by key; a flag has
	// the value "".
	set map[string]string
}

// numbers are parameters that take a number from least to most.
var numbers = map[string]struct{ least, most int }{
	"nconnect":    {1, 16},
	"timeo":       {1, 65535}, // tenths of a second
	"retrans":     {0, 65535},
	"rsize":       {1024, 1 << 20},
	"wsize":       {1024, 1 << 20},
	"port":        {1, 65535},
	"mountport":   {1, 65535},
	"acregmin":    {0, 65535},
	"acregmax":    {0, 65535},
	"acdirmin":    {0, 65535},
	"acdirmax":    {0, 65535},
	"actimeo":     {0, 65535},
	"max_connect": {1, 16},
}

// choices are parameters that take one of some words.
var choices = map[string][]string{
	"sec":         {"sys"},
	"proto":       {"tcp", "tcp6"},
	"lookupcache": {"all", "none", "pos", "positive"},
	"local_lock":  {"all", "flock", "posix", "none"},
}

// flags are parameters without a value.
var flags = []string{
	"hard", "soft", "softerr", "ac", "noac", "cto", "nocto", "sharecache", "nosharecache",
	"resvport", "noresvport", "rdirplus", "nordirplus", "nolock", "acl", "noacl",
}

// refused are words that are known to users of mount.nfs or mount(8), and why
// each of them is none of the kernel's.
var refused = func() map[string]string {
	all := map[string]string{}
	for reason, words := range map[string]string{
		"asks mount.nfs to go on trying, and no such program is run": "bg fg retry retry=",
		"is for mount.nfs or mount(8), which are not run": "_netdev nofail auto noauto defaults user nouser users owner group " +
			"comment sloppy namlen mounthost mountvers mountprog nfsprog intr nointr posix noposix udp tcp rdma",
		"is set by the plugin, from the server's name, at each NodePrepareVolume": "addr mountaddr clientaddr mountproto source",
		"needs rpc.statd, a program of the node: locks of version 3 stay local":   "lock",
		"asks for another operation than a mount":                                 "remount bind rbind move",
		"is about propagation, which is the CO's":                                 "shared rshared slave rslave private rprivate unbindable runbindable",
		"is a security label, which is the CO's to choose":                        "context fscontext defcontext rootcontext",
		"needs a daemon of the node (cachefilesd)":                                "fsc",
		"lets the kernel choose a version, and it takes 4.0":                      "minorversion v2 v3 v4 v4.0 v4.1 v4.2",
	} {
		for _, w := range strings.Fields(words) {
			all[strings.TrimSuffix(w, "=")] = reason
		}
	}
	return all
}()

// parseOptions reads the mount flags of a capability. Words of the mount itself
// become attributes, words of the kernel's NFS parameters; every other one is
// refused by name, and never ignored. given is the version that the volume was
// created with, or empty.
func parseOptions(field string, c *csi.VolumeCapability, readonly bool, given version) (*options, error) {
	flagsField := field + ".mount.mount_flags"
	o := &options{version: given, set: map[string]string{}}
	var ofMount []string
	var asked version
	for _, word := range c.GetMount().GetMountFlags() {
		key, value, hasValue := strings.Cut(word, "=")
		if key == "vers" || key == "nfsvers" {
			v, ok := versions[value]
			switch {
			case !ok:
				return nil, server.Invalid(flagsField, fmt.Sprintf("%q does not name a version that is fixed", key), versionRule)
			case asked != "" && asked != v:
				return nil, server.Invalid(flagsField, fmt.Sprintf("%q contradicts another version", key), "keep one of them")
			}
			asked = v
			continue
		}
		kind, err := checkOption(key, value, hasValue)
		switch {
		case err != nil:
			return nil, server.Invalid(flagsField, fmt.Sprintf("%q %v", server.FlagName(word), err), "leave it out, or use another")
		case kind == ofTheMount:
			ofMount = append(ofMount, word)
			continue
		}
		if earlier, twice := o.set[key]; twice && earlier != value {
			return nil, server.Invalid(flagsField, fmt.Sprintf("%q is given twice", key), "keep one of them")
		}
		o.set[key] = value
	}
	switch {
	case asked != "" && given != "" && asked != given:
		return nil, server.Invalid(flagsField, `"vers" is not that of the volume's parameters`, "leave it out of one of them")
	case asked != "":
		o.version = asked
	case given == "":
		o.version = defaultVersion
	}
	if err := o.contradictions(); err != nil {
		return nil, server.Invalid(flagsField, err.Error(), "keep one of them")
	}
	var err error
	o.attributes, err = directory.Attributes(field, withFlags(c, ofMount), readonly)
	return o, err
}

// withFlags is a capability with other mount flags.
func withFlags(c *csi.VolumeCapability, flags []string) *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessMode: c.GetAccessMode(),
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{
			MountFlags: flags, VolumeMountGroup: c.GetMount().GetVolumeMountGroup(),
		}},
	}
}

type optionKind int

const (
	ofTheKernel optionKind = iota
	// ofTheMount is left to directory.Attributes, which refuses what it does
	// not know.
	ofTheMount
)

// checkOption says whose word it is; the error completes a sentence.
func checkOption(key, value string, hasValue bool) (optionKind, error) {
	if strings.ContainsAny(value, ",\x00\n") {
		return 0, fmt.Errorf("has a value with a comma or a control character, after which another option could follow")
	}
	if reason, no := refused[key]; no || strings.HasPrefix(key, "x-") || strings.HasPrefix(key, "X-") {
		if !no {
			reason = "is a comment for programs of the node"
		}
		return 0, fmt.Errorf("%s", reason)
	}
	if r, ok := numbers[key]; ok {
		n, err := strconv.Atoi(value)
		if err != nil || n < r.least || n > r.most || strconv.Itoa(n) != value {
			return 0, fmt.Errorf("needs a number from %d to %d", r.least, r.most)
		}
		return ofTheKernel, nil
	}
	if words, ok := choices[key]; ok {
		if !slices.Contains(words, value) {
			return 0, fmt.Errorf("needs one of %s", strings.Join(words, ", "))
		}
		return ofTheKernel, nil
	}
	if slices.Contains(flags, key) {
		if hasValue {
			return 0, fmt.Errorf("takes no value")
		}
		return ofTheKernel, nil
	}
	return ofTheMount, nil
}

// contradictions are pairs of which one at most may be given, and what a
// version does not have.
func (o *options) contradictions() error {
	for _, set := range [][]string{
		{"hard", "soft", "softerr"},
		{"ac", "noac"},
		{"cto", "nocto"},
		{"sharecache", "nosharecache"},
		{"resvport", "noresvport"},
		{"rdirplus", "nordirplus"},
		{"acl", "noacl"},
		{"actimeo", "acregmin"},
		{"actimeo", "acregmax"},
		{"actimeo", "acdirmin"},
		{"actimeo", "acdirmax"},
	} {
		var found []string
		for _, key := range set {
			if _, ok := o.set[key]; ok {
				found = append(found, key)
			}
		}
		if len(found) > 1 {
			return fmt.Errorf("%q and %q contradict each other", found[0], found[1])
		}
	}
	onlyIn3 := []string{"mountport", "nolock", "acl", "noacl", "local_lock"}
	for _, key := range onlyIn3 {
		if _, ok := o.set[key]; ok && o.version != "3" {
			return fmt.Errorf("%q is for version 3 alone", key)
		}
	}
	return nil
}

// network is the family of addresses that proto asks for.
func (o *options) network() string {
	switch o.set["proto"] {
	case "tcp":
		return "ip4"
	case "tcp6":
		return "ip6"
	}
	return "ip"
}

func (o *options) port() int {
	if p, err := strconv.Atoi(o.set["port"]); err == nil {
		return p
	}
	return portNFS
}

// sorted are the parameters that were asked for, in one order.
func (o *options) sorted() []string { return slices.Sorted(maps.Keys(o.set)) }
