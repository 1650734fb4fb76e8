package sp

import (
	"context"
	"crypto/rand"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/fakes/mutant"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// unknown reports whether there is no such volume.
func (p *Plain) unknown(id string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.state.Volumes[id] == nil
}

func refuse[Req, Resp any](c codes.Code) func(*Plain, *Req, func() (*Resp, error)) (*Resp, error) {
	return func(*Plain, *Req, func() (*Resp, error)) (*Resp, error) {
		return nil, status.Error(c, "was called before")
	}
}

// What is wrong with volumes, and with the plugin itself.
var csiVolumeMutants = []Mutant{
	csiSeat("odd-name", mutant.Discovery, requirement.CSIName,
		"the name of the plugin begins with a dash: no directory or label can be made of it",
		altered(func(_ *Plain, _ *csi.GetPluginInfoRequest, a *csi.GetPluginInfoResponse) { a.Name = "-" + a.Name })),
	csiSeat("new-node-id", mutant.Discovery, requirement.CSINodeID,
		"the node has another id each time it is asked: what is attached to it is attached to nobody",
		altered(func(_ *Plain, _ *csi.NodeGetInfoRequest, a *csi.NodeGetInfoResponse) { a.NodeId += rand.Text() })),
	csiSeat("modify-not-served", mutant.Discovery, requirement.CSIServed,
		"a capability is reported whose call is UNIMPLEMENTED: a CO tries for ever",
		replaced(func(context.Context, *Plain, *csi.ControllerModifyVolumeRequest, func() (*csi.ControllerModifyVolumeResponse, error)) (*csi.ControllerModifyVolumeResponse, error) {
			return nil, status.Error(codes.Unimplemented, "to come")
		})),
	csiSeat("nameless-volume", mutant.Validation, requirement.CSICreateArguments,
		"a volume without a name is created: no repeat finds it again",
		replaced(func(_ context.Context, _ *Plain, r *csi.CreateVolumeRequest, next func() (*csi.CreateVolumeResponse, error)) (*csi.CreateVolumeResponse, error) {
			if r.GetName() == "" {
				r.Name = rand.Text()
			}
			return next()
		})),
	csiSeat("volume-each-call", mutant.Repeats, requirement.CSICreateSame,
		"each call makes a volume: a CO that repeats after a timeout pays for two and knows of one",
		repeats((*csi.CreateVolumeRequest).GetName, func(_ *Plain, r *csi.CreateVolumeRequest, next func() (*csi.CreateVolumeResponse, error)) (*csi.CreateVolumeResponse, error) {
			r.Name += rand.Text()
			return next()
		})),
	csiSeat("any-size-is-the-same", mutant.Repeats, requirement.CSICreateIncompatible,
		"a volume of the name is answered whatever its size: the consumer gets less than was asked for",
		replaced(func(_ context.Context, p *Plain, r *csi.CreateVolumeRequest, next func() (*csi.CreateVolumeResponse, error)) (*csi.CreateVolumeResponse, error) {
			p.mu.Lock()
			was := p.state.Volumes[idOf("volume", r.GetName())]
			p.mu.Unlock()
			if was != nil {
				r.CapacityRange = nil
			}
			return next()
		})),
	csiSeat("half-size", mutant.Data, requirement.CSICreateSize,
		"the volume has half the size that is required: it is full when nobody expects it",
		altered(func(_ *Plain, _ *csi.CreateVolumeRequest, a *csi.CreateVolumeResponse) { a.Volume.CapacityBytes /= 2 })),
	csiSeat("used-volume", mutant.Data, requirement.CSICreateEmpty,
		"a new volume has the files of one that was deleted: the next owner reads them",
		altered(func(p *Plain, r *csi.CreateVolumeRequest, a *csi.CreateVolumeResponse) {
			if r.GetVolumeContentSource() == nil {
				_ = os.WriteFile(filepath.Join(p.place(a.GetVolume().GetVolumeId()), "of-somebody-else"), []byte("private"), 0o600)
			}
		})),
	csiSeat("create-races", mutant.Concurrency, requirement.CSICreateConcurrent,
		"two calls at once for one name make two volumes, and one of them is lost",
		func() plainFault {
			var mu sync.Mutex
			flying := map[string]int{}
			return replaced(func(_ context.Context, _ *Plain, r *csi.CreateVolumeRequest, next func() (*csi.CreateVolumeResponse, error)) (*csi.CreateVolumeResponse, error) {
				name := r.GetName()
				mu.Lock()
				flying[name]++
				if flying[name] > 1 {
					r.Name += rand.Text()
				}
				mu.Unlock()
				defer func() { mu.Lock(); flying[name]--; mu.Unlock() }()
				time.Sleep(20 * time.Millisecond)
				return next()
			})
		}()),
	csiSeat("delete-of-nothing", mutant.Validation, requirement.CSIDeleteArguments,
		"a call without volume_id is OK: a CO with a fault believes it has deleted something",
		forgiving[csi.DeleteVolumeRequest, csi.DeleteVolumeResponse](func(_ *Plain, r *csi.DeleteVolumeRequest) bool { return r.GetVolumeId() == "" })),
	csiSeat("delete-once", mutant.Repeats, requirement.CSIDeleteRepeated,
		"a volume that is gone is NOT_FOUND to a second delete: it can never be forgotten",
		replaced(func(_ context.Context, p *Plain, r *csi.DeleteVolumeRequest, next func() (*csi.DeleteVolumeResponse, error)) (*csi.DeleteVolumeResponse, error) {
			if r.GetVolumeId() != "" && p.unknown(r.GetVolumeId()) {
				return nil, noVolume(r.GetVolumeId())
			}
			return next()
		})),
	csiSeat("delete-nothing", mutant.Leaks, requirement.CSIDeleteGone,
		"OK is answered and the volume stays: somebody pays for it for ever",
		replaced(func(context.Context, *Plain, *csi.DeleteVolumeRequest, func() (*csi.DeleteVolumeResponse, error)) (*csi.DeleteVolumeResponse, error) {
			return &csi.DeleteVolumeResponse{}, nil
		})),
	csiSeat("validate-nothing", mutant.Validation, requirement.CSIValidateArguments,
		"a call without capabilities confirms all there are",
		forgiving[csi.ValidateVolumeCapabilitiesRequest, csi.ValidateVolumeCapabilitiesResponse](func(_ *Plain, r *csi.ValidateVolumeCapabilitiesRequest) bool {
			return len(r.GetVolumeCapabilities()) == 0
		})),
	csiSeat("validate-unknown", mutant.Codes, requirement.CSIValidateUnknown,
		"a volume that does not exist is validated: a CO schedules its consumer",
		forgiving[csi.ValidateVolumeCapabilitiesRequest, csi.ValidateVolumeCapabilitiesResponse](func(p *Plain, r *csi.ValidateVolumeCapabilitiesRequest) bool {
			return r.GetVolumeId() != "" && len(r.GetVolumeCapabilities()) > 0 && p.unknown(r.GetVolumeId())
		})),
	csiSeat("confirms-nothing", mutant.Validation, requirement.CSIValidateCreated,
		"not even the capabilities of its creation are confirmed for a volume",
		altered(func(_ *Plain, _ *csi.ValidateVolumeCapabilitiesRequest, a *csi.ValidateVolumeCapabilitiesResponse) {
			a.Confirmed = nil
		})),
	csiSeat("confirms-everything", mutant.Validation, requirement.CSIValidateHonest,
		"what the volume does not support is confirmed: the consumer fails on the node",
		altered(func(_ *Plain, r *csi.ValidateVolumeCapabilitiesRequest, a *csi.ValidateVolumeCapabilitiesResponse) {
			a.Confirmed = &csi.ValidateVolumeCapabilitiesResponse_Confirmed{VolumeCapabilities: r.GetVolumeCapabilities()}
		})),
	csiSeat("lists-all-but-one", mutant.Listing, requirement.CSIListVolumes,
		"one volume is missing from the list: a clean-up takes it for lost",
		altered(func(_ *Plain, _ *csi.ListVolumesRequest, a *csi.ListVolumesResponse) {
			if n := len(a.GetEntries()); n > 0 && a.GetNextToken() == "" {
				a.Entries = a.Entries[:n-1]
			}
		})),
	csiSeat("pages-overlap", mutant.Listing, requirement.CSIListVolumesPages,
		"max_entries is not heeded: a page is the whole list, and so is the next",
		replaced(func(_ context.Context, _ *Plain, r *csi.ListVolumesRequest, next func() (*csi.ListVolumesResponse, error)) (*csi.ListVolumesResponse, error) {
			r.MaxEntries = 0
			return next()
		})),
	csiSeat("any-token-lists", mutant.Listing, requirement.CSIListVolumesToken,
		"a token of somebody else begins the list anew: volumes are counted twice",
		replaced(func(_ context.Context, _ *Plain, r *csi.ListVolumesRequest, next func() (*csi.ListVolumesResponse, error)) (*csi.ListVolumesResponse, error) {
			answer, err := next()
			if status.Code(err) == codes.Aborted {
				r.StartingToken = ""
				return next()
			}
			return answer, err
		})),
	csiSeat("gets-any-volume", mutant.Codes, requirement.CSIGetVolume,
		"a volume that does not exist is answered as if it were there and well",
		replaced(func(_ context.Context, p *Plain, r *csi.ControllerGetVolumeRequest, next func() (*csi.ControllerGetVolumeResponse, error)) (*csi.ControllerGetVolumeResponse, error) {
			if p.unknown(r.GetVolumeId()) {
				return &csi.ControllerGetVolumeResponse{Volume: &csi.Volume{VolumeId: r.GetVolumeId()}}, nil
			}
			return next()
		})),
	csiSeat("modify-once", mutant.Repeats, requirement.CSIModify,
		"a repeat of what is done already is refused: a CO that missed the answer never gets one",
		repeats((*csi.ControllerModifyVolumeRequest).GetVolumeId, refuse[csi.ControllerModifyVolumeRequest, csi.ControllerModifyVolumeResponse](codes.AlreadyExists))),
	csiSeat("modify-nothing", mutant.Validation, requirement.CSIModifyArguments,
		"a call without parameters is OK: nobody learns that nothing was modified",
		forgiving[csi.ControllerModifyVolumeRequest, csi.ControllerModifyVolumeResponse](func(_ *Plain, r *csi.ControllerModifyVolumeRequest) bool { return len(r.GetMutableParameters()) == 0 })),
	csiSeat("modify-unknown", mutant.Codes, requirement.CSIModifyUnknown,
		"a volume that does not exist is modified",
		forgiving[csi.ControllerModifyVolumeRequest, csi.ControllerModifyVolumeResponse](func(p *Plain, r *csi.ControllerModifyVolumeRequest) bool {
			return r.GetVolumeId() != "" && len(r.GetMutableParameters()) > 0 && p.unknown(r.GetVolumeId())
		})),
	csiSeat("negative-capacity", mutant.Codes, requirement.CSIGetCapacity,
		"the free capacity is below zero: schedulers add it up",
		altered(func(_ *Plain, _ *csi.GetCapacityRequest, a *csi.GetCapacityResponse) { a.AvailableCapacity = -1 })),
	csiSeat("expands-too-little", mutant.Data, requirement.CSIExpandSize,
		"OK is answered with less than was required",
		altered(func(_ *Plain, _ *csi.ControllerExpandVolumeRequest, a *csi.ControllerExpandVolumeResponse) {
			a.CapacityBytes /= 2
		})),
	csiSeat("expand-by-nothing", mutant.Validation, requirement.CSIExpandArguments,
		"a call without capacity_range is OK",
		forgiving[csi.ControllerExpandVolumeRequest, csi.ControllerExpandVolumeResponse](func(_ *Plain, r *csi.ControllerExpandVolumeRequest) bool { return r.GetCapacityRange() == nil })),
	csiSeat("expand-unknown", mutant.Codes, requirement.CSIExpandUnknown,
		"a volume that does not exist is expanded",
		replaced(func(_ context.Context, p *Plain, r *csi.ControllerExpandVolumeRequest, next func() (*csi.ControllerExpandVolumeResponse, error)) (*csi.ControllerExpandVolumeResponse, error) {
			if r.GetVolumeId() != "" && r.GetCapacityRange() != nil && p.unknown(r.GetVolumeId()) {
				return &csi.ControllerExpandVolumeResponse{CapacityBytes: r.GetCapacityRange().GetRequiredBytes()}, nil
			}
			return next()
		})),
	csiSeat("expand-once", mutant.Repeats, requirement.CSIExpandRepeated,
		"a repeat is refused because the volume has the size already: the claim is never resized",
		repeats((*csi.ControllerExpandVolumeRequest).GetVolumeId, refuse[csi.ControllerExpandVolumeRequest, csi.ControllerExpandVolumeResponse](codes.OutOfRange))),
	csiSeat("expand-by-formatting", mutant.Data, requirement.CSIExpandData,
		"the volume is made anew in its new size: what was in it is gone",
		altered(func(p *Plain, r *csi.ControllerExpandVolumeRequest, _ *csi.ControllerExpandVolumeResponse) {
			empty(p.place(r.GetVolumeId()))
		})),
}

// What is wrong with snapshots, copies and groups.
var csiCopyMutants = []Mutant{
	csiSeat("nameless-snapshot", mutant.Validation, requirement.CSISnapshotArguments,
		"a snapshot without a name is taken: no repeat finds it again",
		replaced(func(_ context.Context, _ *Plain, r *csi.CreateSnapshotRequest, next func() (*csi.CreateSnapshotResponse, error)) (*csi.CreateSnapshotResponse, error) {
			if r.GetName() == "" {
				r.Name = rand.Text()
			}
			return next()
		})),
	csiSeat("snapshot-each-call", mutant.Repeats, requirement.CSISnapshotSame,
		"each call takes a snapshot: a CO that repeats pays for two and knows of one",
		repeats((*csi.CreateSnapshotRequest).GetName, func(_ *Plain, r *csi.CreateSnapshotRequest, next func() (*csi.CreateSnapshotResponse, error)) (*csi.CreateSnapshotResponse, error) {
			r.Name += rand.Text()
			return next()
		})),
	csiSeat("snapshot-of-another", mutant.Data, requirement.CSISnapshotIncompatible,
		"a snapshot of the name is answered whichever volume it is of: another's data is restored",
		replaced(func(_ context.Context, p *Plain, r *csi.CreateSnapshotRequest, next func() (*csi.CreateSnapshotResponse, error)) (*csi.CreateSnapshotResponse, error) {
			p.mu.Lock()
			was := p.state.Snapshots[idOf("snapshot", r.GetName())]
			p.mu.Unlock()
			if was != nil {
				r.SourceVolumeId = was.Volume
			}
			return next()
		})),
	csiSeat("timeless-snapshot", mutant.Codes, requirement.CSISnapshotDescribed,
		"a snapshot has no time of creation: the newest cannot be told from the oldest",
		altered(func(_ *Plain, _ *csi.CreateSnapshotRequest, a *csi.CreateSnapshotResponse) {
			a.Snapshot.CreationTime = nil
		})),
	csiSeat("empty-restore", mutant.Data, requirement.CSISnapshotData,
		"a volume that is made from a snapshot is empty: the restore is noticed to be none when it is needed",
		func(p *Plain) {
			p.rules.copy = func(_ *Plain, to, from string) error {
				if filepath.Base(from)[:8] == "snapshot" {
					return os.Mkdir(to, 0o777)
				}
				return os.CopyFS(to, os.DirFS(from))
			}
		}),
	csiSeat("live-snapshot", mutant.Data, requirement.CSISnapshotKept,
		"a snapshot is another name of the volume's directory: what is deleted there is deleted here",
		func(p *Plain) {
			p.rules.copy = func(_ *Plain, to, from string) error {
				if filepath.Base(to)[:8] == "snapshot" {
					return os.Symlink(from, to)
				}
				return os.CopyFS(to, os.DirFS(from))
			}
		}),
	csiSeat("snapshot-delete-of-nothing", mutant.Validation, requirement.CSISnapshotDeleteArguments,
		"a call without snapshot_id is OK",
		forgiving[csi.DeleteSnapshotRequest, csi.DeleteSnapshotResponse](func(_ *Plain, r *csi.DeleteSnapshotRequest) bool { return r.GetSnapshotId() == "" })),
	csiSeat("snapshot-delete-once", mutant.Repeats, requirement.CSISnapshotDeleteRepeated,
		"a snapshot that is gone is NOT_FOUND to a second delete: it can never be forgotten",
		replaced(func(_ context.Context, p *Plain, r *csi.DeleteSnapshotRequest, next func() (*csi.DeleteSnapshotResponse, error)) (*csi.DeleteSnapshotResponse, error) {
			p.mu.Lock()
			known := p.state.Snapshots[r.GetSnapshotId()] != nil
			p.mu.Unlock()
			if r.GetSnapshotId() != "" && !known {
				return nil, noSnapshot(r.GetSnapshotId())
			}
			return next()
		})),
	csiSeat("lists-deleted-snapshots", mutant.Listing, requirement.CSIListSnapshots,
		"one snapshot is missing from the list: a backup is taken for lost",
		altered(func(_ *Plain, r *csi.ListSnapshotsRequest, a *csi.ListSnapshotsResponse) {
			if n := len(a.GetEntries()); n > 0 && a.GetNextToken() == "" && r.GetSnapshotId() == "" && r.GetSourceVolumeId() == "" {
				a.Entries = a.Entries[:n-1]
			}
		})),
	csiSeat("lists-all-snapshots", mutant.Listing, requirement.CSIListSnapshotsFilter,
		"source_volume_id is not heeded: the snapshots of others are taken for those of the volume",
		replaced(func(_ context.Context, _ *Plain, r *csi.ListSnapshotsRequest, next func() (*csi.ListSnapshotsResponse, error)) (*csi.ListSnapshotsResponse, error) {
			r.SourceVolumeId = ""
			return next()
		})),
	csiSeat("snapshot-pages-overlap", mutant.Listing, requirement.CSIListSnapshotsPages,
		"max_entries is not heeded: a page is the whole list",
		replaced(func(_ context.Context, _ *Plain, r *csi.ListSnapshotsRequest, next func() (*csi.ListSnapshotsResponse, error)) (*csi.ListSnapshotsResponse, error) {
			r.MaxEntries = 0
			return next()
		})),
	csiSeat("any-token-lists-snapshots", mutant.Listing, requirement.CSIListSnapshotsToken,
		"a token of somebody else begins the list anew",
		replaced(func(_ context.Context, _ *Plain, r *csi.ListSnapshotsRequest, next func() (*csi.ListSnapshotsResponse, error)) (*csi.ListSnapshotsResponse, error) {
			answer, err := next()
			if status.Code(err) == codes.Aborted {
				r.StartingToken = ""
				return next()
			}
			return answer, err
		})),
	csiSeat("gets-any-snapshot", mutant.Codes, requirement.CSIGetSnapshot,
		"a snapshot that does not exist is answered as ready to use",
		replaced(func(_ context.Context, _ *Plain, r *csi.GetSnapshotRequest, next func() (*csi.GetSnapshotResponse, error)) (*csi.GetSnapshotResponse, error) {
			answer, err := next()
			if status.Code(err) == codes.NotFound {
				return &csi.GetSnapshotResponse{Snapshot: &csi.Snapshot{SnapshotId: r.GetSnapshotId(), ReadyToUse: true}}, nil
			}
			return answer, err
		})),
	csiSeat("empty-clone", mutant.Data, requirement.CSICloneData,
		"a clone is empty",
		func(p *Plain) {
			p.rules.copy = func(_ *Plain, to, from string) error {
				if filepath.Base(from)[:6] == "volume" && filepath.Base(to)[:6] == "volume" {
					return os.Mkdir(to, 0o777)
				}
				return os.CopyFS(to, os.DirFS(from))
			}
		}),
	csiSeat("linked-clone", mutant.Data, requirement.CSICopyIndependent,
		"the files of a clone are hard links to those of the original: a write to one is a write to both",
		func(p *Plain) {
			p.rules.copy = func(_ *Plain, to, from string) error {
				if filepath.Base(to)[:6] != "volume" {
					return os.CopyFS(to, os.DirFS(from))
				}
				err := os.Mkdir(to, 0o777)
				entries, listed := os.ReadDir(from)
				for _, e := range entries {
					err = errors.Join(err, os.Link(filepath.Join(from, e.Name()), filepath.Join(to, e.Name())))
				}
				return errors.Join(err, listed)
			}
		}),
	csiSeat("copy-of-nothing", mutant.Codes, requirement.CSICopySourceUnknown,
		"a volume from a snapshot that does not exist is created empty: the restore looks done",
		replaced(func(_ context.Context, _ *Plain, r *csi.CreateVolumeRequest, next func() (*csi.CreateVolumeResponse, error)) (*csi.CreateVolumeResponse, error) {
			answer, err := next()
			if status.Code(err) == codes.NotFound {
				r.VolumeContentSource = nil
				return next()
			}
			return answer, err
		})),
	csiSeat("copy-without-source", mutant.Codes, requirement.CSICopySourceTold,
		"a volume that is a copy does not say of what: a CO concludes that sources are not supported, and deletes it",
		altered(func(_ *Plain, _ *csi.CreateVolumeRequest, a *csi.CreateVolumeResponse) { a.Volume.ContentSource = nil })),
	csiSeat("group-each-call", mutant.Repeats, requirement.CSIGroupSnapshots,
		"a repeat takes the snapshots of the group again",
		repeats((*csi.CreateVolumeGroupSnapshotRequest).GetName, func(_ *Plain, r *csi.CreateVolumeGroupSnapshotRequest, next func() (*csi.CreateVolumeGroupSnapshotResponse, error)) (*csi.CreateVolumeGroupSnapshotResponse, error) {
			r.Name += rand.Text()
			return next()
		})),
	csiSeat("group-of-one", mutant.Data, requirement.CSIGroupData,
		"all snapshots of a group are of its first volume: the others are lost when they are restored",
		replaced(func(_ context.Context, p *Plain, r *csi.CreateVolumeGroupSnapshotRequest, next func() (*csi.CreateVolumeGroupSnapshotResponse, error)) (*csi.CreateVolumeGroupSnapshotResponse, error) {
			was := p.rules.copy
			p.rules.copy = func(p *Plain, to, _ string) error { return was(p, to, p.place(r.GetSourceVolumeIds()[0])) }
			defer func() { p.rules.copy = was }()
			return next()
		})),
	csiSeat("gets-any-group", mutant.Codes, requirement.CSIGroupGet,
		"a group that does not exist is answered as ready to use",
		replaced(func(_ context.Context, _ *Plain, r *csi.GetVolumeGroupSnapshotRequest, next func() (*csi.GetVolumeGroupSnapshotResponse, error)) (*csi.GetVolumeGroupSnapshotResponse, error) {
			answer, err := next()
			if status.Code(err) == codes.NotFound {
				return &csi.GetVolumeGroupSnapshotResponse{GroupSnapshot: &csi.VolumeGroupSnapshot{GroupSnapshotId: r.GetGroupSnapshotId(), ReadyToUse: true}}, nil
			}
			return answer, err
		})),
	csiSeat("group-leaves-snapshots", mutant.Leaks, requirement.CSIGroupDelete,
		"a group is deleted and its snapshots are not: nobody knows of them any more",
		replaced(func(_ context.Context, p *Plain, r *csi.DeleteVolumeGroupSnapshotRequest, next func() (*csi.DeleteVolumeGroupSnapshotResponse, error)) (*csi.DeleteVolumeGroupSnapshotResponse, error) {
			p.mu.Lock()
			kept := maps.Clone(p.state.Snapshots)
			p.mu.Unlock()
			answer, err := next()
			p.mu.Lock()
			p.state.Snapshots = kept
			p.mu.Unlock()
			return answer, err
		})),
}
