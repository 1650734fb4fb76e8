package sanity

import (
	"context"
	"path/filepath"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// publishSpecs are about a plugin that mounts volumes itself.
func publishSpecs(s *section) {
	s.in(NodePublish)
	publishArgumentSpecs(s)
	publishedSpecs(s)
	unpublishSpecs(s)
	publishedStatsSpecs(s)
}

func publishArgumentSpecs(s *section) {
	for what, change := range map[string]func(*csi.NodePublishVolumeRequest){
		"volume_id":         func(r *csi.NodePublishVolumeRequest) { r.VolumeId = "" },
		"target_path":       func(r *csi.NodePublishVolumeRequest) { r.TargetPath = "" },
		"volume_capability": func(r *csi.NodePublishVolumeRequest) { r.VolumeCapability = nil },
	} {
		s.spec("NodePublishVolume without "+what+" is INVALID_ARGUMENT", Covers(requirement.CSIPublishArguments), func(t *trial) {
			r := t.publication(t.volume())
			change(r)
			t.wantCode(requirement.CSIPublishArguments, t.publishAt(r), codes.InvalidArgument)
		})
	}
	s.spec("NodePublishVolume of a volume that does not exist is NOT_FOUND", Covers(requirement.CSIPublishUnknown), func(t *trial) {
		if t.features[StageVolume] || t.features[PublishVolume] {
			t.unsupported("a volume that does not exist cannot be staged or attached, and the plugin has that step")
		}
		t.wantCode(requirement.CSIPublishUnknown, t.publishAt(t.publication(t.goneVolume())), codes.NotFound)
	})
	s.spec("NodePublishVolume without staging_target_path is FAILED_PRECONDITION", Covers(requirement.CSIPublishStaged), func(t *trial) {
		r := t.publication(t.volume())
		r.StagingTargetPath = ""
		t.wantCode(requirement.CSIPublishStaged, t.publishAt(r), codes.FailedPrecondition)
	}, StageVolume)
	s.spec("a mount flag is not ignored", Covers(requirement.CSIPublishFlags), func(t *trial) {
		v := t.bareVolume(t.capability(t.defaultMode()))
		t.publish(v)
		v.capability = &csi.VolumeCapability{
			AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{MountFlags: []string{"no_such_flag_at_all"}}},
			AccessMode: v.capability.GetAccessMode(),
		}
		if t.features[StageVolume] {
			if err := t.stageAt(t.staging(v)); err != nil {
				t.alive(err)
				return // it is refused there
			}
		}
		err := t.publishAt(t.publication(v))
		t.alive(err)
		t.want(requirement.CSIPublishFlags, err != nil, "an error to a flag that no filesystem has", "OK")
	}, accessMount)
}

func publishedSpecs(s *section) {
	s.spec("what one publication wrote the next one reads", Covers(requirement.CSIPublishData), func(t *trial) {
		one, two := t.volume(), t.volume()
		text, other := t.filled(one), t.filled(two)
		for range 2 {
			t.wantText(requirement.CSIPublishData, one, text, "what was written to this volume before, and not to another one")
			t.wantText(requirement.CSIPublishData, two, other, "what was written to this volume before, and not to another one")
		}
		t.use(one, false, func(c *consumer) { t.clear(c) })
		t.use(two, false, func(c *consumer) { t.clear(c) })
	})
	s.spec("a published volume is mounted once", Covers(requirement.CSIPublishMounts), func(t *trial) {
		r := t.publication(t.volume())
		t.publishedOK(r)
		n := len(t.mountsAt(r.GetTargetPath()))
		t.want(requirement.CSIPublishMounts, n == 1, "1 mount at target_path", "%s", count(n, "mount"))
	}, accessMount)
	s.spec("a read-only publication takes no change", Covers(requirement.CSIPublishReadonly), func(t *trial) {
		v := t.volume()
		text := t.filled(v)
		r := t.publication(v)
		r.Readonly = true
		t.publishedOK(r)
		// In the plugin's namespace: where a mount is made read-only in a
		// second step, as every program does that has mount(2) alone, copies
		// that have propagated meanwhile stay writable, and COs do not rely
		// on them.
		t.inPlugin(func() {
			t.refusesWrites(requirement.CSIPublishReadonly, &consumer{target: r.GetTargetPath(), volume: v.id}, text)
		})
		t.unpublished(r)
		t.use(v, false, func(c *consumer) { t.clear(c) })
	})
	s.spec("a repeated publication mounts nothing", Covers(requirement.CSIPublishRepeated), func(t *trial) {
		r := t.publication(t.volume())
		t.publishedOK(r)
		before := len(t.mountsAt(r.GetTargetPath()))
		for range 2 {
			t.wantCode(requirement.CSIPublishRepeated, t.publishAt(r), codes.OK)
		}
		now := len(t.mountsAt(r.GetTargetPath()))
		t.want(requirement.CSIPublishRepeated, now == before, count(before, "mount")+" at target_path", "%s", count(now, "mount"))
	})
	s.spec("one target for reading and for writing is ALREADY_EXISTS", Covers(requirement.CSIPublishIncompatible), func(t *trial) {
		r := t.publication(t.volume())
		t.publishedOK(r)
		other := proto.CloneOf(r)
		other.Readonly = true
		t.wantCode(requirement.CSIPublishIncompatible, t.publishAt(other), codes.AlreadyExists)
	})
	s.spec("a volume for a single writer is published once", Covers(requirement.CSIPublishWriters), func(t *trial) {
		v, e := t.volumeIn(singleWriter)
		if e != nil {
			end(e)
		}
		first := t.publication(v)
		t.publishedOK(first)
		t.wantCode(requirement.CSIPublishWriters, t.publishAt(t.publication(v)), codes.FailedPrecondition)
		t.unpublished(first)
		err := t.publishAt(t.publication(v))
		t.want(requirement.CSIPublishWriters, err == nil, "OK as soon as the first is unpublished", "%s", answered(err))
	}, NodeMultiWriter)
	s.spec("publications at once come to one mount", Covers(requirement.CSIPublishConcurrent), func(t *trial) {
		r := t.publication(t.volume())
		t.cleanup(func() error { return t.settledUnpublish(r) })
		errs := parallel(t.ctx, func(ctx context.Context) error {
			return only(t.clients.node.NodePublishVolume(ctx, proto.CloneOf(r)))
		})
		for _, err := range errs {
			t.wantCode(requirement.CSIPublishConcurrent, err, codes.OK, codes.Aborted)
		}
		var err error
		t.poll(t.config.Timeout, func() bool {
			err = only(t.clients.node.NodePublishVolume(t.ctx, r))
			return status.Code(err) != codes.Aborted
		})
		t.wantCode(requirement.CSIPublishConcurrent, err, codes.OK)
		n := len(t.mountsAt(r.GetTargetPath()))
		t.want(requirement.CSIPublishConcurrent, n <= 1, "1 mount at target_path", "%s", count(n, "mount"))
	})
}

// settledUnpublish repeats until it is not ABORTED.
func (t *trial) settledUnpublish(r *csi.NodePublishVolumeRequest) (err error) {
	t.poll(t.config.Timeout, func() bool {
		err = t.unpublish(r)
		return status.Code(err) != codes.Aborted
	})
	return wrap("NodeUnpublishVolume", err)
}

func unpublishSpecs(s *section) {
	s.spec("NodeUnpublishVolume without its arguments is INVALID_ARGUMENT", Covers(requirement.CSIUnpublishArguments), func(t *trial) {
		r := t.publication(t.volume())
		t.publishedOK(r)
		for _, change := range []func(*csi.NodePublishVolumeRequest){
			func(r *csi.NodePublishVolumeRequest) { r.VolumeId = "" },
			func(r *csi.NodePublishVolumeRequest) { r.TargetPath = "" },
		} {
			other := proto.CloneOf(r)
			change(other)
			t.wantCode(requirement.CSIUnpublishArguments, t.unpublish(other), codes.InvalidArgument)
		}
	})
	s.spec("nothing is left where a volume was published", Covers(requirement.CSIUnpublishClean), func(t *trial) {
		r := t.publication(t.volume())
		t.publishedOK(r)
		t.wantCode(requirement.CSIUnpublishClean, t.unpublish(r), codes.OK)
		n := len(t.mountsAt(r.GetTargetPath()))
		t.want(requirement.CSIUnpublishClean, n == 0, "no mount at target_path", "%s", count(n, "mount"))
		left := contents(filepath.Dir(r.GetTargetPath()))
		t.want(requirement.CSIUnpublishClean, left == "nothing", "nothing in the directory of target_path, which the CO made", "%s", left)
	})
	s.spec("what is not published is unpublished", Covers(requirement.CSIUnpublishRepeated), func(t *trial) {
		r := t.publication(t.volume())
		t.publishedOK(r)
		for range 3 {
			t.wantCode(requirement.CSIUnpublishRepeated, t.unpublish(r), codes.OK)
		}
	})
	s.spec("the data outlives the publication", Covers(requirement.CSIUnpublishData), func(t *trial) {
		v := t.volume()
		text := t.filled(v)
		for range 2 {
			t.wantText(requirement.CSIUnpublishData, v, text, "what was written before NodeUnpublishVolume")
		}
		t.use(v, false, func(c *consumer) { t.clear(c) })
	})
	s.spec("a publication outlives the plugin's process, and ends when asked to", Covers(requirement.CSIPublishSurvives), func(t *trial) {
		t.mayRestart()
		v := t.volume()
		r := t.publication(v)
		t.publishedOK(r)
		c := &consumer{target: r.GetTargetPath(), volume: v.id}
		text := t.nonce()
		t.putBy(requirement.CSIPublishData, c, text)
		t.crash()
		same, found := t.shows(c, text)
		t.want(requirement.CSIPublishSurvives, same, "the volume still there for its consumer", "%s", found)
		t.clear(c)
		t.wantCode(requirement.CSIPublishSurvives, t.unpublish(r), codes.OK)
		n := len(t.mountsAt(r.GetTargetPath()))
		t.want(requirement.CSIPublishSurvives, n == 0, "no mount at target_path after a new process unpublished", "%s", count(n, "mount"))
	})
}

func publishedStatsSpecs(s *section) {
	stats := func(t *trial, r *csi.NodePublishVolumeRequest, change func(*csi.NodeGetVolumeStatsRequest)) (*csi.NodeGetVolumeStatsResponse, error) {
		asked := &csi.NodeGetVolumeStatsRequest{VolumeId: r.GetVolumeId(), VolumePath: r.GetTargetPath(), StagingTargetPath: r.GetStagingTargetPath()}
		change(asked)
		return t.clients.node.NodeGetVolumeStats(t.ctx, asked)
	}
	s.spec("a published volume has its usage told", Covers(requirement.CSIStats), func(t *trial) {
		r := t.publication(t.volume())
		t.publishedOK(r)
		answer, err := stats(t, r, func(*csi.NodeGetVolumeStatsRequest) {})
		t.wantCode(requirement.CSIStats, err, codes.OK)
		t.want(requirement.CSIStats, len(answer.GetUsage()) > 0, "usage in the answer", "none")
		for _, u := range answer.GetUsage() {
			t.want(requirement.CSIStats, u.GetTotal() >= 0 && u.GetUsed() >= 0 && u.GetAvailable() >= 0, "no negative figure", "%s", describe(u))
		}
	}, VolumeStats)
	s.spec("NodeGetVolumeStats without its arguments is INVALID_ARGUMENT", Covers(requirement.CSIStatsArguments), func(t *trial) {
		r := t.publication(t.volume())
		t.publishedOK(r)
		for _, change := range []func(*csi.NodeGetVolumeStatsRequest){
			func(r *csi.NodeGetVolumeStatsRequest) { r.VolumeId = "" },
			func(r *csi.NodeGetVolumeStatsRequest) { r.VolumePath = "" },
		} {
			_, err := stats(t, r, change)
			t.wantCode(requirement.CSIStatsArguments, err, codes.InvalidArgument)
		}
	}, VolumeStats)
	s.spec("NodeGetVolumeStats of a path where no volume is is NOT_FOUND", Covers(requirement.CSIStatsUnknown), func(t *trial) {
		r := t.publication(t.volume())
		t.publishedOK(r)
		for _, change := range []func(*csi.NodeGetVolumeStatsRequest){
			func(r *csi.NodeGetVolumeStatsRequest) { r.VolumePath = filepath.Join(t.dir, "nowhere") },
			func(r *csi.NodeGetVolumeStatsRequest) { r.VolumeId = t.canary() },
		} {
			_, err := stats(t, r, change)
			t.wantCode(requirement.CSIStatsUnknown, err, codes.NotFound)
		}
	}, VolumeStats)
	s.spec("a published volume that was expanded grows on the node", Covers(requirement.CSINodeExpand), func(t *trial) {
		v := t.volume()
		if !v.createdNow {
			t.unsupported("the plugin creates no volumes, and those of others are not made larger")
		}
		text := t.filled(v)
		want := t.larger(v)
		answer, err := t.clients.controller.ControllerExpandVolume(t.ctx, &csi.ControllerExpandVolumeRequest{
			VolumeId: v.id, CapacityRange: &csi.CapacityRange{RequiredBytes: want}, VolumeCapability: v.capability, Secrets: t.config.secrets("ControllerExpandVolume"),
		})
		if status.Code(err) == codes.FailedPrecondition {
			t.unsupported("the plugin expands no volume that a node has: " + status.Convert(err).Message())
		}
		t.need(requirement.CSIExpandSize, err, "OK")
		r := t.publication(v)
		t.publishedOK(r)
		if answer.GetNodeExpansionRequired() {
			_, err := t.clients.node.NodeExpandVolume(t.ctx, &csi.NodeExpandVolumeRequest{
				VolumeId: v.id, VolumePath: r.GetTargetPath(), StagingTargetPath: v.staging, VolumeCapability: v.capability,
				CapacityRange: &csi.CapacityRange{RequiredBytes: want}, Secrets: t.config.secrets("NodeExpandVolume"),
			})
			t.wantCode(requirement.CSINodeExpand, err, codes.OK)
		}
		t.unpublished(r)
		t.wantText(requirement.CSINodeExpand, v, text, "what was written before the volume grew")
	}, ExpandVolume, NodeExpandVolume)
}

// unclean is the rule a plugin breaks that leaves something in a directory it
// was given to publish or stage at.
func (t *trial) unclean(dir string) requirement.ID {
	if strings.HasPrefix(filepath.Base(dir), "staging-") {
		return requirement.CSIUnstageClean
	}
	return requirement.CSIUnpublishClean
}
