package co

import (
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"

	"github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

func TestWhatIsKeptForReadingHasNoSecret(t *testing.T) {
	const canary = "canary-5d1f"
	specs := []*preparev1alpha1.MountSpec{{Kind: &preparev1alpha1.MountSpec_Filesystem{Filesystem: &preparev1alpha1.FilesystemMount{
		FsType: "cifs",
		Parameters: []*preparev1alpha1.FsParameter{
			{Key: "password", Value: &preparev1alpha1.FsParameter_Secret{Secret: canary}},
			{Key: "vers", Value: &preparev1alpha1.FsParameter_Text{Text: "3.1.1"}},
		},
	}}}}
	kept := string(withoutSecrets(specs))
	if strings.Contains(kept, canary) || !strings.Contains(kept, "password") || !strings.Contains(kept, "3.1.1") {
		t.Errorf("kept: %s", kept)
	}
	if specs[0].GetFilesystem().GetParameters()[0].GetSecret() != canary {
		t.Error("the mount spec itself lost its secret")
	}
	asked := askedOf(&csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY},
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: "cifs", MountFlags: []string{"noatime", "password=" + canary}}},
	})
	want := &Asked{AccessMode: "MULTI_NODE_READER_ONLY", FSType: "cifs", MountFlags: []string{"noatime", "password="}}
	if d := cmp.Diff(want, asked); d != "" {
		t.Error(d)
	}
}
