package sanity

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/sanity/report"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

func TestOutcomeOfASpec(t *testing.T) {
	for _, test := range []struct {
		name    string
		config  func(*Config)
		spec    definition
		outcome report.Outcome
		message string
		breaks  requirement.ID
	}{
		{name: "a body that ends", spec: about(func(*trial) {}), outcome: report.Passed},
		{
			name:    "what does not hold",
			spec:    about(func(t *trial) { t.want(requirement.PrepareReadonly, false, "this", "that") }),
			outcome: report.Failed, message: "expected  this", breaks: requirement.PrepareReadonly,
		},
		{
			name:    "a wrong code",
			spec:    about(func(t *trial) { t.wantCode(requirement.PrepareReadonly, status.Error(codes.Internal, "odd"), codes.OK) }),
			outcome: report.Failed, message: "actual    INTERNAL: odd", breaks: requirement.PrepareReadonly,
		},
		{
			name:    "a system call of the suite",
			spec:    about(func(t *trial) { t.sysfail("looking", unix.EPERM) }),
			outcome: report.CouldNotRun, message: "looking: operation not permitted",
		},
		{
			name:    "a feature nobody claims",
			spec:    about(func(*trial) { panic("ran") }, KindFUSE),
			outcome: report.Unsupported, message: "does not claim node-prepare.kind.fuse",
		},
		{
			name:    "left out",
			config:  func(c *Config) { c.Only = []requirement.ID{requirement.ListComplete} },
			spec:    about(func(*trial) { panic("ran") }),
			outcome: report.Filtered,
		},
		{
			name:    "asked for",
			config:  func(c *Config) { c.Only = []requirement.ID{requirement.PrepareReadonly} },
			spec:    about(func(*trial) {}),
			outcome: report.Passed,
		},
		{
			name: "a mount left in the namespace of the spec",
			spec: about(func(t *trial) {
				t.sysfail("mounting", unix.Mount("left", t.dir, "tmpfs", 0, ""))
			}),
			outcome: report.CouldNotRun, message: "fault of the suite",
		},
		{
			name: "a file left beside prepare_path",
			spec: about(func(t *trial) {
				t.write(filepath.Join(t.dir, "lock"), "")
			}),
			outcome: report.Failed, message: "holds lock", breaks: requirement.PrepareStaysBelow,
		},
		{
			name: "a file left in prepare_path",
			spec: about(func(t *trial) {
				t.write(filepath.Join(t.mkdir("prepare"), "record"), "")
			}),
			outcome: report.Failed, message: "holds record", breaks: requirement.UnpreparePathEmptied,
		},
		{
			name: "a clean-up that fails",
			spec: about(func(t *trial) {
				t.cleanup(func() error { return errors.New("stuck") })
			}),
			outcome: report.CouldNotRun, message: "stuck",
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			if test.config == nil {
				test.config = unchanged
			}
			s := started(t, test.config)
			r := s.run(t.Context(), test.spec)
			if r.Outcome != test.outcome || !strings.Contains(r.Message, test.message) || r.Breaks != test.breaks {
				t.Errorf("got %s, breaks %q, %s\nwant %s, breaks %q, %s", r.Outcome, r.Breaks, r.Message, test.outcome, test.breaks, test.message)
			}
			if left := names(s.dir); len(left) > 0 {
				t.Errorf("left in the directory of the suite: %v", left)
			}
		})
	}
}

func TestCleanUpComesInReverseWhateverFails(t *testing.T) {
	s := started(t, unchanged)
	var order []int
	s.run(t.Context(), about(func(t *trial) {
		for i := range 3 {
			t.cleanup(func() error {
				order = append(order, i)
				if i == 1 {
					return errors.New("fails")
				}
				return nil
			})
		}
		t.fail(requirement.PrepareReadonly, "this", "that")
	}))
	if len(order) != 3 || order[0] != 2 || order[2] != 0 {
		t.Errorf("clean-up ran in the order %v, want 2 1 0", order)
	}
}

func TestARootCauseFailsOnce(t *testing.T) {
	s := started(t, unchanged)
	needs := about(func(t *trial) {
		t.need(requirement.PrepareAnswered, status.Error(codes.Internal, "broken"), "OK")
	})
	first := s.run(t.Context(), needs)
	if first.Outcome != report.Failed || first.Breaks != requirement.PrepareAnswered {
		t.Fatalf("the first: %s, breaks %s", first.Outcome, first.Breaks)
	}
	for range 2 {
		later := s.run(t.Context(), needs)
		if later.Outcome != report.CouldNotRun || !strings.Contains(later.Message, `prepare.answered, which does not hold: see "a spec"`) {
			t.Errorf("a later one: %s: %s", later.Outcome, later.Message)
		}
	}
}

func TestAPluginThatIsGoneFailsOneSpec(t *testing.T) {
	needRoot(t)
	c := Config{Exec: []string{"sh", "-c", "exit 3"}, WorkDir: t.TempDir()}
	s := newSuite(&c)
	t.Cleanup(s.Stop)
	err := s.Start(t.Context())
	if !errors.Is(err, ErrUnreachable) || !strings.Contains(err.Error(), "exit status 3") {
		t.Fatalf("start: %v", err)
	}
	if r := s.run(t.Context(), about(func(*trial) { panic("ran") })); r.Outcome != report.CouldNotRun {
		t.Errorf("a spec: %s", r.Outcome)
	}
	s = started(t, unchanged)
	s.clients.close()
	ask := about(func(t *trial) {
		_, err := t.listed()
		t.wantCode(requirement.PrepareReadonly, err, codes.OK)
	})
	closed := s.run(t.Context(), ask)
	if closed.Outcome != report.Failed {
		t.Errorf("the spec that found out: %s: %s", closed.Outcome, closed.Message)
	}
}

func TestTheMainThreadStaysInItsNamespace(t *testing.T) {
	s := started(t, unchanged)
	before, err := leaderNamespace()
	if err != nil {
		t.Fatal(err)
	}
	var inside string
	s.run(t.Context(), about(func(*trial) { inside, _ = os.Readlink("/proc/thread-self/ns/mnt") }))
	after, err := leaderNamespace()
	own, _ := os.Readlink("/proc/self/ns/mnt")
	if err != nil || before != after || inside == own || inside == "" {
		t.Errorf("before %d, after %d (%v); the spec ran in %s, the process is in %s", before, after, err, inside, own)
	}
}
