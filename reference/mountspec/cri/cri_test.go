package cri

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"
	runtimev1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/csi-prepare/csi-prepare/reference/mountspec"
)

var (
	device = &mountspec.BlockDevice{Major: 8, Minor: 16, DevicePath: "/dev/of-the-plugin"}
	bind   = &mountspec.Bind{Source: mountspec.PathRef{Base: mountspec.BaseStaging}}
	ro     = mountspec.Attributes{Readonly: true}

	modern  = &runtimev1.RuntimeFeatures{MountOptions: true}
	handler = &runtimev1.RuntimeHandlerFeatures{RecursiveReadOnlyMounts: true}
	relaxed = mountspec.Policy{AllowSuid: true, AllowDev: true}
)

func TestConvert(t *testing.T) {
	performed := mountspec.Place{Performed: "/run/co/0"}
	for _, tc := range []struct {
		name  string
		spec  mountspec.Spec
		place mountspec.Place
		o     Options
		want  Entries
	}{
		{
			"whatever is performed is a private bind",
			mountspec.Spec{Target: "a", Kind: &mountspec.Filesystem{Type: "cifs", Parameters: []mountspec.Parameter{
				{Key: "password", Secret: mountspec.NewSecret("hunter2")},
			}}},
			performed,
			Options{Features: modern},
			Entries{Mounts: []*runtimev1.Mount{{
				ContainerPath: "/data/a", HostPath: "/run/co/0", MountOptions: []string{"nosuid", "nodev"},
			}}},
		},
		{
			"read-only on a runtime of old",
			mountspec.Spec{Kind: bind, Attributes: ro},
			performed,
			Options{Policy: relaxed},
			Entries{Mounts: []*runtimev1.Mount{{ContainerPath: "/data", HostPath: "/run/co/0", Readonly: true}}},
		},
		{
			"read-only with all below where the runtime can",
			mountspec.Spec{Kind: &mountspec.Handle{ID: "h"}, Attributes: ro},
			performed,
			Options{Policy: relaxed, Handler: handler},
			Entries{Mounts: []*runtimev1.Mount{{
				ContainerPath: "/data", HostPath: "/run/co/0", Readonly: true, RecursiveReadOnly: true,
			}}},
		},
		{
			"what the mount has is asked for again, and relatime is what it stays",
			mountspec.Spec{Kind: &mountspec.FUSE{ID: "f"}, Attributes: mountspec.Attributes{Atime: mountspec.Relatime}},
			mountspec.Place{Performed: "/run/co/0", Attributes: mountspec.AttrNoexec},
			Options{Policy: relaxed, Features: modern},
			Entries{Mounts: []*runtimev1.Mount{{
				ContainerPath: "/data", HostPath: "/run/co/0", MountOptions: []string{"noexec"},
			}}},
		},
		{
			"device",
			mountspec.Spec{Kind: device},
			mountspec.Place{Found: "/run/co/dev/1"},
			Options{ContainerPath: "/dev/vol"},
			Entries{Devices: []*runtimev1.Device{{
				ContainerPath: "/dev/vol", HostPath: "/run/co/dev/1", Permissions: "rw",
			}}},
		},
		{
			"read-only device",
			mountspec.Spec{Kind: device, Attributes: ro},
			mountspec.Place{Found: "/run/co/dev/1"},
			Options{ContainerPath: "/dev/vol"},
			Entries{Devices: []*runtimev1.Device{{
				ContainerPath: "/dev/vol", HostPath: "/run/co/dev/1", Permissions: "r",
			}}},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if tc.o.ContainerPath == "" {
				tc.o.ContainerPath = "/data"
			}
			got, err := Convert([]mountspec.Spec{tc.spec}, []mountspec.Place{tc.place}, tc.o)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.want, got, protocmp.Transform()); diff != "" {
				t.Errorf("entries (-want +got):\n%s", diff)
			}
			for _, m := range got.Mounts {
				if m.Propagation != runtimev1.MountPropagation_PROPAGATION_PRIVATE {
					t.Errorf("propagation %v", m.Propagation)
				}
			}
		})
	}
}

func TestConvertRefusesWhatWouldBeLost(t *testing.T) {
	performed := mountspec.Place{Performed: "/run/co/0"}
	for _, tc := range []struct {
		name  string
		spec  mountspec.Spec
		place mountspec.Place
		o     Options
		field string
	}{
		{"no kind", mountspec.Spec{}, performed, Options{}, "kind"},
		{"bind that is not performed", mountspec.Spec{Kind: bind}, mountspec.Place{Found: "/src"}, Options{}, "bind"},
		{"filesystem", mountspec.Spec{Kind: &mountspec.Filesystem{Type: "ext4", Device: device}}, mountspec.Place{Found: "/n"}, Options{}, "filesystem"},
		{"handle", mountspec.Spec{Kind: &mountspec.Handle{}}, mountspec.Place{}, Options{}, "handle"},
		{"FUSE", mountspec.Spec{Kind: &mountspec.FUSE{}}, mountspec.Place{}, Options{}, "fuse"},
		{"extension", mountspec.Spec{Kind: &mountspec.Extension{}}, mountspec.Place{}, Options{}, "extension"},
		{
			// A runtime reads the link, gets "/", and binds the node's root.
			"detached mount by descriptor",
			mountspec.Spec{Kind: &mountspec.FUSE{}},
			mountspec.Place{Performed: "/proc/4711/fd/9"},
			Options{},
			"performed",
		},
		{
			"descriptor of the runtime's own",
			mountspec.Spec{Kind: &mountspec.FUSE{}},
			mountspec.Place{Performed: "/proc/self/fd/9"},
			Options{},
			"performed",
		},
		{"nosuid of the policy, on a runtime of old", mountspec.Spec{Kind: bind}, performed, Options{}, "attributes.nosuid"},
		{
			"noexec on a runtime of old",
			mountspec.Spec{Kind: bind, Attributes: mountspec.Attributes{Noexec: true}},
			performed,
			Options{Policy: relaxed, Features: &runtimev1.RuntimeFeatures{}},
			"attributes.noexec",
		},
		{
			"noatime",
			mountspec.Spec{Kind: bind, Attributes: mountspec.Attributes{Atime: mountspec.Noatime}},
			performed,
			Options{Features: modern},
			"attributes.atime",
		},
		{
			"nosymfollow the mount has",
			mountspec.Spec{Kind: bind},
			mountspec.Place{Performed: "/run/co/0", Attributes: mountspec.AttrNosymfollow},
			Options{Features: modern},
			"attributes.nosymfollow",
		},
		{"device outside /dev", mountspec.Spec{Kind: device}, mountspec.Place{Found: "/n"}, Options{}, "target"},
		{"device by the Plugin's hint", mountspec.Spec{Kind: device}, mountspec.Place{}, Options{ContainerPath: "/dev/v"}, "found"},
		{"relative container path", mountspec.Spec{Kind: bind}, performed, Options{ContainerPath: "data"}, "target"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if tc.o.ContainerPath == "" {
				tc.o.ContainerPath = "/data"
			}
			got, err := Convert([]mountspec.Spec{tc.spec}, []mountspec.Place{tc.place}, tc.o)
			var lost *mountspec.ConsumerError
			if !errors.As(err, &lost) {
				t.Fatalf("error %v, entries %v", err, got)
			}
			if lost.Index != 0 || lost.Field != tc.field || lost.Consumer != "CRI" {
				t.Errorf("%v; want mount_specs[0].%s", err, tc.field)
			}
		})
	}
}
