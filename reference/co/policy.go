package co

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path"
	"regexp"
	"slices"
	"strings"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/csi-prepare/csi-prepare/reference/mountspec"
)

// PolicyVersion is the apiVersion of a policy file.
const PolicyVersion = "csi-prepare/v1alpha1"

// Policy is what the operator allows, for all plugins and for single ones. The
// zero value allows the defaults.
type Policy struct {
	defaults Settings
	drivers  map[string]Settings
}

// Settings are what the operator allows one plugin.
type Settings struct {
	// Kinds are the kinds of mount spec that are performed.
	Kinds []mountspec.KindName `json:"kinds"`
	// FSTypes are the filesystem types that are performed. An ephemeral
	// volume may be a tmpfs besides.
	FSTypes []string `json:"fsTypes"`
	// AllowSuid and AllowDev drop the nosuid and nodev that every mount gets
	// otherwise; Noexec adds a noexec.
	AllowSuid bool `json:"allowSuid"`
	AllowDev  bool `json:"allowDev"`
	Noexec    bool `json:"noexec"`
	// FollowLinks allows symbolic links, resolved in the consumer's root, on
	// the way to the target; CreateTarget makes what is missing of it.
	FollowLinks  bool `json:"followLinks"`
	CreateTarget bool `json:"createTarget"`
	// LSMContext is the label of filesystems that support one.
	LSMContext string `json:"lsmContext"`
	// Grants are directories that the plugin may name as sources of binds,
	// by the names it knows them by.
	Grants map[string]string `json:"grants"`
	// Protected are places in a consumer, with all below them, that nothing
	// is performed onto, besides the ones that always are.
	Protected []string `json:"protected"`
	// PluginUID and PluginGID are the user the plugin runs as, to whom its
	// directories and its end of the side channel belong; nil is whoever
	// listens at the endpoint.
	PluginUID *uint32 `json:"pluginUID"`
	PluginGID *uint32 `json:"pluginGID"`
	// FUSEMaxRead caps the max_read of FUSE mounts, in bytes; 0 is 1 MiB.
	// FUSEServerPermissions lets a server decide by itself who may do what.
	FUSEMaxRead           uint32 `json:"fuseMaxRead"`
	FUSEServerPermissions bool   `json:"fuseServerPermissions"`
	// Failover is how long the server of a resumable FUSE mount may be away
	// before its connection is aborted.
	Failover Duration `json:"failover"`
	// CallDeadline bounds one RPC, StepDeadline one act of the kernel's.
	CallDeadline Duration `json:"callDeadline"`
	StepDeadline Duration `json:"stepDeadline"`
	// Attempts is how often a call without a final outcome is made, and an
	// undo of what is busy; Backoff is the first pause between two, which
	// doubles, up to half a minute.
	Attempts int      `json:"attempts"`
	Backoff  Duration `json:"backoff"`
}

// Duration is a time.Duration that reads and writes "1m30s".
type Duration time.Duration

// MarshalText implements encoding.TextMarshaler.
func (d Duration) MarshalText() ([]byte, error) { return []byte(time.Duration(d).String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (d *Duration) UnmarshalText(text []byte) error {
	v, err := time.ParseDuration(string(text))
	*d = Duration(v)
	return err
}

// offered are the kinds this CO can perform: all but extensions.
var offered = []mountspec.KindName{mountspec.KindFilesystem, mountspec.KindBind, mountspec.KindBlockDevice, mountspec.KindHandle, mountspec.KindFUSE}

// DefaultSettings returns the defaults of SPEC.md, section Security.
func DefaultSettings() Settings {
	return Settings{
		Kinds: slices.Clone(offered),
		FSTypes: []string{
			"ext2", "ext3", "ext4", "xfs", "btrfs",
			"nfs", "nfs4", "cifs", "smb3", "ceph", "erofs", "squashfs",
		},
		FollowLinks: true, CreateTarget: true, Failover: Duration(time.Minute),
		CallDeadline: Duration(2 * time.Minute), StepDeadline: Duration(30 * time.Second),
		Attempts: 5, Backoff: Duration(100 * time.Millisecond),
	}
}

// For returns the settings for the plugin with a name, its GetPluginInfo name.
func (p *Policy) For(driver string) Settings {
	s, found := p.drivers[driver]
	switch {
	case found:
	case p.defaults.Attempts == 0:
		return DefaultSettings()
	default:
		s = p.defaults
	}
	return s.clone()
}

func (s Settings) clone() Settings {
	s.Kinds, s.FSTypes, s.Protected = slices.Clone(s.Kinds), slices.Clone(s.FSTypes), slices.Clone(s.Protected)
	s.Grants = maps.Clone(s.Grants)
	return s
}

// ParsePolicy reads a policy file, YAML or JSON:
//
//	apiVersion: csi-prepare/v1alpha1
//	kind: Policy
//	defaults:                      # for every plugin; all fields of Settings
//	  noexec: true
//	drivers:                       # by plugin name; what is not set is as in defaults
//	  hostpath.csi-prepare.dev:
//	    kinds: [BIND]
//	    grants: {data: /srv/volumes}
//
// What is not set is as in DefaultSettings. A list replaces the default, a
// grant is added. A name that is no field, or one given twice, is an error.
func ParsePolicy(text []byte) (*Policy, error) {
	data, err := yaml.YAMLToJSONStrict(text)
	if err != nil {
		return nil, fmt.Errorf("policy: %w", err)
	}
	var file struct {
		APIVersion string                     `json:"apiVersion"`
		Kind       string                     `json:"kind"`
		Defaults   json.RawMessage            `json:"defaults"`
		Drivers    map[string]json.RawMessage `json:"drivers"`
	}
	if err := strict(data, &file); err != nil {
		return nil, fmt.Errorf("policy: %w", err)
	}
	if file.APIVersion != PolicyVersion || file.Kind != "Policy" {
		return nil, fmt.Errorf("policy: apiVersion %q, kind %q: want %s, Policy", file.APIVersion, file.Kind, PolicyVersion)
	}
	p := &Policy{drivers: map[string]Settings{}}
	if p.defaults, err = DefaultSettings().with(file.Defaults); err != nil {
		return nil, fmt.Errorf("policy: defaults: %w", err)
	}
	for name, raw := range file.Drivers {
		if p.drivers[name], err = p.defaults.with(raw); err != nil {
			return nil, fmt.Errorf("policy: drivers.%s: %w", name, err)
		}
	}
	return p, nil
}

// ReadPolicy reads the policy file at path, as ParsePolicy does.
func ReadPolicy(path string) (*Policy, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("policy: %w", err)
	}
	p, err := ParsePolicy(text)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return p, nil
}

func strict(data []byte, to any) error {
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	return d.Decode(to)
}

// with returns s with the fields that raw sets.
func (s Settings) with(raw json.RawMessage) (Settings, error) {
	s = s.clone()
	if len(raw) > 0 {
		if err := strict(raw, &s); err != nil {
			return s, err
		}
	}
	return s, s.check()
}

var grantName = regexp.MustCompile(`^[a-z0-9-]{1,63}$`)

func (s *Settings) check() error {
	for _, k := range s.Kinds {
		if !slices.Contains(offered, k) {
			return fmt.Errorf("kinds: %s is not performed by this CO: choose among %v", k, offered)
		}
	}
	for _, name := range sortedKeys(s.Grants) {
		if !grantName.MatchString(name) {
			return fmt.Errorf("grants: %q is not a name: use 1 to 63 of [a-z0-9-]", name)
		}
		if !cleanPath(s.Grants[name]) {
			return fmt.Errorf("grants.%s: %q: has to be an absolute directory, in its shortest form and not /", name, s.Grants[name])
		}
	}
	for _, p := range s.Protected {
		if !cleanPath(p) {
			return fmt.Errorf("protected: %q: has to be absolute, in its shortest form and not /", p)
		}
	}
	switch {
	case len(s.Kinds) == 0:
		return errors.New("kinds: at least one")
	case s.CallDeadline <= 0:
		return errors.New("callDeadline: has to be positive")
	case s.StepDeadline <= 0:
		return errors.New("stepDeadline: has to be positive")
	case s.Failover <= 0:
		return errors.New("failover: has to be positive")
	case s.Attempts < 1:
		return errors.New("attempts: at least 1")
	case s.Backoff < 0:
		return errors.New("backoff: must not be negative")
	}
	return nil
}

// Performer returns what a CO with these settings offers a plugin.
func (s *Settings) Performer(ephemeral, userNamespace bool) mountspec.Performer {
	p := mountspec.Performer{
		Kinds: slices.Clone(s.Kinds), FSTypes: slices.Clone(s.FSTypes),
		Grants: sortedKeys(s.Grants), UserNamespace: userNamespace,
	}
	if ephemeral && !slices.Contains(p.FSTypes, "tmpfs") {
		p.FSTypes = append(p.FSTypes, "tmpfs")
	}
	return p
}

// Mount returns the part of the settings that performing depends on.
func (s *Settings) Mount() mountspec.Policy {
	return mountspec.Policy{
		AllowSuid: s.AllowSuid, AllowDev: s.AllowDev, Noexec: s.Noexec,
		FollowLinks: s.FollowLinks, CreateTarget: s.CreateTarget, LSMContext: s.LSMContext,
	}
}

// ErrProtected is a target that is never performed onto.
var ErrProtected = errors.New("a protected place")

// CheckTarget refuses a path in a consumer that is protected. In /dev block
// devices are allowed.
func (s *Settings) CheckTarget(place string, block bool) error {
	place = path.Clean(place)
	if place == "/" || place == "/etc" {
		return fmt.Errorf("%w: %s itself", ErrProtected, place)
	}
	for _, p := range append([]string{"/proc", "/sys", "/dev", "/run/secrets", "/var/run/secrets"}, s.Protected...) {
		if block && p == "/dev" && place != p {
			continue
		}
		if place == p || strings.HasPrefix(place, p+"/") {
			return fmt.Errorf("%w: %s is %s or below it", ErrProtected, place, p)
		}
	}
	return nil
}
