package sp

import (
	"context"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/fakes/mutant"
	preparev1alpha1 "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// Data lost, exposed or of another volume.
var dataMutants = []Mutant{
	seat("wipes-data", mutant.Data, requirement.UnprepareDataKept,
		"unprepare empties the volume, taking it for scratch space of the preparation",
		instead(func(_ context.Context, s *Server, r *unprepareRequest, next func() (*unprepareResponse, error)) (*unprepareResponse, error) {
			if s.known(r.GetVolumeId(), r.GetPrepareId()) {
				empty(s.where(r.GetVolumeId()))
			}
			return next()
		})),
}

// Attributes that are asked for and not given.
var attributeMutants = []Mutant{
	seat("ignores-readonly", mutant.Attributes, requirement.PrepareReadonly,
		"readonly of the request reaches no mount spec: a consumer that was to read only can write",
		specs(func(_ *Server, r *prepareRequest, spec *preparev1alpha1.MountSpec) {
			if r.GetReadonly() {
				spec.Attributes.Readonly = false
			}
		})),
	seat("ignores-reader-only", mutant.Attributes, requirement.PrepareReaderOnly,
		"a READER_ONLY access mode alone does not make the mount specs read-only",
		specs(func(_ *Server, r *prepareRequest, spec *preparev1alpha1.MountSpec) {
			spec.Attributes.Readonly = r.GetReadonly()
		})),
	seat("ignores-mount-flags", mutant.Attributes, requirement.PrepareMountFlagRefused,
		"mount flags it does not know are dropped in silence: the operator believes that they hold",
		asked(func(_ *Server, r *prepareRequest) {
			if m := r.GetVolumeCapability().GetMount(); m != nil {
				m.MountFlags = slices.DeleteFunc(m.MountFlags, func(f string) bool { return flags[f] == nil })
			}
		})),
	seat("ignores-mount-group", mutant.Attributes, requirement.PrepareMountGroupRefused,
		"volume_mount_group is accepted and nothing is done about it: the consumer cannot write",
		asked(func(_ *Server, r *prepareRequest) {
			if m := r.GetVolumeCapability().GetMount(); m != nil {
				m.VolumeMountGroup = ""
			}
		})),
}

// Something is made where nothing may be, or stays behind.
var leakMutants = []Mutant{
	seat("leaks-mount", mutant.Leaks, requirement.PrepareNoMount,
		"prepare mounts a tmpfs of its own at prepare_path and never takes it away: the CO's rmdir fails for ever",
		answered(func(_ *Server, r *prepareRequest, _ *prepareResponse) {
			_ = unix.Mount("leak", r.GetPreparePath(), "tmpfs", 0, "size=64k")
		})),
	seat("writes-beside-path", mutant.Leaks, requirement.PrepareStaysBelow,
		"a lock file lies beside prepare_path, in a directory of the CO, for as long as the preparation lives",
		both(
			answered(func(_ *Server, r *prepareRequest, _ *prepareResponse) {
				_ = os.WriteFile(r.GetPreparePath()+".lock", nil, 0o600)
			}),
			answered(func(_ *Server, r *unprepareRequest, _ *unprepareResponse) {
				_ = os.Remove(r.GetPreparePath() + ".lock")
			}),
		)),
	seat("leaves-file", mutant.Leaks, requirement.UnpreparePathEmptied,
		"prepare leaves a record in prepare_path and unprepare forgets it: the CO's rmdir fails",
		answered(func(_ *Server, r *prepareRequest, _ *prepareResponse) { _ = os.WriteFile(record(r), nil, 0o600) })),
	seat("ok-before-finished", mutant.Leaks, requirement.UnprepareFinished,
		"unprepare answers OK and empties prepare_path afterwards: the CO, sure that it is over, races with it",
		both(
			answered(func(_ *Server, r *prepareRequest, _ *prepareResponse) { _ = os.WriteFile(record(r), nil, 0o600) }),
			answered(func(_ *Server, r *unprepareRequest, _ *unprepareResponse) { later(func() { _ = os.Remove(record(r)) }) }),
		)),
	seat("removes-all", mutant.Leaks, requirement.UnprepareOnlyOwn,
		"unprepare removes whatever it finds in prepare_path, though it made nothing there",
		answered(func(_ *Server, r *unprepareRequest, _ *unprepareResponse) { empty(r.GetPreparePath()) })),
	seat("keeps-refused", mutant.Leaks, requirement.PrepareNothingLeft,
		"a preparation that was refused is kept all the same: it shows in the list and blocks the volume",
		func(s *Server) {
			s.rules.refuse = func(s *Server, r *prepareRequest, err error) error {
				s.state.prepared[pair{r.GetVolumeId(), r.GetPrepareId()}] = lasting(r)
				return err
			}
		}),
}

// record is the file some mutants make in prepare_path.
func record(r interface{ GetPreparePath() string }) string {
	return filepath.Join(r.GetPreparePath(), "prepared")
}

// empty removes what lies in a directory.
func empty(directory string) {
	inside, err := os.ReadDir(directory)
	if err != nil {
		return
	}
	for _, entry := range inside {
		_ = os.RemoveAll(filepath.Join(directory, entry.Name()))
	}
}
