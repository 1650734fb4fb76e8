package sp

import (
	"context"
	"path/filepath"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/csi-prepare/csi-prepare/fakes/mutant"
	preparev1alpha1 "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// Responses of other kinds than a BIND that break one rule of theirs. Only a
// consumer in a user namespace gets them, so that little else is touched.
var kindMutants = []Mutant{
	filesystem("type-of-odd-bytes", requirement.FilesystemTypeCharset,
		"a filesystem type with a slash, which would be taken for a path", func(f *preparev1alpha1.FilesystemMount) { f.FsType = "nfs/4" }),
	filesystem("type-not-offered", requirement.FilesystemTypeOffered,
		"a filesystem type that the CO did not offer: its operator never allowed it", func(f *preparev1alpha1.FilesystemMount) { f.FsType = "afs" }),
	filesystem("type-of-the-kernel", requirement.FilesystemTypeForbidden,
		"procfs as a volume: the consumer sees the processes of the node", func(f *preparev1alpha1.FilesystemMount) {
			f.FsType, f.Source, f.Parameters = "proc", nil, nil
		}),
	withParameter("mount-word-as-parameter", requirement.FilesystemNoMountWords, "a mount word among the parameters, where the kernel refuses it or a helper obeys", "nosuid", ""),
	withParameter("fstab-word-as-parameter", requirement.FilesystemNoUserspaceWords, "a word of fstab among the parameters, which no kernel knows", "_netdev", ""),
	withParameter("object-as-parameter", requirement.FilesystemNoObjectWords, "a parameter that names another object of the node", "lowerdir", "/etc"),
	withParameter("label-as-parameter", requirement.FilesystemNoLabelWords, "a label is set by the plugin, and opens the volume to other consumers", "context", "system_u:object_r:etc_t:s0"),
	withParameter("idmap-as-parameter", requirement.FilesystemNoIDMapWords, "an ID mapping is set by the plugin behind the CO's back", "uidmap", "0:0:1"),
	withParameter("key-of-odd-bytes", requirement.FilesystemParameterKey, "a key with an equals sign: what is key and what is value depends on who splits it", "a=b", "c"),
	withParameter("value-with-a-comma", requirement.FilesystemParameterValue, "a value with a comma, which brings an option of its own along", "lookupcache", "all,suid"),
	filesystem("parameters-beyond-a-page", requirement.FilesystemParametersLength,
		"more parameters than the kernel takes: it cuts them off in silence", func(f *preparev1alpha1.FilesystemMount) {
			for i := range 20 {
				f.Parameters = append(f.Parameters, text("k"+strings.Repeat("x", i+1), strings.Repeat("v", 250)))
			}
		}),
	filesystem("parameter-twice", requirement.FilesystemParameterOnce,
		"a parameter comes twice: which counts depends on the kernel", func(f *preparev1alpha1.FilesystemMount) {
			f.Parameters = append(f.Parameters, text("vers", "4.1"))
		}),
	filesystem("source-too-long", requirement.FilesystemSourceLength,
		"a source longer than the table of mounts can show", func(f *preparev1alpha1.FilesystemMount) {
			f.Source = &preparev1alpha1.FilesystemMount_Opaque{Opaque: "192.0.2.1:/" + strings.Repeat("a", 300)}
		}),
	filesystem("source-is-a-path", requirement.FilesystemSourceNoPath,
		"a source that is a path of the node: whose disk it is nobody checked", func(f *preparev1alpha1.FilesystemMount) {
			f.FsType, f.Parameters, f.Source = "ext4", nil, &preparev1alpha1.FilesystemMount_Opaque{Opaque: "/dev/sda"}
		}),
	seat("handle-without-id", mutant.Specs, requirement.HandleID,
		"a handle without an id: no descriptor can belong to it",
		otherKind(preparev1alpha1.MountKind_MOUNT_KIND_HANDLE, func(m *preparev1alpha1.MountSpec) {
			m.Kind = &preparev1alpha1.MountSpec_Handle{Handle: &preparev1alpha1.MountHandle{FsType: "xfs"}}
		})),
	seat("handle-without-type", mutant.Specs, requirement.HandleFSType,
		"a handle that does not say what filesystem it is of: the operator's list of types does not reach it",
		otherKind(preparev1alpha1.MountKind_MOUNT_KIND_HANDLE, func(m *preparev1alpha1.MountSpec) {
			m.Kind = &preparev1alpha1.MountSpec_Handle{Handle: &preparev1alpha1.MountHandle{HandleId: "h"}}
		})),
	seat("fuse-without-id", mutant.Specs, requirement.FUSEID,
		"a FUSE mount without an id: nothing tells which connection it is",
		otherKind(preparev1alpha1.MountKind_MOUNT_KIND_FUSE, func(m *preparev1alpha1.MountSpec) {
			m.Kind = &preparev1alpha1.MountSpec_Fuse{Fuse: &preparev1alpha1.FuseMount{}}
		})),
	seat("extension-not-offered", mutant.Specs, requirement.ExtensionOffered,
		"an extension that the CO did not offer",
		otherKind(preparev1alpha1.MountKind_MOUNT_KIND_EXTENSION, func(m *preparev1alpha1.MountSpec) {
			m.Kind = &preparev1alpha1.MountSpec_Extension{Extension: &anypb.Any{TypeUrl: "type.example.com/odd.v1.Program"}}
		})),
	seat("infers-from-directories", mutant.Restart, requirement.CrashNoInference,
		"a directory with something in it is taken for a preparation: what a careless CO left behind comes back as a volume in use",
		answered(func(_ *Server, _ *listRequest, a *listResponse) {
			known := map[string]bool{}
			for _, e := range a.GetEntries() {
				known[e.GetPreparePath()] = true
			}
			for _, e := range a.GetEntries() {
				siblings, err := filepath.Glob(filepath.Join(filepath.Dir(e.GetPreparePath()), "prepare-*", "*"))
				if err != nil {
					continue
				}
				for _, inside := range siblings {
					if path := filepath.Dir(inside); !known[path] {
						known[path] = true
						a.Entries = append(a.Entries, &preparev1alpha1.NodeListPreparedVolumesResponse_Entry{
							VolumeId: e.GetVolumeId(), PrepareId: filepath.Base(path), PreparePath: path,
						})
					}
				}
			}
		})),
	seat("node-service-elsewhere", mutant.Discovery, requirement.DiscoverySameEndpoint,
		"NodePrepare is served at an endpoint where the Node service is not: the CO finds one of the two",
		instead(func(context.Context, *Server, *csi.NodeGetCapabilitiesRequest, func() (*csi.NodeGetCapabilitiesResponse, error)) (*csi.NodeGetCapabilitiesResponse, error) {
			return nil, status.Error(codes.Unimplemented, "unknown service csi.v1.Node")
		})),
}

// otherKind claims a kind, and answers it to a consumer in a user namespace.
func otherKind(kind preparev1alpha1.MountKind, change func(*preparev1alpha1.MountSpec)) fault {
	return both(
		answered(func(_ *Server, _ *capabilitiesQuery, a *capabilitiesReply) {
			a.Capabilities = append(a.Capabilities, &preparev1alpha1.NodePrepareServiceCapability{
				Type: &preparev1alpha1.NodePrepareServiceCapability_Kind_{Kind: &preparev1alpha1.NodePrepareServiceCapability_Kind{Kind: kind}},
			})
		}),
		specs(func(_ *Server, r *prepareRequest, m *preparev1alpha1.MountSpec) {
			if r.GetPerformer().GetUserNamespace() {
				change(m)
			}
		}),
	)
}

// filesystem is a mutant with a fault in a FILESYSTEM that is right without.
func filesystem(name string, breaks requirement.ID, story string, change func(*preparev1alpha1.FilesystemMount)) Mutant {
	return seat(name, mutant.Specs, breaks, story, otherKind(preparev1alpha1.MountKind_MOUNT_KIND_FILESYSTEM, func(m *preparev1alpha1.MountSpec) {
		f := &preparev1alpha1.FilesystemMount{
			FsType: "nfs4", Source: &preparev1alpha1.FilesystemMount_Opaque{Opaque: "192.0.2.1:/volume"},
			Parameters: []*preparev1alpha1.FsParameter{text("vers", "4.2"), text("addr", "192.0.2.1")},
		}
		change(f)
		m.Kind = &preparev1alpha1.MountSpec_Filesystem{Filesystem: f}
	}))
}

// withParameter is such a mutant with one parameter more.
func withParameter(name string, breaks requirement.ID, story, key, value string) Mutant {
	return filesystem(name, breaks, story, func(f *preparev1alpha1.FilesystemMount) {
		p := &preparev1alpha1.FsParameter{Key: key}
		if value != "" {
			p = text(key, value)
		}
		f.Parameters = append(f.Parameters, p)
	})
}

// handleMutants serve over FUSE and name what they have not delivered.
var handleMutants = served([]Mutant{
	seat("fuse-names-another-handle", mutant.Data, requirement.HandleDelivered,
		"the answer names a handle under which nothing was handed over: there is no mount to attach",
		both(wrong(func(m *preparev1alpha1.MountSpec) {
			if f := m.GetFuse(); f != nil {
				f.HandleId += "-of-another"
			}
		}), overFUSE(serving{}))),
})
