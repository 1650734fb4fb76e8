package containerd

import (
	"errors"
	"strings"
	"testing"

	"github.com/containerd/containerd/api/types"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/csi-prepare/csi-prepare/reference/mountspec"
)

var (
	device = &mountspec.BlockDevice{Major: 8, Minor: 16}
	single = &mountspec.Bind{Source: mountspec.PathRef{Base: mountspec.BaseStaging}}
	tree   = &mountspec.Bind{Source: mountspec.PathRef{Base: mountspec.BaseStaging}, Recursive: true}
	ro     = mountspec.Attributes{Readonly: true}
)

const forced = mountspec.AttrNosuid | mountspec.AttrNodev

func TestConvert(t *testing.T) {
	for _, tc := range []struct {
		name  string
		spec  mountspec.Spec
		place mountspec.Place
		o     Options
		want  *types.Mount
	}{
		{
			"read-only bind is given the full set",
			mountspec.Spec{Kind: single, Attributes: ro},
			mountspec.Place{Found: "/src", Private: true, Attributes: mountspec.AttrNoexec | mountspec.AttrNoatime},
			Options{},
			&types.Mount{Type: "bind", Source: "/src", Options: []string{"bind", "ro", "nosuid", "nodev", "noexec", "noatime"}},
		},
		{
			"writable bind of a mount that has the attributes",
			mountspec.Spec{Kind: single, Attributes: mountspec.Attributes{Atime: mountspec.Relatime}},
			mountspec.Place{Performed: "/run/co/0", Private: true, Attributes: forced},
			Options{},
			&types.Mount{Type: "bind", Source: "/run/co/0", Options: []string{"bind", "nosuid", "nodev", "relatime"}},
		},
		{
			"writable bind that keeps an attribute with no option",
			mountspec.Spec{Kind: single, Attributes: mountspec.Attributes{Nosymfollow: true}},
			mountspec.Place{Performed: "/run/co/0", Private: true, Attributes: mountspec.AttrNosymfollow},
			Options{Policy: mountspec.Policy{AllowDev: true, AllowSuid: true}},
			&types.Mount{Type: "bind", Source: "/run/co/0", Options: []string{"bind"}},
		},
		{
			"tree that is performed",
			mountspec.Spec{Kind: tree, Attributes: ro},
			mountspec.Place{Performed: "/run/co/0", Private: true, Attributes: forced},
			Options{},
			&types.Mount{Type: "bind", Source: "/run/co/0", Options: []string{"rbind", "ro", "nosuid", "nodev"}},
		},
		{
			"tree with nothing to narrow",
			mountspec.Spec{Kind: tree},
			mountspec.Place{Found: "/src", Private: true},
			Options{Policy: mountspec.Policy{AllowDev: true, AllowSuid: true}},
			&types.Mount{Type: "bind", Source: "/src", Options: []string{"rbind"}},
		},
		{
			"filesystem on a device",
			mountspec.Spec{Attributes: mountspec.Attributes{Readonly: true, Atime: mountspec.Strictatime}, Kind: &mountspec.Filesystem{
				Type: "ext4", Device: device, SuperblockReadonly: true,
				Parameters: []mountspec.Parameter{{Key: "noload"}, {Key: "errors", Text: "continue"}},
			}},
			mountspec.Place{Found: "/run/co/dev/1"},
			Options{},
			&types.Mount{
				Type: "ext4", Source: "/run/co/dev/1",
				Options: []string{"ro", "nosuid", "nodev", "strictatime", "noload", "errors=continue"},
			},
		},
		{
			"network filesystem, made on the node",
			mountspec.Spec{Kind: &mountspec.Filesystem{
				Type: "nfs4", Source: "h:/e", Parameters: []mountspec.Parameter{{Key: "addr", Text: "2001:db8::1"}},
			}},
			mountspec.Place{},
			Options{},
			&types.Mount{Type: "nfs4", Source: "h:/e", Options: []string{"nosuid", "nodev", "addr=2001:db8::1"}},
		},
		{
			"FUSE by descriptor",
			mountspec.Spec{Kind: &mountspec.FUSE{ID: "f"}},
			mountspec.Place{Performed: "/proc/4711/fd/9", Private: true, Attributes: forced},
			Options{},
			&types.Mount{Type: "bind", Source: "/proc/4711/fd/9", Options: []string{"bind", "nosuid", "nodev"}},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			tc.o.PrivateParent = true
			tc.spec.Target = "a/b"
			tc.want.Target = "a/b"
			got, err := Convert([]mountspec.Spec{tc.spec}, []mountspec.Place{tc.place}, tc.o)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff([]*types.Mount{tc.want}, got, protocmp.Transform()); diff != "" {
				t.Errorf("mounts (-want +got):\n%s", diff)
			}
		})
	}
}

func TestConvertRefusesWhatWouldBeLost(t *testing.T) {
	private := mountspec.Place{Performed: "/run/co/0", Private: true, Attributes: forced}
	node := mountspec.Place{Found: "/run/co/dev/1"}
	ext4 := func(params ...mountspec.Parameter) *mountspec.Filesystem {
		return &mountspec.Filesystem{Type: "ext4", Device: device, Parameters: params}
	}
	idmap := mountspec.Policy{IDMap: true}
	for _, tc := range []struct {
		name  string
		spec  mountspec.Spec
		place mountspec.Place
		o     Options
		field string
	}{
		{"no kind", mountspec.Spec{}, private, Options{}, "kind"},
		{"device", mountspec.Spec{Kind: device}, node, Options{}, "block_device"},
		{"extension", mountspec.Spec{Kind: &mountspec.Extension{}}, private, Options{}, "extension"},
		{"handle with no place", mountspec.Spec{Kind: &mountspec.Handle{}}, mountspec.Place{Private: true}, Options{}, "handle"},
		{"bind of a shared mount", mountspec.Spec{Kind: single}, mountspec.Place{Found: "/src", Attributes: forced}, Options{}, "bind"},
		{
			"writable bind of a mount without the attributes",
			mountspec.Spec{Kind: single},
			mountspec.Place{Found: "/src", Private: true, Attributes: mountspec.AttrNosuid},
			Options{},
			"attributes.nodev",
		},
		{
			"access time of a writable bind",
			mountspec.Spec{Kind: single, Attributes: mountspec.Attributes{Atime: mountspec.Relatime}},
			mountspec.Place{Performed: "/src", Private: true, Attributes: forced | mountspec.AttrNoatime},
			Options{},
			"attributes.atime",
		},
		{
			"tree that is not performed",
			mountspec.Spec{Kind: tree, Attributes: ro},
			mountspec.Place{Found: "/src", Private: true, Attributes: forced},
			Options{},
			"bind.recursive",
		},
		{
			"nosymfollow of a read-only bind",
			mountspec.Spec{Kind: single, Attributes: ro},
			mountspec.Place{Performed: "/run/co/0", Private: true, Attributes: mountspec.AttrNosymfollow},
			Options{},
			"attributes.nosymfollow",
		},
		{
			"nosymfollow of a filesystem",
			mountspec.Spec{Kind: ext4(), Attributes: mountspec.Attributes{Nosymfollow: true}},
			node,
			Options{},
			"attributes.nosymfollow",
		},
		{
			"mapped bind",
			mountspec.Spec{Kind: single, IDMapSupported: true},
			mountspec.Place{Found: "/src", Private: true, Attributes: forced},
			Options{Policy: idmap},
			"idmap_supported",
		},
		{"mapped filesystem", mountspec.Spec{Kind: ext4(), IDMapSupported: true}, node, Options{Policy: idmap}, "idmap_supported"},
		{
			"secret",
			mountspec.Spec{Kind: ext4(mountspec.Parameter{Key: "p", Secret: mountspec.NewSecret("hunter2")})},
			node,
			Options{},
			"filesystem.parameters[0].secret",
		},
		{
			"comma",
			mountspec.Spec{Kind: ext4(mountspec.Parameter{Key: "p", Text: "a,b"})},
			node,
			Options{},
			"filesystem.parameters[0]",
		},
		{
			"template in a value",
			mountspec.Spec{Kind: ext4(mountspec.Parameter{Key: "p", Text: "{{ mount 0 }}"})},
			node,
			Options{},
			"filesystem",
		},
		{
			"template in a source",
			mountspec.Spec{Kind: &mountspec.Filesystem{Type: "nfs4", Source: "h:/{{ source 0 }}"}},
			mountspec.Place{},
			Options{},
			"filesystem",
		},
		{"template in a target", mountspec.Spec{Kind: single, Target: "{{ target 0 }}"}, private, Options{}, "bind"},
		{"mount alone read-only", mountspec.Spec{Kind: ext4(), Attributes: ro}, node, Options{}, "filesystem.superblock_readonly"},
		{"device with no node", mountspec.Spec{Kind: ext4()}, mountspec.Place{}, Options{}, "found"},
		{
			"label",
			mountspec.Spec{Kind: &mountspec.Filesystem{Type: "ext4", Device: device, LSMContextSupported: true}},
			node,
			Options{Policy: mountspec.Policy{LSMContext: "a:b:c:s0"}},
			"filesystem.lsm_context_supported",
		},
		{
			"descriptor of a handle",
			mountspec.Spec{Kind: &mountspec.Handle{}},
			mountspec.Place{Performed: "/proc/4711/fd/9", Private: true, Attributes: forced},
			Options{},
			"performed",
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			tc.o.PrivateParent = true
			got, err := Convert([]mountspec.Spec{{Kind: single}, tc.spec}, []mountspec.Place{private, tc.place}, tc.o)
			var lost *mountspec.ConsumerError
			if !errors.As(err, &lost) {
				t.Fatalf("error %v, mounts %v", err, got)
			}
			if lost.Index != 1 || lost.Field != tc.field || lost.Consumer != "containerd" {
				t.Errorf("%v; want mount_specs[1].%s", err, tc.field)
			}
			if strings.Contains(err.Error(), "hunter2") {
				t.Errorf("shows a secret: %v", err)
			}
		})
	}
}

func TestConvertRefusesASharedParent(t *testing.T) {
	for field, s := range map[string]mountspec.Spec{
		"bind":       {Kind: single},
		"filesystem": {Kind: &mountspec.Filesystem{Type: "tmpfs"}},
	} {
		place := mountspec.Place{Performed: "/run/co/0", Private: true, Attributes: forced}
		_, err := Convert([]mountspec.Spec{s}, []mountspec.Place{place}, Options{})
		var lost *mountspec.ConsumerError
		if !errors.As(err, &lost) || lost.Field != field {
			t.Errorf("%s: %v", field, err)
		}
	}
}
