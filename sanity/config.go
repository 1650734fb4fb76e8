package sanity

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/csi-prepare/csi-prepare/sanity/report"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// Defaults of a Config.
const (
	DefaultTimeout      = 10 * time.Second
	DefaultReadyTimeout = 10 * time.Second
)

// Config says what is tested and what the suite needs to know about it. The
// zero value with an Endpoint, an Exec or a Performer is complete.
type Config struct {
	// Endpoint is the plugin's CSI socket: a path, "unix:///path", or
	// "dns:///host:port". With Exec it is where the command will listen; if
	// empty a socket is made up and given to the command in CSI_ENDPOINT.
	Endpoint string
	// ControllerEndpoint is where the Controller service is, if elsewhere.
	ControllerEndpoint string
	// Exec starts the plugin (or, with Performer, the performer). The suite
	// may kill it with SIGKILL and start it again with the same arguments.
	// "{endpoint}" in an argument stands for the endpoint's URL.
	Exec []string
	// Performer is the socket of a csi.prepare.testing.v1alpha1.Performer.
	// If set it is the performer that is tested, and Endpoint is unused.
	// With Exec it may be "new", as an empty Endpoint above.
	Performer string
	// Name is what reports call a performer, which cannot be asked for it.
	// Default: its endpoint.
	Name string

	// Grants are the directories the operator granted, name to directory.
	Grants map[string]string
	// Exports are the directories behind network filesystems, as this
	// machine reaches them at the server: HOST:PATH to directory.
	Exports map[string]string
	// NoServer says why network filesystems cannot be performed here, if
	// they cannot: what would perform one is could-not-run.
	NoServer string
	// StateDir is where the plugin keeps its state, if that is known; the
	// suite looks there for secrets in clear.
	StateDir string
	// DataDirs are where the plugin keeps the files that are attached as loop
	// devices, if that is known: one left on such a file is its.
	DataDirs []string
	// WorkDir is where the suite makes its directory, which is removed at the
	// end. The plugin has to see it under the same path. Default: the
	// system's temporary directory.
	WorkDir string

	// VolumeIDs name volumes that exist already, for a plugin that cannot
	// create any. Two of them let every spec run; nothing but files the
	// suite made itself is changed in them, or of a block volume 4096 bytes,
	// which are put back.
	VolumeIDs []string
	// VolumeContexts holds the volume_context of each of VolumeIDs.
	VolumeContexts map[string]map[string]string
	// Block tests volumes of the block access type. Without it they are of
	// the mount access type.
	Block bool
	// VolumeSize is the capacity the suite asks for when it creates a volume,
	// in bytes. Zero asks for none.
	VolumeSize int64
	// VolumeParameters are the parameters of CreateVolume.
	VolumeParameters map[string]string
	// SnapshotParameters are those of CreateSnapshot, MutableParameters those
	// of ControllerModifyVolume.
	SnapshotParameters map[string]string
	MutableParameters  map[string]string
	// Secrets, by the keys of csi-sanity's secrets file:
	// "CreateVolumeSecret", "NodePrepareVolumeSecret" and so on.
	Secrets map[string]map[string]string

	// Timeout is the deadline of each call.
	Timeout time.Duration
	// ReadyTimeout is how long the plugin may take to answer its first call.
	ReadyTimeout time.Duration
	// Seed of ids and random data, and of the order if that is random. Zero
	// takes one from the clock.
	Seed int64

	// Only restricts the run to the specs that cover one of these.
	Only []requirement.ID
	// Profile restricts the run to a profile, all of whose features then have
	// to be claimed, and whose verdict is that of the run.
	Profile string
	// Features, if not nil, is what the plugin is meant to have. The run
	// does not begin if that is not what it reports.
	Features []string
	// KnownFailing lists what the plugin is known to break, with the reason;
	// "idempotency.*" names all requirements of that group. An entry that no
	// failure is due to fails the run.
	KnownFailing report.Known

	// Report, if set, is called once at the end. The error fails the suite.
	Report func(*report.Report) error
	// Progress, if set, is called as each spec ends.
	Progress func(report.Spec)
	// Log receives the output of a plugin that Exec starts. Default: none.
	Log io.Writer
	// Rerun is the command a failure message gives to run a spec again, up
	// to the requirement's id. Default: one made up from the fields above.
	Rerun string
}

// complete returns a copy with defaults filled in.
func (c Config) complete() (Config, error) {
	if c.Timeout == 0 {
		c.Timeout = DefaultTimeout
	}
	if c.ReadyTimeout == 0 {
		c.ReadyTimeout = DefaultReadyTimeout
	}
	if c.Seed == 0 {
		c.Seed = time.Now().UnixNano() & (1<<31 - 1)
	}
	if c.Timeout < 0 || c.ReadyTimeout < 0 {
		return c, errors.New("timeout: is negative; give a duration above zero")
	}
	if c.VolumeSize < 0 {
		return c, errors.New("volume size: is negative; give bytes")
	}
	for name, dir := range c.Grants {
		if !filepath.IsAbs(dir) {
			return c, fmt.Errorf("grant %s: %q is not an absolute path", name, dir)
		}
	}
	if err := c.checkExports(); err != nil {
		return c, err
	}
	for _, id := range c.Only {
		if _, ok := requirement.Lookup(id); !ok {
			return c, fmt.Errorf("requirement %q: no such id; `prepare-sanity list` has them all", id)
		}
	}
	if err := c.KnownFailing.Check(c.seat()); err != nil {
		return c, err
	}
	if p := profileByName(c.Profile); c.Profile != "" && p == nil {
		return c, fmt.Errorf("profile %q: no such profile; there are %s", c.Profile, strings.Join(profileNames(), ", "))
	} else if p != nil && p.actor != c.seat() {
		return c, fmt.Errorf("profile %s: is of the other seat", c.Profile)
	}
	if c.seat() == requirement.SP && c.Endpoint == "" && len(c.Exec) == 0 {
		return c, errors.New("endpoint: is empty; give the plugin's socket, or a command that starts it")
	}
	if c.Rerun == "" {
		c.Rerun = c.rerun()
	}
	return c, nil
}

// seat is who is tested.
func (c Config) seat() requirement.Actor {
	if c.Performer != "" {
		return requirement.CO
	}
	return requirement.SP
}

// rerun is the command line that repeats a run of c, up to "--id".
func (c Config) rerun() string {
	var b strings.Builder
	b.WriteString("prepare-sanity ")
	if c.seat() == requirement.CO {
		fmt.Fprintf(&b, "executor --performer %s", c.Performer)
	} else {
		b.WriteString("run")
		if c.Endpoint != "" {
			fmt.Fprintf(&b, " --csi.endpoint %s", c.Endpoint)
		}
	}
	if len(c.Exec) > 0 {
		fmt.Fprintf(&b, " --exec '%s'", strings.Join(c.Exec, " "))
	}
	names := make([]string, 0, len(c.Grants))
	for name := range c.Grants {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		fmt.Fprintf(&b, " --grant %s=%s", name, c.Grants[name])
	}
	for _, export := range slices.Sorted(maps.Keys(c.Exports)) {
		fmt.Fprintf(&b, " --export %s=%s", export, c.Exports[export])
	}
	for _, id := range c.VolumeIDs {
		fmt.Fprintf(&b, " --volume-id %s", id)
	}
	if c.Block {
		b.WriteString(" --csi.testvolumeaccesstype block")
	}
	return b.String()
}

// secrets returns those for one call, which may be nil.
func (c Config) secrets(call string) map[string]string { return c.Secrets[call+"Secret"] }
