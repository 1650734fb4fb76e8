package sp

import (
	"os"
	"strings"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/csi-prepare/csi-prepare/fakes/mutant"
	preparev1alpha1 "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// Responses that break one rule of mount specs.
var specMutants = []Mutant{
	seat("mounts-nothing", mutant.Specs, requirement.SpecCount,
		"prepare is OK with no mount spec at all: the consumer writes into the directory that lies there",
		answered(func(_ *Server, _ *prepareRequest, a *prepareResponse) { a.MountSpecs = nil })),
	seat("spec-too-many", mutant.Specs, requirement.SpecCount,
		"seventeen mount specs in one response",
		more("a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l", "m", "n", "o", "p")),
	seat("spec-no-kind", mutant.Specs, requirement.SpecKindSet,
		"a mount spec without a kind",
		wrong(func(m *preparev1alpha1.MountSpec) { m.Kind = nil })),
	seat("spec-first-target", mutant.Specs, requirement.SpecFirstTarget,
		"the first mount spec has a target: nothing is attached where the consumer looks",
		wrong(func(m *preparev1alpha1.MountSpec) { m.Target = "data" })),
	seat("spec-target-absolute", mutant.Specs, requirement.SpecTargetRelative,
		"a target that begins with a slash",
		more("/etc")),
	seat("spec-target-dots", mutant.Specs, requirement.SpecTargetRelative,
		"a target that climbs out of the volume",
		more("a/../../etc")),
	seat("spec-target-long", mutant.Specs, requirement.SpecTargetLength,
		"a component of a target longer than any file name can be",
		more(strings.Repeat("a", 256))),
	seat("spec-target-twice", mutant.Specs, requirement.SpecTargetUnique,
		"two mount specs for one target: the second hides the first",
		more("a", "a")),
	seat("spec-target-order", mutant.Specs, requirement.SpecTargetOrder,
		"a target before the one it lies below: the later mount covers the earlier",
		more("a/b", "a")),
	seat("spec-unknown-field", mutant.Specs, requirement.SpecNoUnknownFields,
		"a field no version of the contract defines, which a careless CO drops in silence",
		wrong(func(m *preparev1alpha1.MountSpec) {
			m.ProtoReflect().SetUnknown(protowire.AppendVarint(protowire.AppendTag(nil, 99, protowire.VarintType), 1))
		})),
	seat("spec-unknown-field-deep", mutant.Specs, requirement.SpecNoUnknownFields,
		"the same, deep inside the source of a bind",
		source(func(p *preparev1alpha1.PathRef) {
			p.ProtoReflect().SetUnknown(protowire.AppendVarint(protowire.AppendTag(nil, 99, protowire.VarintType), 1))
		})),
	seat("spec-unknown-enum", mutant.Specs, requirement.SpecNoUnknownFields,
		"an access time mode that is not defined",
		wrong(func(m *preparev1alpha1.MountSpec) { m.Attributes.Atime = 42 })),
	seat("spec-nul", mutant.Specs, requirement.SpecText,
		"a NUL byte in a path: what follows it is cut off by the kernel",
		source(func(p *preparev1alpha1.PathRef) { p.Relative += "\x00.bak" })),
	seat("spec-grant-not-offered", mutant.Specs, requirement.BindGrantOffered,
		"the source lies in a grant the performer did not offer",
		source(func(p *preparev1alpha1.PathRef) { p.Grant = "nobody-granted-this" })),
	seat("spec-base-unknown", mutant.Specs, requirement.BindBaseKnown,
		"the source has no base",
		source(func(p *preparev1alpha1.PathRef) { p.Base, p.Grant = preparev1alpha1.PathRef_BASE_UNKNOWN, "" })),
	seat("spec-base-not-set", mutant.Specs, requirement.BindBaseSet,
		"the source is relative to a staging path, though the call had none",
		specs(func(_ *Server, r *prepareRequest, m *preparev1alpha1.MountSpec) {
			if r.GetStagingTargetPath() == "" {
				p := m.GetBind().GetSource()
				p.Base, p.Grant = preparev1alpha1.PathRef_STAGING, ""
			}
		})),
	seat("spec-grant-with-other-base", mutant.Specs, requirement.BindGrantOnlyGranted,
		"a grant is named beside another base: which of the two counts is left to chance",
		source(func(p *preparev1alpha1.PathRef) { p.Base = preparev1alpha1.PathRef_PREPARE })),
	seat("spec-source-dots", mutant.Escape, requirement.BindRelative,
		"the source climbs out of its grant",
		source(func(p *preparev1alpha1.PathRef) { p.Relative = "../" + p.GetRelative() })),
	seat("spec-source-absolute", mutant.Escape, requirement.BindRelative,
		"the source is an absolute path of the node",
		source(func(p *preparev1alpha1.PathRef) { p.Relative = "/etc" })),
	seat("spec-source-symlink", mutant.Escape, requirement.BindNoSymlink,
		"the source is reached through a symlink that the plugin can point elsewhere at any time",
		specs(func(s *Server, r *prepareRequest, m *preparev1alpha1.MountSpec) {
			_ = os.Symlink(r.GetVolumeId(), s.where(r.GetVolumeId())+".link")
			m.GetBind().GetSource().Relative += ".link"
		})),
	seat("spec-source-long", mutant.Specs, requirement.SpecFieldLength,
		"a source longer than any path can be",
		source(func(p *preparev1alpha1.PathRef) { p.Relative = strings.Repeat("a/", 2048) + "a" })),
	seat("spec-device-for-mount", mutant.Specs, requirement.SpecMountVolume,
		"a block device is answered for a volume that was asked for as a directory",
		wrong(func(m *preparev1alpha1.MountSpec) {
			m.Kind = &preparev1alpha1.MountSpec_BlockDevice{BlockDevice: &preparev1alpha1.BlockDevice{Major: 7}}
		})),
}

// wrong changes the one mount spec, whatever the request.
func wrong(change func(*preparev1alpha1.MountSpec)) fault {
	return specs(func(_ *Server, _ *prepareRequest, m *preparev1alpha1.MountSpec) { change(m) })
}

// source changes the source of the one mount spec.
func source(change func(*preparev1alpha1.PathRef)) fault {
	return wrong(func(m *preparev1alpha1.MountSpec) { change(m.GetBind().GetSource()) })
}

// more adds a copy of the one mount spec for each of the targets.
func more(targets ...string) fault {
	return answered(func(_ *Server, _ *prepareRequest, a *prepareResponse) {
		for _, target := range targets {
			m := proto.CloneOf(a.MountSpecs[0])
			m.Target = target
			a.MountSpecs = append(a.MountSpecs, m)
		}
	})
}
