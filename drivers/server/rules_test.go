package server

import (
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	prepare "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

func mountCapability(mode csi.VolumeCapability_AccessMode_Mode, flags ...string) *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: mode},
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{MountFlags: flags}},
	}
}

func validRequest() *prepare.NodePrepareVolumeRequest {
	return &prepare.NodePrepareVolumeRequest{
		VolumeId:         "v1",
		PrepareId:        "p1",
		PreparePath:      "/run/co/p1",
		VolumeCapability: mountCapability(csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER),
		Performer: &prepare.Performer{
			Kernel: prepare.Performer_NODE,
			Kinds:  []prepare.MountKind{prepare.MountKind_MOUNT_KIND_BIND},
			Grants: []string{"data"},
		},
	}
}

// A request that breaks a rule is INVALID_ARGUMENT, and the message names the
// field but not its value.
func TestPrepareFieldRules(t *testing.T) {
	const value = "UNSHOWN"
	tests := []struct {
		name  string
		field string // "" if the request is fine
		edit  func(*prepare.NodePrepareVolumeRequest)
	}{
		{"valid", "", func(*prepare.NodePrepareVolumeRequest) {}},
		{"no volume id", "volume_id", func(r *prepare.NodePrepareVolumeRequest) { r.VolumeId = "" }},
		{"longest volume id", "", func(r *prepare.NodePrepareVolumeRequest) { r.VolumeId = strings.Repeat("v", 128) }},
		{"volume id too long", "volume_id", func(r *prepare.NodePrepareVolumeRequest) { r.VolumeId = strings.Repeat(value, 20) }},
		{"no prepare id", "prepare_id", func(r *prepare.NodePrepareVolumeRequest) { r.PrepareId = "" }},
		{"longest prepare id", "", func(r *prepare.NodePrepareVolumeRequest) { r.PrepareId = strings.Repeat("a", 128) }},
		{"prepare id too long", "prepare_id", func(r *prepare.NodePrepareVolumeRequest) { r.PrepareId = strings.Repeat("a", 129) }},
		{"prepare id of dots", "prepare_id", func(r *prepare.NodePrepareVolumeRequest) { r.PrepareId = ".." }},
		{"hidden prepare id", "prepare_id", func(r *prepare.NodePrepareVolumeRequest) { r.PrepareId = "." + value }},
		{"prepare id with a slash", "prepare_id", func(r *prepare.NodePrepareVolumeRequest) { r.PrepareId = "a/../" + value }},
		{"prepare id with a newline", "prepare_id", func(r *prepare.NodePrepareVolumeRequest) { r.PrepareId = value + "\n" }},
		{"prepare id beyond ASCII", "prepare_id", func(r *prepare.NodePrepareVolumeRequest) { r.PrepareId = value + "é" }},
		{"prepare id with a zero byte", "prepare_id", func(r *prepare.NodePrepareVolumeRequest) { r.PrepareId = value + "\x00" }},
		{"dots inside", "", func(r *prepare.NodePrepareVolumeRequest) { r.PrepareId = "a..b_C-9" }},
		{"no prepare path", "prepare_path", func(r *prepare.NodePrepareVolumeRequest) { r.PreparePath = "" }},
		{"relative prepare path", "prepare_path", func(r *prepare.NodePrepareVolumeRequest) { r.PreparePath = value + "/p" }},
		{"prepare path with dots", "prepare_path", func(r *prepare.NodePrepareVolumeRequest) { r.PreparePath = "/run/../" + value }},
		{"prepare path with a final slash", "prepare_path", func(r *prepare.NodePrepareVolumeRequest) { r.PreparePath = "/run/" + value + "/" }},
		{"prepare path with a zero byte", "prepare_path", func(r *prepare.NodePrepareVolumeRequest) { r.PreparePath = "/run/" + value + "\x00" }},
		{"longest prepare path", "", func(r *prepare.NodePrepareVolumeRequest) { r.PreparePath = strings.Repeat("/a", 2047) + "b" }},
		{"prepare path too long", "prepare_path", func(r *prepare.NodePrepareVolumeRequest) { r.PreparePath = strings.Repeat("/a", 2048) }},
		{"relative staging path", "staging_target_path", func(r *prepare.NodePrepareVolumeRequest) { r.StagingTargetPath = value }},
		{"no capability", "volume_capability", func(r *prepare.NodePrepareVolumeRequest) { r.VolumeCapability = nil }},
		{"no access type", "volume_capability.access_type", func(r *prepare.NodePrepareVolumeRequest) { r.VolumeCapability.AccessType = nil }},
		{"no access mode", "volume_capability.access_mode", func(r *prepare.NodePrepareVolumeRequest) { r.VolumeCapability.AccessMode = nil }},
		{"an access mode of the future", "volume_capability.access_mode", func(r *prepare.NodePrepareVolumeRequest) { r.VolumeCapability.AccessMode.Mode = 77 }},
		{"no performer", "performer", func(r *prepare.NodePrepareVolumeRequest) { r.Performer = nil }},
		{"no kernel", "performer.kernel", func(r *prepare.NodePrepareVolumeRequest) { r.Performer.Kernel = 0 }},
		{"a kernel of the future", "performer.kernel", func(r *prepare.NodePrepareVolumeRequest) { r.Performer.Kernel = 9 }},
		{"no kinds", "performer.kinds", func(r *prepare.NodePrepareVolumeRequest) { r.Performer.Kinds = nil }},
		{"a kind of the future beside one", "", func(r *prepare.NodePrepareVolumeRequest) { r.Performer.Kinds = append(r.Performer.Kinds, 99) }},
		{"context too large", "volume_context", func(r *prepare.NodePrepareVolumeRequest) {
			r.VolumeContext = map[string]string{"k": strings.Repeat("v", 4096)}
		}},
		{"secrets too large", "secrets", func(r *prepare.NodePrepareVolumeRequest) {
			r.Secrets = map[string]string{"k": strings.Repeat(value, 1000)}
		}},
		{"grants too large", "grants", func(r *prepare.NodePrepareVolumeRequest) {
			r.Performer.Grants = []string{strings.Repeat("a", 4000), strings.Repeat("b", 97)}
		}},
		{"flags too large", "mount_flags", func(r *prepare.NodePrepareVolumeRequest) {
			r.VolumeCapability.GetMount().MountFlags = []string{strings.Repeat(value, 1000)}
		}},
		{"fs type too long", "fs_type", func(r *prepare.NodePrepareVolumeRequest) {
			r.VolumeCapability.GetMount().FsType = strings.Repeat("x", 129)
		}},
		{"socket path too long", "handle_socket", func(r *prepare.NodePrepareVolumeRequest) { r.HandleSocket = "/" + strings.Repeat("s", 107) }},
		{"relative socket path", "handle_socket", func(r *prepare.NodePrepareVolumeRequest) { r.HandleSocket = "s" }},
		{"socket without a token", "handoff_token", func(r *prepare.NodePrepareVolumeRequest) { r.HandleSocket = "/run/s" }},
		{"socket and token", "", func(r *prepare.NodePrepareVolumeRequest) {
			r.HandleSocket, r.HandoffToken = "/run/s", []byte("0123456789abcdef")
		}},
		{"a token without a socket has no effect", "", func(r *prepare.NodePrepareVolumeRequest) { r.HandoffToken = []byte("x") }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			req := proto.CloneOf(validRequest())
			tt.edit(req)
			err := Sizes(req)
			if err == nil {
				err = checkPrepare(req)
			}
			if tt.field == "" {
				if err != nil {
					t.Fatalf("refused: %v", err)
				}
				return
			}
			s := status.Convert(err)
			if s.Code() != codes.InvalidArgument || !strings.HasPrefix(s.Message(), tt.field+": ") {
				t.Errorf("got %v %q, want InvalidArgument naming %s", s.Code(), s.Message(), tt.field)
			}
			if strings.Contains(s.Message(), value) {
				t.Errorf("the message holds the value: %q", s.Message())
			}
			if len(s.Message()) > 300 {
				t.Errorf("the message has %d bytes", len(s.Message()))
			}
		})
	}
}
