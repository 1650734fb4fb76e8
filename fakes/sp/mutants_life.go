package sp

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/csi-prepare/csi-prepare/fakes/mutant"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// A restart, a cancelled call, a concurrent one; and what may not be shown or
// reached in the course of it.
var lifeMutants = []Mutant{
	seat("forgets-on-restart", mutant.Restart, requirement.ListSurvivesRestart,
		"preparations are kept in memory alone: after a restart of the plugin they are in no list",
		keeping(func(s *state) { clear(s.prepared) })),
	seat("refuses-repeat-after-restart", mutant.Restart, requirement.CrashStateSurvives,
		"the capability of a preparation is lost in a restart: an identical repeat is ALREADY_EXISTS",
		keeping(func(s *state) {
			for key, r := range s.prepared {
				r = proto.CloneOf(r)
				r.VolumeCapability = nil
				s.prepared[key] = r
			}
		})),
	seat("ignores-boot-id", mutant.Restart, requirement.CrashBootID,
		"preparations of an earlier boot are taken for living ones: what they stood for is gone",
		func(s *Server) { s.rules.boot = func() (string, error) { return "any", nil } }),
	seat("cancelled-holds-lock", mutant.Concurrency, requirement.ConcurrencyCancelled,
		"a call that was cancelled never gives its lock back: the pair answers ABORTED for ever",
		func(s *Server) {
			var held memory[pair, bool]
			instead(func(ctx context.Context, _ *Server, r *prepareRequest, next func() (*prepareResponse, error)) (*prepareResponse, error) {
				key := pair{r.GetVolumeId(), r.GetPrepareId()}
				if held.all()[key] {
					return nil, status.Error(codes.Aborted, "prepare_id: a call for it is pending")
				}
				answer, err := next()
				if cancelled(ctx) {
					held.swap(key, true)
				}
				return answer, err
			})(s)
		}),
	seat("concurrent-internal", mutant.Concurrency, requirement.ConcurrencySamePair,
		"the second of two calls at a time for one pair is INTERNAL, which says that the plugin is broken",
		func(s *Server) {
			var pending memory[pair, bool]
			instead(func(_ context.Context, _ *Server, r *prepareRequest, next func() (*prepareResponse, error)) (*prepareResponse, error) {
				key := pair{r.GetVolumeId(), r.GetPrepareId()}
				if busy, _ := pending.swap(key, true); busy {
					return nil, status.Error(codes.Internal, "prepare_id: the record is locked")
				}
				defer pending.swap(key, false)
				time.Sleep(5 * time.Millisecond)
				return next()
			})(s)
		}),
	seat("one-lock-for-all", mutant.Concurrency, requirement.ConcurrencyOthersFree,
		"a call that was cancelled keeps the plugin's one lock for a while, and every other volume waits",
		func(s *Server) {
			one := make(chan struct{}, 1)
			instead(func(ctx context.Context, _ *Server, _ *prepareRequest, next func() (*prepareResponse, error)) (*prepareResponse, error) {
				select {
				case one <- struct{}{}:
				case <-ctx.Done():
					return nil, status.FromContextError(ctx.Err()).Err()
				}
				answer, err := next()
				if cancelled(ctx) {
					time.AfterFunc(10*time.Second, func() { <-one })
				} else {
					<-one
				}
				return answer, err
			})(s)
		}),
	seat("secret-in-error", mutant.Secrets, requirement.SecuritySecretsSP,
		"an error repeats the request, its secrets included: they end up in events everybody reads",
		failed(func(r *prepareRequest, err error) error {
			return status.Errorf(status.Code(err), "%s (secrets %q)", status.Convert(err).Message(), r.GetSecrets())
		})),
	seat("secret-in-log", mutant.Secrets, requirement.SecuritySecretsSP,
		"every request is logged whole",
		asked(func(_ *Server, r *prepareRequest) {
			fmt.Fprintln(os.Stderr, "prepare", r.GetVolumeId(), r.GetSecrets())
		})),
	seat("secret-in-file", mutant.Secrets, requirement.SecuritySecretsSP,
		"the secrets of a preparation are kept on disk in clear",
		answered(func(s *Server, r *prepareRequest, _ *prepareResponse) {
			if s.config.StateDir != "" && len(r.GetSecrets()) > 0 {
				secrets := slices.Sorted(maps.Values(r.GetSecrets()))
				_ = os.WriteFile(filepath.Join(s.config.StateDir, "secrets"), []byte(strings.Join(secrets, "\n")), 0o600)
			}
		})),
	seat("name-escapes", mutant.Escape, requirement.SecurityIDConfined,
		"the name of a volume becomes a path: with dots in it a directory is made outside the grant",
		asked(func(s *Server, r *csi.CreateVolumeRequest) {
			grant := s.config.Grants[s.grant()]
			// No further than beside the grant: this is a fake.
			if escaped := filepath.Join(grant, r.GetName()); filepath.Dir(escaped) == filepath.Dir(grant) && escaped != grant {
				_ = os.Mkdir(escaped, 0o700)
			}
		})),
}

// cancelled reports whether a caller gives up while its call is at work,
// which takes long enough for that, and longer if there is a deadline soon.
func cancelled(ctx context.Context) bool {
	work := 5 * time.Millisecond
	if deadline, set := ctx.Deadline(); set && time.Until(deadline) < 100*time.Millisecond {
		work += 200 * time.Millisecond
	}
	select {
	case <-ctx.Done():
		return true
	case <-time.After(work):
		return false
	}
}

// keeping changes what is made durable, and only that.
func keeping(change func(*state)) fault {
	return func(s *Server) {
		s.rules.keep = func(dir, boot string, now *state) error {
			kept := state{volumes: now.volumes, prepared: maps.Clone(now.prepared), staged: now.staged}
			change(&kept)
			return keep(dir, boot, &kept)
		}
	}
}
