package oci

import (
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/runtime-spec/specs-go"
	"github.com/opencontainers/runtime-spec/specs-go/features"

	"github.com/csi-prepare/csi-prepare/reference/mountspec"
)

func pointer[T any](v T) *T { return &v }

// modern is what a runtime with everything reports (runc 1.5).
func modern() *features.Features {
	return &features.Features{
		MountOptions: strings.Fields(`async atime bind defaults dev diratime dirsync exec idmap iversion lazytime
			loud mand noatime nodev nodiratime noexec noiversion nolazytime nomand norelatime nostrictatime nosuid
			nosymfollow private ratime rbind rdev rdiratime relatime remount rexec ridmap rnoatime rnodev rnodiratime
			rnoexec rnorelatime rnostrictatime rnosuid rnosymfollow ro rprivate rrelatime rro rrw rshared rslave
			rstrictatime rsuid rsymfollow runbindable rw shared silent slave strictatime suid symfollow sync tmpcopyup
			unbindable`),
		Linux: &features.Linux{MountExtensions: &features.MountExtensions{
			IDMap: &features.IDMap{Enabled: pointer(true)},
		}},
	}
}

var (
	device  = &mountspec.BlockDevice{Major: 8, Minor: 16, DevicePath: "/dev/of-the-plugin"}
	bind    = &mountspec.Bind{Source: mountspec.PathRef{Base: mountspec.BaseStaging}}
	rbind   = &mountspec.Bind{Source: mountspec.PathRef{Base: mountspec.BaseStaging}, Recursive: true}
	mapping = []specs.LinuxIDMapping{{ContainerID: 0, HostID: 100000, Size: 65536}}
)

func TestConvert(t *testing.T) {
	performed := mountspec.Place{Performed: "/run/co/p1/0"}
	found := mountspec.Place{Found: "/var/lib/staging"}
	for _, tc := range []struct {
		name  string
		spec  mountspec.Spec
		place mountspec.Place
		o     Options
		want  specs.Mount
	}{
		{
			"bind with the policy's attributes, propagation stated",
			mountspec.Spec{Kind: bind},
			found,
			Options{},
			specs.Mount{
				Destination: "/data", Type: "bind", Source: "/var/lib/staging",
				Options: []string{"bind", "nosuid", "nodev", "rprivate"},
			},
		},
		{
			"bind with everything the source has given again",
			mountspec.Spec{Kind: bind, Attributes: mountspec.Attributes{Readonly: true, Atime: mountspec.Relatime}},
			mountspec.Place{Found: "/src", Attributes: mountspec.AttrNoexec | mountspec.AttrNoatime},
			Options{Policy: mountspec.Policy{AllowSuid: true, AllowDev: true}},
			specs.Mount{
				Destination: "/data", Type: "bind", Source: "/src",
				Options: []string{"bind", "ro", "noexec", "relatime", "rprivate"},
			},
		},
		{
			"access time of the source where the spec names none",
			mountspec.Spec{Kind: bind},
			mountspec.Place{Found: "/src", Attributes: mountspec.AttrNoatime | mountspec.AttrNodiratime},
			Options{},
			specs.Mount{
				Destination: "/data", Type: "bind", Source: "/src",
				Options: []string{"bind", "nosuid", "nodev", "noatime", "nodiratime", "rprivate"},
			},
		},
		{
			"tree with the words for trees",
			mountspec.Spec{Kind: rbind, Attributes: mountspec.Attributes{Readonly: true, Recursive: true}},
			found,
			Options{Features: modern()},
			specs.Mount{
				Destination: "/data", Type: "bind", Source: "/var/lib/staging",
				Options: []string{"rbind", "rro", "rnosuid", "rnodev", "rprivate"},
			},
		},
		{
			"tree that is performed needs them no more",
			mountspec.Spec{Kind: rbind, Attributes: mountspec.Attributes{Readonly: true, Recursive: true}},
			performed,
			Options{UserNamespace: true, Locked: true},
			specs.Mount{
				Destination: "/data", Type: "bind", Source: "/run/co/p1/0",
				Options: []string{"rbind", "ro", "nosuid", "nodev", "rprivate"},
			},
		},
		{
			"ID mapping",
			mountspec.Spec{Kind: bind, IDMapSupported: true},
			found,
			Options{
				Policy: mountspec.Policy{IDMap: true}, Features: modern(), UIDMappings: mapping, GIDMappings: mapping,
			},
			specs.Mount{
				Destination: "/data", Type: "bind", Source: "/var/lib/staging",
				Options:     []string{"bind", "nosuid", "nodev", "rprivate", "idmap"},
				UIDMappings: mapping, GIDMappings: mapping,
			},
		},
		{
			"ID mapping of a tree",
			mountspec.Spec{Kind: rbind, IDMapSupported: true},
			found,
			Options{
				Policy: mountspec.Policy{IDMap: true}, Features: modern(), UIDMappings: mapping, GIDMappings: mapping,
			},
			specs.Mount{
				Destination: "/data", Type: "bind", Source: "/var/lib/staging",
				Options:     []string{"rbind", "rnosuid", "rnodev", "rprivate", "ridmap"},
				UIDMappings: mapping, GIDMappings: mapping,
			},
		},
		{
			"ID mapping that is performed is not done twice",
			mountspec.Spec{Kind: bind, IDMapSupported: true},
			performed,
			Options{Policy: mountspec.Policy{IDMap: true}},
			specs.Mount{
				Destination: "/data", Type: "bind", Source: "/run/co/p1/0",
				Options: []string{"bind", "nosuid", "nodev", "rprivate"},
			},
		},
		{
			"filesystem on a device, by the node the CO checked",
			mountspec.Spec{
				Attributes: mountspec.Attributes{Readonly: true, Atime: mountspec.Noatime},
				Kind: &mountspec.Filesystem{
					Type: "ext4", Device: device, SuperblockReadonly: true,
					Parameters: []mountspec.Parameter{{Key: "errors", Text: "remount-ro"}, {Key: "lazytime"}},
				},
			},
			mountspec.Place{Found: "/run/co/dev/1"},
			Options{Features: modern()},
			specs.Mount{
				Destination: "/data", Type: "ext4", Source: "/run/co/dev/1",
				Options: []string{"ro", "nosuid", "nodev", "noatime", "private", "errors=remount-ro", "lazytime"},
			},
		},
		{
			"tmpfs",
			mountspec.Spec{Kind: &mountspec.Filesystem{
				Type: "tmpfs", Parameters: []mountspec.Parameter{{Key: "size", Text: "1m"}},
			}},
			mountspec.Place{},
			Options{},
			specs.Mount{
				Destination: "/data", Type: "tmpfs",
				Options: []string{"nosuid", "nodev", "private", "size=1m"},
			},
		},
		{
			"network filesystem in the node's network namespace",
			mountspec.Spec{Kind: &mountspec.Filesystem{
				Type: "nfs4", Source: "h:/a,b", Parameters: []mountspec.Parameter{{Key: "addr", Text: "192.0.2.1"}},
			}},
			mountspec.Place{},
			Options{NodeNetwork: true},
			specs.Mount{
				Destination: "/data", Type: "nfs4", Source: "h:/a,b",
				Options: []string{"nosuid", "nodev", "private", "addr=192.0.2.1"},
			},
		},
		{
			"filesystem that is performed: nothing of it is text any more",
			mountspec.Spec{Kind: &mountspec.Filesystem{
				Type: "cifs", Source: "//h/s", Parameters: []mountspec.Parameter{
					{Key: "password", Secret: mountspec.NewSecret("hunter2")}, {Key: "x", Text: "a,b"},
				},
			}},
			performed,
			Options{UserNamespace: true},
			specs.Mount{
				Destination: "/data", Type: "bind", Source: "/run/co/p1/0",
				Options: []string{"bind", "nosuid", "nodev", "rprivate"},
			},
		},
		{
			"FUSE by the descriptor of the CO's own mount",
			mountspec.Spec{Kind: &mountspec.FUSE{ID: "f"}},
			mountspec.Place{Performed: "/proc/4711/fd/9", Attributes: mountspec.AttrNosuid | mountspec.AttrNodev},
			Options{},
			specs.Mount{
				Destination: "/data", Type: "bind", Source: "/proc/4711/fd/9",
				Options: []string{"bind", "nosuid", "nodev", "rprivate"},
			},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			tc.o.Destination = "/data"
			got, err := Convert([]mountspec.Spec{tc.spec}, []mountspec.Place{tc.place}, tc.o)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(Entries{Mounts: []specs.Mount{tc.want}}, got); diff != "" {
				t.Errorf("entries (-want +got):\n%s", diff)
			}
		})
	}
}

func TestConvertKeepsTheOrderAndJoinsTargets(t *testing.T) {
	got, err := Convert(
		[]mountspec.Spec{{Kind: bind}, {Target: "a/b", Kind: bind}, {Target: "a/b/c", Kind: bind}},
		[]mountspec.Place{{Found: "/1"}, {Found: "/2"}, {Found: "/3"}},
		Options{Destination: "/data"},
	)
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []string{"/data", "/data/a/b", "/data/a/b/c"} {
		if got.Mounts[i].Destination != want {
			t.Errorf("mounts[%d] goes to %q, want %q", i, got.Mounts[i].Destination, want)
		}
	}
}

func TestConvertDevice(t *testing.T) {
	for _, tc := range []struct {
		name     string
		readonly bool
		o        Options
		access   string
		mode     os.FileMode
	}{
		{"read-write", false, Options{}, "rw", 0o600},
		{"read-only, owner and mode of the CO", true, Options{FileMode: 0o660, UID: 7, GID: 8}, "r", 0o660},
	} {
		t.Run(tc.name, func(t *testing.T) {
			tc.o.Destination = "/dev/vol"
			s := mountspec.Spec{Kind: device, Attributes: mountspec.Attributes{Readonly: tc.readonly}}
			got, err := Convert([]mountspec.Spec{s}, []mountspec.Place{{}}, tc.o)
			if err != nil {
				t.Fatal(err)
			}
			want := Entries{
				Devices: []specs.LinuxDevice{{
					Path: "/dev/vol", Type: "b", Major: 8, Minor: 16, FileMode: &tc.mode, UID: &tc.o.UID, GID: &tc.o.GID,
				}},
				DeviceRules: []specs.LinuxDeviceCgroup{{
					Allow: true, Type: "b", Major: pointer(int64(8)), Minor: pointer(int64(16)), Access: tc.access,
				}},
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("entries (-want +got):\n%s", diff)
			}
		})
	}
}

func TestConvertRefusesWhatWouldBeLost(t *testing.T) {
	ext4 := func(params ...mountspec.Parameter) *mountspec.Filesystem {
		return &mountspec.Filesystem{Type: "ext4", Device: device, Parameters: params}
	}
	node := mountspec.Place{Found: "/run/co/dev/1"}
	old := modern()
	old.Linux = nil
	custom := modern()
	custom.MountOptions = append(custom.MountOptions, "copy-symlink")
	ro := mountspec.Attributes{Readonly: true}
	idmap := mountspec.Policy{IDMap: true}

	for _, tc := range []struct {
		name  string
		spec  mountspec.Spec
		place mountspec.Place
		o     Options
		field string
	}{
		{"no kind", mountspec.Spec{}, node, Options{}, "kind"},
		{"extension", mountspec.Spec{Kind: &mountspec.Extension{}}, node, Options{}, "extension"},
		{"handle with no place", mountspec.Spec{Kind: &mountspec.Handle{ID: "h"}}, node, Options{}, "handle"},
		{"FUSE with no place", mountspec.Spec{Kind: &mountspec.FUSE{ID: "f"}}, mountspec.Place{}, Options{}, "fuse"},
		{"bind of nothing", mountspec.Spec{Kind: bind}, mountspec.Place{}, Options{}, "found"},
		{"relative source", mountspec.Spec{Kind: bind}, mountspec.Place{Found: "staging"}, Options{}, "found"},
		{"root of the node", mountspec.Spec{Kind: bind}, mountspec.Place{Performed: "/"}, Options{}, "performed"},
		{"source with dots", mountspec.Spec{Kind: bind}, mountspec.Place{Found: "/a/../b"}, Options{}, "found"},
		{"source with a NUL byte", mountspec.Spec{Kind: bind}, mountspec.Place{Found: "/a\x00"}, Options{}, "found"},
		{
			"descriptor of whoever resolves it",
			mountspec.Spec{Kind: &mountspec.FUSE{ID: "f"}},
			mountspec.Place{Performed: "/proc/self/fd/9"},
			Options{},
			"performed",
		},
		{"the same by another name", mountspec.Spec{Kind: bind}, mountspec.Place{Found: "/dev/fd/9"}, Options{}, "found"},
		{
			"root of a process",
			mountspec.Spec{Kind: bind},
			mountspec.Place{Found: "/proc/1/root"},
			Options{},
			"found",
		},
		{
			"descriptor of a clone",
			mountspec.Spec{Kind: bind},
			mountspec.Place{Performed: "/proc/4711/fd/9"},
			Options{},
			"performed",
		},
		{
			"descriptor of a handle",
			mountspec.Spec{Kind: &mountspec.Handle{ID: "h"}},
			mountspec.Place{Performed: "/proc/4711/fd/9"},
			Options{},
			"performed",
		},
		{
			"descriptor into a user namespace",
			mountspec.Spec{Kind: &mountspec.FUSE{ID: "f"}},
			mountspec.Place{Performed: "/proc/4711/fd/9"},
			Options{UserNamespace: true},
			"performed",
		},
		{
			"descriptor of a mapped mount",
			mountspec.Spec{Kind: &mountspec.FUSE{ID: "f"}, IDMapSupported: true},
			mountspec.Place{Performed: "/proc/4711/fd/9"},
			Options{Policy: idmap},
			"performed",
		},

		{
			"secret",
			mountspec.Spec{Kind: ext4(
				mountspec.Parameter{Key: "a"}, mountspec.Parameter{Key: "p", Secret: mountspec.NewSecret("hunter2")},
			)},
			node,
			Options{},
			"filesystem.parameters[1].secret",
		},
		{
			"comma in a value",
			mountspec.Spec{Kind: ext4(mountspec.Parameter{Key: "commit", Text: "30,ro"})},
			node,
			Options{},
			"filesystem.parameters[0]",
		},
		{
			"newline in a value",
			mountspec.Spec{Kind: ext4(mountspec.Parameter{Key: "commit", Text: "30\nro"})},
			node,
			Options{},
			"filesystem.parameters[0]",
		},
		{
			"comma in a key",
			mountspec.Spec{Kind: ext4(mountspec.Parameter{Key: "discard,ro"})},
			node,
			Options{},
			"filesystem.parameters[0]",
		},
		{
			"more than mount(2) takes",
			mountspec.Spec{Kind: ext4(
				mountspec.Parameter{Key: "a", Text: strings.Repeat("x", 4000)},
				mountspec.Parameter{Key: "b", Text: strings.Repeat("x", 91)},
			)},
			node,
			Options{},
			"filesystem.parameters",
		},
		{
			"parameter the runtime takes for its own",
			mountspec.Spec{Kind: ext4(mountspec.Parameter{Key: "copy-symlink"})},
			node,
			Options{Features: custom},
			"filesystem.parameters",
		},
		{
			"superblock alone read-only",
			mountspec.Spec{Kind: &mountspec.Filesystem{
				Type: "ext4", Device: device, SuperblockReadonly: true,
			}},
			node,
			Options{},
			"filesystem.superblock_readonly",
		},
		{"mount alone read-only", mountspec.Spec{Kind: ext4(), Attributes: ro}, node, Options{}, "filesystem.superblock_readonly"},
		{"device with no node", mountspec.Spec{Kind: ext4()}, mountspec.Place{}, Options{}, "found"},
		{"device with a relative node", mountspec.Spec{Kind: ext4()}, mountspec.Place{Found: "sdb"}, Options{}, "found"},
		{"filesystem in a user namespace", mountspec.Spec{Kind: ext4()}, node, Options{UserNamespace: true}, "filesystem"},
		{
			"filesystem in the container's network",
			mountspec.Spec{Kind: &mountspec.Filesystem{
				Type: "nfs4", Source: "h:/e",
			}},
			mountspec.Place{},
			Options{},
			"filesystem.opaque",
		},
		{"mapped filesystem", mountspec.Spec{Kind: ext4(), IDMapSupported: true}, node, Options{Policy: idmap}, "idmap_supported"},
		{
			"label",
			mountspec.Spec{Kind: &mountspec.Filesystem{Type: "ext4", Device: device, LSMContextSupported: true}},
			node,
			Options{Policy: mountspec.Policy{LSMContext: "system_u:object_r:container_file_t:s0"}},
			"filesystem.lsm_context_supported",
		},

		{
			"tree on a runtime that reports nothing",
			mountspec.Spec{Kind: rbind, Attributes: ro},
			node,
			Options{},
			"attributes.readonly",
		},
		{
			"nosymfollow on such a runtime",
			mountspec.Spec{Kind: bind, Attributes: mountspec.Attributes{Nosymfollow: true}},
			node,
			Options{},
			"attributes.nosymfollow",
		},
		{
			"mapping on such a runtime",
			mountspec.Spec{Kind: bind, IDMapSupported: true},
			node,
			Options{Policy: idmap, UIDMappings: mapping, GIDMappings: mapping},
			"idmap_supported",
		},
		{
			"mapping on a runtime without it",
			mountspec.Spec{Kind: bind, IDMapSupported: true},
			node,
			Options{Policy: idmap, Features: old, UIDMappings: mapping, GIDMappings: mapping},
			"idmap_supported",
		},
		{
			"mapping that is not given",
			mountspec.Spec{Kind: bind, IDMapSupported: true},
			node,
			Options{Policy: idmap, Features: modern(), UIDMappings: mapping},
			"idmap_supported",
		},
		{
			"mapping the Plugin does not support",
			mountspec.Spec{Kind: bind},
			node,
			Options{Policy: idmap, Features: modern(), UIDMappings: mapping, GIDMappings: mapping},
			"idmap_supported",
		},
		{
			"attributes the container could clear",
			mountspec.Spec{Kind: bind, Attributes: ro},
			mountspec.Place{Found: "/src", Attributes: mountspec.AttrNosuid | mountspec.AttrNodev},
			Options{UserNamespace: true},
			"attributes",
		},

		{
			"a restriction that a user namespace could clear",
			mountspec.Spec{Kind: &mountspec.FUSE{ID: "f"}, Attributes: mountspec.Attributes{Readonly: true}},
			mountspec.Place{Performed: "/run/co/p1/0", Attributes: mountspec.AttrReadonly | mountspec.AttrNosuid | mountspec.AttrNodev},
			Options{UserNamespace: true},
			"attributes.readonly",
		},

		{"device outside /dev", mountspec.Spec{Kind: device}, node, Options{}, "target"},
		{
			"device in a user namespace",
			mountspec.Spec{Kind: device},
			node,
			Options{UserNamespace: true, Destination: "/dev/vol"},
			"block_device",
		},
		{"relative destination", mountspec.Spec{Kind: bind}, node, Options{Destination: "data"}, "target"},
		{"root of the container", mountspec.Spec{Kind: bind}, node, Options{Destination: "/"}, "target"},
		{"destination with dots", mountspec.Spec{Kind: bind}, node, Options{Destination: "/data/../etc"}, "target"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if tc.o.Destination == "" {
				tc.o.Destination = "/data"
			}
			first := mountspec.Spec{Kind: bind}
			list, places := []mountspec.Spec{first, tc.spec}, []mountspec.Place{{Performed: "/run/co/0"}, tc.place}
			index := 1
			if tc.o.Destination != "/data" {
				list, places, index = list[1:], places[1:], 0
			}
			got, err := Convert(list, places, tc.o)
			var lost *mountspec.ConsumerError
			if !errors.As(err, &lost) {
				t.Fatalf("error %v, entries %+v", err, got)
			}
			if lost.Index != index || lost.Field != tc.field || lost.Consumer != "OCI" {
				t.Errorf("%v; want mount_specs[%d].%s", err, index, tc.field)
			}
			if strings.Contains(err.Error(), "hunter2") {
				t.Errorf("shows a secret: %v", err)
			}
		})
	}
}

func TestConvertWantsAPlaceForEach(t *testing.T) {
	if _, err := Convert(make([]mountspec.Spec, 2), make([]mountspec.Place, 1), Options{}); err == nil {
		t.Error("accepted one place for two specs")
	}
}
