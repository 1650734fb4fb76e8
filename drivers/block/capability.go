package block

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/drivers/block/filesystem"
	"github.com/csi-prepare/csi-prepare/drivers/server"
	prepare "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// supported tells why no volume supports a capability, "" if all do. Mount
// flags are not looked at.
func (d *Driver) supported(c *csi.VolumeCapability) (reason string) {
	switch mode := c.GetAccessMode().GetMode(); mode {
	case csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER,
		csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY,
		csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER,
		csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER:
	default:
		return fmt.Sprintf("access_mode: %s is not supported, a volume is a device of one node; use a SINGLE_NODE mode", mode)
	}
	if c.GetBlock() != nil {
		return ""
	}
	if t := c.GetMount().GetFsType(); t != "" && !slices.Contains(d.types, filesystem.Type(t)) {
		return fmt.Sprintf("fs_type: is none of %v; use one of them, or leave it empty", d.types)
	}
	if len(d.types) == 0 {
		return "access_type: mount is not supported, the programs to make filesystems are not installed; use block"
	}
	return ""
}

func readerOnly(c *csi.VolumeCapability) bool {
	return c.GetAccessMode().GetMode() == csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY
}

// checkCapabilities is for CreateVolume, where all that cannot be honoured is
// INVALID_ARGUMENT.
func (d *Driver) checkCapabilities(caps []*csi.VolumeCapability) error {
	const field = "volume_capabilities"
	if len(caps) == 0 {
		return server.Invalid(field, "is required", "set at least one")
	}
	for i, c := range caps {
		name := fmt.Sprintf("%s[%d]", field, i)
		if err := server.CheckCapability(name, c); err != nil {
			return err
		}
		if reason := d.supported(c); reason != "" {
			return status.Errorf(codes.InvalidArgument, "%s.%s", name, reason)
		}
		if _, err := readOptions(name, c, d.typeOf(c), false); err != nil {
			return err
		}
	}
	return nil
}

// typeOf is the filesystem type a capability asks for.
func (d *Driver) typeOf(c *csi.VolumeCapability) filesystem.Type {
	switch t := c.GetMount().GetFsType(); {
	case c.GetBlock() != nil:
		return ""
	case t != "":
		return filesystem.Type(t)
	}
	return d.types[0]
}

// options are what a capability comes to.
type options struct {
	attributes *prepare.MountAttributes
	parameters []*prepare.FsParameter
}

// rendered are the parameters as records and the kernel's tables have them,
// in no order.
func (o options) rendered() []string {
	var all []string
	for _, p := range o.parameters {
		if _, hasValue := p.GetValue().(*prepare.FsParameter_Text); hasValue {
			all = append(all, p.GetKey()+"="+p.GetText())
		} else {
			all = append(all, p.GetKey())
		}
	}
	slices.Sort(all)
	return all
}

// parameterWords are the mount flags that become parameters of the superblock,
// with the values that are let through: none that starts a program, names a
// file or lets one consumer halt the node.
var parameterWords = map[filesystem.Type]map[string]*regexp.Regexp{
	filesystem.Ext4: {
		"discard": nil, "nodiscard": nil,
		"errors": regexp.MustCompile(`^(continue|remount-ro)$`),
		"data":   regexp.MustCompile(`^(ordered|journal|writeback)$`),
		"commit": regexp.MustCompile(`^[1-9][0-9]{0,3}$`),
	},
	filesystem.XFS: {
		"discard": nil, "nodiscard": nil, "wsync": nil,
		"largeio": nil, "nolargeio": nil, "inode32": nil, "inode64": nil, "swalloc": nil, "nouuid": nil,
		"allocsize": regexp.MustCompile(`^[1-9][0-9]{0,9}[kmg]?$`),
		"logbufs":   regexp.MustCompile(`^[2-8]$`),
		"logbsize":  regexp.MustCompile(`^(16|32|64|128|256)k$`),
	},
	filesystem.Btrfs: {
		"discard": regexp.MustCompile(`^(sync|async)$`), "nodiscard": nil,
		"ssd": nil, "nossd": nil, "autodefrag": nil, "noautodefrag": nil,
		"compress":       regexp.MustCompile(`^(no|lzo|(zlib|zstd)(:[0-9]{1,2})?)$`),
		"compress-force": regexp.MustCompile(`^(lzo|(zlib|zstd)(:[0-9]{1,2})?)$`),
		"commit":         regexp.MustCompile(`^[1-9][0-9]{0,3}$`),
	},
}

// readOptions turns the mount flags of a capability into attributes and
// parameters of a filesystem of type t, or refuses the first it cannot: never
// is one left out. Words that lift a restriction are refused, as the CO may
// add restrictions.
func readOptions(field string, c *csi.VolumeCapability, t filesystem.Type, readonly bool) (options, error) {
	o := options{attributes: &prepare.MountAttributes{Readonly: readonly || readerOnly(c)}}
	mount := field + ".mount"
	field = mount + ".mount_flags"
	writable := false
	for _, flag := range c.GetMount().GetMountFlags() {
		var err error
		if mode, isAtime := atimeWords[flag]; isAtime {
			err = o.atime(field, flag, mode)
		} else if flag == "rw" {
			writable = true
		} else if !o.attribute(flag) {
			err = o.parameter(field, flag, t)
		}
		if err != nil {
			return o, err
		}
	}
	if writable && o.attributes.Readonly {
		return o, server.Invalid(field, `"rw" contradicts a read-only mount`, "leave it out")
	}
	if c.GetMount().GetVolumeMountGroup() != "" {
		return o, server.Invalid(mount+".volume_mount_group", "cannot be honoured, "+string(t)+" keeps the group of each file", "leave it empty and let the CO change the owner of files")
	}
	return o, nil
}

var atimeWords = map[string]prepare.MountAttributes_Atime{
	"relatime":    prepare.MountAttributes_RELATIME,
	"noatime":     prepare.MountAttributes_NOATIME,
	"strictatime": prepare.MountAttributes_STRICTATIME,
}

func (o *options) atime(field, word string, mode prepare.MountAttributes_Atime) error {
	if was := o.attributes.Atime; was != prepare.MountAttributes_ATIME_UNSPECIFIED && was != mode {
		return server.Invalid(field, fmt.Sprintf("%q contradicts another access time flag", word), "keep one of them")
	}
	o.attributes.Atime = mode
	return nil
}

// attribute takes a word that is a restriction of the mount.
func (o *options) attribute(word string) bool {
	a := o.attributes
	is, known := map[string]*bool{
		"ro": &a.Readonly, "nosuid": &a.Nosuid, "nodev": &a.Nodev, "noexec": &a.Noexec,
		"nosymfollow": &a.Nosymfollow, "nodiratime": &a.Nodiratime,
	}[word]
	if known {
		*is = true
	}
	return known
}

// parameter takes a word that is a parameter of the superblock.
func (o *options) parameter(field, flag string, t filesystem.Type) error {
	key, value, hasValue := strings.Cut(flag, "=")
	pattern, known := parameterWords[t][key]
	// btrfs takes "discard" and "compress" without a value too.
	bare := pattern == nil || t == filesystem.Btrfs && (key == "discard" || strings.HasPrefix(key, "compress"))
	if !known || hasValue && (pattern == nil || !pattern.MatchString(value)) || !hasValue && !bare {
		return server.Invalid(field, fmt.Sprintf("%q cannot be honoured by a mount of %s", server.FlagName(flag), t),
			"use ro, nosuid, nodev, noexec, nosymfollow, nodiratime, one of relatime, noatime, strictatime, and of its parameters "+
				strings.Join(slices.Sorted(maps.Keys(parameterWords[t])), ", "))
	}
	for _, p := range o.parameters {
		if p.GetKey() == key || p.GetKey() == "no"+key || "no"+p.GetKey() == key {
			return server.Invalid(field, fmt.Sprintf("%q is given twice, or with its contrary", server.FlagName(flag)), "keep one of them")
		}
	}
	p := &prepare.FsParameter{Key: key}
	if hasValue {
		p.Value = &prepare.FsParameter_Text{Text: value}
	}
	o.parameters = append(o.parameters, p)
	return nil
}
