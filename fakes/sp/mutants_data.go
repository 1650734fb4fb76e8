package sp

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/moby/sys/mountinfo"
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
			if !mutant.Contained() {
				fmt.Fprintln(os.Stderr, "leaks-mount: not in the machine's own mount namespace; use unshare -m")
				return
			}
			_ = unix.Mount("leak", r.GetPreparePath(), "tmpfs", 0, "size=64k")
		})),
	seat("mounts-unannounced", mutant.Leaks, requirement.CapabilitiesPropagation,
		"the volume is mounted in prepare_path and bound from there, and requires_propagation is not reported: on a node without propagation the directory is empty",
		mounting(true)),
	seat("binds-mount-of-any-type", mutant.Data, requirement.BindMountFSTypeSet,
		"the source is a mount of the plugin's own and mount_fs_type is not set: when the mount is missing, the CO binds the empty directory under it",
		both(mounting(false), answered(func(_ *Server, _ *capabilitiesQuery, a *capabilitiesReply) {
			a.Capabilities = append(a.Capabilities, &preparev1alpha1.NodePrepareServiceCapability{
				Type: &preparev1alpha1.NodePrepareServiceCapability_RequiresPropagation_{
					RequiresPropagation: &preparev1alpha1.NodePrepareServiceCapability_RequiresPropagation{Prepare: true},
				},
			})
		}))),
	seat("keeps-descriptor", mutant.Leaks, requirement.UnprepareResourcesFreed,
		"each preparation leaves a descriptor of the volume open: the node runs out of them",
		answered(func(s *Server, r *prepareRequest, _ *prepareResponse) {
			_, _ = unix.Open(s.where(r.GetVolumeId()), unix.O_PATH|unix.O_CLOEXEC, 0)
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

// mounting makes s mount the volume in prepare_path, and answer a BIND of that
// mount, with its type or without.
func mounting(typed bool) fault {
	at := func(r interface{ GetPreparePath() string }) string { return filepath.Join(r.GetPreparePath(), "mount") }
	return both(
		answered(func(s *Server, r *prepareRequest, a *prepareResponse) {
			if !mutant.Contained() {
				return
			}
			if err := os.Mkdir(at(r), 0o700); err == nil {
				_ = unix.Mount(s.where(r.GetVolumeId()), at(r), "", unix.MS_BIND, "")
			}
			b := a.MountSpecs[0].GetBind()
			b.Source = &preparev1alpha1.PathRef{Base: preparev1alpha1.PathRef_PREPARE, Relative: "mount"}
			if typed {
				b.MountFsType = typeOf(at(r))
			}
		}),
		answered(func(_ *Server, r *unprepareRequest, _ *unprepareResponse) {
			_ = unix.Unmount(at(r), unix.UMOUNT_NOFOLLOW)
			_ = os.Remove(at(r))
		}),
	)
}

// typeOf returns the type of the filesystem mounted at a path.
func typeOf(path string) string {
	mounts, err := mountinfo.GetMounts(mountinfo.SingleEntryFilter(path))
	if err != nil || len(mounts) == 0 {
		return ""
	}
	return mounts[0].FSType
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
