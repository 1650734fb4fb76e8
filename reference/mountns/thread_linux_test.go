package mountns

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
)

// strays are the threads of this process that are not where the leader is.
func strays(t *testing.T) []string {
	t.Helper()
	home, err := os.Readlink("/proc/self/ns/mnt")
	must(t, err)
	tasks, err := filepath.Glob("/proc/self/task/*")
	must(t, err)
	var found []string
	for _, task := range tasks {
		at, err := os.Readlink(task + "/ns/mnt")
		if err == nil && at != home {
			found = append(found, task+" in "+at)
		}
	}
	return found
}

func noStrays(t *testing.T) {
	t.Helper()
	// A thread that was given up ends on its own, a moment after its task.
	for try := 0; ; try++ {
		found := strays(t)
		if len(found) == 0 {
			return
		}
		if try == 1000 {
			t.Fatalf("threads left in another namespace: %v", found)
		}
		runtime.Gosched()
	}
}

func TestDoIsInsideAndNotOnTheLeader(t *testing.T) {
	n := namespace(t)
	wd, err := os.Getwd()
	must(t, err)
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			for range 50 {
				err := n.Do(t.Context(), func() error {
					if unix.Gettid() == unix.Getpid() {
						t.Error("on the leader of the process")
					}
					here, err := Own()
					if err != nil {
						return err
					}
					defer here.Close()
					if here.ID() != n.ID() {
						t.Errorf("in %s, want %s", here, n)
					}
					return unix.Chdir(t.TempDir())
				})
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	noStrays(t)
	if now, _ := os.Getwd(); now != wd {
		t.Errorf("the process's working directory is %s, was %s", now, wd)
	}
}

func TestDoStartsAtTheRootOfTheNamespace(t *testing.T) {
	n := namespace(t)
	inside(t, n, func() error { return unix.Chdir("/proc") })
	inside(t, n, func() error {
		wd, err := unix.Getcwd(make([]byte, 100))
		_ = wd
		if err != nil {
			return err
		}
		var here, root unix.Stat_t
		if err := errors.Join(unix.Stat(".", &here), unix.Stat("/", &root)); err != nil {
			return err
		}
		if here.Ino != root.Ino || here.Dev != root.Dev {
			t.Error("the working directory of an earlier visit was kept")
		}
		return nil
	})
}

func TestGoroutinesStartedInsideRunOutside(t *testing.T) {
	n := namespace(t)
	inside(t, n, func() error {
		id := make(chan uint64)
		go func() {
			var id64 uint64
			if here, err := Own(); err == nil {
				id64 = here.ID()
				_ = here.Close()
			}
			id <- id64
		}()
		if got := <-id; got == n.ID() {
			t.Error("a goroutine ran inside; the documentation says otherwise")
		}
		return nil
	})
}

func TestDoPassesOnHowTheFunctionEnds(t *testing.T) {
	n := namespace(t)
	want := errors.New("mine")
	if err := n.Do(t.Context(), func() error { return want }); !errors.Is(err, want) {
		t.Errorf("error: %v", err)
	}
	func() {
		defer func() {
			if p := recover(); p != "loud" {
				t.Errorf("panic: recovered %v", p)
			}
		}()
		_ = n.Do(t.Context(), func() error { panic("loud") })
		t.Error("panic: Do returned")
	}()
	ended := make(chan bool)
	go func() {
		defer close(ended)
		_ = n.Do(t.Context(), func() error { runtime.Goexit(); return nil })
		t.Error("Goexit: Do returned")
	}()
	<-ended
	noStrays(t)
	inside(t, n, func() error { return nil })
}

func TestAFunctionThatLeavesTheNamespaceDoesNotSpoilTheThread(t *testing.T) {
	n, other := namespace(t), namespace(t)
	for range 2 * maxIdle {
		inside(t, n, func() error { return unix.Setns(other.FD(), unix.CLONE_NEWNS) })
		inside(t, n, func() error { return unix.Unshare(unix.CLONE_NEWNS) })
	}
	noStrays(t)
}

func TestEnteringWhatIsNoNamespaceFails(t *testing.T) {
	n := namespace(t)
	null, err := os.Open("/dev/null")
	must(t, err)
	defer null.Close()
	broken := &Namespace{file: null, fd: int(null.Fd()), features: kernel.Probe()}
	ran := false
	if err := broken.Do(t.Context(), func() error { ran = true; return nil }); !errors.Is(err, unix.EINVAL) || ran {
		t.Errorf("Do: %v, ran %v; want EINVAL and not run", err, ran)
	}
	if v, err := broken.Enter(t.Context()); !errors.Is(err, unix.EINVAL) {
		t.Errorf("Enter: %v, %v; want EINVAL", v, err)
	}
	inside(t, n, func() error { return nil })
	noStrays(t)
}

func TestWaitingForAThreadEndsWithTheContext(t *testing.T) {
	n := namespace(t)
	release := make(chan struct{})
	var entered, done sync.WaitGroup
	for range maxThreads {
		entered.Add(1)
		done.Go(func() {
			_ = n.Do(t.Context(), func() error { entered.Done(); <-release; return nil })
		})
	}
	entered.Wait()
	ctx, cancel := context.WithCancel(t.Context())
	result := make(chan error)
	go func() { result <- n.Do(ctx, func() error { return nil }) }()
	cancel()
	if err := <-result; !errors.Is(err, context.Canceled) {
		t.Errorf("waiting: %v, want context.Canceled", err)
	}
	close(release)
	done.Wait()
	inside(t, n, func() error { return nil })
	noStrays(t)
	threads.Lock()
	defer threads.Unlock()
	if len(threads.idle) > maxIdle || len(slots) != 0 {
		t.Errorf("%d threads idle of at most %d, %d in use", len(threads.idle), maxIdle, len(slots))
	}
}

func TestVisitKeepsTheThreadInside(t *testing.T) {
	n := namespace(t)
	v, err := n.Enter(t.Context())
	must(t, err)
	var tids [3]int
	for i := range tids {
		must(t, v.Do(func() error {
			tids[i] = unix.Gettid()
			here, err := Own()
			if err != nil {
				return err
			}
			defer here.Close()
			if here.ID() != n.ID() {
				t.Errorf("step %d in %s", i, here)
			}
			return nil
		}))
	}
	if tids[0] != tids[1] || tids[1] != tids[2] {
		t.Errorf("the steps ran on threads %v", tids)
	}
	v.Leave()
	v.Leave()
	if err := v.Do(func() error { return nil }); !errors.Is(err, os.ErrClosed) {
		t.Errorf("a step after Leave: %v, want os.ErrClosed", err)
	}
	noStrays(t)
}
