package sanity

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/csi-prepare/csi-prepare/reference/fusemount"
	"github.com/csi-prepare/csi-prepare/reference/handoff"
	"github.com/csi-prepare/csi-prepare/reference/kernel"
	"github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// settled is how long a server has to close a connection it does not mean to
// keep.
const settled = 300 * time.Millisecond

// fuseSpecs are about mounts that the suite makes and the plugin serves: who
// serves them, from when, and what becomes of them when one of the two dies.
func fuseSpecs(s *section) {
	s.in(NodeFUSE)
	s.spec("a mount is served when the call is answered", Covers(requirement.FUSEServed, requirement.HandleDelivered, requirement.FUSEID), func(t *trial) {
		v := t.sharedVolume()
		for range 3 {
			r := t.request(v)
			answer := t.prepared(r)
			t.perform(t.consumer(), r, answer)
		}
	}, KindFUSE)
	s.spec("a server asks for no more than it may choose", Covers(requirement.FUSEParameters), func(t *trial) {
		r := t.request(t.volume())
		_, err := t.prepare(r)
		c := t.clients.channel
		c.mu.Lock()
		refused := c.refused[keyOf(r)]
		c.mu.Unlock()
		if refused != nil && strings.HasPrefix(refused.Message, "fuse_request.") {
			t.fail(requirement.FUSEParameters, "a fuse_request that keeps the rules", refused.Error())
		}
		t.need(requirement.PrepareAnswered, err, "OK to a call that keeps every rule")
	}, KindFUSE)
	s.spec("the end of the process behind the socket is no end of a mount", Covers(requirement.FUSEOutlivesRPC, requirement.HandoffConnectionStays), func(t *trial) {
		t.mayRestart()
		r := t.request(t.volume())
		answer := t.prepared(r)
		c := t.consumer()
		t.perform(c, r, answer)
		text := t.nonce()
		t.put(c, text)
		h, ok := t.handleOf(r)
		if !ok {
			t.unsupported("the volume was not answered with a FUSE mount")
		}
		time.Sleep(settled)
		select {
		case <-h.Gone:
			t.want(requirement.HandoffConnectionStays, fusemount.Prove(t.soon(), h.Mount) != nil, "a connection that is open for as long as the server serves", "it is closed, and the mount is served")
		default:
		}
		t.sysfail("killing the plugin", t.process.kill())
		same, found := t.showsWithin(c, text, t.config.Timeout)
		t.sysfail("starting the plugin again", t.resume(t.ctx))
		t.want(requirement.FUSEOutlivesRPC, same, "the file while the process behind the CSI socket is dead", "%s", found)
		select {
		case <-h.Gone:
			t.fail(requirement.FUSEOutlivesRPC, "a server that goes on", "it closed its connection when the process behind the CSI socket was killed")
		default:
		}
		_, err := t.prepare(r)
		t.wantCode(requirement.CrashStateSurvives, err, codes.OK)
		same, found = t.showsWithin(c, text, t.config.Timeout)
		t.want(requirement.FUSEOutlivesRPC, same, "the file after a restart and a repeated call", "%s", found)
	}, KindFUSE)
	s.spec("nothing serves after unprepare", Covers(requirement.UnprepareFinished, requirement.UnprepareResourcesFreed), func(t *trial) {
		v := t.volume()
		for range 3 {
			r := t.request(v)
			answer := t.prepared(r)
			c := t.consumer()
			t.perform(c, r, answer)
			w := t.serverOf(r)
			t.sysfail("undoing what was performed", t.undoAt(c))
			t.unprepared(r)
			t.want(requirement.UnprepareFinished, !w.stillServes(), "that no process has the device of a mount that is unprepared", "process %d has it", w.pid)
		}
	}, KindFUSE)
	s.spec("a mount that lives is not unprepared", Covers(requirement.UnprepareFinished), func(t *trial) {
		r := t.fuse(t.volume())
		h, _ := t.handleOf(r)
		kept, err := kernel.OpenTree(int(h.Mount.Fd()), "", unix.OPEN_TREE_CLONE)
		t.sysfail("cloning the mount", err)
		err = t.unprepare(r)
		serves := fusemount.Prove(t.soon(), os.NewFile(uintptr(kept), "kept")) == nil
		t.sysfail("closing a mount", unix.Close(kept))
		t.want(requirement.UnprepareFinished, err != nil || !serves, "FAILED_PRECONDITION while the CO has a mount of it", "OK, and the server goes on serving")
		t.poll(t.config.Timeout, func() bool { err = t.unprepare(r); return err == nil })
		t.wantCode(requirement.UnprepareFinished, err, codes.OK)
	}, KindFUSE)
	s.spec("a repeat after the death of the server leads to one that serves", Covers(requirement.FUSERevived), func(t *trial) {
		r := t.request(t.volume())
		answer := t.prepared(r)
		c := t.consumer()
		t.perform(c, r, answer)
		text := t.nonce()
		t.put(c, text)
		t.killServer(r)
		again := t.revived(r)
		fresh := t.consumer()
		t.perform(fresh, r, again)
		same, found := t.showsWithin(fresh, text, t.config.Timeout)
		t.want(requirement.FUSERevived, same, "what was written before the server died", "%s", found)
		t.sysfail("removing the file", os.Remove(fresh.file(t)))
	}, KindFUSE)
	s.spec("what is said to be resumable is resumed", Covers(requirement.FUSEResumableTrue), resumedSpec, KindFUSE)
	s.spec("without a successor nobody waits for ever", Covers(requirement.FUSERevived), func(t *trial) {
		r := t.request(t.volume())
		answer := t.prepared(r)
		c := t.consumer()
		t.perform(c, r, answer)
		t.killServer(r)
		dead := t.poll(failover+t.config.Timeout, func() bool {
			return errors.Is(t.askRoot(c.target), unix.ENOTCONN)
		})
		if !dead {
			end(couldNotRun("the mount of a dead server does not end"))
		}
		fresh := t.consumer()
		t.perform(fresh, r, t.revived(r))
	}, KindFUSE)
	s.spec("who has other secrets gets another mount", Covers(requirement.FUSEIdentity), func(t *trial) {
		v := t.sharedVolume()
		first, second := t.request(v), t.request(v)
		second.Secrets = maps.Clone(second.GetSecrets())
		if second.Secrets == nil {
			second.Secrets = map[string]string{}
		}
		second.Secrets["csi-prepare-identity"] = t.nonce()
		t.perform(t.consumer(), first, t.prepared(first))
		answer, err := t.prepare(second)
		if err != nil {
			t.alive(err)
			return // it refuses the other, which shares nothing either
		}
		t.perform(t.consumer(), second, answer)
		one, known := t.handleOf(first)
		other, too := t.handleOf(second)
		if !known || !too {
			t.unsupported("the volume was not answered with a FUSE mount")
		}
		t.want(requirement.FUSEIdentity, !other.Shared && !one.Shared, "a mount of its own for each of two calls with different secrets", "they share one")
	}, KindFUSE)
	s.spec("a CO that lost everything is served again", Covers(requirement.FUSECORestart), func(t *trial) {
		r := t.request(t.volume())
		answer := t.prepared(r)
		c := t.consumer()
		t.perform(c, r, answer)
		text := t.nonce()
		t.put(c, text)
		t.adopts(c)
		t.sysfail("restarting the channel", t.clients.channel.restart())
		again, err := t.prepare(r)
		t.wantCode(requirement.FUSECORestart, err, codes.OK)
		missing := t.missing(r)
		t.want(requirement.FUSECORestart, missing == nil, "a mount that came with the call", "%v", missing)
		fresh := t.consumer()
		t.perform(fresh, r, again)
		same, found := t.showsWithin(fresh, text, t.config.Timeout)
		t.want(requirement.FUSECORestart, same, "what was written before the CO restarted", "%s", found)
		t.sysfail("removing the file", os.Remove(fresh.file(t)))
	}, KindFUSE)
	s.in(NodeMount)
	s.spec("mounts of a plugin that wants propagation come and go", Covers(requirement.CapabilitiesPropagation, requirement.UnpreparePathEmptied), propagatedSpec, RequiresPropagation)
}

func keyOf(r *prepareRequest) handoff.Key {
	return handoff.Key{VolumeID: r.GetVolumeId(), PrepareID: r.GetPrepareId()}
}

// soon is a context for a look at a mount that may not answer.
func (t *trial) soon() context.Context {
	ctx, cancel := context.WithTimeout(t.ctx, t.config.Timeout)
	t.cleanup(func() error { cancel(); return nil })
	return ctx
}

// fuse prepares a volume that has to be answered with a FUSE mount.
func (t *trial) fuse(v *volume) *prepareRequest {
	r := t.request(v)
	t.prepared(r)
	if _, ok := t.handleOf(r); !ok {
		if missing := t.missing(r); missing != nil {
			t.need(brokenBy(missing), missing, "a FUSE mount that is served")
		}
		t.unsupported("the volume was not answered with a FUSE mount")
	}
	return r
}

// missing is why a handle that the last answer names is not usable.
func (t *trial) missing(r *prepareRequest) error {
	c := t.clients.channel
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.missing[keyOf(r)]
}

// revived repeats a call whose server is gone until it is OK.
func (t *trial) revived(r *prepareRequest) *prepareResponse {
	var answer *prepareResponse
	var err error
	t.poll(failover+t.config.Timeout, func() bool {
		answer, err = t.prepare(r)
		return err == nil
	})
	t.wantCode(requirement.FUSERevived, err, codes.OK)
	missing := t.missing(r)
	t.want(requirement.FUSERevived, missing == nil, "a mount that somebody serves", "%v", missing)
	h, ok := t.handleOf(r)
	if !ok {
		t.unsupported("the volume was not answered with a FUSE mount")
	}
	if err := fusemount.Prove(t.soon(), h.Mount); err != nil {
		_ = fusemount.Abort(t.ctx, h.Mount) // whoever waits is let go
		t.fail(requirement.FUSERevived, "a mount that somebody serves", err.Error())
	}
	return answer
}

// showsWithin reads a file of a volume whose server may be dead, in a goroutine
// that can be left.
func (t *trial) showsWithin(c *consumer, text string, limit time.Duration) (same bool, found string) {
	type result struct {
		same  bool
		found string
	}
	done := make(chan result, 1)
	go func() {
		var r result
		err := t.ns.Do(context.WithoutCancel(t.ctx), func() error {
			r.same, r.found = t.shows(c, text)
			return nil
		})
		if err != nil {
			r.found = err.Error()
		}
		done <- r
	}()
	select {
	case r := <-done:
		return r.same, r.found
	case <-time.After(limit):
		return false, fmt.Sprintf("reading it does not end within %v", limit)
	}
}

// askRoot asks the server of a mount for its root, and does not wait long.
func (t *trial) askRoot(path string) error {
	done := make(chan error, 1)
	go func() {
		done <- t.ns.Do(context.WithoutCancel(t.ctx), func() error {
			var st unix.Statfs_t
			return unix.Statfs(path, &st)
		})
	}()
	select {
	case err := <-done:
		return err
	case <-time.After(200 * time.Millisecond):
		return context.DeadlineExceeded
	}
}

// adopts lets deposits find the mount of a consumer.
func (t *trial) adopts(c *consumer) {
	channel := t.clients.channel
	channel.mu.Lock()
	defer channel.mu.Unlock()
	channel.adopting = func(ctx context.Context, device *os.File) (mount *os.File, err error) {
		err = t.ns.Do(ctx, func() error {
			fd, err := kernel.OpenTree(unix.AT_FDCWD, c.target, unix.OPEN_TREE_CLONE)
			if err != nil {
				return err
			}
			mount = os.NewFile(uintptr(fd), "adopted")
			if same, err := fusemount.Same(device, mount); err != nil || !same {
				return errors.Join(err, errors.New("the device is of another mount"))
			}
			return nil
		})
		return mount, err
	}
	t.cleanup(func() error {
		channel.mu.Lock()
		defer channel.mu.Unlock()
		channel.adopting = nil
		return nil
	})
}

// resumedSpec kills the server of a mount that is said to be resumable, with
// files open and requests on their way.
func resumedSpec(t *trial) {
	r := t.request(t.volume())
	answer := t.prepared(r)
	if !answer.GetMountSpecs()[0].GetFuse().GetResumable() {
		t.unsupported("the plugin does not say that its mounts are resumable")
	}
	c := t.consumer()
	t.perform(c, r, answer)
	f, err := os.OpenFile(c.file(t), os.O_RDWR|os.O_CREATE, 0o600)
	t.sysfail("making a file in the volume", err)
	closed := false
	t.cleanup(func() error {
		if closed {
			return nil
		}
		return f.Close()
	})
	for round := range 3 {
		text := []byte(t.nonce())
		t.killServer(r)
		wrote := make(chan error, 1)
		go func() { // it waits for the successor
			_, err := f.WriteAt(text, int64(round*len(text)))
			wrote <- err
		}()
		again, err := t.prepare(r)
		t.wantCode(requirement.FUSEResumableTrue, err, codes.OK)
		t.want(requirement.FUSEResumableTrue, again.GetMountSpecs()[0].GetFuse().GetHandleId() == answer.GetMountSpecs()[0].GetFuse().GetHandleId(),
			"the same handle, served on", "another handle")
		select {
		case err = <-wrote:
		case <-time.After(failover + t.config.Timeout):
			t.fail(requirement.FUSEResumableTrue, "that an operation begun while the server was dead completes", "it does not end")
		}
		t.want(requirement.FUSEResumableTrue, err == nil, "that a file which was open stays usable", "writing to it: %s", errnoName(err))
		_ = unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED) // ask the server
		back := make([]byte, len(text))
		_, err = f.ReadAt(back, int64(round*len(text)))
		t.want(requirement.FUSEResumableTrue, err == nil && string(back) == string(text), "what was written", "%q, %s", back, errnoName(err))
	}
	closed = true
	t.sysfail("closing the file", f.Close())
	t.sysfail("removing the file", os.Remove(c.file(t)))
}

// propagatedSpec sees that a mount the plugin makes reaches the namespace of
// the spec, a slave of the plugin's, and leaves it again; and that what is
// mounted in the spec does not reach the plugin.
func propagatedSpec(t *trial) {
	if t.beyond == nil {
		end(couldNotRun("whether mounts propagate from the plugin's namespace to the suite's is up to whoever started it; --exec 'CMD …' lets the suite do that"))
	}
	probe := t.tmpfs()
	table, err := t.beyond.Table(t.ctx)
	t.sysfail("reading the mount table of the plugin", err)
	if len(table.Below(probe)) > 0 {
		end(couldNotRun("what the suite mounts reaches the plugin: the environment propagates both ways"))
	}
	r := t.request(t.volume())
	r.Performer.Kinds = []preparev1alpha1.MountKind{preparev1alpha1.MountKind_MOUNT_KIND_BIND}
	answer, err := t.prepare(r)
	t.need(requirement.PrepareAnswered, err, "OK to a CO that is able to bind")
	bases := []string{r.GetPreparePath()}
	if staging := r.GetStagingTargetPath(); staging != "" {
		bases = append(bases, staging)
	}
	here, err := t.ns.Table(t.ctx)
	t.sysfail("reading the mount table of the spec", err)
	arrived := 0
	for _, base := range bases {
		arrived += len(here.Below(base))
	}
	t.want(requirement.CapabilitiesPropagation, arrived > 0, "a mount of the plugin's at or below "+filepath.Base(bases[0])+" in the namespace of the CO", "none")
	c := t.consumer()
	t.perform(c, r, answer)
	text := t.nonce()
	t.put(c, text)
	t.sysfail("removing the file", os.Remove(c.file(t)))
	t.sysfail("undoing what was performed", t.undoAt(c))
	t.unprepared(r)
	if here, err = t.ns.Table(t.ctx); err == nil {
		left := here.Below(r.GetPreparePath())
		t.want(requirement.UnpreparePathEmptied, len(left) == 0, "no mount below prepare_path after unprepare, in the CO's namespace too", "%v", left)
	}
}
