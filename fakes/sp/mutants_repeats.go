package sp

import (
	"context"
	"maps"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/fakes/mutant"
	preparev1alpha1 "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// A call repeated, or made for one more consumer.
var repeatMutants = []Mutant{
	seat("refuses-repeat", mutant.Repeats, requirement.IdempotencySame,
		"an identical repeat is ALREADY_EXISTS: a CO that lost the answer can never go on",
		func(s *Server) { s.rules.same = func(_, _ *prepareRequest) bool { return false } }),
	seat("other-spec-on-retry", mutant.Repeats, requirement.IdempotencyEquivalent,
		"each repeat answers a mount spec with an attribute more: the CO cannot tell whether what it performed still holds",
		instead(func(_ context.Context, s *Server, r *prepareRequest, next func() (*prepareResponse, error)) (*prepareResponse, error) {
			again := s.known(r.GetVolumeId(), r.GetPrepareId())
			answer, err := next()
			if err == nil && again {
				answer.MountSpecs[0].Attributes.Noexec = true
			}
			return answer, err
		})),
	seat("never-already-exists", mutant.Repeats, requirement.IdempotencyIncompatible,
		"the same pair with other arguments is OK: which of the two sets is in force nobody knows",
		func(s *Server) { s.rules.same = func(_, _ *prepareRequest) bool { return true } }),
	seat("shares-single-writer", mutant.Repeats, requirement.IdempotencySingleWriter,
		"a SINGLE_NODE_SINGLE_WRITER volume is prepared for a second consumer: two writers, one corrupted volume",
		mode(csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER, csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER)),
	seat("shares-writer", mutant.Repeats, requirement.IdempotencyWriter,
		"SINGLE_NODE_WRITER is shared between consumers although the plugin tells the finer modes apart",
		mode(csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER, csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER)),
	seat("refuses-legacy-writer", mutant.Repeats, requirement.IdempotencyWriterLegacy,
		"a plugin that does not tell the finer modes apart refuses the second consumer that COs count on",
		both(
			func(s *Server) { s.config.LegacyWriters = true },
			mode(csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER, csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER),
		)),
	seat("refuses-multi-writer", mutant.Repeats, requirement.IdempotencyOtherID,
		"SINGLE_NODE_MULTI_WRITER admits one consumer only",
		mode(csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER, csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER)),
	seat("compares-secrets", mutant.Repeats, requirement.IdempotencySecrets,
		"a repeat with rotated secrets is ALREADY_EXISTS: the consumer loses its storage when the credential is renewed",
		func(s *Server) {
			var secrets memory[pair, map[string]string]
			instead(func(_ context.Context, s *Server, r *prepareRequest, next func() (*prepareResponse, error)) (*prepareResponse, error) {
				again := s.known(r.GetVolumeId(), r.GetPrepareId())
				was, _ := secrets.swap(pair{r.GetVolumeId(), r.GetPrepareId()}, r.GetSecrets())
				if again && !maps.Equal(was, r.GetSecrets()) {
					return nil, status.Error(codes.AlreadyExists, "prepare_id: is in use with other secrets")
				}
				return next()
			})(s)
		}),
	seat("ignores-narrower-performer", mutant.Repeats, requirement.IdempotencyPerformerNarrower,
		"a repeat is answered from memory, though the performer can no longer perform what is remembered",
		asked(func(s *Server, r *prepareRequest) {
			if s.known(r.GetVolumeId(), r.GetPrepareId()) && len(r.GetPerformer().GetKinds()) > 0 {
				r.Performer = s.offer()
			}
		})),
	seat("drops-narrower-performer", mutant.Repeats, requirement.IdempotencyPerformerNarrower,
		"the right refusal of a narrower performer takes the living preparation with it",
		func(s *Server) {
			s.rules.refuse = func(s *Server, r *prepareRequest, err error) error {
				delete(s.state.prepared, pair{r.GetVolumeId(), r.GetPrepareId()})
				return err
			}
		}),
	seat("other-spec-for-wider-performer", mutant.Repeats, requirement.IdempotencyPerformerWider,
		"when a repeat offers more the answer changes, though the first is what the consumer runs on",
		func(s *Server) {
			var offered memory[pair, int]
			answered(func(_ *Server, r *prepareRequest, answer *prepareResponse) {
				now := len(r.GetPerformer().GetKinds())
				if was, found := offered.swap(pair{r.GetVolumeId(), r.GetPrepareId()}, now); found && now > was {
					answer.MountSpecs[0].GetBind().Recursive = true
				}
			})(s)
		}),
	seat("unprepare-unknown-refused", mutant.Repeats, requirement.UnprepareUnknownOk,
		"unprepare of a pair it does not know is NOT_FOUND: after a lost answer the CO never gets rid of the volume",
		instead(func(_ context.Context, s *Server, r *unprepareRequest, next func() (*unprepareResponse, error)) (*unprepareResponse, error) {
			if known := s.known(r.GetVolumeId(), r.GetPrepareId()); !known && r.GetVolumeId() != "" && r.GetPrepareId() != "" && r.GetPreparePath() != "" {
				return nil, status.Error(codes.NotFound, "prepare_id: is not prepared")
			}
			return next()
		})),
	seat("unprepare-twice-refused", mutant.Repeats, requirement.IdempotencyUnprepare,
		"the second of two unprepare calls is NOT_FOUND",
		func(s *Server) {
			var gone memory[pair, bool]
			instead(func(_ context.Context, s *Server, r *unprepareRequest, next func() (*unprepareResponse, error)) (*unprepareResponse, error) {
				key := pair{r.GetVolumeId(), r.GetPrepareId()}
				known := s.known(key.volume, key.prepare)
				if gone.all()[key] && !known {
					return nil, status.Error(codes.NotFound, "prepare_id: is not prepared any more")
				}
				answer, err := next()
				if err == nil && known {
					gone.swap(key, true)
				}
				return answer, err
			})(s)
		}),
}

// mode takes one access mode for another.
func mode(from, to csi.VolumeCapability_AccessMode_Mode) fault {
	return asked(func(_ *Server, r *prepareRequest) {
		if m := r.GetVolumeCapability().GetAccessMode(); m.GetMode() == from {
			m.Mode = to
		}
	})
}

// offer is a performer that can perform every spec of s.
func (s *Server) offer() *preparev1alpha1.Performer {
	p := &preparev1alpha1.Performer{
		Kernel: preparev1alpha1.Performer_NODE,
		Kinds:  []preparev1alpha1.MountKind{preparev1alpha1.MountKind_MOUNT_KIND_BIND},
	}
	for name := range s.config.Grants {
		p.Grants = append(p.Grants, name)
	}
	return p
}
