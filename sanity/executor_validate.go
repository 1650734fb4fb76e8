package sanity

import (
	"path/filepath"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// violating are lists of mount specs that each break one rule. The first of a
// list is always right by itself, so that an executor that begins before it
// has read to the end has something to perform.
func violating() map[string]func(*performRequest) {
	second := func(change func(*mountSpec)) func(*performRequest) {
		return func(r *performRequest) { r.MountSpecs = append(r.MountSpecs, with(bind("dir", "other", nil), change)) }
	}
	first := func(change func(*mountSpec)) func(*performRequest) {
		return func(r *performRequest) { change(r.MountSpecs[0]) }
	}
	filesystem := func(parameter string) func(*performRequest) {
		return func(r *performRequest) {
			r.MountSpecs = append(r.MountSpecs, tmpfsOf("dir", nil, &preparev1alpha1.FsParameter{Key: parameter}))
		}
	}
	return map[string]func(*performRequest){
		"no mount spec at all":                  func(r *performRequest) { r.MountSpecs = nil },
		"a writable mount for a read-only call": func(r *performRequest) { r.Request.Readonly = true },
		"a writable second mount for such a call": func(r *performRequest) {
			r.Request.Readonly = true
			r.MountSpecs[0].Attributes = &attributes{Readonly: true}
			r.MountSpecs = append(r.MountSpecs, bind("dir", "other", nil))
		},
		"17 mount specs": func(r *performRequest) {
			for range 16 {
				r.MountSpecs = append(r.MountSpecs, bind("dir", "other", nil))
			}
		},
		"a first mount spec with a target": first(func(s *mountSpec) { s.Target = "dir" }),
		"a second mount spec without":      second(func(s *mountSpec) { s.Target = "" }),
		"an absolute target":               second(func(s *mountSpec) { s.Target = "/dir" }),
		"a target that climbs":             second(func(s *mountSpec) { s.Target = "dir/../../x" }),
		"a target with a dot":              second(func(s *mountSpec) { s.Target = "./dir" }),
		"a component of 256 bytes":         second(func(s *mountSpec) { s.Target = strings.Repeat("a", 256) }),
		"a NUL byte in a target":           second(func(s *mountSpec) { s.Target = "dir\x00x" }),
		"the same target twice": func(r *performRequest) {
			r.MountSpecs = append(r.MountSpecs, bind("dir", "other", nil), bind("dir", "other", nil))
		},
		"a target before what it lies below": func(r *performRequest) {
			r.MountSpecs = append(r.MountSpecs, bind("dir/inner", "other", nil), bind("dir", "dir", nil))
		},
		"no kind":                     second(func(s *mountSpec) { s.Kind = nil }),
		"a kind that was not offered": func(r *performRequest) { r.Request.Performer.Kinds = r.Request.Performer.Kinds[:1] },
		"a filesystem type not offered": func(r *performRequest) {
			r.Request.Performer.FsTypes = nil
			r.MountSpecs = append(r.MountSpecs, tmpfsOf("dir", nil))
		},
		"a grant that was not offered": func(r *performRequest) { r.Request.Performer.Grants = nil },
		"a base the call did not have": second(func(s *mountSpec) {
			s.GetBind().Source = &preparev1alpha1.PathRef{Base: preparev1alpha1.PathRef_STAGING}
		}),
		"no base":                           second(func(s *mountSpec) { s.GetBind().Source = &preparev1alpha1.PathRef{Relative: "volume"} }),
		"a source that climbs":              second(func(s *mountSpec) { s.GetBind().Source.Relative = "volume/../volume" }),
		"an absolute source":                second(func(s *mountSpec) { s.GetBind().Source.Relative = "/etc" }),
		"a mount word as a parameter":       filesystem("nosuid"),
		"a bind as a parameter":             filesystem("bind"),
		"a word of mount(8) as a parameter": filesystem("_netdev"),
		"a parameter twice":                 filesystem("size"),
		"a comma in a key":                  filesystem("size=1m,ro"),
		"a block device for a mount volume": second(func(s *mountSpec) {
			s.Kind = &preparev1alpha1.MountSpec_BlockDevice{BlockDevice: &preparev1alpha1.BlockDevice{Major: 7}}
		}),
		"a field of a later version": second(func(s *mountSpec) {
			s.ProtoReflect().SetUnknown(protowire.AppendVarint(protowire.AppendTag(nil, 77, protowire.VarintType), 1))
		}),
		"a field of a later version, nested": second(func(s *mountSpec) {
			s.GetBind().GetSource().ProtoReflect().SetUnknown(protowire.AppendVarint(protowire.AppendTag(nil, 77, protowire.VarintType), 1))
		}),
		"an access time mode of a later one": second(func(s *mountSpec) { s.Attributes = &attributes{Atime: 42} }),
		"a procfs": func(r *performRequest) {
			r.Request.Performer.FsTypes = []string{"proc"}
			r.MountSpecs = append(r.MountSpecs, &mountSpec{Target: "dir", Kind: &preparev1alpha1.MountSpec_Filesystem{Filesystem: &preparev1alpha1.FilesystemMount{FsType: "proc"}}})
		},
	}
}

func validateSpecs(s *section) {
	s.spec("mount specs that break a rule are refused, and nothing is performed", Covers(requirement.ValidateNothingPerformed), func(t *trial) {
		g := t.rig()
		for what, change := range violating() {
			r := g.performance(bind("", "", nil))
			change(r)
			_, err := g.perform(r)
			g.alive(err)
			g.want(requirement.ValidateNothingPerformed, status.Code(err) == codes.InvalidArgument, "INVALID_ARGUMENT to "+what, "%s", answered(err))
			g.wantNothing(requirement.ValidateNothingPerformed, "after "+what)
		}
	})
	s.spec("nothing is seen of a list whose last mount spec breaks a rule", Covers(requirement.ValidateWholeFirst), func(t *trial) {
		g := t.rig()
		for _, what := range []string{"an absolute target", "no kind", "a writable second mount for such a call", "a source that climbs"} {
			r := g.performance(bind("", "", nil))
			violating()[what](r)
			seen := g.watch(func() bool { return exists(filepath.Join(g.target, "file")) }, func() {
				_, err := g.perform(r)
				g.alive(err)
				g.want(requirement.ValidateWholeFirst, err != nil, "an error to "+what, "OK")
			})
			g.want(requirement.ValidateWholeFirst, !seen, "nothing performed of a list with "+what, "the first mount was there for a moment")
			g.wantNothing(requirement.ValidateWholeFirst, "after "+what)
		}
	})
}
