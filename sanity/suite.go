package sanity

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/reference/mountns"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
	"github.com/csi-prepare/csi-prepare/spec/testingv1alpha1"
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
	// descriptors counts the namespaces that other processes were given.
	descriptors int
}

func newSuite(c *Config) *Suite {
	return &Suite{given: c, actor: c.seat(), broken: map[requirement.ID]string{}}
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

func (s *Suite) start(ctx context.Context) (err error) {
	if s.config, err = s.given.complete(); err != nil {
		return err
	}
	s.random = rand.New(rand.NewPCG(uint64(s.config.Seed), 0)) //nolint:gosec // test data, not keys
	if s.nsBefore, err = leaderNamespace(); err != nil {
		return err
	}
	if s.own, err = mountns.Own(); err != nil {
		return err
	}
	if s.dir, err = os.MkdirTemp(s.config.WorkDir, "prepare-sanity-"); err != nil {
		return fmt.Errorf("making the working directory: %w", err)
	}
	if err = os.Chmod(s.dir, 0o755); err != nil { //nolint:gosec // a plugin of another user has to pass
		return fmt.Errorf("opening the working directory: %w", err)
	}
	if len(s.config.Exec) > 0 {
		if err = s.launch(ctx); err != nil {
			return err
		}
	}
	endpoint := s.endpoint()
	if s.clients, err = dial(endpoint, s.config.ControllerEndpoint, s.config.Timeout, s.seen.answer); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, s.config.ReadyTimeout)
	defer cancel()
	if s.actor == requirement.CO {
		return s.readyPerformer(ctx, endpoint)
	}
	return s.readyPlugin(ctx, endpoint)
}

// launch starts the command in a namespace of its own.
func (s *Suite) launch(ctx context.Context) (err error) {
	address := &s.config.Endpoint
	if s.actor == requirement.CO {
		address = &s.config.Performer
	}
	if *address == "" || *address == "new" {
		*address = "unix://" + filepath.Join(s.dir, "csi.sock")
		s.furniture = append(s.furniture, "csi.sock")
	}
	if s.beyond, err = mountns.New(ctx); err != nil {
		return err
	}
	err = s.beyond.Do(ctx, func() error {
		if err := unix.Mount(s.dir, s.dir, "", unix.MS_BIND, ""); err != nil {
			return err
		}
		return unix.Mount("", s.dir, "", unix.MS_SHARED, "")
	})
	if err != nil {
		return fmt.Errorf("sharing %s with the plugin: %w", s.dir, err)
	}
	argv := slices.Clone(s.config.Exec)
	for i := range argv {
		argv[i] = strings.ReplaceAll(argv[i], "{endpoint}", *address)
	}
	s.process = &process{
		argv: argv, env: []string{"CSI_ENDPOINT=" + *address}, ns: s.beyond,
		log: &capture{also: s.config.Log},
	}
	if err := s.process.start(); err != nil {
		return fmt.Errorf("%w: %w", ErrUnreachable, err)
	}
	return nil
}

// await makes a call until it is answered, the process is gone or the time
// is over. Whatever is no answer is put into words.
func (s *Suite) await(ctx context.Context, endpoint, what string, call func(context.Context) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	if s.process != nil {
		ended := s.process.ended
		go func() {
			select {
			case <-ended:
				cancel(s.process.gone())
			case <-ctx.Done():
			}
		}()
	}
	err := call(ctx)
	switch status.Code(err) {
	case codes.OK:
		return nil
	case codes.Unavailable, codes.DeadlineExceeded, codes.Canceled:
	default:
		return fmt.Errorf("%w: %s: %s", ErrUnreachable, what, answered(err))
	}
	if s.process != nil {
		if gone := s.process.gone(); gone != nil {
			return fmt.Errorf("%w: %w", ErrUnreachable, gone)
		}
	}
	if why := socketState(endpoint); why != nil {
		return fmt.Errorf("%w: %w (waited %v)", ErrUnreachable, why, s.config.ReadyTimeout)
	}
	return fmt.Errorf("%w: %s at %s is not answered (waited %v): %s", ErrUnreachable, what, endpoint, s.config.ReadyTimeout, status.Convert(err).Message())
}

func (s *Suite) readyPlugin(ctx context.Context, endpoint string) error {
	c := s.clients
	err := s.await(ctx, endpoint, "GetPluginInfo", func(ctx context.Context) error {
		info, err := c.identity.GetPluginInfo(ctx, &csi.GetPluginInfoRequest{}, grpc.WaitForReady(true))
		s.name, s.version = info.GetName(), info.GetVendorVersion()
		return err
	})
	if err != nil {
		return err
	}
	err = s.await(ctx, endpoint, "Probe", func(ctx context.Context) error { return untilReady(ctx, c) })
	if err != nil {
		return err
	}
	err = s.await(ctx, endpoint, "discovery", func(ctx context.Context) error {
		var err error
		s.features, err = discover(ctx, c)
		if code := status.Code(err); code == codes.Unimplemented {
			return nil
		}
		return err
	})
	if err != nil {
		return err
	}
	if pid := s.pid(); pid != 0 && s.process == nil {
		// A plugin in a pid namespace of its own, or of another user, may be
		// out of sight: its table is then not read.
		s.pluginNS, _ = mountns.OfPID(pid)
	}
	if s.features == nil {
		return fmt.Errorf("%w: %s %s does not serve csi.prepare.v1alpha1.NodePrepare", ErrNothingToTest, s.name, s.version)
	}
	if s.config.Features != nil {
		if err := compareFeatures(s.config.Features, s.features); err != nil {
			return err
		}
	}
	if p := profileByName(s.config.Profile); p != nil {
		if f, lacks := s.features.missing(p.requires); lacks {
			return fmt.Errorf("profile %s: the plugin does not claim %s", p.name, f)
		}
	}
	if !s.features[CreateDeleteVolume] && len(s.config.VolumeIDs) == 0 {
		return fmt.Errorf("%w: %s cannot create volumes; name volumes that exist with --volume-id", ErrNothingToTest, s.name)
	}
	if info, err := c.node.NodeGetInfo(ctx, &csi.NodeGetInfoRequest{}); err == nil {
		s.node = info.GetNodeId()
	}
	return nil
}

func untilReady(ctx context.Context, c *clients) error {
	for {
		answer, err := c.identity.Probe(ctx, &csi.ProbeRequest{}, grpc.WaitForReady(true))
		// A call that went out on the connection of a predecessor, before its
		// end was noticed, is lost with it.
		lost := status.Code(err) == codes.Unavailable && ctx.Err() == nil
		if !lost && (err != nil || answer.GetReady() == nil || answer.GetReady().GetValue()) {
			return err
		}
		select {
		case <-ctx.Done():
			if lost {
				return err
			}
			return status.Error(codes.DeadlineExceeded, "Probe answers that the plugin is not ready")
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func (s *Suite) readyPerformer(ctx context.Context, endpoint string) error {
	s.name, s.features = orElse(s.config.Name, endpoint), features{}
	return s.await(ctx, endpoint, "Undo", func(ctx context.Context) error {
		// Any answer will do: to undo nothing is no test.
		_, err := s.clients.performer.Undo(ctx, &testingv1alpha1.UndoRequest{Id: "ready"}, grpc.WaitForReady(true))
		switch status.Code(err) {
		case codes.Unavailable, codes.DeadlineExceeded, codes.Canceled, codes.Unimplemented:
			return err
		}
		return nil
	})
}

// stop ends what start started and removes what it made.
func (s *Suite) stop() { s.stopped.Do(s.end) }

func (s *Suite) end() {
	if s.clients != nil {
		s.clients.close()
	}
	if s.process != nil {
		s.process.stop()
	}
	for _, ns := range []*mountns.Namespace{s.beyond, s.pluginNS} {
		if ns != nil {
			ns.Close() //nolint:errcheck // nothing of it is needed any more
		}
	}
	if s.own == nil {
		return
	}
	if s.dir != "" {
		s.err = errors.Join(s.err, s.removeTree(s.dir))
	}
	s.own.Close() //nolint:errcheck // it was only looked at
}

// restart kills the plugin as a crash would and starts it again.
func (s *Suite) restart(ctx context.Context) error {
	if err := s.process.kill(); err != nil {
		return err
	}
	return s.resume(ctx)
}

// resume starts the plugin that was killed, and waits until it answers.
func (s *Suite) resume(ctx context.Context) error {
	if p := socketPath(s.endpoint()); p != "" {
		// A crash leaves the socket. It is the suite's to remove, in a
		// directory of the suite's.
		if err := os.Remove(p); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	if err := s.process.start(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, s.config.ReadyTimeout)
	defer cancel()
	if s.actor == requirement.CO {
		return s.readyPerformer(ctx, s.endpoint())
	}
	return s.await(ctx, s.endpoint(), "Probe", func(ctx context.Context) error { return untilReady(ctx, s.clients) })
}

// endpoint of who is tested.
func (s *Suite) endpoint() string {
	if s.actor == requirement.CO {
		return s.config.Performer
	}
	return s.config.Endpoint
}

// wanted reports whether the user left the spec in.
func (s *Suite) wanted(d definition) bool {
	only := s.given.Only
	if len(only) > 0 && !slices.ContainsFunc(d.covers, func(id requirement.ID) bool { return slices.Contains(only, id) }) {
		return false
	}
	p := profileByName(s.given.Profile)
	return p == nil || p.actor == s.actor
}

func (s *Suite) noteBroken(id requirement.ID, spec string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.broken[id] == "" {
		s.broken[id] = spec
	}
}

func (s *Suite) brokenIn(id requirement.ID) (spec string, known bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	spec, known = s.broken[id]
	return spec, known
}

// goneSince says why nothing can run any more, "" if it can.
func (s *Suite) goneSince() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.gone
}

// checkGone finds out whether the plugin still answers. If it does not, that
// is kept as the reason why no later spec can run.
func (s *Suite) checkGone(spec string) error {
	why := s.silence()
	if why == nil {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.gone == "" {
		s.gone = fmt.Sprintf("the plugin is gone since %q: %v", spec, why)
	}
	return why
}

func (s *Suite) silence() error {
	if s.process != nil {
		// The end of a process is seen a little after that of its socket.
		select {
		case <-s.process.ended:
			return s.process.gone()
		case <-time.After(100 * time.Millisecond):
		}
	}
	// This call is the suite's own, and in no spec's journal.
	ctx, cancel := context.WithTimeout(context.Background(), s.config.Timeout)
	defer cancel()
	var err error
	if s.actor == requirement.CO {
		_, err = s.clients.performer.Undo(ctx, &testingv1alpha1.UndoRequest{Id: "ready"})
	} else {
		_, err = s.clients.identity.Probe(ctx, &csi.ProbeRequest{})
	}
	switch status.Code(err) {
	case codes.Unavailable, codes.DeadlineExceeded:
		if s.process != nil && s.process.gone() != nil {
			return s.process.gone()
		}
		return fmt.Errorf("it answers nothing any more: %s", answered(err))
	}
	return nil
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
// that its mounts have to propagate is believed; every other one is not let
// near, so that a mount it makes for a consumer never gets there.
func (s *Suite) copyNamespace(ctx context.Context) (*mountns.Namespace, error) {
	if s.beyond != nil && s.features[RequiresPropagation] {
		return s.beyond.Copy(ctx, mountns.Slave())
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
