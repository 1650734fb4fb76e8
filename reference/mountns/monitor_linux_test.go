package mountns

import (
	"context"
	"errors"
	"os"
	"slices"
	"strconv"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
)

func monitorOf(t *testing.T, n *Namespace, options ...MonitorOption) *Monitor {
	t.Helper()
	m, err := NewMonitor(options...)
	must(t, err)
	t.Cleanup(func() { _ = m.Close() })
	must(t, m.Add(t.Context(), n))
	return m
}

// collect waits for at least count events.
func collect(t *testing.T, m *Monitor, count int) []Event {
	t.Helper()
	var events []Event
	for len(events) < count {
		more, err := m.Next(t.Context())
		must(t, err)
		events = append(events, more...)
	}
	return events
}

// unrecovered are the events without the mark of how they were found.
func unrecovered(events []Event) []Event {
	events = slices.Clone(events)
	for i := range events {
		events[i].Recovered = false
	}
	return events
}

func TestMonitorTellsWhatComesAndGoes(t *testing.T) {
	eachKernel(t, func(t *testing.T, f kernel.Features) {
		first, second := limited(namespace(t), f), limited(namespace(t), f)
		dir := t.TempDir()
		m := monitorOf(t, first, WithFeatures(f))
		must(t, m.Add(t.Context(), second))
		must(t, m.Add(t.Context(), second))
		for _, n := range []*Namespace{first, second} {
			inside(t, n, func() error { return mountTmpfs(dir, "") })
			mount, _ := tableOf(t, n).Top(dir)
			want := []Event{{Namespace: n.ID(), ID: mount.ID, Kind: Attached}}
			if diff := cmp.Diff(want, unrecovered(collect(t, m, 1))); diff != "" {
				t.Error(diff)
			}
			inside(t, n, func() error { return unix.Unmount(dir, 0) })
			want[0].Kind = Detached
			if diff := cmp.Diff(want, unrecovered(collect(t, m, 1))); diff != "" {
				t.Error(diff)
			}
		}
		// A namespace no longer watched is silent.
		must(t, m.Remove(first))
		inside(t, first, func() error { return mountTmpfs(dir, "") })
		inside(t, second, func() error { return mountTmpfs(dir, "") })
		mount, _ := tableOf(t, second).Top(dir)
		want := []Event{{Namespace: second.ID(), ID: mount.ID, Kind: Attached}}
		if diff := cmp.Diff(want, unrecovered(collect(t, m, 1))); diff != "" {
			t.Error(diff)
		}
	})
}

func TestMonitorTellsAMove(t *testing.T) {
	need(t, "mount events", kernel.Probe().MountEvents)
	n := namespace(t)
	dir := t.TempDir()
	inside(t, n, func() error {
		return errors.Join(mountTmpfs(dir, ""), unix.Mount("", dir, "", unix.MS_PRIVATE, ""),
			mountTmpfs(dir+"/from", ""), os.Mkdir(dir+"/to", 0o700))
	})
	mount, _ := tableOf(t, n).Top(dir + "/from")
	m := monitorOf(t, n)
	inside(t, n, func() error { return unix.Mount(dir+"/from", dir+"/to", "", unix.MS_MOVE, "") })
	want := []Event{{Namespace: n.ID(), ID: mount.ID, Kind: Moved}}
	if diff := cmp.Diff(want, collect(t, m, 1)); diff != "" {
		t.Error(diff)
	}
}

// What the queue cannot hold is found by comparing, and the account is right
// afterwards.
func TestMonitorRecoversFromOverflow(t *testing.T) {
	need(t, "mount events", kernel.Probe().MountEvents)
	text, err := os.ReadFile("/proc/sys/fs/fanotify/max_queued_events")
	must(t, err)
	limit, err := strconv.Atoi(string(text[:len(text)-1]))
	must(t, err)
	if limit > 1<<17 {
		t.Skipf("filling a queue of %d events takes too long", limit)
	}
	n := namespace(t)
	dir := t.TempDir()
	inside(t, n, func() error { return errors.Join(mountTmpfs(dir, ""), mountTmpfs(dir+"/leaves", "")) })
	leaves, _ := tableOf(t, n).Top(dir + "/leaves")
	m := monitorOf(t, n)
	inside(t, n, func() error {
		if err := os.Mkdir(dir+"/restless", 0o700); err != nil {
			return err
		}
		for range limit/2 + 10 {
			if err := unix.Mount(dir+"/leaves", dir+"/restless", "", unix.MS_BIND, ""); err != nil {
				return err
			}
			if err := unix.Unmount(dir+"/restless", unix.MNT_DETACH); err != nil {
				return err
			}
		}
		return errors.Join(unix.Unmount(dir+"/leaves", 0), mountTmpfs(dir+"/stays", ""))
	})
	stays, _ := tableOf(t, n).Top(dir + "/stays")
	state := map[uint64]bool{}
	var last []Event
	for !state[stays.ID] {
		last = collect(t, m, 1)
		for _, e := range last {
			if e.Kind == Attached == state[e.ID] && e.ID != leaves.ID {
				t.Fatalf("%+v, but attached is %v", e, state[e.ID])
			}
			state[e.ID] = e.Kind == Attached
		}
	}
	for _, want := range []Event{
		{Namespace: n.ID(), ID: stays.ID, Kind: Attached, Recovered: true},
		{Namespace: n.ID(), ID: leaves.ID, Kind: Detached, Recovered: true},
	} {
		if !slices.Contains(last, want) {
			t.Errorf("not found by the comparison: %+v", want)
		}
	}
	for id, there := range state {
		if there && id != stays.ID {
			t.Errorf("mount %d is still taken to be attached", id)
		}
	}
	// And events flow again.
	inside(t, n, func() error { return unix.Unmount(dir+"/stays", 0) })
	want := []Event{{Namespace: n.ID(), ID: stays.ID, Kind: Detached}}
	if diff := cmp.Diff(want, collect(t, m, 1)); diff != "" {
		t.Error(diff)
	}
}

func TestMonitorWithAnUnlimitedQueueLosesNothing(t *testing.T) {
	need(t, "mount events", kernel.Probe().MountEvents)
	n := namespace(t)
	dir := t.TempDir()
	m := monitorOf(t, n, UnlimitedQueue())
	const cycles = 8300 // more than the default queue holds
	inside(t, n, func() error {
		for range cycles {
			if err := unix.Mount("/proc", dir, "", unix.MS_BIND, ""); err != nil {
				return err
			}
			if err := unix.Unmount(dir, 0); err != nil {
				return err
			}
		}
		return nil
	})
	for i, e := range collect(t, m, 2*cycles) {
		if want := []EventKind{Attached, Detached}[i%2]; e.Kind != want || e.Recovered {
			t.Fatalf("event %d: %+v, want %v", i, e, want)
		}
	}
}

func TestNextEndsWithItsContextAndWithClose(t *testing.T) {
	eachKernel(t, func(t *testing.T, f kernel.Features) {
		n := limited(namespace(t), f)
		m := monitorOf(t, n, WithFeatures(f))
		ctx, cancel := context.WithCancel(t.Context())
		result := make(chan error)
		go func() { _, err := m.Next(ctx); result <- err }()
		cancel()
		if err := <-result; !errors.Is(err, context.Canceled) {
			t.Errorf("Next: %v, want context.Canceled", err)
		}
		go func() { _, err := m.Next(t.Context()); result <- err }()
		must(t, m.Close())
		if err := <-result; !errors.Is(err, os.ErrClosed) {
			t.Errorf("Next: %v, want os.ErrClosed", err)
		}
		if err := m.Add(t.Context(), n); !errors.Is(err, os.ErrClosed) {
			t.Errorf("Add: %v, want os.ErrClosed", err)
		}
		must(t, m.Close())
	})
}

// A watched namespace is not kept alive by being watched; when it goes, its
// mounts are told of and it is forgotten.
func TestMonitorDoesNotKeepANamespace(t *testing.T) {
	need(t, "mount events", kernel.Probe().MountEvents)
	n, other := namespace(t), namespace(t)
	ids := idsOf(t, n)
	m := monitorOf(t, n)
	must(t, m.Add(t.Context(), other))
	must(t, n.Close())
	events := collect(t, m, len(ids))
	for _, e := range events {
		if e.Namespace != n.ID() || e.Kind != Detached || !slices.Contains(ids, e.ID) {
			t.Errorf("%+v, want a mount of namespace %d detached", e, n.ID())
		}
	}
	if len(m.watched) != 1 || m.watched[other.ID()] == nil {
		t.Errorf("still watched: %v", m.watched)
	}
}
