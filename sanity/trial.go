package sanity

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/reference/handoff"
	"github.com/csi-prepare/csi-prepare/reference/mountns"
	"github.com/csi-prepare/csi-prepare/sanity/report"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// trial is one spec while it runs. Its body is on a thread inside ns, a mount
// namespace of its own, so that it may mount and look at files as it likes;
// goroutines it starts are not inside, and are only good for calls.
type trial struct {
	*Suite
	definition definition

	ctx context.Context //nolint:containedctx // of the spec, replaced for its clean-up
	ns  *mountns.Namespace
	// nsFile is a descriptor of ns for other processes, 0 if none was needed.
	nsFile int
	// dir is the spec's own directory. The plugin sees it too.
	dir     string
	journal journal
	before  *snapshot
	ids     []uint64 // room for ids of mounts
	// directories the spec made for the plugin, and nothing else is in dir.
	directories []string
	// undo takes away what was made, the last first.
	undo []func() error
	// ending are the preparations whose end is among that.
	ending map[handoff.Key]bool
	// kernel is what the kernel said to the last system call of the suite
	// that failed, or of a performance.
	kernel string
	// stretches are what devices held where the spec wrote, by volume.
	stretches map[string][]byte
	made      int // names handed out
	given     int // volumes of the user's handed out
}

// run runs one spec, from nothing to nothing.
func (s *Suite) run(ctx context.Context, d definition) result {
	if !s.wanted(d) {
		return result{Outcome: report.Filtered, Message: "left out by --id or --profile"}
	}
	if err := s.begin(ctx); err != nil {
		return resultOf(couldNotRun("the suite could not start: %v", err))
	}
	if f, missing := s.features.missing(d.needs); missing {
		return result{Outcome: report.Unsupported, Message: lacking(f)}
	}
	if why := s.goneSince(); why != "" {
		return resultOf(couldNotRun("%s", why))
	}
	t := &trial{Suite: s, definition: d, ending: map[handoff.Key]bool{}}
	if err := t.setUp(ctx); err != nil {
		return resultOf(couldNotRun("making a mount namespace and a directory for the spec: %v", err))
	}
	begun := time.Now()
	e := t.inside(func() { d.body(t) })
	if e != nil && ctx.Err() != nil {
		// What the end of its time made of the spec says nothing.
		e = couldNotRun("interrupted, or not at its end after %v", specTimeout)
	}
	if e = t.notServed(e); e == nil {
		e = t.unreported()
	}
	if left := t.takeAway(); e == nil {
		e = left
	}
	body := time.Since(begun)
	if left := t.compare(); e == nil {
		e = left
	}
	if left := t.removeDirectories(); e == nil {
		e = left
	}
	if err := t.tearDown(); e == nil && err != nil {
		e = couldNotRun("removing the directory of the spec: %v", err)
	}
	r := result{Outcome: report.Passed}
	if e != nil {
		r = resultOf(e)
	}
	s.redact(&r)
	r.Body = body.Seconds()
	if r.Outcome == report.Failed {
		s.noteBroken(r.Breaks, d.name)
	}
	return r
}

func (t *trial) setUp(ctx context.Context) error {
	t.ctx = recorded(ctx, &t.journal)
	var err error
	if t.ns, err = t.copyNamespace(ctx); err != nil {
		return err
	}
	if t.dir, err = os.MkdirTemp(t.Suite.dir, "spec-"); err != nil {
		return errors.Join(err, t.ns.Close())
	}
	if err = os.Chmod(t.dir, 0o755); err == nil {
		t.before, err = t.look(ctx)
	}
	if err != nil {
		return errors.Join(err, t.tearDown())
	}
	return nil
}

// inside runs f on a thread in the namespace of the spec.
func (t *trial) inside(f func()) *ending {
	var e *ending
	err := t.ns.Do(t.ctx, func() error {
		e = caught(f)
		return nil
	})
	if err != nil {
		return couldNotRun("entering the mount namespace of the spec: %v", err)
	}
	return e
}

// cleanup registers what takes away something that was just made.
func (t *trial) cleanup(f func() error) { t.undo = append(t.undo, f) }

// takeAway undoes everything, whatever of it fails, and returns the first
// thing that did. It is not stopped by the end of the spec's own time.
func (t *trial) takeAway() *ending {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.ctx), 2*t.config.Timeout)
	defer cancel()
	t.ctx = ctx
	var first *ending
	for _, f := range slices.Backward(t.undo) {
		e := t.inside(func() {
			if err := f(); err != nil {
				end(couldNotRun("taking away what the spec made: %v", err))
			}
		})
		if first == nil {
			first = e
		}
	}
	t.undo = nil
	return first
}

// tearDown lets go of the namespace and removes the spec's directory, unless
// something is still mounted there.
func (t *trial) tearDown() error {
	err := t.ns.Close()
	if t.nsFile != 0 {
		err = errors.Join(err, unix.Close(t.nsFile))
	}
	return errors.Join(err, t.removeTree(t.dir))
}

// name returns a name that nothing else in this run has, and no other run
// is likely to have.
func (t *trial) name(kind string) string {
	t.made++
	return fmt.Sprintf("%s-%s-%d", kind, filepath.Base(t.dir), t.made)
}

// mkdir makes an empty directory of the spec's own that the plugin can use.
func (t *trial) mkdir(kind string) string {
	dir := filepath.Join(t.dir, t.name(kind))
	t.directories = append(t.directories, dir)
	if err := os.Mkdir(dir, 0o700); err != nil {
		end(couldNotRun("making a directory: %v", err))
	}
	if uid := t.peerUID(); uid != os.Geteuid() {
		if err := os.Chown(dir, uid, -1); err != nil {
			end(couldNotRun("giving a directory to the plugin's user: %v", err))
		}
	}
	return dir
}

// fail ends the spec: a requirement does not hold.
func (t *trial) fail(id requirement.ID, expected, actual string) {
	t.failCall(id, t.lastCall(), expected, actual)
}

func (t *trial) lastCall() string {
	if c, ok := t.journal.last(); ok {
		return c.String()
	}
	return ""
}

func (t *trial) failCall(id requirement.ID, call, expected, actual string) {
	end(t.failed(id, call, expected, actual, t.tableNow()))
}

// want fails the spec unless ok.
func (t *trial) want(id requirement.ID, ok bool, expected, actual string, args ...any) {
	if !ok {
		t.fail(id, expected, fmt.Sprintf(actual, args...))
	}
}

// wantCode fails the spec unless the last call ended with one of the codes.
func (t *trial) wantCode(id requirement.ID, err error, want ...codes.Code) {
	t.alive(err)
	if slices.Contains(want, status.Code(err)) {
		return
	}
	if slices.Contains(want, codes.OK) {
		t.lacksGrant(err)
	}
	expected := ""
	for i, c := range want {
		if i > 0 {
			expected += " or "
		}
		expected += codeName(c)
	}
	t.fail(id, expected, answered(err))
}

// answered says how a call came out.
func answered(err error) string {
	if err == nil {
		return "OK"
	}
	s := status.Convert(err)
	return fmt.Sprintf("%s: %s", codeName(s.Code()), s.Message())
}

// need ends the spec if something it builds on failed. The first time that is
// a failure of the requirement that did not hold; after that, and if a spec
// of its own has found it already, specs that need it point there.
func (t *trial) need(id requirement.ID, err error, expected string) {
	if err == nil {
		return
	}
	t.alive(err)
	t.lacksGrant(err)
	if spec, known := t.brokenIn(id); known {
		end(couldNotRun("needs %s, which does not hold: see %q", id, spec))
	}
	t.fail(id, expected, answered(err))
}

// lacksGrant ends the spec if a call may have been refused because the user
// named no directory that the plugin could bind from.
func (t *trial) lacksGrant(err error) {
	if status.Code(err) == codes.FailedPrecondition && t.features[KindBind] && len(t.config.Grants) == 0 && t.actor == requirement.SP {
		end(couldNotRun("the plugin refuses to prepare; if it binds from a directory the operator granted it, name that with --grant NAME=DIR"))
	}
}

// alive fails the spec, once for the whole run, if the plugin is gone.
func (t *trial) alive(err error) {
	switch status.Code(err) {
	case codes.Unavailable, codes.DeadlineExceeded:
	default:
		return
	}
	why := t.checkGone(t.definition.name)
	if why == nil {
		return
	}
	t.fail(t.definition.covers[0], "an answer", why.Error())
}

// sysfail keeps what the kernel said and ends the spec as one that could not
// run: for system calls the suite itself needs.
func (t *trial) sysfail(doing string, err error) {
	if err != nil {
		end(couldNotRun("%s: %v", doing, err))
	}
}

// poll calls f until it is true or the time is over, on the thread of the
// spec, and returns whether it became true. It is for what the plugin does
// in its own time; no spec depends on how long that is.
func (t *trial) poll(limit time.Duration, f func() bool) bool {
	for end := time.Now().Add(limit); ; time.Sleep(2 * time.Millisecond) {
		if f() {
			return true
		}
		if time.Now().After(end) || t.ctx.Err() != nil {
			return false
		}
	}
}

// errnoName returns "EROFS" for the error of a system call, or its text.
func errnoName(err error) string {
	var e unix.Errno
	if errors.As(err, &e) {
		return unix.ErrnoName(e)
	}
	if err == nil {
		return "success"
	}
	return err.Error()
}
