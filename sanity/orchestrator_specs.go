package sanity

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/spec/requirement"
	"github.com/csi-prepare/csi-prepare/spec/testingv1alpha1"
)

// orchestratorSpecs are about what a CO asks of a plugin, and when.
func orchestratorSpecs(s *section) {
	s.spec("a plugin without NodePrepare is not broken", Covers(requirement.DiscoveryUnimplemented), func(t *trial) {
		p := t.stub(func(p *stub) { p.absent = true })
		err := t.up(t.user(p, "v"))
		t.alive(err)
		t.want(requirement.DiscoveryUnimplemented, status.Code(err) == codes.Unimplemented || err == nil && len(p.of("NodePublishVolume")) > 0,
			"UNIMPLEMENTED, or NodePublishVolume instead", "%s; the plugin was asked: %s", answered(err), p.all())
	}, Orchestrate)
	s.spec("a plugin without NodePrepare is asked for it once", Covers(requirement.DiscoveryNotAgain), func(t *trial) {
		p := t.stub(func(p *stub) { p.absent = true })
		for range 3 {
			t.alive(t.up(t.user(p, "v")))
		}
		asked := len(p.of("NodePrepareGetCapabilities"))
		t.want(requirement.DiscoveryNotAgain, asked == 1, "one NodePrepareGetCapabilities on one connection", "%d", asked)
	}, Orchestrate)
	s.spec("what is prepared is not published besides", Covers(requirement.DiscoveryOneWay), func(t *trial) {
		p := t.stub(nil)
		t.isUp(t.user(p, "v"), p)
		p.prepare = func(*prepareRequest) (*prepareResponse, error) {
			return nil, status.Error(codes.FailedPrecondition, "not this one")
		}
		t.alive(t.up(t.user(p, "w")))
		t.want(requirement.DiscoveryOneWay, len(p.of("NodePublishVolume")) == 0, "no NodePublishVolume for a consumer of NodePrepareVolume", "it was called; all calls: %s", p.all())
	}, Orchestrate)
	s.spec("each preparation has an empty path of its own", Covers(requirement.PreparePathPrivate), func(t *trial) {
		p := t.stub(nil)
		var mu sync.Mutex
		used, found := map[string]string{}, ""
		p.prepare = func(r *prepareRequest) (*prepareResponse, error) {
			mu.Lock()
			defer mu.Unlock()
			if other, taken := used[r.GetPreparePath()]; taken && other != r.GetPrepareId() {
				found = "the path of " + other + ", which lives"
			}
			if left := contents(r.GetPreparePath()); left != "nothing" && used[r.GetPreparePath()] == "" {
				found = "a prepare_path with " + left
			}
			used[r.GetPreparePath()] = r.GetPrepareId()
			return nil, nil //nolint:nilnil // the right answer is then given
		}
		for range 2 {
			t.alive(t.up(t.user(p, "v")))
		}
		mu.Lock()
		defer mu.Unlock()
		t.want(requirement.PreparePathPrivate, found == "", "an empty directory that no other preparation has", "%s", found)
		t.want(requirement.PreparePathPrivate, len(used) == 2, "two paths for two preparations", "%s", count(len(used), "path"))
	}, Orchestrate)
	s.spec("no other user can enter the path of a preparation", Covers(requirement.SecurityLedgerPrivate), func(t *trial) {
		p := t.stub(nil)
		t.isUp(t.user(p, "v"), p)
		path := p.of("NodePrepareVolume")[0].path
		open := ""
		for _, dir := range []string{path, filepath.Dir(path)} {
			info, err := os.Stat(dir)
			t.sysfail("looking at prepare_path", err)
			if info.Mode().Perm()&0o077 == 0 {
				return
			}
			open += info.Mode().Perm().String() + " "
		}
		t.fail(requirement.SecurityLedgerPrivate, "a prepare_path, or the directory it is in, for its owner alone", "modes "+open)
	}, Orchestrate)
	s.spec("two consumers have two prepare_ids", Covers(requirement.PrepareIDOwn), func(t *trial) {
		p := t.stub(nil)
		t.isUp(t.user(p, "v"), p)
		t.alive(t.up(t.user(p, "v")))
		seen := map[string]bool{}
		for _, e := range p.of("NodePrepareVolume") {
			seen[e.prepare] = true
		}
		t.want(requirement.PrepareIDOwn, len(seen) == 2, "two prepare_ids for two consumers of a volume", "%d", len(seen))
	}, Orchestrate)
	s.spec("each performance follows a call of its own", Covers(requirement.PrepareEachPerformance), func(t *trial) {
		p := t.stub(nil)
		for i := range 3 {
			u := t.user(p, "v")
			t.alive(t.up(u))
			calls := len(p.of("NodePrepareVolume"))
			t.want(requirement.PrepareEachPerformance, calls == i+1, itoa(i+1)+" NodePrepareVolume after as many consumers", "%d; all calls: %s", calls, p.all())
			t.isDown(u)
		}
	}, Orchestrate)
	s.spec("what may be prepared is ended", Covers(requirement.PrepareEndUncertain), func(t *trial) {
		p := t.stub(nil)
		p.prepare = func(r *prepareRequest) (*prepareResponse, error) {
			if _, err := p.prepared(r); err != nil {
				return nil, err
			}
			return nil, status.Error(codes.Unavailable, "the answer is lost")
		}
		u := t.user(p, "v")
		err := t.up(u)
		t.want(requirement.PrepareEndUncertain, err != nil, "an error to a volume that was not prepared", "OK")
		t.wantEnded(requirement.PrepareEndUncertain, p, "UNAVAILABLE")
	}, Orchestrate)
	s.spec("a response that is refused is ended", Covers(requirement.ValidateEndsPreparation), func(t *trial) {
		p := t.stub(nil)
		p.prepare = func(r *prepareRequest) (*prepareResponse, error) {
			answer, err := p.prepared(r)
			if err == nil {
				answer.MountSpecs[0].Target = "/etc"
			}
			return answer, err
		}
		u := t.user(p, "v")
		err := t.up(u)
		t.alive(err)
		t.want(requirement.ValidateEndsPreparation, err != nil, "an error to mount specs that break a rule", "OK")
		t.wantEnded(requirement.ValidateEndsPreparation, p, "mount specs that break a rule")
	}, Orchestrate)
	s.spec("nothing is unprepared that is performed", Covers(requirement.UnprepareUndoneFirst), func(t *trial) {
		p := t.stub(nil)
		u := t.user(p, "v")
		t.isUp(u, p)
		var still atomic.Int32
		p.unprepare = func(*unprepareRequest) error {
			table, err := t.ns.Table(context.WithoutCancel(t.ctx))
			if err == nil {
				still.Add(int32(len(table.At(u.target))))
			}
			return nil
		}
		t.isDown(u)
		t.want(requirement.UnprepareUndoneFirst, still.Load() == 0, "no mount in the consumer when NodeUnprepareVolume is called", "%d is there", still.Load())
	}, Orchestrate)
	s.spec("prepare_path goes by one rmdir", Covers(requirement.UnprepareRmdir), rmdirSpec, Orchestrate)
	s.spec("nothing is unstaged that another consumer has", Covers(requirement.UnprepareBeforeUnstage), func(t *trial) {
		p := t.stub(func(p *stub) { p.stages = true })
		one, two := t.user(p, "v"), t.user(p, "v")
		t.isUp(one, p)
		t.isUp(two, p)
		t.isDown(one)
		t.want(requirement.UnprepareBeforeUnstage, len(p.of("NodeUnstageVolume")) == 0, "no NodeUnstageVolume while a second consumer has the volume", "it was called")
		t.isDown(two)
		t.want(requirement.UnprepareBeforeUnstage, len(p.of("NodeUnstageVolume")) == 1, "NodeUnstageVolume after the last consumer", "all calls: %s", p.all())
	}, Orchestrate)
	s.spec("nothing is unstaged before unprepare is OK", Covers(requirement.UnprepareBeforeUnstage), func(t *trial) {
		p := t.stub(func(p *stub) { p.stages = true })
		u := t.user(p, "v")
		t.isUp(u, p)
		p.refuses(2)
		early := ""
		for range 10 {
			err := t.down(u)
			t.alive(err)
			if len(p.of("NodeUnstageVolume")) > 0 && !p.ended(p.of("NodePrepareVolume")[0]) {
				early = p.all()
			}
			if err == nil {
				break
			}
		}
		t.want(requirement.UnprepareBeforeUnstage, early == "", "no NodeUnstageVolume before an OK to NodeUnprepareVolume", "%s", early)
	}, Orchestrate)
	s.spec("a refusal to unprepare is not the end", Covers(requirement.UnprepareBackOff), func(t *trial) {
		p := t.stub(nil)
		u := t.user(p, "v")
		t.isUp(u, p)
		p.refuses(2)
		for range 10 {
			if err := t.down(u); err == nil {
				break
			}
		}
		t.want(requirement.UnprepareBackOff, p.ended(p.of("NodePrepareVolume")[0]), "NodeUnprepareVolume until it is OK", "all calls: %s", p.all())
	}, Orchestrate)
	s.spec("calls for one volume do not overlap", Covers(requirement.ConcurrencySingleFlight), func(t *trial) {
		p := t.stub(nil)
		p.prepare = func(*prepareRequest) (*prepareResponse, error) {
			time.Sleep(30 * time.Millisecond) // a plugin at work
			return nil, nil                   //nolint:nilnil // the right answer is then given
		}
		var users []*user
		for range 4 {
			users = append(users, t.user(p, "v"))
		}
		var wg sync.WaitGroup
		errs := make([]error, len(users))
		for i, u := range users {
			wg.Go(func() { errs[i] = t.up(u) })
		}
		wg.Wait()
		for _, err := range errs {
			t.alive(err)
		}
		p.mu.Lock()
		most := p.most
		p.mu.Unlock()
		t.want(requirement.ConcurrencySingleFlight, most <= 1, "at most one call for a volume at a time", "%d", most)
	}, Orchestrate)
	s.spec("a CO that is killed while it prepares ends the preparation", Covers(requirement.CrashIntentDurable), killedSpec, Orchestrate)
}

// wantEnded wants the preparations that were begun to be ended, by the time
// Up has returned or a little later.
func (t *trial) wantEnded(id requirement.ID, p *stub, what string) {
	ended := t.poll(t.config.Timeout, func() bool {
		begun := p.of("NodePrepareVolume")
		for _, e := range begun {
			if !p.ended(e) {
				return false
			}
		}
		return len(begun) > 0
	})
	t.want(id, ended, "an OK to NodeUnprepareVolume after "+what, "none; all calls: %s", p.all())
}

// rmdirSpec leaves a file in prepare_path, as a plugin with a fault does. A CO
// that removes all below it would delete what a mount leads to.
func rmdirSpec(t *trial) {
	p := t.stub(nil)
	u := t.user(p, "v")
	t.isUp(u, p)
	path := p.of("NodePrepareVolume")[0].path
	t.isDown(u)
	t.want(requirement.UnprepareRmdir, !exists(path), "prepare_path removed after NodeUnprepareVolume", "it is still there")

	u = t.user(p, "v")
	t.isUp(u, p)
	calls := p.of("NodePrepareVolume")
	left := filepath.Join(calls[len(calls)-1].path, "left")
	t.write(left, "what a mount led to")
	t.cleanup(func() error { return ignoreMissing(os.Remove(left)) })
	err := t.down(u)
	t.alive(err)
	t.want(requirement.UnprepareRmdir, exists(left), "a prepare_path that is not empty kept (Down: "+answered(err)+")", "the file in it is gone")
	t.sysfail("removing the file", os.Remove(left))
}

// killedSpec kills the CO while the plugin prepares, and looks whether its
// successor ends what was begun.
func killedSpec(t *trial) {
	if t.process == nil {
		end(couldNotRun("the CO has to be killed; --exec 'CMD …' lets the suite start it"))
	}
	p := t.stub(nil)
	inside, release := make(chan struct{}), make(chan struct{})
	var first sync.Once
	p.prepare = func(r *prepareRequest) (*prepareResponse, error) {
		if _, err := p.prepared(r); err != nil {
			return nil, err
		}
		first.Do(func() {
			close(inside)
			<-release
		})
		return nil, nil //nolint:nilnil // the right answer is then given
	}
	u := t.user(p, "v")
	var err error // of a CO that is killed in the middle of it
	done := make(chan struct{})
	go func() { defer close(done); err = t.up(u) }()
	select {
	case <-inside:
	case <-done:
		close(release)
		t.need(requirement.PrepareEachPerformance, errors.Join(err, status.Error(codes.Unknown, "no NodePrepareVolume")), "NodePrepareVolume")
	}
	killed := t.process.kill()
	close(release)
	<-done
	t.sysfail("killing the CO", killed)
	t.sysfail("starting the CO again", t.resume(t.ctx))
	_, err = t.clients.orchestrator.Resume(t.ctx, &testingv1alpha1.ResumeRequest{Endpoints: []string{p.endpoint}})
	if err != nil && !strings.Contains(answered(err), "UNIMPLEMENTED") {
		t.alive(err)
	}
	t.wantEnded(requirement.CrashIntentDurable, p, "the CO was killed and started again")
}
