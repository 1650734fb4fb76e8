package sp

import (
	"context"
	"os"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/fakes/mutant"
	preparev1alpha1 "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// What has to be refused and is not, or is under another code.
var refusalMutants = []Mutant{
	seat("refuses-readonly", mutant.Codes, requirement.PrepareAnswered,
		"a read-only preparation is refused, for no reason that the contract knows",
		instead(func(_ context.Context, s *Server, r *prepareRequest, next func() (*prepareResponse, error)) (*prepareResponse, error) {
			answer, err := next()
			if err == nil && r.GetReadonly() {
				s.mu.Lock()
				defer s.mu.Unlock()
				delete(s.state.prepared, pair{r.GetVolumeId(), r.GetPrepareId()})
				return nil, status.Error(codes.FailedPrecondition, "readonly: is not supported")
			}
			return answer, err
		})),
	seat("volume-not-found-internal", mutant.Codes, requirement.PrepareVolumeNotFound,
		"a volume that does not exist is INTERNAL: the CO tries again for ever",
		failed(func(_ *prepareRequest, err error) error {
			if status.Code(err) == codes.NotFound {
				return status.Error(codes.Internal, status.Convert(err).Message())
			}
			return err
		})),
	seat("makes-missing-path", mutant.Validation, requirement.PreparePathMissing,
		"a prepare_path that is not there is made: with a wrong root it comes to lie in the plugin's own filesystem",
		asked(func(_ *Server, r *prepareRequest) {
			if strings.HasPrefix(r.GetPreparePath(), "/") {
				_ = os.Mkdir(r.GetPreparePath(), 0o700)
			}
		})),
	seat("adopts-full-path", mutant.Validation, requirement.PreparePathEmpty,
		"a prepare_path with something in it is taken for a preparation half made, and finished",
		func(s *Server) {
			s.rules.refuse = func(s *Server, r *prepareRequest, err error) error {
				if strings.Contains(err.Error(), "not empty") {
					s.state.prepared[pair{r.GetVolumeId(), r.GetPrepareId()}] = lasting(r)
					return nil
				}
				return err
			}
		}),
	seat("ignores-kinds", mutant.Validation, requirement.PrepareKindOffered,
		"a BIND is answered to a performer that can perform FILESYSTEM alone",
		accepting(func(p, all *preparev1alpha1.Performer) { p.Kinds = all.Kinds })),
	seat("ignores-kernel", mutant.Data, requirement.PrepareOtherKernel,
		"a directory of the node is answered to a virtual machine, whose kernel does not share its page cache",
		accepting(func(p, all *preparev1alpha1.Performer) { p.Kernel = all.Kernel })),
	seat("no-accepted-kind-invalid", mutant.Codes, requirement.PrepareNoAcceptedKind,
		"a performer that accepts nothing is told INVALID_ARGUMENT, as if its request were malformed",
		failed(func(_ *prepareRequest, err error) error {
			if text := status.Convert(err).Message(); strings.HasPrefix(text, "performer: ") && status.Code(err) == codes.FailedPrecondition {
				return status.Error(codes.InvalidArgument, text)
			}
			return err
		})),
	seat("refuses-unknown-kind", mutant.Validation, requirement.PrepareUnknownKindIgnored,
		"a performer that offers a kind of a later version is refused: no CO can ever move ahead of its plugins",
		instead(func(_ context.Context, _ *Server, r *prepareRequest, next func() (*prepareResponse, error)) (*prepareResponse, error) {
			for _, k := range r.GetPerformer().GetKinds() {
				if _, known := preparev1alpha1.MountKind_name[int32(k)]; !known {
					return nil, invalid("performer.kinds", "holds an unknown kind")
				}
			}
			return next()
		})),
	seat("refuses-unknown-grant", mutant.Validation, requirement.PrepareUnknownGrantIgnored,
		"a performer that offers the grants of other plugins too is refused",
		instead(func(_ context.Context, s *Server, r *prepareRequest, next func() (*prepareResponse, error)) (*prepareResponse, error) {
			for _, name := range r.GetPerformer().GetGrants() {
				if _, known := s.config.Grants[name]; !known {
					return nil, invalid("performer.grants", "holds an unknown name")
				}
			}
			return next()
		})),
	seat("accepts-block", mutant.Validation, requirement.PrepareUnsupportedCapability,
		"a request for a block device is answered with a directory",
		asked(func(_ *Server, r *prepareRequest) {
			if r.GetVolumeCapability().GetBlock() != nil {
				r.VolumeCapability.AccessType = &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}}
			}
		})),
	seat("prepares-unstaged", mutant.Validation, requirement.PrepareStagingRequired,
		"a plugin that stages prepares what was never staged",
		both(
			func(s *Server) { s.config.Staging = true },
			asked(func(s *Server, r *prepareRequest) {
				s.mu.Lock()
				defer s.mu.Unlock()
				r.StagingTargetPath = orElse(r.GetStagingTargetPath(), "/unstaged")
				s.state.staged[r.GetVolumeId()] = &csi.NodeStageVolumeRequest{
					VolumeId: r.GetVolumeId(), StagingTargetPath: r.GetStagingTargetPath(), VolumeCapability: r.GetVolumeCapability(),
				}
			}),
		)),
	seat("unstages-prepared", mutant.Undoing, requirement.UnprepareUnstageRefused,
		"a volume is unstaged under a living preparation",
		both(
			func(s *Server) { s.config.Staging = true },
			instead(func(_ context.Context, s *Server, r *csi.NodeUnstageVolumeRequest, next func() (*csi.NodeUnstageVolumeResponse, error)) (*csi.NodeUnstageVolumeResponse, error) {
				answer, err := next()
				if status.Code(err) == codes.FailedPrecondition {
					s.mu.Lock()
					defer s.mu.Unlock()
					delete(s.state.staged, r.GetVolumeId())
					return &csi.NodeUnstageVolumeResponse{}, nil
				}
				return answer, err
			}),
		)),
	seat("deletes-prepared", mutant.Data, requirement.UnprepareDeleteRefused,
		"a volume is deleted under a living preparation, its data with it",
		asked(func(s *Server, r *csi.DeleteVolumeRequest) {
			s.mu.Lock()
			defer s.mu.Unlock()
			for key := range s.state.of(r.GetVolumeId()) {
				delete(s.state.prepared, key)
			}
		})),
	seat("stats-refuse-path", mutant.Codes, requirement.StatsByPreparePath,
		"stats know publish paths only: the volume of a preparation has none, and cannot be measured",
		instead(func(_ context.Context, _ *Server, r *csi.NodeGetVolumeStatsRequest, _ func() (*csi.NodeGetVolumeStatsResponse, error)) (*csi.NodeGetVolumeStatsResponse, error) {
			return nil, status.Errorf(codes.NotFound, "volume_path: nothing is published at %q", r.GetVolumePath())
		})),
}

// accepting makes s see a performer with a part of a better one.
func accepting(better func(p, all *preparev1alpha1.Performer)) fault {
	return func(s *Server) {
		s.rules.accepts = func(p *preparev1alpha1.Performer, spec *preparev1alpha1.MountSpec) bool {
			seen := &preparev1alpha1.Performer{Kernel: p.GetKernel(), Kinds: p.GetKinds(), Grants: p.GetGrants()}
			better(seen, s.offer())
			return accepts(seen, spec)
		}
	}
}
