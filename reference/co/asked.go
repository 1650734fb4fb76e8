package co

import (
	"encoding/json"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"

	"github.com/csi-prepare/csi-prepare/reference/mountspec/wire"
	"github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// Asked is what the capability of a use asks for, as far as it may be kept.
type Asked struct {
	AccessMode string `json:"access_mode"`
	FSType     string `json:"fs_type,omitempty"`
	// MountFlags are without values, "commit=" for "commit=60": one may be a
	// secret.
	MountFlags []string `json:"mount_flags,omitempty"`
}

func askedOf(c *csi.VolumeCapability) *Asked {
	a := &Asked{AccessMode: c.GetAccessMode().GetMode().String(), FSType: c.GetMount().GetFsType()}
	for _, flag := range c.GetMount().GetMountFlags() {
		if key, _, valued := strings.Cut(flag, "="); valued {
			flag = key + "="
		}
		a.MountFlags = append(a.MountFlags, flag)
	}
	return a
}

// withoutSecrets is a list of mount specs as it may be kept, nil if it cannot be.
func withoutSecrets(specs []*preparev1alpha1.MountSpec) json.RawMessage {
	clean := make([]*preparev1alpha1.MountSpec, len(specs))
	for i, s := range specs {
		clean[i] = proto.CloneOf(s)
		for _, p := range clean[i].GetFilesystem().GetParameters() {
			if p.GetSecret() != "" {
				p.Value = &preparev1alpha1.FsParameter_Text{Text: shownInstead}
			}
		}
	}
	text, err := wire.Marshal(clean)
	if err != nil {
		return nil // it is for reading alone; nothing is decided by it
	}
	return text
}
