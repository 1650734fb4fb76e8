package fuse

import (
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/reference/fusemount"
	"github.com/csi-prepare/csi-prepare/reference/handoff"
)

// inConsumer runs fn where the volume is mounted. It must leave no file of the
// volume open.
func (s *site) inConsumer(fn func() error) {
	s.t.Helper()
	s.must(s.consumer.Do(s.t.Context(), fn))
}

func TestAVolumeIsUsedAndGone(t *testing.T) {
	for name, parameters := range map[string]map[string]string{
		"disk": nil, "memory": {"medium": "memory"}, "owner": {"owner": "1000:1001"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSite(t, nil)
			key := handoff.Key{VolumeID: s.create("v", parameters), PrepareID: "p"}
			for range 2 { // data stays from one preparation to the next
				s.up(key)
				s.inConsumer(func() error {
					f := s.point("p") + "/f"
					old, _ := os.ReadFile(f)
					if err := os.WriteFile(f, append(old, 'x'), 0o644); err != nil {
						return err
					}
					var st unix.Stat_t
					if err := unix.Stat(f, &st); err != nil {
						return err
					}
					if owner := fmt.Sprintf("%d:%d", st.Uid, st.Gid); parameters["owner"] != "" && owner != parameters["owner"] {
						t.Errorf("the owner is %s", owner)
					}
					return nil
				})
				s.down(key)
				if left := s.servers(); len(left) > 0 {
					t.Errorf("still serving after Unprepare: %v", left)
				}
			}
			s.up(key)
			s.inConsumer(func() error {
				b, err := os.ReadFile(s.point("p") + "/f")
				if string(b) != "xx" {
					t.Errorf("it holds %q", b)
				}
				return err
			})
			s.down(key)
			if n := s.listener.Descriptors(); n != 0 {
				t.Errorf("the CO holds %d descriptors", n)
			}
		})
	}
}

func TestTheServingProcessHasNoPrivilege(t *testing.T) {
	s := newSite(t, nil)
	key := handoff.Key{VolumeID: s.create("v", nil), PrepareID: "p"}
	s.up(key)
	pids := s.servers()
	if len(pids) != 1 {
		t.Fatalf("serving processes: %v", pids)
	}
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pids[0]))
	s.must(err)
	for _, want := range []string{
		fmt.Sprintf("Uid:\t%d\t%[1]d\t%[1]d\t%[1]d", plugin), "CapInh:\t0000000000000000",
		"CapPrm:\t0000000000000000", "CapEff:\t0000000000000000", "CapAmb:\t0000000000000000",
	} {
		if !strings.Contains(string(text), want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	for _, file := range []string{"cmdline", "environ"} {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pids[0], file))
		s.must(err)
		if strings.Contains(string(b), "token") {
			t.Errorf("%s: %q", file, b)
		}
	}
	s.down(key)
}

func TestNothingNoticesTheDeathOfTheCSIProcess(t *testing.T) {
	s := newSite(t, nil)
	key := handoff.Key{VolumeID: s.create("v", nil), PrepareID: "p"}
	s.up(key)
	c := s.consume("p")
	s.stop(syscall.SIGKILL)
	time.Sleep(100 * time.Millisecond)
	s.start()
	if _, err := s.call(key); err != nil { // a repeat finds the server
		t.Error(err)
	}
	time.Sleep(100 * time.Millisecond)
	if o := c.finish(t); o.Failed+o.Corrupt+o.Twice > 0 || o.Operations == 0 {
		t.Errorf("%+v", o)
	}
	select {
	case n := <-s.gone:
		t.Errorf("the CO noticed: %+v", n)
	default:
	}
	s.down(key)
}

func TestTheDeathOfTheServingProcessIsADelay(t *testing.T) {
	s := newSite(t, nil)
	key := handoff.Key{VolumeID: s.create("v", nil), PrepareID: "p"}
	s.up(key)
	stop := s.failover()
	c := s.consume("p")
	kills := 100
	if testing.Short() {
		kills = 10
	}
	for range kills {
		time.Sleep(60 * time.Millisecond)
		pids := s.servers()
		for range 500 {
			if len(pids) == 1 {
				break
			}
			time.Sleep(10 * time.Millisecond)
			pids = s.servers()
		}
		if len(pids) != 1 {
			t.Fatalf("serving processes: %v", pids)
		}
		s.must(unix.Kill(pids[0], unix.SIGKILL))
	}
	time.Sleep(100 * time.Millisecond)
	o := c.finish(t)
	if n := stop(); n == 0 || n > kills { // one that dies before it serves is a failed call
		t.Errorf("the CO noticed %d deaths of %d", n, kills)
	}
	t.Logf("%d operations over %d deaths; %d answered as done before", o.Operations, kills, o.Twice)
	if o.Failed > 0 || o.Corrupt > 0 || o.Operations == 0 {
		t.Errorf("%+v", o)
	}
	s.down(key)
}

func TestNobodyWaitsForASuccessorForEver(t *testing.T) {
	s := newSite(t, func(c *handoff.Config) { c.Failover = 300 * time.Millisecond })
	key := handoff.Key{VolumeID: s.create("v", nil), PrepareID: "p"}
	s.up(key)
	c := s.consume("p")
	time.Sleep(50 * time.Millisecond)
	for _, pid := range s.servers() {
		s.must(unix.Kill(pid, unix.SIGKILL))
	}
	for final := false; !final; {
		n := <-s.gone
		final = n.Until.IsZero()
		if n.Err != nil {
			t.Errorf("abort: %v", n.Err)
		}
	}
	o := c.finish(t) // it is not stuck
	if !strings.Contains(o.First, unix.ENOTCONN.Error()) && !strings.Contains(o.First, unix.ECONNABORTED.Error()) {
		t.Errorf("the consumer got %q", o.First)
	}
	// Prepared anew, it is a new mount, and is put in the place of the dead.
	h, err := s.call(key)
	s.must(err)
	s.inConsumer(func() error {
		err := fusemount.Replace(t.Context(), h.Mount, s.point("p"), nil)
		if err == nil {
			_, err = os.ReadDir(s.point("p"))
		}
		return err
	})
	s.down(key)
}

func TestADepositAfterTheCORestarted(t *testing.T) {
	s := newSite(t, nil)
	key := handoff.Key{VolumeID: s.create("v", nil), PrepareID: "p"}
	s.up(key)
	c := s.consume("p")
	s.listener.Close()
	s.listen(nil)
	h, err := s.call(key)
	s.must(err)
	if !h.Resumable || s.listener.Descriptors() != 3 {
		t.Errorf("%+v, %d descriptors", h, s.listener.Descriptors())
	}
	// And what was deposited is resumed from.
	stop := s.failover()
	for _, pid := range s.servers() {
		s.must(unix.Kill(pid, unix.SIGKILL))
	}
	time.Sleep(200 * time.Millisecond)
	if o := c.finish(t); o.Failed+o.Corrupt > 0 {
		t.Errorf("%+v", o)
	}
	if n := stop(); n != 1 {
		t.Errorf("%d failovers", n)
	}
	s.down(key)
}

func TestUnprepareWhileTheConnectionLives(t *testing.T) {
	s := newSite(t, nil)
	key := handoff.Key{VolumeID: s.create("v", nil), PrepareID: "p"}
	s.up(key)
	if err := s.unprepare(key); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("got %v", err)
	}
	s.down(key)
	s.must(s.unprepare(key)) // again: OK
}

func TestWithoutASocketThereIsNoFUSE(t *testing.T) {
	s := newSite(t, func(c *handoff.Config) { c.Mount = nil })
	key := handoff.Key{VolumeID: s.create("v", nil), PrepareID: "p"}
	if _, err := s.call(key); status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "no FUSE") {
		t.Errorf("got %v", err)
	}
	if left := s.servers(); len(left) > 0 {
		t.Errorf("serving processes: %v", left)
	}
}
