package perform

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/mountns"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
)

// nested is a list of mount specs in which every sort of step occurs.
func nested() []mountspec.Spec {
	return []mountspec.Spec{
		bind("", "data", readonly), tmpfs("sub"),
		bind("file", "data/file", func(s *mountspec.Spec) { s.Kind.(*mountspec.Bind).IsFile = true }),
	}
}

var errInjected = errors.New("injected")

// TestFailureAtEachStep lets each step of a performance fail in turn: whatever
// the step, nothing is left of it in any namespace, and no file is open.
func TestFailureAtEachStep(t *testing.T) {
	for _, x := range executors {
		t.Run(x.name, func(t *testing.T) {
			inside(t, func(r *rig) {
				shared := func() { r.mount("", r.dir, "", unix.MS_SHARED, "") }
				private := func() { r.mount("", r.dir, "", unix.MS_PRIVATE, "") }
				for _, parent := range []func(){private, shared} {
					parent()
					failEachStep(r, x)
				}
			})
		})
	}
}

func failEachStep(r *rig, x way) {
	r.Helper()
	fds := x.openFiles(r)
	machine, err := mountns.TakeSnapshot(r.ctx)
	must(r, err)
	before, files := r.table(), r.tree("consumer")
	o := r.options(func(o *Options) {
		o.Policy.CreateTarget = true
		o.Journal = func([]Receipt) error { return nil }
	})
	for n := 0; ; n++ {
		count, failed := 0, ""
		broken := x.failing(r, func(step string) error {
			if count++; count == n+1 {
				failed = step
				return errInjected
			}
			return nil
		})
		p, err := broken.Perform(r.ctx, r.target("consumer/new/place"), nested(), o)
		if failed == "" {
			must(r, err)
			r.undo(x.on(r), p.Receipts)
			r.Logf("%d steps", n)
			if n < 10 {
				r.Errorf("only %d steps", n)
			}
			break
		}
		var step *Error
		if !errors.Is(err, errInjected) || !errors.As(err, &step) || step.Step != failed && failed != "open created" {
			r.Errorf("failed at %s: got %v", failed, err)
		}
		r.same(before)
		if got := r.tree("consumer"); got != files {
			r.Errorf("failed at %s: it left\n%s", failed, got)
		}
		if got := x.openFiles(r); got != fds {
			r.Errorf("failed at %s: %d files are open, %d were before", failed, got, fds)
		}
	}
	now, err := mountns.TakeSnapshot(r.ctx)
	must(r, err)
	for _, ns := range now.Namespaces {
		for _, was := range machine.Namespaces {
			if ns.ID == was.ID && ns.ID == r.ns.ID() && len(ns.Mounts) != len(was.Mounts) {
				r.Errorf("namespace %d has %d mounts, had %d", ns.ID, len(ns.Mounts), len(was.Mounts))
			}
		}
	}
}

// TestFailureAtEachStepOfUndo lets each step of an undo fail in turn; the next
// undo completes it.
func TestFailureAtEachStepOfUndo(t *testing.T) {
	for _, x := range executors {
		t.Run(x.name, func(t *testing.T) {
			inside(t, func(r *rig) {
				fds, before, files := x.openFiles(r), r.table(), r.tree("consumer")
				o := r.options(func(o *Options) { o.Policy.CreateTarget = true })
				for n := 0; ; n++ {
					p := r.perform(x.on(r), r.target("consumer/new/place"), nested(), o)
					count, failed := 0, false
					broken := x.failing(r, func(string) error {
						if count++; count == n+1 {
							failed = true
							return errInjected
						}
						return nil
					})
					err := broken.Undo(r.ctx, nil, p.Receipts)
					if failed != errors.Is(err, errInjected) {
						t.Fatalf("step %d: %v", n, err)
					}
					r.undo(x.on(r), p.Receipts)
					r.same(before)
					if got := r.tree("consumer"); got != files {
						t.Errorf("step %d: it left\n%s", n, got)
					}
					if got := x.openFiles(r); got != fds {
						t.Errorf("step %d: %d files are open, %d were before", n, got, fds)
					}
					if !failed {
						break
					}
				}
			})
		})
	}
}

// TestJournalIsEnough: the receipts the journal saw undo what was performed,
// wherever it stopped.
func TestJournalIsEnough(t *testing.T) {
	for _, x := range executors {
		if x.old {
			continue // mount(2) gives a mount its id when it is visible
		}
		t.Run(x.name, func(t *testing.T) {
			inside(t, func(r *rig) {
				before, files := r.table(), r.tree("consumer")
				var seen []Receipt
				var atJournal *mountns.Table
				o := r.options(func(o *Options) {
					o.Policy.CreateTarget = true
					o.Journal = func(receipts []Receipt) error {
						text, err := json.Marshal(receipts)
						must(r, err)
						must(r, json.Unmarshal(text, &seen))
						atJournal = r.table()
						return nil
					}
				})
				p := r.perform(x.on(r), r.target("consumer/new/place"), nested(), o)
				if d := mountns.Diff(before, atJournal); !d.Empty() {
					t.Errorf("visible before the journal:\n%s", d)
				}
				for i := range seen {
					if seen[i].MountID != p.Receipts[i].MountID || seen[i].Target != p.Receipts[i].Target ||
						seen[i].MntnsID != p.Receipts[i].MntnsID || seen[i].ParentID != 0 && seen[i].ParentID != p.Receipts[i].ParentID {
						t.Errorf("the journal had %+v, the receipt is %+v", seen[i], p.Receipts[i])
					}
				}
				r.undo(&Executor{features: x.on(r).features}, seen)
				r.same(before)
				if got := r.tree("consumer"); got != files {
					t.Errorf("it left\n%s", got)
				}
			})
		})
	}
}

func TestJournalThatFailsStopsThePerformance(t *testing.T) {
	inside(t, func(r *rig) {
		before, files := r.table(), r.tree("consumer")
		o := r.options(func(o *Options) {
			o.Policy.CreateTarget = true
			o.Journal = func([]Receipt) error { return errInjected }
		})
		_, err := Perform(r.ctx, r.target("consumer/new/place"), nested(), o)
		if !errors.Is(err, errInjected) {
			t.Errorf("got %v", err)
		}
		r.same(before)
		if got := r.tree("consumer"); got != files {
			t.Errorf("it left\n%s", got)
		}
	})
}

// victim is the environment variable that makes this program a process that
// performs and is killed: "what,step,journal,dir".
const victim = "PERFORM_TEST_VICTIM"

// startThreads has package mountns start the threads that it keeps for the next
// visit of a namespace, so that tests can compare numbers of open files.
func startThreads() error {
	if os.Getuid() != 0 {
		return nil
	}
	ctx := context.Background()
	ns, err := mountns.Own()
	if err != nil {
		return err
	}
	defer ns.Close()
	visit := func() error { return nil }
	for range 4 {
		inner := visit
		visit = func() error { return ns.Do(ctx, inner) }
	}
	return visit()
}

func TestMain(m *testing.M) {
	MainIfChild()
	if task, ok := os.LookupEnv(victim); ok {
		if err := beKilled(task); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if task, ok := os.LookupEnv(rootless); ok {
		if err := performRootless(task); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if err := startThreads(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// beKilled performs, or undoes, in the namespace it was started in, and kills
// itself before the step with the given number.
func beKilled(task string) error {
	var what, dir string
	var step int
	fields := strings.SplitN(task, ",", 3)
	what, dir = fields[0], fields[2]
	if _, err := fmt.Sscan(fields[1], &step); err != nil {
		return err
	}
	journal := dir + "/journal"
	count := 0
	e := Executor{before: func(string) error {
		if count++; count == step+1 {
			return unix.Kill(os.Getpid(), unix.SIGKILL)
		}
		return nil
	}}
	r := &rig{dir: dir}
	if what == "undo" {
		receipts, err := readJournal(journal)
		if err != nil {
			return err
		}
		return e.Undo(context.Background(), nil, receipts)
	}
	o := r.options(func(o *Options) {
		o.Policy.CreateTarget = true
		o.Journal = func(receipts []Receipt) error {
			text, err := json.Marshal(receipts)
			if err != nil {
				return err
			}
			return os.WriteFile(journal, text, 0o600)
		}
	})
	_, err := e.Perform(context.Background(), r.target("consumer/new/place"), tenSpecs(), o)
	return err
}

// tenSpecs is a transaction as large as one gets in practice.
func tenSpecs() []mountspec.Spec {
	specs := []mountspec.Spec{bind("", "ten", readonly)}
	for i := 1; i < 10; i++ {
		name := fmt.Sprint("d", i)
		if i%3 == 0 {
			specs = append(specs, tmpfs(name))
		} else {
			specs = append(specs, bind(name, "data"))
		}
	}
	return specs
}

func readJournal(name string) ([]Receipt, error) {
	text, err := os.ReadFile(name)
	if err != nil {
		return nil, err
	}
	var receipts []Receipt
	return receipts, json.Unmarshal(text, &receipts)
}

// TestKilledAtEachStep kills a process at every step of a performance of ten
// specs, and then one at every step of its undo: what another process reads in
// the journal brings the place to whole or nothing, and nothing to none.
func TestKilledAtEachStep(t *testing.T) {
	runs := 500
	if testing.Short() {
		runs = 150
	}
	inside(t, func(r *rig) {
		r.ctx = t.Context() // it may take longer than a minute
		for i := 1; i < 10; i++ {
			r.mkdir(fmt.Sprint("grant/ten/d", i))
		}
		before, files := r.table(), r.tree("consumer")
		var kills, nothing, whole, undoKills int
		for n, step, undoStep := 0, 0, 0; n < runs; n++ {
			killed := r.victim("perform", step)
			if step++; !killed {
				step = 0 // past the last
			} else {
				kills++
			}
			receipts, err := readJournal(r.path("journal"))
			left := mountns.Diff(before, r.table())
			switch {
			case errors.Is(err, os.ErrNotExist):
				nothing++
				if !left.Empty() {
					t.Fatalf("step %d: no journal, and yet\n%s", step-1, left)
				}
			case err != nil:
				t.Fatal(err)
			case len(left.Added) == 10:
				whole++
			case left.Empty():
				nothing++
			default:
				t.Fatalf("step %d: half of it is left:\n%s", step-1, left)
			}
			if len(left.Added) == 10 {
				if r.victim("undo", undoStep) {
					undoKills++
					undoStep++
				} else {
					undoStep = 0
				}
			}
			r.undo(&plain, receipts)
			r.same(before)
			if got := r.tree("consumer"); got != files {
				t.Fatalf("step %d: it left\n%s", step-1, got)
			}
			_ = os.Remove(r.path("journal"))
			if t.Failed() {
				return
			}
		}
		t.Logf("%d runs, %d killed while performing (%d whole, %d nothing, 0 half), %d killed while undoing", runs, kills, whole, nothing, undoKills)
	})
}

// victim runs a process that is to be killed before a step, in the rig's
// namespace, and says whether it was.
func (r *rig) victim(what string, step int) bool {
	r.Helper()
	c := exec.Command("/proc/self/exe", "-test.run=none")
	c.Env = append(os.Environ(), fmt.Sprintf("%s=%s,%d,%s", victim, what, step, r.dir))
	out, err := c.CombinedOutput()
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.Sys().(syscall.WaitStatus).Signaled() {
		return true
	}
	if err != nil {
		r.Fatalf("%s: %v\n%s", what, err, out)
	}
	return false
}
