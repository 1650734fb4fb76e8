package sanity

import (
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

func idempotencySpecs(s *section) {
	s.spec("a repeat is OK with equivalent mount specs", Covers(requirement.IdempotencySame, requirement.IdempotencyEquivalent), func(t *trial) {
		r := t.request(t.volume())
		first := t.prepared(r)
		for range 3 {
			again, err := t.prepare(clone(r))
			t.wantCode(requirement.IdempotencySame, err, codes.OK)
			t.wantEquivalent(requirement.IdempotencyEquivalent, first, again)
		}
	})
	s.spec("the pair with other arguments is ALREADY_EXISTS", Covers(requirement.IdempotencyIncompatible), func(t *trial) {
		for what, change := range map[string]func(*prepareRequest){
			"another readonly":     func(r *prepareRequest) { r.Readonly = !r.Readonly },
			"another prepare_path": func(r *prepareRequest) { r.PreparePath = t.mkdir("prepare") },
			"another access mode":  func(r *prepareRequest) { r.VolumeCapability = t.capability(nodeReader) },
		} {
			r := t.request(t.volume())
			t.prepared(r)
			other := clone(r)
			change(other)
			_, err := t.clients.prepare.NodePrepareVolume(t.ctx, other)
			t.alive(err)
			t.want(requirement.IdempotencyIncompatible, status.Code(err) == codes.AlreadyExists, "ALREADY_EXISTS to the same pair with "+what, "%s", answered(err))
			t.wantKept(requirement.IdempotencyIncompatible, r)
		}
	})
	for _, mode := range []accessMode{multiWriter, manyNodesWriters, manyReadersOne, manyReaders} {
		s.spec("another prepare_id is OK for "+mode.String(), Covers(requirement.IdempotencyOtherID), func(t *trial) {
			_, err := t.twice(mode, mode)
			t.wantCode(requirement.IdempotencyOtherID, err, codes.OK)
		})
	}
	s.spec("another prepare_id is FAILED_PRECONDITION for SINGLE_NODE_SINGLE_WRITER", Covers(requirement.IdempotencySingleWriter), func(t *trial) {
		first, err := t.twice(singleWriter, singleWriter)
		t.wantCode(requirement.IdempotencySingleWriter, err, codes.FailedPrecondition)
		t.wantKept(requirement.IdempotencySingleWriter, first)
		t.unprepared(first)
		next := t.request(&volume{id: first.GetVolumeId(), context: first.GetVolumeContext(), published: first.GetPublishContext(), staging: first.GetStagingTargetPath(), capability: first.GetVolumeCapability()})
		_, err = t.prepare(next)
		t.want(requirement.IdempotencySingleWriter, err == nil, "OK as soon as the first is unprepared", "%s", answered(err))
	})
	s.spec("an exclusive mode counts whichever came first", Covers(requirement.IdempotencySingleWriter), func(t *trial) {
		_, err := t.twice(singleWriter, multiWriter)
		t.wantCode(requirement.IdempotencySingleWriter, err, codes.FailedPrecondition)
	})
	for _, mode := range []accessMode{nodeWriter, nodeReader} {
		s.spec("another prepare_id is FAILED_PRECONDITION for "+mode.String()+" where modes are told apart", Covers(requirement.IdempotencyWriter), func(t *trial) {
			if !t.tellsWriters() {
				t.unsupported("the plugin does not claim SINGLE_NODE_MULTI_WRITER")
			}
			_, err := t.twice(mode, mode)
			t.wantCode(requirement.IdempotencyWriter, err, codes.FailedPrecondition)
		})
		s.spec("another prepare_id is OK for "+mode.String()+" where modes are not told apart", Covers(requirement.IdempotencyWriterLegacy), func(t *trial) {
			if t.tellsWriters() {
				t.unsupported("the plugin claims SINGLE_NODE_MULTI_WRITER")
			}
			_, err := t.twice(mode, mode)
			t.wantCode(requirement.IdempotencyWriterLegacy, err, codes.OK)
		})
	}
	s.spec("a repeat may have other secrets", Covers(requirement.IdempotencySecrets), func(t *trial) {
		r := t.request(t.volume())
		first := t.prepared(r)
		other := clone(r)
		if len(other.Secrets) == 0 {
			other.Secrets = map[string]string{"added": t.canary()}
		} else {
			other.Secrets["added"] = t.canary()
		}
		again, err := t.prepare(other)
		t.wantCode(requirement.IdempotencySecrets, err, codes.OK)
		t.wantEquivalent(requirement.IdempotencySecrets, first, again)
	})
	s.spec("a performer that no longer covers the mount specs is FAILED_PRECONDITION", Covers(requirement.IdempotencyPerformerNarrower), func(t *trial) {
		r := t.request(t.volume())
		first := t.prepared(r)
		narrow := clone(r)
		narrow.Performer.Kinds = []preparev1alpha1.MountKind{preparev1alpha1.MountKind_MOUNT_KIND_EXTENSION}
		_, err := t.prepare(narrow)
		t.wantCode(requirement.IdempotencyPerformerNarrower, err, codes.FailedPrecondition)
		t.wantKept(requirement.IdempotencyPerformerNarrower, r)
		again, err := t.prepare(r)
		t.wantCode(requirement.IdempotencyPerformerNarrower, err, codes.OK)
		t.wantEquivalent(requirement.IdempotencyPerformerNarrower, first, again)
	})
	s.spec("a performer that offers more changes nothing", Covers(requirement.IdempotencyPerformerWider), func(t *trial) {
		v := t.volume()
		r := t.request(v)
		r.Performer.Kinds = nil
		for k := range t.usualKinds(v) {
			r.Performer.Kinds = append(r.Performer.Kinds, k)
		}
		first := t.prepared(r)
		wide := clone(r)
		wide.Performer = t.performer()
		wide.Performer.Grants = append(wide.Performer.Grants, "one-more")
		wide.Performer.Idmap = true
		again, err := t.prepare(wide)
		t.wantCode(requirement.IdempotencyPerformerWider, err, codes.OK)
		t.wantEquivalent(requirement.IdempotencyPerformerWider, first, again)
	})
	s.spec("a repeated unprepare is OK", Covers(requirement.IdempotencyUnprepare), func(t *trial) {
		r := t.request(t.volume())
		t.prepared(r)
		for range 3 {
			t.wantCode(requirement.IdempotencyUnprepare, t.unprepare(r), codes.OK)
		}
	})
}

// twice prepares a volume under one prepare_id, and returns how the plugin
// answers another one. The volume has the access mode of the first.
func (t *trial) twice(first, second accessMode) (*prepareRequest, error) {
	v, e := t.volumeIn(first)
	if e != nil {
		end(e)
	}
	r := t.request(v)
	_, err := t.prepare(r)
	t.lacksGrant(err)
	if status.Code(err) == codes.FailedPrecondition && first != t.defaultMode() {
		t.unsupported("the plugin prepares no volume with " + first.String() + ": " + status.Convert(err).Message())
	}
	t.need(requirement.PrepareAnswered, err, "OK to the first prepare_id")
	other := t.request(v)
	other.VolumeCapability = t.capability(second)
	_, err = t.prepare(other)
	return r, err
}

func (t *trial) wantEquivalent(id requirement.ID, first, again *prepareResponse) {
	t.want(id, equivalent(first, again), "equivalent mount specs: "+specText(first, -1), "%s", specText(again, -1))
}

// wantKept wants a preparation to be as it was, after a refusal that must
// not touch it.
func (t *trial) wantKept(id requirement.ID, r *prepareRequest) {
	refusal := t.lastCall()
	if t.entry(r) == nil {
		t.failCall(id, refusal, "that the preparation lives on", "it is not listed any more")
	}
}
