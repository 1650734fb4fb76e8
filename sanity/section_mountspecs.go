package sanity

import (
	"path/filepath"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/reference/mountspec"
	"github.com/csi-prepare/csi-prepare/reference/mountspec/wire"
	"github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// staticRules are the rules of mount specs that are judged by their text, on
// every answer the run sees, with the feature they have a meaning for.
var staticRules = []struct {
	rule string
	id   requirement.ID
	of   Feature
}{
	{"there are 1 to 16", requirement.SpecCount, ""},
	{"each has exactly one kind", requirement.SpecKindSet, ""},
	{"the first and only the first has no target", requirement.SpecFirstTarget, ""},
	{"targets are relative and plain", requirement.SpecTargetRelative, ""},
	{"targets keep their length", requirement.SpecTargetLength, ""},
	{"no target comes twice", requirement.SpecTargetUnique, ""},
	{"a target comes after what it lies below", requirement.SpecTargetOrder, ""},
	{"nothing is set that SPEC.md does not define", requirement.SpecNoUnknownFields, ""},
	{"text has no NUL and is UTF-8", requirement.SpecText, ""},
	{"fields keep their limits", requirement.SpecFieldLength, ""},
	{"a mount volume is no block device", requirement.SpecMountVolume, ""},
	{"every mount spec of a read-only call is read-only", requirement.PrepareReadonly, ""},
	{"every mount spec of a READER_ONLY mode is read-only", requirement.PrepareReaderOnly, ""},
	{"every kind was offered", requirement.PrepareKindOffered, ""},
	{"a block volume is one block device", requirement.SpecBlockVolume, KindBlockDevice},
	{"a filesystem has a proper type", requirement.FilesystemTypeCharset, KindFilesystem},
	{"a filesystem is of a type that was offered", requirement.FilesystemTypeOffered, KindFilesystem},
	{"a filesystem is storage", requirement.FilesystemTypeForbidden, KindFilesystem},
	{"no parameter is a mount word", requirement.FilesystemNoMountWords, KindFilesystem},
	{"no parameter is a word of mount(8)", requirement.FilesystemNoUserspaceWords, KindFilesystem},
	{"no parameter names another object", requirement.FilesystemNoObjectWords, KindFilesystem},
	{"no parameter is a label", requirement.FilesystemNoLabelWords, KindFilesystem},
	{"no parameter maps ids", requirement.FilesystemNoIDMapWords, KindFilesystem},
	{"keys of parameters are proper", requirement.FilesystemParameterKey, KindFilesystem},
	{"values of parameters are proper", requirement.FilesystemParameterValue, KindFilesystem},
	{"parameters fit a page", requirement.FilesystemParametersLength, KindFilesystem},
	{"no parameter comes twice", requirement.FilesystemParameterOnce, KindFilesystem},
	{"a source keeps its length", requirement.FilesystemSourceLength, KindFilesystem},
	{"a source is no path of the node", requirement.FilesystemSourceNoPath, KindFilesystem},
	{"names of servers are resolved", requirement.FilesystemNamesResolved, KindFilesystem},
	{"versions of protocols are said", requirement.FilesystemVersionExplicit, KindFilesystem},
	{"a source does not climb", requirement.FilesystemSourceNoDotdot, KindFilesystem},
	{"the base of a bind is known", requirement.BindBaseKnown, KindBind},
	{"the base of a bind was in the call", requirement.BindBaseSet, KindBind},
	{"the grant of a bind was offered", requirement.BindGrantOffered, KindBind},
	{"a grant stands with the base GRANTED alone", requirement.BindGrantOnlyGranted, KindBind},
	{"the source of a bind is relative and plain", requirement.BindRelative, KindBind},
	{"a block device has numbers", requirement.BlockNumbers, KindBlockDevice},
	{"a block device has no attribute but readonly", requirement.BlockAttributes, KindBlockDevice},
	{"a handle has an id", requirement.HandleID, KindHandle},
	{"a handle has a type", requirement.HandleFSType, KindHandle},
	{"a FUSE mount has an id", requirement.FUSEID, KindFUSE},
	{"an extension was offered", requirement.ExtensionOffered, KindExtension},
}

func mountSpecSpecs(s *section) {
	for _, rule := range staticRules {
		var n []Feature
		if rule.of != "" {
			n = append(n, rule.of)
		}
		s.spec(rule.rule, Covers(rule.id), func(t *trial) {
			t.survey()
			if b, ok := t.seen.broke(rule.id); ok {
				t.failCall(b.id, b.call, "an answer that keeps the rule", b.detail)
			}
		}, n...)
	}
	s.spec("the source of a bind is reached through no link", Covers(requirement.BindNoSymlink), func(t *trial) {
		r := t.request(t.volume())
		known := false
		for i, spec := range t.prepared(r).GetMountSpecs() {
			source := spec.GetBind().GetSource()
			base := t.base(r, source.GetBase().String(), source.GetGrant())
			if source == nil || base == "" {
				continue
			}
			known = true
			link := linkBelow(base, source.GetRelative())
			t.want(requirement.BindNoSymlink, link == "", "directories all the way from the base to the source", "mount_specs[%d]: %s is a symbolic link", i, link)
		}
		if !known {
			t.unsupported("the suite knows no directory behind the volume; --grant NAME=DIR names those of a plugin that binds")
		}
	}, KindBind)
	s.spec("a source the plugin mounts has its type named", Covers(requirement.BindMountFSTypeSet), func(t *trial) {
		r := t.request(t.volume())
		answer := t.prepared(r)
		if len(t.before.tables) < 3 {
			end(couldNotRun("the plugin's mount table cannot be read, or is the suite's own; --exec 'CMD …' lets the suite start it in a namespace of its own"))
		}
		table, err := t.before.tables[2].ns.Table(t.ctx)
		t.sysfail("reading the plugin's mount table", err)
		for i, spec := range answer.GetMountSpecs() {
			bind := spec.GetBind()
			base := t.base(r, bind.GetSource().GetBase().String(), bind.GetSource().GetGrant())
			if base == "" || bind.GetMountFsType() != "" {
				continue
			}
			source := filepath.Join(base, bind.GetSource().GetRelative())
			for at := source; strings.HasPrefix(at, base); at = filepath.Dir(at) {
				_, was := t.before.tables[2].table.Top(at)
				m, is := table.Top(at)
				t.want(requirement.BindMountFSTypeSet, !is || was, "mount_fs_type, since the plugin mounts there", "mount_specs[%d] has none, and the plugin has mounted %s", i, m)
			}
		}
	}, KindBind)
}

// survey makes calls of every sort, so that rules are judged on more than
// one answer, whatever else the run does. It is the same once a run.
func (t *trial) survey() {
	t.surveyed.Do(func() {
		v := t.volume()
		for _, change := range []func(*prepareRequest){
			func(*prepareRequest) {},
			func(r *prepareRequest) { r.Readonly = true },
			func(r *prepareRequest) { r.VolumeCapability = t.capability(nodeReader) },
			func(r *prepareRequest) { r.VolumeCapability = t.capability(manyReaders) },
			func(r *prepareRequest) {
				r.Performer.Kinds = append(r.Performer.Kinds, preparev1alpha1.MountKind_MOUNT_KIND_EXTENSION)
			},
			func(r *prepareRequest) { r.Performer.Kinds = r.Performer.Kinds[:1] },
			func(r *prepareRequest) { r.Performer.FsTypes = nil },
			func(r *prepareRequest) { r.Performer.UserNamespace, r.Performer.Idmap = true, true },
		} {
			r := t.request(v)
			change(r)
			if _, err := t.prepare(r); err == nil {
				t.unprepared(r)
			} else if status.Code(err) != codes.FailedPrecondition {
				t.alive(err)
			}
		}
	})
	if t.seen.count() == 0 {
		end(couldNotRun("no answer with mount specs was seen"))
	}
}

// count returns how many answers were seen.
func (o *observed) count() int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.answers
}

// equivalent reports whether two answers come to the same: kinds, sources,
// attributes and order, while secrets, addresses, device numbers and ids of
// handles may differ.
func equivalent(a, b *prepareResponse) bool {
	one, _ := wire.FromProto(a.GetMountSpecs())
	two, _ := wire.FromProto(b.GetMountSpecs())
	if len(one) != len(two) {
		return false
	}
	for i := range one {
		if essence(one[i]) != essence(two[i]) {
			return false
		}
	}
	return true
}

// essence renders what has to stay the same of a mount spec.
func essence(s mountspec.Spec) string {
	switch k := s.Kind.(type) {
	case *mountspec.Filesystem:
		plain := *k
		plain.Device = nil
		plain.Parameters = nil
		for _, p := range k.Parameters {
			if p.Key == "addr" || !p.Secret.IsZero() {
				p = mountspec.Parameter{Key: p.Key}
			}
			plain.Parameters = append(plain.Parameters, p)
		}
		s.Kind = &plain
	case *mountspec.BlockDevice:
		s.Kind = &mountspec.BlockDevice{}
	case *mountspec.Handle:
		s.Kind = &mountspec.Handle{FSType: k.FSType, Served: k.Served}
	case *mountspec.FUSE:
		s.Kind = &mountspec.FUSE{Resumable: k.Resumable}
	}
	return kindText(s)
}
