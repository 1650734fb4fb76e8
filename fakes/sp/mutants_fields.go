package sp

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/fakes/mutant"
	preparev1alpha1 "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// Requests that break a rule of their fields and are let through.
var fieldMutants = []Mutant{
	seat("accepts-no-volume-id", mutant.Validation, requirement.PrepareVolumeIDRequired,
		"a missing volume_id is looked up like any other and not found, which sends the CO after a deleted volume",
		failed(func(r *prepareRequest, err error) error {
			if r.GetVolumeId() == "" {
				return noVolume("")
			}
			return err
		})),
	seat("accepts-no-prepare-id", mutant.Validation, requirement.PreparePrepareIDRequired,
		"a missing prepare_id gets a default: two consumers share one preparation",
		asked(func(_ *Server, r *prepareRequest) { r.PrepareId = orElse(r.GetPrepareId(), "default") })),
	seat("accepts-any-prepare-id", mutant.Escape, requirement.PreparePrepareIDAlphabet,
		"a prepare_id of any characters is taken and made to fit: a path in it meets no resistance",
		asked(func(_ *Server, r *prepareRequest) {
			r.PrepareId = outside.ReplaceAllString(r.GetPrepareId(), "_")
			if len(r.PrepareId) > 128 {
				r.PrepareId = r.PrepareId[:128]
			}
		})),
	seat("accepts-no-capability", mutant.Validation, requirement.PrepareCapabilityRequired,
		"a missing volume_capability is taken for a shared, writable mount",
		asked(func(_ *Server, r *prepareRequest) {
			if r.VolumeCapability == nil {
				r.VolumeCapability = &csi.VolumeCapability{
					AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
					AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER},
				}
			}
		})),
	seat("accepts-no-path", mutant.Validation, requirement.PreparePathRequired,
		"a missing prepare_path is replaced by a directory of the plugin's own choice",
		asked(func(s *Server, r *prepareRequest) { r.PreparePath = orElse(r.GetPreparePath(), s.scratch()) })),
	seat("accepts-relative-path", mutant.Validation, requirement.PreparePathAbsolute,
		"a relative prepare_path is replaced by a directory of the plugin's own choice",
		asked(func(s *Server, r *prepareRequest) {
			if r.GetPreparePath() != "" && !filepath.IsAbs(r.GetPreparePath()) {
				r.PreparePath = s.scratch()
			}
		})),
	seat("accepts-no-performer", mutant.Validation, requirement.PreparePerformerRequired,
		"a missing performer is taken for one that can perform anything",
		asked(func(s *Server, r *prepareRequest) {
			if r.Performer == nil {
				r.Performer = s.offer()
			}
		})),
	seat("accepts-no-kinds", mutant.Validation, requirement.PreparePerformerRequired,
		"a performer without kinds is taken for one that can perform anything",
		asked(func(s *Server, r *prepareRequest) {
			if r.Performer != nil && len(r.Performer.Kinds) == 0 {
				r.Performer = s.offer()
			}
		})),
	seat("accepts-no-kernel", mutant.Validation, requirement.PreparePerformerRequired,
		"a performer without a kernel is taken for the node's own, which a virtual machine is not",
		asked(func(_ *Server, r *prepareRequest) {
			if r.Performer != nil && r.Performer.Kernel == preparev1alpha1.Performer_KERNEL_UNKNOWN {
				r.Performer.Kernel = preparev1alpha1.Performer_NODE
			}
		})),
	seat("names-no-field", mutant.Validation, requirement.PrepareFieldNamed,
		"INVALID_ARGUMENT says that something is wrong and not what",
		failed(func(_ *prepareRequest, err error) error {
			if status.Code(err) == codes.InvalidArgument {
				return status.Error(codes.InvalidArgument, "bad request")
			}
			return err
		})),
	seat("shows-mount-flag", mutant.Secrets, requirement.PrepareMountFlagMasked,
		"the error about a mount flag repeats all of it, the password after the '=' included",
		failed(func(r *prepareRequest, err error) error {
			if text := status.Convert(err).Message(); strings.Contains(text, "mount_flags") {
				return status.Errorf(status.Code(err), "%s: %q", text, r.GetVolumeCapability().GetMount().GetMountFlags())
			}
			return err
		})),
	seat("unprepare-accepts-no-volume-id", mutant.Validation, requirement.UnprepareVolumeIDRequired,
		"unprepare without a volume_id is OK, and nothing is unprepared",
		asked(func(_ *Server, r *unprepareRequest) { r.VolumeId = orElse(r.GetVolumeId(), "none") })),
	seat("unprepare-accepts-no-prepare-id", mutant.Validation, requirement.UnpreparePrepareIDRequired,
		"unprepare without a prepare_id is OK, and nothing is unprepared",
		asked(func(_ *Server, r *unprepareRequest) { r.PrepareId = orElse(r.GetPrepareId(), "none") })),
	seat("unprepare-accepts-no-path", mutant.Validation, requirement.UnpreparePathRequired,
		"unprepare without a prepare_path takes the one it remembers, or none",
		asked(func(s *Server, r *unprepareRequest) { r.PreparePath = orElse(r.GetPreparePath(), s.path(r), "none") })),
	seat("unprepare-accepts-other-path", mutant.Validation, requirement.UnpreparePathDiffers,
		"unprepare with the path of another preparation is OK: the CO removes the wrong directory",
		asked(func(s *Server, r *unprepareRequest) {
			if r.GetPreparePath() != "" {
				r.PreparePath = orElse(s.path(r), r.GetPreparePath())
			}
		})),
}

// outside are the bytes a prepare_id may not hold, and the dot it may not
// begin with.
var outside = regexp.MustCompile(`^\.|[^A-Za-z0-9._-]`)

// scratch is an empty directory of the plugin.
func (s *Server) scratch() string {
	directory := filepath.Join(s.config.Grants[s.grant()], "scratch")
	_ = os.Mkdir(directory, 0o700)
	return directory
}

// path is the prepare_path of the preparation a request is about, or "".
func (s *Server) path(r *unprepareRequest) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.state.prepared[pair{r.GetVolumeId(), r.GetPrepareId()}].GetPreparePath()
}

// orElse returns the first text that is not empty.
func orElse(texts ...string) string {
	for _, t := range texts {
		if t != "" {
			return t
		}
	}
	return ""
}
