// Package wire converts between the messages of csi.prepare.v1alpha1 and the
// plain values of package mountspec.
//
// What a Go value cannot show, a field of a later version for example, is
// reported here; every other rule is [mountspec.Validate]'s.
package wire

import (
	"cmp"
	"slices"
	"strconv"

	"google.golang.org/protobuf/types/known/anypb"

	"github.com/csi-prepare/csi-prepare/reference/mountspec"
	"github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// Validate is FromProto and [mountspec.Validate] in one: the specs of a
// response and every rule they break, in the order of the response.
func Validate(msgs []*preparev1alpha1.MountSpec, req mountspec.Request) ([]mountspec.Spec, []mountspec.Violation) {
	specs, lost := FromProto(msgs)
	found := mountspec.Validate(specs, req)
	if len(lost) == 0 {
		return specs, found
	}
	found = append(found, lost...)
	slices.SortStableFunc(found, func(a, b mountspec.Violation) int { return cmp.Compare(a.Index, b.Index) })
	return specs, found
}

// FromProto converts mount specs as they came from the wire. The violations
// are of what the conversion loses and only of that: fields, enum values and
// arms of a later version, at any depth, which protobuf would pass over in
// silence (spec.no-unknown-fields), and values that are set and empty
// (filesystem.parameter-value).
//
// A spec with no arm, or an arm of a later version, becomes one with a nil
// Kind, which [mountspec.Validate] refuses; a caller therefore needs the
// violations of both, as [Validate] returns them. Of a list over
// [mountspec.MaxSpecs], which is refused as a whole, only that many are
// searched.
//
// The result shares no memory with msgs.
func FromProto(msgs []*preparev1alpha1.MountSpec) ([]mountspec.Spec, []mountspec.Violation) {
	specs := make([]mountspec.Spec, len(msgs))
	var lost losses
	for i, m := range msgs {
		specs[i] = fromProto(m)
		if i < mountspec.MaxSpecs {
			lost.search(i, m)
		}
	}
	return specs, lost.found
}

func fromProto(m *preparev1alpha1.MountSpec) mountspec.Spec {
	return mountspec.Spec{
		Target:         m.GetTarget(),
		Kind:           kindFromProto(m),
		Attributes:     attributesFromProto(m.GetAttributes()),
		IDMapSupported: m.GetIdmapSupported(),
	}
}

// kindFromProto returns an untyped nil where no arm of this version is set.
func kindFromProto(m *preparev1alpha1.MountSpec) mountspec.Kind {
	if k := m.GetFilesystem(); k != nil {
		return filesystemFromProto(k)
	}
	if k := m.GetBind(); k != nil {
		return &mountspec.Bind{
			Source: mountspec.PathRef{
				Base:     baseFromProto(k.GetSource().GetBase()),
				Relative: k.GetSource().GetRelative(),
				Grant:    k.GetSource().GetGrant(),
			},
			Recursive:   k.GetRecursive(),
			IsFile:      k.GetIsFile(),
			MountFSType: k.GetMountFsType(),
		}
	}
	if k := m.GetBlockDevice(); k != nil {
		return deviceFromProto(k)
	}
	if k := m.GetHandle(); k != nil {
		return &mountspec.Handle{ID: k.GetHandleId(), FSType: k.GetFsType(), Served: k.GetServed()}
	}
	if k := m.GetFuse(); k != nil {
		return &mountspec.FUSE{ID: k.GetHandleId(), Resumable: k.GetResumable()}
	}
	if k := m.GetExtension(); k != nil {
		e := &mountspec.Extension{TypeURL: k.GetTypeUrl()}
		if v := k.GetValue(); len(v) > 0 {
			e.Value = slices.Clone(v)
		}
		return e
	}
	return nil
}

func filesystemFromProto(k *preparev1alpha1.FilesystemMount) *mountspec.Filesystem {
	f := &mountspec.Filesystem{
		Type:                k.GetFsType(),
		Source:              k.GetOpaque(),
		SuperblockReadonly:  k.GetSuperblockReadonly(),
		Served:              k.GetServed(),
		LSMContextSupported: k.GetLsmContextSupported(),
	}
	if d := k.GetDevice(); d != nil {
		f.Device = deviceFromProto(d)
	}
	if n := len(k.GetParameters()); n > 0 {
		f.Parameters = make([]mountspec.Parameter, n)
	}
	for i, p := range k.GetParameters() {
		f.Parameters[i] = mountspec.Parameter{
			Key:    p.GetKey(),
			Text:   p.GetText(),
			Secret: mountspec.NewSecret(p.GetSecret()),
		}
	}
	return f
}

func deviceFromProto(d *preparev1alpha1.BlockDevice) *mountspec.BlockDevice {
	return &mountspec.BlockDevice{
		Major:      d.GetMajor(),
		Minor:      d.GetMinor(),
		Diskseq:    d.GetDiskseq(),
		DevicePath: d.GetDevicePath(),
	}
}

// baseFromProto does not convert the number: a value of a later version would
// wrap into one of this.
func baseFromProto(b preparev1alpha1.PathRef_Base) mountspec.Base {
	switch b {
	case preparev1alpha1.PathRef_STAGING:
		return mountspec.BaseStaging
	case preparev1alpha1.PathRef_PREPARE:
		return mountspec.BasePrepare
	case preparev1alpha1.PathRef_GRANTED:
		return mountspec.BaseGranted
	default:
		return mountspec.BaseUnknown
	}
}

func attributesFromProto(a *preparev1alpha1.MountAttributes) mountspec.Attributes {
	return mountspec.Attributes{
		Readonly:    a.GetReadonly(),
		Nosuid:      a.GetNosuid(),
		Nodev:       a.GetNodev(),
		Noexec:      a.GetNoexec(),
		Nosymfollow: a.GetNosymfollow(),
		Atime:       atimeFromProto(a.GetAtime()),
		Nodiratime:  a.GetNodiratime(),
		Recursive:   a.GetRecursive(),
	}
}

func atimeFromProto(a preparev1alpha1.MountAttributes_Atime) mountspec.Atime {
	switch a {
	case preparev1alpha1.MountAttributes_RELATIME:
		return mountspec.Relatime
	case preparev1alpha1.MountAttributes_NOATIME:
		return mountspec.Noatime
	case preparev1alpha1.MountAttributes_STRICTATIME:
		return mountspec.Strictatime
	default:
		return mountspec.AtimeUnspecified
	}
}

// Proto converts specs to messages. FromProto of the result gives back equal
// specs if [mountspec.Validate] accepts them.
func Proto(specs []mountspec.Spec) []*preparev1alpha1.MountSpec {
	msgs := make([]*preparev1alpha1.MountSpec, len(specs))
	for i := range specs {
		msgs[i] = toProto(&specs[i])
	}
	return msgs
}

func toProto(s *mountspec.Spec) *preparev1alpha1.MountSpec {
	m := &preparev1alpha1.MountSpec{
		Target:         s.Target,
		Attributes:     attributesProto(s.Attributes),
		IdmapSupported: s.IDMapSupported,
	}
	switch k := s.Kind.(type) {
	case *mountspec.Filesystem:
		m.Kind = &preparev1alpha1.MountSpec_Filesystem{Filesystem: filesystemProto(k)}
	case *mountspec.Bind:
		m.Kind = &preparev1alpha1.MountSpec_Bind{Bind: &preparev1alpha1.BindMount{
			Source: &preparev1alpha1.PathRef{
				Base:     preparev1alpha1.PathRef_Base(k.Source.Base),
				Relative: k.Source.Relative,
				Grant:    k.Source.Grant,
			},
			Recursive:   k.Recursive,
			IsFile:      k.IsFile,
			MountFsType: k.MountFSType,
		}}
	case *mountspec.BlockDevice:
		m.Kind = &preparev1alpha1.MountSpec_BlockDevice{BlockDevice: deviceProto(k)}
	case *mountspec.Handle:
		m.Kind = &preparev1alpha1.MountSpec_Handle{Handle: &preparev1alpha1.MountHandle{
			HandleId: k.ID, FsType: k.FSType, Served: k.Served,
		}}
	case *mountspec.FUSE:
		m.Kind = &preparev1alpha1.MountSpec_Fuse{Fuse: &preparev1alpha1.FuseMount{
			HandleId: k.ID, Resumable: k.Resumable,
		}}
	case *mountspec.Extension:
		m.Kind = &preparev1alpha1.MountSpec_Extension{Extension: &anypb.Any{
			TypeUrl: k.TypeURL, Value: slices.Clone(k.Value),
		}}
	}
	return m
}

func filesystemProto(k *mountspec.Filesystem) *preparev1alpha1.FilesystemMount {
	m := &preparev1alpha1.FilesystemMount{
		FsType:              k.Type,
		SuperblockReadonly:  k.SuperblockReadonly,
		Served:              k.Served,
		LsmContextSupported: k.LSMContextSupported,
	}
	switch {
	case k.Device != nil:
		m.Source = &preparev1alpha1.FilesystemMount_Device{Device: deviceProto(k.Device)}
	case k.Source != "":
		m.Source = &preparev1alpha1.FilesystemMount_Opaque{Opaque: k.Source}
	}
	for _, p := range k.Parameters {
		f := &preparev1alpha1.FsParameter{Key: p.Key}
		switch {
		case !p.Secret.IsZero():
			f.Value = &preparev1alpha1.FsParameter_Secret{Secret: p.Secret.Reveal()}
		case p.Text != "":
			f.Value = &preparev1alpha1.FsParameter_Text{Text: p.Text}
		}
		m.Parameters = append(m.Parameters, f)
	}
	return m
}

func deviceProto(d *mountspec.BlockDevice) *preparev1alpha1.BlockDevice {
	return &preparev1alpha1.BlockDevice{
		Major: d.Major, Minor: d.Minor, Diskseq: d.Diskseq, DevicePath: d.DevicePath,
	}
}

func attributesProto(a mountspec.Attributes) *preparev1alpha1.MountAttributes {
	if a == (mountspec.Attributes{}) {
		return nil
	}
	return &preparev1alpha1.MountAttributes{
		Readonly:    a.Readonly,
		Nosuid:      a.Nosuid,
		Nodev:       a.Nodev,
		Noexec:      a.Noexec,
		Nosymfollow: a.Nosymfollow,
		Atime:       preparev1alpha1.MountAttributes_Atime(a.Atime),
		Nodiratime:  a.Nodiratime,
		Recursive:   a.Recursive,
	}
}

// emptyValues reports parameters whose value is set and empty, which as a Go
// value is a flag.
func (l *losses) emptyValues(m *preparev1alpha1.MountSpec) {
	for i, p := range m.GetFilesystem().GetParameters() {
		var name string
		switch v := p.GetValue().(type) {
		case *preparev1alpha1.FsParameter_Text:
			if v.Text != "" {
				continue
			}
			name = "text"
		case *preparev1alpha1.FsParameter_Secret:
			if v.Secret != "" {
				continue
			}
			name = "secret"
		default:
			continue
		}
		l.add(requirement.FilesystemParameterValue,
			"filesystem.parameters["+strconv.Itoa(i)+"]."+name,
			"set and empty: leave it unset for a flag, or send 1 to 255 bytes")
	}
}
