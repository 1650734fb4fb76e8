package sp

import (
	"context"
	"slices"
	"strings"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/fakes/mutant"
	preparev1alpha1 "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// overNetwork has a Server answer an NFS filesystem in the place of a BIND, of a
// server that nobody has to reach: what is judged is the text.
func overNetwork(change func(*preparev1alpha1.FilesystemMount)) fault {
	return both(
		func(s *Server) {
			s.rules.accepts = func(p *preparev1alpha1.Performer, _ *preparev1alpha1.MountSpec) bool {
				return p.GetKernel() == preparev1alpha1.Performer_NODE &&
					slices.Contains(p.GetKinds(), preparev1alpha1.MountKind_MOUNT_KIND_FILESYSTEM) && slices.Contains(p.GetFsTypes(), "nfs4")
			}
		},
		answered(func(_ *Server, _ *capabilitiesQuery, a *capabilitiesReply) {
			for _, c := range a.GetCapabilities() {
				if k := c.GetKind(); k != nil {
					k.Kind = preparev1alpha1.MountKind_MOUNT_KIND_FILESYSTEM
				}
			}
		}),
		specs(func(_ *Server, r *prepareRequest, m *preparev1alpha1.MountSpec) {
			fs := &preparev1alpha1.FilesystemMount{
				FsType:     "nfs4",
				Source:     &preparev1alpha1.FilesystemMount_Opaque{Opaque: "nfs.example:/volumes/" + r.GetVolumeId()},
				Parameters: []*preparev1alpha1.FsParameter{text("addr", "192.0.2.1"), text("vers", "4.2"), text("proto", "tcp"), {Key: "hard"}},
			}
			change(fs)
			m.Kind, m.IdmapSupported = &preparev1alpha1.MountSpec_Filesystem{Filesystem: fs}, false
		}),
	)
}

func text(key, value string) *preparev1alpha1.FsParameter {
	return &preparev1alpha1.FsParameter{Key: key, Value: &preparev1alpha1.FsParameter_Text{Text: value}}
}

// plainly changes nothing.
func plainly(*preparev1alpha1.FilesystemMount) {}

// parameter gives a parameter another value, or takes it away.
func parameter(key, value string) func(*preparev1alpha1.FilesystemMount) {
	return func(fs *preparev1alpha1.FilesystemMount) {
		fs.Parameters = slices.DeleteFunc(fs.Parameters, func(p *preparev1alpha1.FsParameter) bool { return p.GetKey() == key })
		if value != "" {
			fs.Parameters = append(fs.Parameters, text(key, value))
		}
	}
}

// networkMutants answer network filesystems, or treat their servers badly.
var networkMutants = []Mutant{
	seat("network-no-address", mutant.Specs, requirement.FilesystemNamesResolved,
		"the server is named and not resolved, as mount.nfs would do it: the kernel refuses the mount",
		overNetwork(parameter("addr", ""))),
	seat("network-address-a-name", mutant.Specs, requirement.FilesystemNamesResolved,
		"the address is the server's name: the kernel refuses the mount",
		overNetwork(parameter("addr", "nfs.example"))),
	seat("network-no-version", mutant.Specs, requirement.FilesystemVersionExplicit,
		"the version is left to the kernel, which takes 4.0: locks and sessions are not those that were tested",
		overNetwork(parameter("vers", ""))),
	seat("network-version-open", mutant.Specs, requirement.FilesystemVersionExplicit,
		"version 4 without a minor one: the kernel chooses",
		overNetwork(parameter("vers", "4"))),
	seat("network-source-climbs", mutant.Escape, requirement.FilesystemSourceNoDotdot,
		"the subdirectory of a volume climbs out of it: the consumer sees the volumes of others",
		overNetwork(func(fs *preparev1alpha1.FilesystemMount) {
			fs.Source = &preparev1alpha1.FilesystemMount_Opaque{Opaque: fs.GetOpaque() + "/../.."}
		})),
	seat("network-flags-split", mutant.Escape, requirement.PrepareMountFlagSingle,
		"mount flags are joined by commas and split again: the value of one brings in another that was refused by name",
		both(overNetwork(plainly), asked(func(_ *Server, r *prepareRequest) {
			if m := r.GetVolumeCapability().GetMount(); m != nil {
				m.MountFlags = strings.FieldsFunc(strings.Join(m.GetMountFlags(), ","), func(c rune) bool { return c == ',' })
			}
		}))),
	seat("network-session-released", mutant.Data, requirement.UnprepareOthersKept,
		"the session with the server ends with the first preparation that goes: every other consumer of the volume on the node loses it",
		sessionReleased()),
}

// sessionReleased ends the session of a volume with the first Unprepare, so that
// a repeat for another preparation finds none.
func sessionReleased() fault {
	var mu sync.Mutex
	released := map[string]bool{}
	return both(
		instead(func(_ context.Context, s *Server, r *unprepareRequest, next func() (*unprepareResponse, error)) (*unprepareResponse, error) {
			was := s.known(r.GetVolumeId(), r.GetPrepareId())
			answer, err := next()
			if err == nil && was {
				mu.Lock()
				released[r.GetVolumeId()] = true
				mu.Unlock()
			}
			return answer, err
		}),
		instead(func(_ context.Context, s *Server, r *prepareRequest, next func() (*prepareResponse, error)) (*prepareResponse, error) {
			repeat := s.known(r.GetVolumeId(), r.GetPrepareId())
			mu.Lock()
			gone := released[r.GetVolumeId()]
			if !repeat {
				released[r.GetVolumeId()] = false // logs in anew
			}
			mu.Unlock()
			if gone && repeat {
				return nil, status.Error(codes.Internal, "no session with the server")
			}
			return next()
		}),
	)
}
