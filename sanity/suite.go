package sanity

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/mountns"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// ErrUnreachable says that the plugin could not be started or did not answer
// in time.
var ErrUnreachable = errors.New("the plugin cannot be reached")

// ErrNothingToTest says that the plugin answers, but has nothing this suite
// tests.
var ErrNothingToTest = errors.New("there is nothing to test")

// Suite is one run against one plugin or performer.
type Suite struct {
	given  *Config // as the user holds it; read when the run begins
	config Config
	actor  requirement.Actor
	// profilesOf are the profiles of each spec, by section and name.
	profilesOf map[string][]Profile

	once     sync.Once
	startErr error
	stopped  sync.Once
	err      error

	dir string // of the run, below WorkDir
	// furniture is what the suite puts into dir beside the specs' own.
	furniture []string
	own       *mountns.Namespace
	nsBefore  uint64 // inode of the leader's mount namespace
	// beyond is where a plugin that the suite starts lives: dir is a shared
	// mount there, so that what the plugin mounts can reach a spec.
	beyond *mountns.Namespace
	// pluginNS is where a plugin lives that was there before.
	pluginNS *mountns.Namespace
	process  *process
	clients  *clients
	features features
	name     string // of the plugin
	version  string
	node     string // of NodeGetInfo
	random   *rand.Rand

	seen     observed
	surveyed sync.Once
	overhead time.Duration

	mu     sync.Mutex
	broken map[requirement.ID]string // the spec that found it first
	gone   string                    // why no spec can run any more
	// secrets are texts no report may show, each with what stands for it.
	secrets []string
	// descriptors counts the namespaces that other processes were given.
	descriptors int
	// loopsBefore are the loop devices there were when the run began.
	loopsBefore map[string]uint64
	// leftLoops are the loop devices that were found left.
	leftLoops []string
}

func newSuite(c *Config) *Suite {
	return &Suite{given: c, actor: c.seat(), profilesOf: map[string][]Profile{}, broken: map[requirement.ID]string{}}
}

// Start begins the run, for a caller that wants to know before the first spec
// whether the plugin answers; without it the first spec does. The error is
// ErrUnreachable, ErrNothingToTest, or one that names a faulty setting.
func (s *Suite) Start(ctx context.Context) error { return s.begin(ctx) }

// Plugin returns name and version of who is tested, after Start.
func (s *Suite) Plugin() (name, version string) { return s.name, s.version }

// Seed returns the seed of the run, after Start.
func (s *Suite) Seed() int64 { return s.config.Seed }

// Total returns how many specs the run is to have, after what Only and Profile
// leave out.
func (s *Suite) Total() int {
	n := 0
	for _, sec := range sections(s.actor) {
		for _, d := range sec.specs {
			if s.wanted(d) {
				n++
			}
		}
	}
	return n
}

// Err returns what went wrong with the suite itself, after the run.
func (s *Suite) Err() error { return s.err }

// Stop ends what Start started, for a caller that never ran Ginkgo.
func (s *Suite) Stop() { s.stop() }

// Overhead returns the time the suite spent on a spec beside the spec itself:
// the median of those that ran, after the run.
func (s *Suite) Overhead() time.Duration { return s.overhead }

// begin starts what has to be started, once, and waits until the plugin
// answers. The error is the same for every caller.
func (s *Suite) begin(ctx context.Context) error {
	s.once.Do(func() {
		s.startErr = s.start(ctx)
	})
	return s.startErr
}

// wanted reports whether the user left the spec in.
func (s *Suite) wanted(d definition) bool {
	only := s.given.Only
	if len(only) > 0 && !slices.ContainsFunc(d.covers, func(id requirement.ID) bool { return slices.Contains(only, id) }) {
		return false
	}
	return s.given.Profile == "" || slices.Contains(d.profiles, Profile(s.given.Profile))
}

// whom says who is tested, for failure messages.
func (s *Suite) whom() string {
	who := strings.TrimSpace(s.name + " " + s.version)
	pid := s.pid()
	if pid == 0 {
		return who + ", pid unknown, mount namespace unknown"
	}
	ns := "unknown"
	if link, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/mnt", pid)); err == nil {
		ns = link
	}
	return fmt.Sprintf("%s, pid %d, mount namespace %s", who, pid, ns)
}

// pid of the plugin, 0 if it is not known.
func (s *Suite) pid() int {
	if s.clients == nil {
		return 0
	}
	return int(s.clients.peer.Load())
}

// peerUID is the user the plugin runs as, this process's own if that is not
// known.
func (s *Suite) peerUID() int {
	var st unix.Stat_t
	if pid := s.pid(); pid != 0 && unix.Stat(fmt.Sprintf("/proc/%d", pid), &st) == nil {
		return int(st.Uid)
	}
	return os.Geteuid()
}

// copyNamespace makes the mount namespace of one spec. A plugin that declares
// that its mounts have to propagate is believed, as is one that publishes
// volumes itself; every other one is not let near, so that a mount it makes for
// a consumer never gets there.
func (t *trial) copyNamespace(ctx context.Context) (*mountns.Namespace, error) {
	if t.beyond != nil && (t.features[RequiresPropagation] || t.publishes()) {
		return t.beyond.Copy(ctx, mountns.Slave())
	}
	return mountns.New(ctx)
}

// removeTree removes a directory the suite made, unless anything is mounted
// there: then it names the mount, and everything stays.
func (s *Suite) removeTree(dir string) error {
	table, err := s.own.Table(context.Background())
	if err != nil {
		return err
	}
	if below := table.Below(dir); len(below) > 0 {
		return fmt.Errorf("%s is kept: still mounted there: %s", dir, below[0])
	}
	return os.RemoveAll(dir)
}

// leaderNamespace identifies the mount namespace of the process's first
// thread, which is what others see as the namespace of the process.
func leaderNamespace() (uint64, error) {
	var st unix.Stat_t
	if err := unix.Stat(fmt.Sprintf("/proc/%d/task/%d/ns/mnt", os.Getpid(), os.Getpid()), &st); err != nil {
		return 0, fmt.Errorf("reading the mount namespace of this process: %w", err)
	}
	return st.Ino, nil
}
