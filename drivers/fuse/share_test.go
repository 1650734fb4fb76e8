package fuse

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/handoff"
)

var sharing = map[string]string{"share": "true"}

func (s *site) sameFilesystem(a, b string) (same bool) {
	s.t.Helper()
	s.inConsumer(func() error {
		var one, other unix.Stat_t
		if err := unix.Stat(s.point(a), &one); err != nil {
			return err
		}
		err := unix.Stat(s.point(b), &other)
		same = one.Dev == other.Dev
		return err
	})
	return same
}

func TestPreparationsShareAServer(t *testing.T) {
	s := newSite(t, nil)
	v := s.create("v", sharing)
	p, q := handoff.Key{VolumeID: v, PrepareID: "p"}, handoff.Key{VolumeID: v, PrepareID: "q"}
	s.up(p)
	if h := s.up(q); !h.Shared || !h.Resumable {
		t.Errorf("%+v", h)
	}
	if n := len(s.servers()); n != 1 || !s.sameFilesystem("p", "q") {
		t.Errorf("%d servers", n)
	}
	// What one consumer writes the other reads, at once and not by a second.
	s.inConsumer(func() error {
		for n := range 100 {
			text := fmt.Sprint(n)
			if err := os.WriteFile(s.point("p")+"/f", []byte(text), 0o644); err != nil {
				return err
			}
			if b, err := os.ReadFile(s.point("q") + "/f"); err != nil || string(b) != text {
				return fmt.Errorf("it holds %q, %w", b, err)
			}
		}
		return nil
	})
	// A repeat changes nothing, and one ends without the other.
	if _, err := s.call(q); err != nil {
		t.Error(err)
	}
	s.down(p)
	s.inConsumer(func() error { return os.WriteFile(s.point("q")+"/g", nil, 0o644) })
	s.down(q)
	if left := s.servers(); len(left) > 0 {
		t.Errorf("still serving: %v", left)
	}
	if n := s.listener.Descriptors(); n != 0 {
		t.Errorf("the CO holds %d descriptors", n)
	}
	orphans, err := os.ReadDir(filepath.Join(s.config.Dir, "volumes", v, "orphans"))
	if err != nil || len(orphans) > 0 {
		t.Errorf("orphans: %v, %v", orphans, err)
	}
}

func TestASharedServerIsResumedForAll(t *testing.T) {
	s := newSite(t, nil)
	v := s.create("v", sharing)
	p, q := handoff.Key{VolumeID: v, PrepareID: "p"}, handoff.Key{VolumeID: v, PrepareID: "q"}
	s.up(p)
	s.up(q)
	stop := s.failover()
	one, other := s.consume("p"), s.consume("q")
	for range 3 {
		time.Sleep(100 * time.Millisecond)
		for _, pid := range s.servers() {
			s.must(unix.Kill(pid, unix.SIGKILL))
		}
		s.waitFor(func() bool { return len(s.servers()) == 1 })
	}
	time.Sleep(100 * time.Millisecond)
	for _, c := range []*consumerProcess{one, other} {
		if o := c.finish(t); o.Failed > 0 || o.Operations == 0 {
			t.Errorf("%+v", o)
		}
	}
	if n := stop(); n == 0 {
		t.Error("the CO noticed no death")
	}
	if !s.sameFilesystem("p", "q") || len(s.servers()) != 1 {
		t.Error("they share no more")
	}
	s.down(q)
	s.down(p)
}

func TestASharedServerAfterTheCORestarted(t *testing.T) {
	s := newSite(t, nil)
	v := s.create("v", sharing)
	p, q, r := handoff.Key{VolumeID: v, PrepareID: "p"}, handoff.Key{VolumeID: v, PrepareID: "q"}, handoff.Key{VolumeID: v, PrepareID: "r"}
	s.up(p)
	s.up(q)
	s.listener.Close()
	s.listen(nil)
	for _, key := range []handoff.Key{p, q} {
		if _, err := s.call(key); err != nil {
			t.Fatal(err)
		}
	}
	s.up(r) // a new one gets its share
	if n := len(s.servers()); n != 1 || !s.sameFilesystem("p", "r") {
		t.Errorf("%d servers", n)
	}
	for _, key := range []handoff.Key{r, p, q} {
		s.down(key)
	}
	if left := s.servers(); len(left) > 0 {
		t.Errorf("still serving: %v", left)
	}
}

// Who comes with other secrets is not served by a process that knows these.
func TestWhoBringsSecretsSharesNothing(t *testing.T) {
	s := newSite(t, nil)
	v := s.create("v", sharing)
	p, q, r := handoff.Key{VolumeID: v, PrepareID: "p"}, handoff.Key{VolumeID: v, PrepareID: "q"}, handoff.Key{VolumeID: v, PrepareID: "r"}
	s.up(p)
	s.secrets = map[string]string{"user": "somebody"}
	if h := s.up(q); h.Shared {
		t.Errorf("%+v", h)
	}
	s.secrets = nil
	s.up(r)
	if n := len(s.servers()); n != 2 || s.sameFilesystem("p", "q") || !s.sameFilesystem("p", "r") {
		t.Errorf("%d servers", n)
	}
	s.down(p)
	s.down(r) // the last that shares, while q is there
	if n := len(s.servers()); n != 1 {
		t.Errorf("%d servers", n)
	}
	s.down(q)
}
