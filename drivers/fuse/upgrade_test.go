package fuse

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/handoff"
)

// install puts a copy of this program where the driver is started from, in the
// place of the one that is there.
func (s *site) install() {
	s.t.Helper()
	in, err := os.Open("/proc/self/exe")
	s.must(err)
	defer in.Close()
	s.program = filepath.Join(s.base, "program")
	next, err := os.OpenFile(s.program+".next", os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o755)
	s.must(err)
	_, err = io.Copy(next, in)
	s.must(err)
	s.must(next.Close())
	s.must(os.Rename(next.Name(), s.program))
}

// The program of the driver is replaced while it is at work: first the process
// behind the socket goes over to the new one, then each server.
func TestAnUpgradeUnderLoad(t *testing.T) {
	s := newSite(t, nil)
	s.stop(syscall.SIGTERM)
	s.install()
	s.start()
	key := handoff.Key{VolumeID: s.create("v", nil), PrepareID: "p"}
	s.up(key)
	stop := s.failover()
	c := s.consume("p")
	runs := func(pid int) string {
		to, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid))
		s.must(err)
		return to
	}
	old := s.servers()
	s.install()
	s.stop(syscall.SIGTERM)
	s.start()
	if _, err := s.call(key); err != nil {
		t.Error(err)
	}
	if now := s.servers(); len(now) != 1 || now[0] != old[0] || runs(now[0]) == s.program {
		t.Errorf("servers %v, %v before: the old one goes on", now, old)
	}
	s.must(unix.Kill(old[0], unix.SIGKILL))
	s.waitFor(func() bool { now := s.servers(); return len(now) == 1 && now[0] != old[0] && runs(now[0]) == s.program })
	time.Sleep(200 * time.Millisecond)
	if o := c.finish(t); o.Failed+o.Corrupt > 0 || o.Operations == 0 {
		t.Errorf("%+v", o)
	}
	if n := stop(); n != 1 {
		t.Errorf("%d failovers", n)
	}
	s.down(key)
}
