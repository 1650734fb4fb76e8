package entry_test

import (
	"encoding/json"
	"testing"

	runtimev1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/csi-prepare/csi-prepare/reference/mountspec"
	"github.com/csi-prepare/csi-prepare/reference/mountspec/containerd"
	"github.com/csi-prepare/csi-prepare/reference/mountspec/cri"
	"github.com/csi-prepare/csi-prepare/reference/mountspec/oci"
)

// TestNothingIsLostInSilence changes one thing of a mount spec at a time: the
// result of a conversion changes too, or there is an error.
func TestNothingIsLostInSilence(t *testing.T) {
	policy := mountspec.Policy{AllowSuid: true, AllowDev: true}
	converters := map[string]func(mountspec.Spec, mountspec.Place) (any, error){
		"OCI": func(s mountspec.Spec, p mountspec.Place) (any, error) {
			return oci.Convert([]mountspec.Spec{s}, []mountspec.Place{p},
				oci.Options{Destination: "/data", Policy: policy, NodeNetwork: true})
		},
		"containerd": func(s mountspec.Spec, p mountspec.Place) (any, error) {
			return containerd.Convert([]mountspec.Spec{s}, []mountspec.Place{p},
				containerd.Options{Policy: policy, PrivateParent: true})
		},
		"CRI": func(s mountspec.Spec, p mountspec.Place) (any, error) {
			return cri.Convert([]mountspec.Spec{s}, []mountspec.Place{p}, cri.Options{
				ContainerPath: "/data", Policy: policy, Features: &runtimev1.RuntimeFeatures{MountOptions: true},
			})
		},
	}

	attributes := map[string]func(*mountspec.Spec){
		"readonly":    func(s *mountspec.Spec) { s.Attributes.Readonly = true },
		"nosuid":      func(s *mountspec.Spec) { s.Attributes.Nosuid = true },
		"nodev":       func(s *mountspec.Spec) { s.Attributes.Nodev = true },
		"noexec":      func(s *mountspec.Spec) { s.Attributes.Noexec = true },
		"nosymfollow": func(s *mountspec.Spec) { s.Attributes.Nosymfollow = true },
		"noatime":     func(s *mountspec.Spec) { s.Attributes.Atime = mountspec.Noatime },
		"strictatime": func(s *mountspec.Spec) { s.Attributes.Atime = mountspec.Strictatime },
		"nodiratime":  func(s *mountspec.Spec) { s.Attributes.Nodiratime = true },
		"target":      func(s *mountspec.Spec) { s.Target = "a" },
	}
	filesystem := map[string]func(*mountspec.Filesystem){
		"type":      func(f *mountspec.Filesystem) { f.Type = "xfs" },
		"source":    func(f *mountspec.Filesystem) { f.Source = "other" },
		"parameter": func(f *mountspec.Filesystem) { f.Parameters = append(f.Parameters, mountspec.Parameter{Key: "p"}) },
		"value": func(f *mountspec.Filesystem) {
			f.Parameters = []mountspec.Parameter{{Key: "size", Text: "2m"}}
		},
		"secret": func(f *mountspec.Filesystem) {
			f.Parameters = []mountspec.Parameter{{Key: "size", Secret: mountspec.NewSecret("1m")}}
		},
		"superblock read-only": func(f *mountspec.Filesystem) { f.SuperblockReadonly = true },
		"device":               func(f *mountspec.Filesystem) { f.Device = &mountspec.BlockDevice{Major: 8} },
	}
	base := func() (mountspec.Spec, *mountspec.Filesystem) {
		f := &mountspec.Filesystem{
			Type: "tmpfs", Source: "none", Parameters: []mountspec.Parameter{{Key: "size", Text: "1m"}},
		}
		return mountspec.Spec{Kind: f}, f
	}

	for name, convert := range converters {
		differs := func(what string, plain, changed mountspec.Spec, p mountspec.Place) {
			t.Helper()
			before, err := convert(plain, p)
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			after, err := convert(changed, p)
			if err == nil && text(t, before) == text(t, after) {
				t.Errorf("%s: %s is lost in %s", name, what, text(t, after))
			}
		}
		performed := mountspec.Place{Performed: "/run/co/0", Private: true}
		for what, change := range attributes {
			s := mountspec.Spec{Kind: &mountspec.Bind{}}
			change(&s)
			differs(what+" of a bind", mountspec.Spec{Kind: &mountspec.Bind{}}, s, performed)

			plain, _ := base()
			s, _ = base()
			change(&s)
			if name != "CRI" {
				differs(what+" of a filesystem", plain, s, mountspec.Place{})
			}
		}
		if name == "CRI" {
			continue // knows no filesystem
		}
		for what, change := range filesystem {
			plain, _ := base()
			s, f := base()
			change(f)
			differs(what, plain, s, mountspec.Place{})
		}
		differs("recursion", mountspec.Spec{Kind: &mountspec.Bind{}},
			mountspec.Spec{Kind: &mountspec.Bind{Recursive: true}}, mountspec.Place{Found: "/src", Private: true})
	}
}

func text(t *testing.T, v any) string {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}
