package fuse

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/handoff"
	"github.com/csi-prepare/csi-prepare/reference/master"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
	"github.com/csi-prepare/csi-prepare/reference/perform"
)

// userNamespace is one in which id 0 is the node's 100000.
func (s *site) userNamespace() *os.File {
	s.t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), roleVariable+"=wait")
	in, err := cmd.StdinPipe()
	s.must(err)
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: 100000, Size: 65536}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: 100000, Size: 65536}},
	}
	s.must(cmd.Start())
	f, err := os.Open(fmt.Sprintf("/proc/%d/ns/user", cmd.Process.Pid))
	in.Close()
	_ = cmd.Wait()
	s.must(err)
	s.t.Cleanup(func() { f.Close() })
	return f
}

// perform is what a CO does with the answer: the whole of it.
func (s *site) perform(key handoff.Key, idmap *os.File, a mountspec.Attributes) ([]perform.Receipt, error) {
	s.t.Helper()
	h, err := s.call(key)
	s.must(err)
	s.must(os.MkdirAll(s.point(key.PrepareID), 0o755))
	done, err := perform.Perform(s.t.Context(),
		perform.Target{Namespace: s.consumer, Path: s.point(key.PrepareID)},
		[]mountspec.Spec{{Kind: &mountspec.FUSE{ID: h.ID, Resumable: true}, Attributes: a, IDMapSupported: true}},
		perform.Options{
			Request: mountspec.Request{Performer: mountspec.Performer{Kinds: []mountspec.KindName{mountspec.KindFUSE}, IDMap: true}},
			Masters: map[string]*master.Mount{h.ID: master.Made(h.Mount)},
			IDMap:   idmap,
		})
	if err != nil {
		return nil, err
	}
	return done.Receipts, nil
}

func TestItIsPerformedAndUndone(t *testing.T) {
	s := newSite(t, nil)
	own, err := s.consumer.Table(t.Context())
	s.must(err)
	volume := s.create("v", nil)
	first, second := handoff.Key{VolumeID: volume, PrepareID: "p1"}, handoff.Key{VolumeID: volume, PrepareID: "p2"}
	plain, err := s.perform(first, nil, mountspec.Attributes{})
	s.must(err)
	// Of a consumer in a user namespace, read-only, served by another process.
	mapped, err := s.perform(second, s.userNamespace(), mountspec.Attributes{Readonly: true})
	s.must(err)

	s.inConsumer(func() error {
		if err := os.WriteFile(s.point("p1")+"/f", []byte("x"), 0o644); err != nil {
			return err
		}
		for place, owner := range map[string]uint32{"p1": 0, "p2": 100000} {
			var st unix.Stat_t
			if err := unix.Stat(s.point(place)+"/f", &st); err != nil {
				return err
			}
			if st.Uid != owner || st.Gid != owner {
				t.Errorf("%s: the owner is %d:%d, want %d", place, st.Uid, st.Gid, owner)
			}
		}
		if err := os.WriteFile(s.point("p2")+"/g", nil, 0o644); !errors.Is(err, unix.EROFS) {
			t.Errorf("read-only: %v", err)
		}
		return nil
	})
	// Nobody else sees a mount of it: not the CO either.
	table, err := os.ReadFile("/proc/self/mountinfo")
	s.must(err)
	if n := len(s.servers()); n != 2 {
		t.Errorf("%d serving processes", n)
	}
	for _, place := range []string{"p1", "p2"} {
		if bytes.Contains(table, []byte(s.point(place))) {
			t.Errorf("%s is in the CO's namespace", place)
		}
	}

	s.must(perform.Undo(t.Context(), s.consumer, mapped))
	s.must(perform.Undo(t.Context(), s.consumer, plain))
	for _, key := range []handoff.Key{first, second} {
		s.listener.Release(key)
		s.must(s.unprepare(key))
	}
	after, err := s.consumer.Table(t.Context())
	s.must(err)
	if len(after.Mounts) != len(own.Mounts) {
		t.Errorf("%d mounts, %d before", len(after.Mounts), len(own.Mounts))
	}
}

func TestUndoKeepsABusyMount(t *testing.T) {
	s := newSite(t, nil)
	key := handoff.Key{VolumeID: s.create("v", nil), PrepareID: "p"}
	receipts, err := s.perform(key, nil, mountspec.Attributes{})
	s.must(err)
	c := s.consume("p")
	s.waitFor(func() bool {
		names, err := filepath.Glob(fmt.Sprintf("%s/volumes/volumes/%s/data/consumer-*-worker-0", s.base, key.VolumeID))
		return err == nil && len(names) > 0
	})
	var busy *perform.BusyError
	if err := perform.Undo(t.Context(), s.consumer, receipts); !errors.As(err, &busy) {
		t.Errorf("got %v", err)
	}
	if o := c.finish(t); o.Failed+o.Corrupt > 0 {
		t.Errorf("%+v", o)
	}
	s.must(perform.Undo(t.Context(), s.consumer, receipts))
	s.listener.Release(key)
	s.must(s.unprepare(key))
}
