package sp

import (
	"context"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/fakes/mutant"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// What is wrong with attaching, staging and publishing.
var csiNodeMutants = []Mutant{
	csiSeat("attach-nothing", mutant.Validation, requirement.CSIAttachArguments,
		"a call without volume_capability is OK",
		with(attaching, forgiving[csi.ControllerPublishVolumeRequest, csi.ControllerPublishVolumeResponse](func(_ *Plain, r *csi.ControllerPublishVolumeRequest) bool {
			return r.GetVolumeCapability() == nil
		}))),
	csiSeat("attach-anywhere", mutant.Codes, requirement.CSIAttachUnknown,
		"a volume is attached to a node that does not exist: it is lost until somebody looks",
		with(attaching, replaced(func(_ context.Context, p *Plain, r *csi.ControllerPublishVolumeRequest, next func() (*csi.ControllerPublishVolumeResponse, error)) (*csi.ControllerPublishVolumeResponse, error) {
			if r.GetNodeId() != "" {
				r.NodeId = p.config.NodeID
			}
			return next()
		}))),
	csiSeat("attach-anew", mutant.Repeats, requirement.CSIAttachRepeated,
		"a repeat answers another publish_context: the node looks for a device that is not there",
		with(attaching, repeats((*csi.ControllerPublishVolumeRequest).GetVolumeId, func(_ *Plain, _ *csi.ControllerPublishVolumeRequest, next func() (*csi.ControllerPublishVolumeResponse, error)) (*csi.ControllerPublishVolumeResponse, error) {
			answer, err := next()
			if err == nil {
				answer.PublishContext["slot"] += "-again"
			}
			return answer, err
		}))),
	csiSeat("attach-whatever-mode", mutant.Repeats, requirement.CSIAttachIncompatible,
		"a volume that is attached for reading is attached for writing by a second call, for the first consumer too",
		with(attaching, replaced(func(_ context.Context, p *Plain, r *csi.ControllerPublishVolumeRequest, next func() (*csi.ControllerPublishVolumeResponse, error)) (*csi.ControllerPublishVolumeResponse, error) {
			p.mu.Lock()
			if was, attached := p.state.Attached[r.GetVolumeId()]; attached {
				r.Readonly = was
			}
			p.mu.Unlock()
			return next()
		}))),
	csiSeat("detach-once", mutant.Repeats, requirement.CSIDetachRepeated,
		"a second detach is an error: the volume can go nowhere",
		with(attaching, replaced(func(_ context.Context, p *Plain, r *csi.ControllerUnpublishVolumeRequest, next func() (*csi.ControllerUnpublishVolumeResponse, error)) (*csi.ControllerUnpublishVolumeResponse, error) {
			p.mu.Lock()
			_, attached := p.state.Attached[r.GetVolumeId()]
			p.mu.Unlock()
			if !attached && r.GetVolumeId() != "" {
				return nil, status.Error(codes.Internal, "is not attached")
			}
			return next()
		}))),
	csiSeat("stage-nothing", mutant.Validation, requirement.CSIStageArguments,
		"a call without staging_target_path is OK, and stages nowhere",
		with(stagingToo, forgiving[csi.NodeStageVolumeRequest, csi.NodeStageVolumeResponse](func(_ *Plain, r *csi.NodeStageVolumeRequest) bool { return r.GetStagingTargetPath() == "" }))),
	csiSeat("stage-unknown", mutant.Codes, requirement.CSIStageUnknown,
		"a volume that does not exist is staged",
		with(stagingToo, forgiving[csi.NodeStageVolumeRequest, csi.NodeStageVolumeResponse](func(p *Plain, r *csi.NodeStageVolumeRequest) bool {
			return r.GetVolumeId() != "" && r.GetStagingTargetPath() != "" && r.GetVolumeCapability() != nil && p.unknown(r.GetVolumeId())
		}))),
	csiSeat("stage-each-call", mutant.Repeats, requirement.CSIStageRepeated,
		"each call mounts once more: after some restarts of the CO the table is full of it",
		with(stagingToo, repeats((*csi.NodeStageVolumeRequest).GetStagingTargetPath, func(p *Plain, r *csi.NodeStageVolumeRequest, next func() (*csi.NodeStageVolumeResponse, error)) (*csi.NodeStageVolumeResponse, error) {
			if mutant.Contained() {
				_ = p.mount(r.GetStagingTargetPath(), p.place(r.GetVolumeId()), 0)
			}
			return next()
		}))),
	csiSeat("unstage-once", mutant.Repeats, requirement.CSIUnstageRepeated,
		"a volume that is not staged is an error to unstage",
		with(stagingToo, replaced(func(_ context.Context, p *Plain, r *csi.NodeUnstageVolumeRequest, next func() (*csi.NodeUnstageVolumeResponse, error)) (*csi.NodeUnstageVolumeResponse, error) {
			p.mu.Lock()
			staged := p.state.Staged[r.GetVolumeId()]
			p.mu.Unlock()
			if r.GetVolumeId() != "" && staged == "" {
				return nil, status.Error(codes.Internal, "is not staged")
			}
			return next()
		}))),
	csiSeat("unstage-leaves-mount", mutant.Leaks, requirement.CSIUnstageClean,
		"OK is answered and the staged mount stays: the device is moved away under it",
		with(stagingToo, altered(func(p *Plain, r *csi.NodeUnstageVolumeRequest, _ *csi.NodeUnstageVolumeResponse) {
			if mutant.Contained() && r.GetVolumeId() != "" && !p.unknown(r.GetVolumeId()) {
				_ = p.mount(r.GetStagingTargetPath(), p.place(r.GetVolumeId()), 0)
			}
		}))),
	csiSeat("publish-nothing", mutant.Validation, requirement.CSIPublishArguments,
		"a call without volume_capability is OK",
		forgiving[csi.NodePublishVolumeRequest, csi.NodePublishVolumeResponse](func(_ *Plain, r *csi.NodePublishVolumeRequest) bool {
			return r.GetVolumeCapability() == nil && r.GetVolumeId() != ""
		})),
	csiSeat("publish-unknown", mutant.Codes, requirement.CSIPublishUnknown,
		"a volume that does not exist is published: the consumer starts on a directory of the root disk",
		forgiving[csi.NodePublishVolumeRequest, csi.NodePublishVolumeResponse](func(p *Plain, r *csi.NodePublishVolumeRequest) bool {
			return r.GetVolumeId() != "" && r.GetTargetPath() != "" && r.GetVolumeCapability() != nil && p.unknown(r.GetVolumeId())
		})),
	csiSeat("publish-unstaged", mutant.Codes, requirement.CSIPublishStaged,
		"a volume that is not staged is published: the directory below is",
		with(stagingToo, replaced(func(_ context.Context, p *Plain, r *csi.NodePublishVolumeRequest, next func() (*csi.NodePublishVolumeResponse, error)) (*csi.NodePublishVolumeResponse, error) {
			if r.GetStagingTargetPath() == "" {
				p.mu.Lock()
				r.StagingTargetPath = p.state.Staged[r.GetVolumeId()]
				p.mu.Unlock()
			}
			return next()
		}))),
	csiSeat("publish-another", mutant.Data, requirement.CSIPublishData,
		"a directory of its own is mounted each time: what the last consumer wrote is gone",
		func(p *Plain) {
			p.rules.mount = func(p *Plain, to, from string, flags uintptr) error {
				scratch := filepath.Join(p.dir, "scratch-"+filepath.Base(to))
				_ = os.Mkdir(scratch, 0o777)
				return p.mount(to, scratch, flags)
			}
		}),
	csiSeat("publish-no-mount", mutant.Data, requirement.CSIPublishMounts,
		"the target is made and nothing is mounted on it: the data goes to the root disk and with the consumer",
		func(p *Plain) { p.rules.mount = func(*Plain, string, string, uintptr) error { return nil } }),
	csiSeat("publish-writable", mutant.Attributes, requirement.CSIPublishReadonly,
		"readonly is asked for in the one call that the kernel does not heed: the volume can be written to",
		func(p *Plain) {
			p.rules.mount = func(_ *Plain, to, from string, flags uintptr) error {
				return unix.Mount(from, to, "", unix.MS_BIND|flags, "")
			}
		}),
	csiSeat("publish-each-call", mutant.Repeats, requirement.CSIPublishRepeated,
		"each call mounts once more, and one unpublish takes one away",
		repeats((*csi.NodePublishVolumeRequest).GetTargetPath, func(p *Plain, r *csi.NodePublishVolumeRequest, next func() (*csi.NodePublishVolumeResponse, error)) (*csi.NodePublishVolumeResponse, error) {
			answer, err := next()
			if err == nil && mutant.Contained() {
				_ = p.mount(r.GetTargetPath(), p.place(r.GetVolumeId()), 0)
			}
			return answer, err
		})),
	csiSeat("publish-whatever-mode", mutant.Repeats, requirement.CSIPublishIncompatible,
		"a second publish with another readonly is OK and changes nothing: the consumer has what it did not ask for",
		replaced(func(_ context.Context, p *Plain, r *csi.NodePublishVolumeRequest, next func() (*csi.NodePublishVolumeResponse, error)) (*csi.NodePublishVolumeResponse, error) {
			p.mu.Lock()
			if was := p.state.Published[r.GetTargetPath()]; was != nil {
				r.Readonly = was.Readonly
			}
			p.mu.Unlock()
			return next()
		})),
	csiSeat("publish-two-writers", mutant.Data, requirement.CSIPublishWriters,
		"a volume for a single writer is published a second time: two databases write to it",
		replaced(func(_ context.Context, _ *Plain, r *csi.NodePublishVolumeRequest, next func() (*csi.NodePublishVolumeResponse, error)) (*csi.NodePublishVolumeResponse, error) {
			if m := r.GetVolumeCapability().GetAccessMode(); m.GetMode() == csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER {
				m.Mode = csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER
			}
			return next()
		})),
	csiSeat("publish-drops-flags", mutant.Attributes, requirement.CSIPublishFlags,
		"mount flags that are not known are left out: nobody learns that they are not in force",
		replaced(func(_ context.Context, _ *Plain, r *csi.NodePublishVolumeRequest, next func() (*csi.NodePublishVolumeResponse, error)) (*csi.NodePublishVolumeResponse, error) {
			if m := r.GetVolumeCapability().GetMount(); m != nil {
				m.MountFlags = nil
			}
			return next()
		})),
	csiSeat("publish-races", mutant.Concurrency, requirement.CSIPublishConcurrent,
		"calls at once for one target each see that nothing is mounted, and each mount",
		func(p *Plain) {
			var mu sync.Mutex
			flying := map[string]int{}
			replaced(func(_ context.Context, p *Plain, r *csi.NodePublishVolumeRequest, next func() (*csi.NodePublishVolumeResponse, error)) (*csi.NodePublishVolumeResponse, error) {
				target := r.GetTargetPath()
				mu.Lock()
				flying[target]++
				second := flying[target] == 2
				mu.Unlock()
				defer func() { mu.Lock(); flying[target]--; mu.Unlock() }()
				time.Sleep(20 * time.Millisecond)
				answer, err := next()
				if second && err == nil && mutant.Contained() {
					_ = p.mount(target, p.place(r.GetVolumeId()), 0)
				}
				return answer, err
			})(p)
		}),
	csiSeat("publish-forgotten", mutant.Restart, requirement.CSIPublishSurvives,
		"publications are in memory alone: after a restart unpublish is OK and the mount stays",
		func(p *Plain) {
			p.rules.keep = func(p *Plain) error {
				published := p.state.Published
				p.state.Published = nil
				defer func() { p.state.Published = published }()
				return p.keep()
			}
		}),
	csiSeat("unpublish-nothing", mutant.Validation, requirement.CSIUnpublishArguments,
		"a call without target_path is OK",
		forgiving[csi.NodeUnpublishVolumeRequest, csi.NodeUnpublishVolumeResponse](func(_ *Plain, r *csi.NodeUnpublishVolumeRequest) bool { return r.GetTargetPath() == "" })),
	csiSeat("unpublish-leaves-target", mutant.Leaks, requirement.CSIUnpublishClean,
		"the directory at target_path stays: the CO cannot remove its own above it",
		altered(func(_ *Plain, r *csi.NodeUnpublishVolumeRequest, _ *csi.NodeUnpublishVolumeResponse) {
			_ = os.Mkdir(r.GetTargetPath(), 0o755)
		})),
	csiSeat("unpublish-once", mutant.Repeats, requirement.CSIUnpublishRepeated,
		"a second unpublish is an error: the consumer is terminating for ever",
		repeats((*csi.NodeUnpublishVolumeRequest).GetTargetPath, refuse[csi.NodeUnpublishVolumeRequest, csi.NodeUnpublishVolumeResponse](codes.Internal))),
	csiSeat("unpublish-deletes", mutant.Data, requirement.CSIUnpublishData,
		"what is at target_path is removed before it is unmounted: the volume is emptied",
		replaced(func(_ context.Context, p *Plain, r *csi.NodeUnpublishVolumeRequest, next func() (*csi.NodeUnpublishVolumeResponse, error)) (*csi.NodeUnpublishVolumeResponse, error) {
			if r.GetVolumeId() != "" && !p.unknown(r.GetVolumeId()) {
				empty(p.place(r.GetVolumeId()))
			}
			return next()
		})),
	csiSeat("stats-without-usage", mutant.Codes, requirement.CSIStats,
		"statistics are empty: nobody sees that the volume is full",
		altered(func(_ *Plain, _ *csi.NodeGetVolumeStatsRequest, a *csi.NodeGetVolumeStatsResponse) { a.Usage = nil })),
	csiSeat("stats-of-nothing", mutant.Validation, requirement.CSIStatsArguments,
		"a call without volume_path is OK",
		forgiving[csi.NodeGetVolumeStatsRequest, csi.NodeGetVolumeStatsResponse](func(_ *Plain, r *csi.NodeGetVolumeStatsRequest) bool { return r.GetVolumePath() == "" })),
	csiSeat("stats-of-anything", mutant.Codes, requirement.CSIStatsUnknown,
		"statistics of a path where no volume is are those of the root disk",
		replaced(func(_ context.Context, _ *Plain, r *csi.NodeGetVolumeStatsRequest, next func() (*csi.NodeGetVolumeStatsResponse, error)) (*csi.NodeGetVolumeStatsResponse, error) {
			answer, err := next()
			if status.Code(err) == codes.NotFound {
				return &csi.NodeGetVolumeStatsResponse{Usage: []*csi.VolumeUsage{{Unit: csi.VolumeUsage_BYTES, Total: 1}}}, nil
			}
			return answer, err
		})),
	csiSeat("node-expand-fails", mutant.Repeats, requirement.CSINodeExpand,
		"a filesystem that has its size already is an error to grow",
		replaced(func(context.Context, *Plain, *csi.NodeExpandVolumeRequest, func() (*csi.NodeExpandVolumeResponse, error)) (*csi.NodeExpandVolumeResponse, error) {
			return nil, status.Error(codes.Internal, "is of that size")
		})),
}
