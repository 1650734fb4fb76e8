package wire

import (
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/csi-prepare/csi-prepare/reference/mountspec"
	"github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

const kindPrefix = "MOUNT_KIND_"

// RequestFromProto takes from a call what its answer has to agree with. A
// READER_ONLY access mode makes the request read-only, as `readonly` does.
func RequestFromProto(r *preparev1alpha1.NodePrepareVolumeRequest) mountspec.Request {
	return mountspec.Request{
		Performer: PerformerFromProto(r.GetPerformer()),
		Readonly:  r.GetReadonly() || readerOnly(r.GetVolumeCapability()),
		Block:     r.GetVolumeCapability().GetBlock() != nil,
		Staging:   r.GetStagingTargetPath() != "",
	}
}

func readerOnly(c *csi.VolumeCapability) bool {
	switch c.GetAccessMode().GetMode() {
	case csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY,
		csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY:
		return true
	default:
		return false
	}
}

// PerformerFromProto converts a performer. Kinds this version does not know
// are left out: no spec can be of one.
func PerformerFromProto(p *preparev1alpha1.Performer) mountspec.Performer {
	out := mountspec.Performer{
		OtherKernel:   p.GetKernel() == preparev1alpha1.Performer_OTHER,
		FSTypes:       slices.Clone(p.GetFsTypes()),
		UserNamespace: p.GetUserNamespace(),
		IDMap:         p.GetIdmap(),
		Extensions:    slices.Clone(p.GetExtensions()),
		Grants:        slices.Clone(p.GetGrants()),
	}
	for _, k := range p.GetKinds() {
		if name, known := preparev1alpha1.MountKind_name[int32(k)]; known &&
			k != preparev1alpha1.MountKind_MOUNT_KIND_UNKNOWN {
			out.Kinds = append(out.Kinds, mountspec.KindName(strings.TrimPrefix(name, kindPrefix)))
		}
	}
	return out
}

// PerformerProto converts a performer to its message, without kinds the wire
// does not have.
func PerformerProto(p mountspec.Performer) *preparev1alpha1.Performer {
	out := &preparev1alpha1.Performer{
		Kernel:        preparev1alpha1.Performer_NODE,
		FsTypes:       slices.Clone(p.FSTypes),
		UserNamespace: p.UserNamespace,
		Idmap:         p.IDMap,
		Extensions:    slices.Clone(p.Extensions),
		Grants:        slices.Clone(p.Grants),
	}
	if p.OtherKernel {
		out.Kernel = preparev1alpha1.Performer_OTHER
	}
	for _, k := range p.Kinds {
		if n, known := preparev1alpha1.MountKind_value[kindPrefix+string(k)]; known {
			out.Kinds = append(out.Kinds, preparev1alpha1.MountKind(n))
		}
	}
	return out
}
