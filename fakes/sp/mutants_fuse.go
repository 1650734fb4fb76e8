package sp

import (
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/fakes/mutant"
	preparev1alpha1 "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// servedMutants serve over FUSE.
var servedMutants = served([]Mutant{
	seat("fuse-mounts-visibly", mutant.Leaks, requirement.PrepareNoMount,
		"the plugin binds the volume in prepare_path as well: a mount in a namespace where nobody takes it for the plugin's",
		both(overFUSE(serving{}), answered(func(s *Server, r *prepareRequest, _ *prepareResponse) {
			if mutant.Contained() {
				_ = unix.Mount(s.where(r.GetVolumeId()), r.GetPreparePath(), "", unix.MS_BIND, "")
			}
		}))),
	seat("fuse-answers-unserved", mutant.Data, requirement.FUSEServed,
		"the call is answered before the server serves: whoever looks at the mount waits, for ever if it never does",
		overFUSE(serving{order: func(o *order) { o.Early = true }})),
	seat("fuse-dies-with-the-plugin", mutant.Restart, requirement.FUSEOutlivesRPC,
		"servers are children that end with the process behind the CSI socket: an upgrade of the plugin takes every volume of the node away",
		overFUSE(serving{dies: true})),
	seat("fuse-serves-another-volume", mutant.Data, requirement.PrepareVolumeData,
		"the server is started with the directory of the first volume there is, whichever was asked for",
		overFUSE(serving{order: func(o *order) {
			if all, err := filepath.Glob(filepath.Dir(o.Dir) + "/*"); err == nil && len(all) > 0 {
				o.Dir = slices.Min(all)
			}
		}})),
	seat("fuse-stops-later", mutant.Leaks, requirement.UnprepareFinished,
		"unprepare is OK while the server is still at work: what it has not written yet is lost when the volume moves to another node",
		overFUSE(serving{
			order: func(o *order) { o.Lingers = true },
			wait:  func(string, string) error { return nil },
		})),
	seat("fuse-one-server-for-all", mutant.Escape, requirement.FUSEIdentity,
		"one server serves whoever comes for the volume, by the credentials of who came first",
		overFUSE(serving{order: func(o *order) { o.ShareKey = "all" }})),
	seat("fuse-answers-a-dead-mount", mutant.Data, requirement.FUSERevived,
		"a repeat is answered with what was answered before: after the death of the server it is ENOTCONN for ever",
		overFUSE(serving{alive: func(dir string, r *prepareRequest) string {
			files, err := filepath.Glob(lockFile(dir, digestOf(r.GetVolumeId(), r.GetPrepareId()), "*"))
			if err != nil || len(files) == 0 {
				return ""
			}
			return filepath.Ext(files[0])[1:]
		}})),
	seat("fuse-forgets-the-co", mutant.Restart, requirement.FUSECORestart,
		"a server that lives is answered whether or not the CO holds its mount: after a restart of the CO no consumer can be given it",
		overFUSE(serving{alive: func(dir string, r *prepareRequest) string {
			files, err := filepath.Glob(lockFile(dir, digestOf(r.GetVolumeId(), r.GetPrepareId()), "*"))
			if i := slices.IndexFunc(files, locked); err == nil && i >= 0 {
				return filepath.Ext(files[i])[1:]
			}
			return ""
		}})),
	seat("fuse-cannot-resume", mutant.Restart, requirement.FUSEResumableTrue,
		"mounts are said to be resumable and no process ever resumes one: consumers hang till the deadline instead of failing at once",
		overFUSE(serving{
			order: func(o *order) { o.Pretends = true },
			spec:  func(m *preparev1alpha1.FuseMount) { m.Resumable = true },
		})),
	seat("fuse-asks-for-more", mutant.Validation, requirement.FUSEParameters,
		"the server asks for a parameter of the superblock that is the CO's alone",
		overFUSE(serving{order: func(o *order) { o.Asks = "blksize" }})),
	seat("fuse-hangs-up", mutant.Leaks, requirement.HandoffConnectionStays,
		"the server closes its connection once it serves: the CO takes it for dead, and its death for nothing",
		overFUSE(serving{order: func(o *order) { o.HangsUp = true }})),
})

// served says so of mutants.
func served(all []Mutant) []Mutant {
	for i := range all {
		all[i].Volumes = mutant.Served
	}
	return all
}
