package sanity

import (
	"os"
	"path/filepath"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

func unprepareSpecs(s *section) {
	for _, m := range []malformed{
		{"an empty volume_id", requirement.UnprepareVolumeIDRequired, "", func(r *prepareRequest) { r.VolumeId = "" }},
		{"an empty prepare_id", requirement.UnpreparePrepareIDRequired, "", func(r *prepareRequest) { r.PrepareId = "" }},
		{"an empty prepare_path", requirement.UnpreparePathRequired, "", func(r *prepareRequest) { r.PreparePath = "" }},
	} {
		s.spec("unprepare with "+m.name+" is INVALID_ARGUMENT", Covers(m.id), func(t *trial) {
			r := t.request(t.volume())
			t.prepared(r)
			broken := clone(r)
			m.change(broken)
			t.wantCode(m.id, t.unprepare(broken), codes.InvalidArgument)
		})
	}
	s.spec("unprepare with the prepare_path of another is INVALID_ARGUMENT", Covers(requirement.UnpreparePathDiffers), func(t *trial) {
		r := t.request(t.volume())
		t.prepared(r)
		other := clone(r)
		other.PreparePath = t.mkdir("other")
		t.wantCode(requirement.UnpreparePathDiffers, t.unprepare(other), codes.InvalidArgument)
		t.want(requirement.UnpreparePathDiffers, t.entry(r) != nil, "the preparation still in the list", "it is not listed any more")
	})
	s.spec("unprepare of what is not known is OK", Covers(requirement.UnprepareUnknownOk), func(t *trial) {
		r := t.request(t.volume())
		t.wantCode(requirement.UnprepareUnknownOk, t.unprepare(r), codes.OK)
		r = t.request(t.goneVolume())
		t.wantCode(requirement.UnprepareUnknownOk, t.unprepare(r), codes.OK)
	})
	s.spec("unprepare leaves prepare_path empty when it answers", Covers(requirement.UnpreparePathEmptied, requirement.UnprepareFinished), func(t *trial) {
		r := t.request(t.volume())
		t.prepared(r)
		t.unprepared(r)
		left := contents(r.PreparePath)
		if left == "nothing" {
			return
		}
		if t.poll(2*time.Second, func() bool { return contents(r.PreparePath) == "nothing" }) {
			t.fail(requirement.UnprepareFinished, "that the work is finished when OK is answered", "prepare_path held "+left+", and was emptied a little later")
		}
		t.fail(requirement.UnpreparePathEmptied, "an empty prepare_path", "it holds "+left)
	})
	s.spec("unprepare frees what the preparation held", Covers(requirement.UnprepareResourcesFreed, requirement.UnprepareFinished), freedSpec)
	s.spec("unprepare removes nothing that is not the plugin's", Covers(requirement.UnprepareOnlyOwn), func(t *trial) {
		r := t.request(t.volume())
		t.prepared(r)
		foreign, dir := filepath.Join(r.PreparePath, "foreign"), filepath.Join(r.PreparePath, "foreign.d")
		t.write(foreign, "not the plugin's")
		t.sysfail("making a directory", os.Mkdir(dir, 0o700))
		t.cleanup(func() error { return ignoreMissing(os.Remove(foreign)) })
		t.cleanup(func() error { return ignoreMissing(os.Remove(dir)) })
		err := t.unprepare(r)
		same, found := holds(foreign, "not the plugin's")
		t.want(requirement.UnprepareOnlyOwn, same, "the file the suite put into prepare_path, as it was", "%s (unprepare: %s)", found, answered(err))
		t.want(requirement.UnprepareOnlyOwn, exists(dir), "the directory the suite put into prepare_path", "it is gone (unprepare: %s)", answered(err))
	})
	s.spec("the data outlives the preparation", Covers(requirement.UnprepareDataKept), func(t *trial) {
		v := t.volume()
		text := t.nonce()
		t.withVolume(v, false, func(c *consumer) { t.put(c, text) })
		for range 2 {
			t.withVolume(v, true, func(c *consumer) {
				same, found := t.shows(c, text)
				t.want(requirement.UnprepareDataKept, same, "the file a consumer wrote before NodeUnprepareVolume, as it was", "%s", found)
			})
		}
		t.withVolume(v, false, func(c *consumer) { t.clear(c) })
	})
	s.spec("a volume is not unstaged while it is prepared", Covers(requirement.UnprepareUnstageRefused), func(t *trial) {
		v := t.volume()
		t.prepared(t.request(v))
		t.wantCode(requirement.UnprepareUnstageRefused, t.unstage(v), codes.FailedPrecondition)
	}, StageVolume)
	s.spec("a volume is not deleted while it is prepared", Covers(requirement.UnprepareDeleteRefused), func(t *trial) {
		v := t.volume()
		r := t.request(v)
		t.prepared(r)
		_, err := t.clients.controller.DeleteVolume(t.ctx, &csi.DeleteVolumeRequest{VolumeId: v.id, Secrets: t.config.secrets("DeleteVolume")})
		t.wantCode(requirement.UnprepareDeleteRefused, err, codes.FailedPrecondition)
	}, CreateDeleteVolume)
}

// freedSpec runs the whole life of a preparation a few times and wants the
// plugin to hold no more afterwards than before. The first time is left out:
// what a plugin opens once and keeps is no leak.
func freedSpec(t *trial) {
	pid := t.pid()
	if pid == 0 || len(descriptors(pid)) == 0 {
		end(couldNotRun("the plugin's process cannot be looked at: not on a unix socket, or of another user or pid namespace"))
	}
	v := t.volume()
	cycle := func() {
		for _, readonly := range []bool{false, true} {
			r := t.request(v)
			r.Readonly = readonly
			t.prepared(r)
			t.unprepared(r)
		}
	}
	const cycles = 5
	cycle()
	fds, kids, attached := descriptors(pid), children(pid), len(t.ownLoops())
	for range cycles {
		cycle()
	}
	more := func() string {
		for what, n := range descriptors(pid) {
			if n >= fds[what]+cycles {
				return count(n-fds[what], "descriptor") + " more on " + what
			}
		}
		if now := children(pid); len(now) >= len(kids)+cycles {
			return count(len(now)-len(kids), "process") + " more, the last is " + now[len(now)-1]
		}
		if now := t.ownLoops(); len(now) >= attached+cycles {
			return count(len(now)-attached, "loop device") + " more"
		}
		return ""
	}
	if more() == "" {
		return
	}
	held := more()
	if t.poll(2*time.Second, func() bool { return more() == "" }) {
		t.fail(requirement.UnprepareFinished, "that the work is finished when OK is answered", "after "+count(cycles, "preparation")+" the plugin held "+held+", and let go a little later")
	}
	t.fail(requirement.UnprepareResourcesFreed, "as many descriptors, processes and devices after "+count(cycles, "preparation")+" as before", held)
}
