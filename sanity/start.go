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

func (s *Suite) start(ctx context.Context) (err error) {
	if s.config, err = s.given.complete(); err != nil {
		return err
	}
	for _, of := range s.config.Secrets {
		for _, secret := range of {
			s.hide(secret)
		}
	}
	s.random = rand.New(rand.NewPCG(uint64(s.config.Seed), 0)) //nolint:gosec // test data, not keys
	if s.nsBefore, err = leaderNamespace(); err != nil {
		return err
	}
	if s.own, err = mountns.Own(); err != nil {
		return err
	}
	s.loopsBefore = loopSequences()
	if s.dir, err = os.MkdirTemp(s.config.WorkDir, "prepare-sanity-"); err != nil {
		return fmt.Errorf("making the working directory: %w", err)
	}
	if err = os.Chmod(s.dir, 0o755); err != nil {
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
	if errors.Is(ctx.Err(), context.Canceled) {
		return errors.New("interrupted")
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
		return err
	})
	if err != nil {
		return err
	}
	if s.handsOver() {
		if err := s.openChannel(); err != nil {
			return err
		}
	}
	if pid := s.pid(); pid != 0 && s.process == nil {
		// A plugin in a pid namespace of its own, or of another user, may be
		// out of sight: its table is then not read.
		s.pluginNS, _ = mountns.OfPID(pid)
	}
	if s.config.Features != nil {
		if err := compareFeatures(s.config.Features, s.features); err != nil {
			return err
		}
	}
	s.features.chosen(s.config.Block)
	if s.config.Profile == string(NodeNetwork) {
		s.features[NetworkFilesystem] = true
	}
	if p := profileByName(s.config.Profile); p != nil {
		if f, lacks := s.features.missing(p.claims); lacks {
			return fmt.Errorf("profile %s: %s", p.name, lacking(f))
		}
	}
	if !s.testable() {
		return fmt.Errorf("%w: %s %s serves neither csi.prepare.v1alpha1.NodePrepare nor anything else that has a spec", ErrNothingToTest, s.name, s.version)
	}
	if !s.features[CreateDeleteVolume] && len(s.config.VolumeIDs) == 0 {
		return fmt.Errorf("%w: %s cannot create volumes; name volumes that exist with --volume-id", ErrNothingToTest, s.name)
	}
	if info, err := c.node.NodeGetInfo(ctx, &csi.NodeGetInfoRequest{}); err == nil {
		s.node = info.GetNodeId()
	}
	return nil
}

// testable reports whether the plugin claims what any spec needs.
func (s *Suite) testable() bool {
	for _, sec := range sections(s.actor) {
		for _, d := range sec.specs {
			if _, missing := s.features.missing(d.needs); !missing {
				return true
			}
		}
	}
	return false
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
	err := s.await(ctx, endpoint, "Undo", func(ctx context.Context) error {
		// Any answer will do: to undo nothing is no test.
		_, err := s.clients.performer.Undo(ctx, &testingv1alpha1.UndoRequest{Id: "ready"}, grpc.WaitForReady(true))
		switch status.Code(err) {
		case codes.Unavailable, codes.DeadlineExceeded, codes.Canceled, codes.Unimplemented:
			return err
		}
		return nil
	})
	if err != nil {
		return err
	}
	// A whole CO serves this too; of nothing there is nothing to take down.
	_, err = s.clients.orchestrator.Down(ctx, &testingv1alpha1.DownRequest{})
	if status.Code(err) != codes.Unimplemented {
		s.features[Orchestrate] = true
	}
	return nil
}

// stop ends what start started and removes what it made.
func (s *Suite) stop() { s.stopped.Do(s.end) }

func (s *Suite) end() {
	if s.clients != nil {
		s.clients.channel.close()
		s.clients.close()
	}
	if s.process != nil {
		s.process.stop()
	}
	for _, ns := range []*mountns.Namespace{s.beyond, s.pluginNS} {
		if ns != nil {
			_ = ns.Close() // nothing of it is needed any more
		}
	}
	if s.own == nil {
		return
	}
	if s.dir != "" {
		s.err = errors.Join(s.err, s.removeTree(s.dir))
	}
	_ = s.own.Close() // it was only looked at
}

// restart kills the plugin as a crash would and starts it again.
func (s *Suite) restart(ctx context.Context) error {
	if err := s.process.kill(); err != nil {
		return err
	}
	return s.resume(ctx)
}

// resume starts the plugin that was killed, and waits until it answers, also
// when the spec is interrupted: only a plugin that lives can take away what the
// spec has made.
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
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.config.ReadyTimeout)
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
