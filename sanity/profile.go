package sanity

import (
	"fmt"
	"slices"
	"strings"

	"google.golang.org/grpc/codes"

	"github.com/csi-prepare/csi-prepare/sanity/report"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// Profile is a named set of features, with a verdict of its own: what a
// plugin of that sort has to keep.
type Profile string

// The profiles.
const (
	Controller  Profile = "controller"
	NodePublish Profile = "node-publish"
	NodeMount   Profile = "node-mount"
	NodeBlock   Profile = "node-block"
	NodeFUSE    Profile = "node-fuse"
	NodeNetwork Profile = "node-network"
	COExecutor  Profile = "co-executor"
)

// profile says which plugins claim a Profile.
type profile struct {
	name  Profile
	actor requirement.Actor
	// claims are the features that together claim the profile.
	claims []Feature
	// by is, of the features some specs are about and others are not, those
	// whose specs belong to the profile.
	by    []Feature
	about string
}

var profiles = []profile{
	{Controller, requirement.SP, []Feature{ControllerService}, nil, "a plugin that creates, publishes and snapshots volumes by CSI's Controller service"},
	{NodePublish, requirement.SP, []Feature{PublishOnNode}, []Feature{accessMount, accessBlock}, "a plugin that mounts volumes itself, by CSI's NodePublishVolume"},
	{NodeMount, requirement.SP, []Feature{NodePrepare, accessMount}, []Feature{accessMount}, "a plugin that prepares volumes for directories of consumers"},
	{NodeBlock, requirement.SP, []Feature{NodePrepare, KindBlockDevice, accessBlock}, []Feature{accessBlock, KindBlockDevice}, "a plugin that prepares volumes as raw block devices"},
	{NodeFUSE, requirement.SP, []Feature{NodePrepare, KindFUSE, accessMount}, []Feature{accessMount, KindFUSE}, "a plugin that serves volumes as FUSE filesystems, which the CO mounts"},
	{NodeNetwork, requirement.SP, []Feature{NodePrepare, KindFilesystem, accessMount, NetworkFilesystem}, []Feature{accessMount, NetworkFilesystem}, "a plugin that prepares volumes on network filesystems, which the CO mounts"},
	{COExecutor, requirement.CO, nil, nil, "whoever performs mount specs and undoes them"},
}

// preparing are the profiles of a plugin with NodePrepare. A spec of the
// plugin's seat belongs to all of them, as far as its features allow, unless
// its section says otherwise.
var preparing = []Profile{NodeMount, NodeBlock, NodeFUSE, NodeNetwork}

// distinctive are the features that tell profiles of one service apart: a
// spec that needs one belongs only to profiles that have it.
var distinctive = []Feature{accessMount, accessBlock, KindBlockDevice, KindFUSE, NetworkFilesystem}

func profileByName(name string) *profile {
	if i := slices.IndexFunc(profiles, func(p profile) bool { return string(p.name) == name }); i >= 0 {
		return &profiles[i]
	}
	return nil
}

func profileNames() []string {
	var names []string
	for _, p := range profiles {
		names = append(names, string(p.name))
	}
	return names
}

// Profiles returns the names of the profiles and what each is about.
func Profiles() map[Profile]string {
	about := map[Profile]string{}
	for _, p := range profiles {
		about[p.name] = p.about
	}
	return about
}

// in says to which profiles the specs belong that the section adds from now
// on. A feature that all of these profiles claim is needed by each such spec.
func (s *section) in(of ...Profile) {
	if len(of) == 0 {
		panic(fmt.Sprintf("section %q belongs to no profile", s.name))
	}
	s.profiles = of
}

// belong are the profiles of a spec: those of its section that have what the
// spec needs.
func belong(of []Profile, needs []Feature) []Profile {
	var kept []Profile
	for _, name := range of {
		p := profileByName(string(name))
		fits := func(f Feature) bool { return !slices.Contains(distinctive, f) || slices.Contains(p.by, f) }
		if !slices.ContainsFunc(needs, func(f Feature) bool { return !fits(f) }) {
			kept = append(kept, name)
		}
	}
	return kept
}

// implied are the features that every one of the profiles claims, and that do
// not tell them apart.
func implied(of []Profile) []Feature {
	var common []Feature
	for i, name := range of {
		p := profileByName(string(name))
		claimed := slices.DeleteFunc(slices.Clone(p.claims), func(f Feature) bool { return slices.Contains(distinctive, f) })
		if i == 0 {
			common = claimed
			continue
		}
		common = slices.DeleteFunc(common, func(f Feature) bool { return !slices.Contains(claimed, f) })
	}
	return common
}

// networkFilesystems are the filesystem types that make NetworkFilesystem.
var networkFilesystems = []string{"nfs", "nfs4", "cifs", "smb3", "ceph", "9p", "lustre", "glusterfs", "afs"}

// overNetwork reports whether an answer names a network filesystem.
func overNetwork(answer *prepareResponse) bool {
	return slices.ContainsFunc(answer.GetMountSpecs(), func(s *mountSpec) bool {
		return slices.Contains(networkFilesystems, s.GetFilesystem().GetFsType())
	})
}

// lacks says why the plugin does not claim a profile, "" if it does.
func (s *Suite) lacks(p profile) string {
	for _, f := range p.claims {
		if f == NetworkFilesystem && s.seen.overNetwork() {
			continue
		}
		if !s.features[f] {
			return lacking(f)
		}
	}
	return ""
}

// verdicts are the profiles of the seat with what the run shows about each. A
// profile the plugin does not claim is unsupported; of one it claims nothing
// can be left out without a verdict that says so.
func (s *Suite) verdicts(r *report.Report) []report.Profile {
	var all []report.Profile
	for _, p := range profiles {
		if p.actor != s.actor {
			continue
		}
		if s.config.Profile == string(p.name) {
			r.Profile = string(p.name)
		}
		all = append(all, r.JudgeProfile(s.actor, string(p.name), p.about, s.lacks(p)))
	}
	return all
}

// notServed turns a spec that calls itself unsupported into a failed one, if
// what it needs is claimed and the plugin answered UNIMPLEMENTED all the same:
// a claimed feature cannot be skipped.
func (t *trial) notServed(e *ending) *ending {
	c, called := t.journal.last()
	if e == nil || e.outcome != report.Unsupported || len(t.definition.needs) == 0 || !called || c.code != codes.Unimplemented {
		return e
	}
	var names []string
	for _, f := range t.definition.needs {
		names = append(names, string(f))
	}
	return caught(func() {
		t.fail(t.definition.covers[0], "an answer, since the plugin claims "+strings.Join(names, ", "), "UNIMPLEMENTED: "+c.message)
	})
}
