package sanity

import (
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

func crashSpecs(s *section) {
	s.spec("the list is the same after a crash", Covers(requirement.ListSurvivesRestart), func(t *trial) {
		t.mayRestart()
		r := t.request(t.volume())
		r.Readonly = true
		t.prepared(r)
		before := t.entry(r)
		if before == nil {
			end(couldNotRun("the preparation is not listed, which breaks %s", requirement.ListComplete))
		}
		t.crash()
		after := t.entry(r)
		t.want(requirement.ListSurvivesRestart, after != nil, "the preparation in the list after SIGKILL and a new start", "it is not listed")
		t.want(requirement.ListSurvivesRestart, describe(before) == describe(after), "the same entry: "+describe(before), "%s", describe(after))
	})
	s.spec("repeats and unprepare are answered after a crash as before", Covers(requirement.CrashStateSurvives), func(t *trial) {
		t.mayRestart()
		r := t.request(t.volume())
		first := t.prepared(r)
		t.crash()
		again, err := t.prepare(r)
		t.wantCode(requirement.CrashStateSurvives, err, codes.OK)
		t.wantEquivalent(requirement.CrashStateSurvives, first, again)
		other := clone(r)
		other.Readonly = true
		_, err = t.clients.prepare.NodePrepareVolume(t.ctx, other)
		t.wantCode(requirement.CrashStateSurvives, err, codes.AlreadyExists)
		t.crash()
		t.wantCode(requirement.CrashStateSurvives, t.unprepare(r), codes.OK)
		t.want(requirement.CrashStateSurvives, t.entry(r) == nil, "no such pair in the list after it was unprepared", "it is listed")
		t.crash()
		t.want(requirement.CrashStateSurvives, t.entry(r) == nil, "no such pair in the list after another crash", "it is listed again")
	})
	s.spec("the data outlives a crash", Covers(requirement.CrashStateSurvives, requirement.PrepareVolumeData), func(t *trial) {
		t.mayRestart()
		r := t.request(t.volume())
		answer := t.prepared(r)
		c := t.consumer()
		t.perform(c, r, answer)
		text := t.nonce()
		t.put(c, text)
		t.crash()
		same, found := t.shows(c, text)
		t.want(requirement.CrashStateSurvives, same, "the volume still there for its consumer", "%s", found)
		again, err := t.prepare(r)
		t.wantCode(requirement.CrashStateSurvives, err, codes.OK)
		fresh := t.consumer()
		t.perform(fresh, r, again)
		same, found = t.shows(fresh, text)
		t.want(requirement.PrepareVolumeData, same, "what was written before the crash", "%s", found)
		t.clear(fresh)
	})
	s.spec("preparations of another boot are dropped", Covers(requirement.CrashBootID), func(t *trial) {
		t.mayRestart()
		r := t.request(t.volume())
		t.prepared(r)
		t.cleanup(func() error { return t.restart(t.ctx) })
		if err := t.inAnotherBoot(func() error { return t.restart(t.ctx) }); err != nil {
			end(couldNotRun("giving the plugin another boot id: %v", err))
		}
		if t.entry(r) != nil {
			t.fail(requirement.CrashBootID, "no preparation of the boot before, by /proc/sys/kernel/random/boot_id", "it is still listed")
		}
	})
	s.spec("nothing is inferred from directories", Covers(requirement.CrashNoInference), func(t *trial) {
		living, dead := t.request(t.volume()), t.request(t.volume())
		t.prepared(living)
		t.prepared(dead)
		t.unprepared(dead)
		// What a careless CO may leave: the directory, with something in it,
		// beside that of a living preparation.
		relic := filepath.Join(dead.GetPreparePath(), "relic")
		t.write(relic, "left behind")
		t.cleanup(func() error { return ignoreMissing(os.Remove(relic)) })
		if t.process != nil {
			t.crash()
		}
		t.want(requirement.CrashNoInference, t.entry(dead) == nil, "no pair in the list that is unprepared, whatever lies in its directory", "it is listed")
		entries, err := t.listed()
		t.need(requirement.ListComplete, err, "OK")
		for _, e := range entries {
			t.want(requirement.CrashNoInference, e.GetPreparePath() != dead.GetPreparePath(), "no preparation at that path", "%s is listed for it", e.GetPrepareId())
		}
	})
}

// mayRestart ends the spec if the plugin is not the suite's to kill.
func (t *trial) mayRestart() {
	if t.process == nil {
		end(couldNotRun("the plugin is not the suite's to kill and start again; --exec 'CMD …' lets the suite start it"))
	}
}

// crash kills the plugin with SIGKILL and starts it again.
func (t *trial) crash() {
	err := t.restart(t.ctx)
	if err == nil {
		return
	}
	t.mu.Lock()
	t.gone = fmt.Sprintf("the plugin did not come back after SIGKILL in %q: %v", t.definition.name, err)
	t.mu.Unlock()
	t.fail(t.definition.covers[0], "that the plugin starts again after SIGKILL", err.Error())
}

// inAnotherBoot runs f while the plugin's namespace shows another boot id.
func (t *trial) inAnotherBoot(f func() error) error {
	const bootID = "/proc/sys/kernel/random/boot_id"
	file := filepath.Join(t.Suite.dir, "boot_id")
	text := fmt.Sprintf("%08x-0000-4000-8000-%012x\n", uint32(t.draw()), t.draw()&(1<<48-1))
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		return err
	}
	defer func() { _ = os.Remove(file) }()
	if err := t.beyond.Do(t.ctx, func() error { return unix.Mount(file, bootID, "", unix.MS_BIND, "") }); err != nil {
		return err
	}
	err := f()
	if gone := t.beyond.Do(t.ctx, func() error { return unix.Unmount(bootID, 0) }); err == nil {
		err = gone
	}
	return err
}
