package sp

import (
	"context"
	"maps"
	"os"
	"path"
	"regexp"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	preparev1alpha1 "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// refreshable is the one context key that may change in a repeated call.
const refreshable = "csi.storage.k8s.io/serviceAccount.tokens"

var prepareID = regexp.MustCompile(`^[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}$`)

// NodePrepareGetCapabilities implements preparev1alpha1.NodePrepareServer.
func (s *Server) NodePrepareGetCapabilities(context.Context, *preparev1alpha1.NodePrepareGetCapabilitiesRequest) (*preparev1alpha1.NodePrepareGetCapabilitiesResponse, error) {
	answer := &preparev1alpha1.NodePrepareGetCapabilitiesResponse{Capabilities: []*preparev1alpha1.NodePrepareServiceCapability{
		{Type: &preparev1alpha1.NodePrepareServiceCapability_Rpc{Rpc: &preparev1alpha1.NodePrepareServiceCapability_RPC{
			Type: preparev1alpha1.NodePrepareServiceCapability_RPC_PREPARE_UNPREPARE_VOLUME,
		}}},
		{Type: &preparev1alpha1.NodePrepareServiceCapability_RefreshableContext_{RefreshableContext: &preparev1alpha1.NodePrepareServiceCapability_RefreshableContext{
			Keys: []string{refreshable},
		}}},
	}}
	kinds := []preparev1alpha1.MountKind{preparev1alpha1.MountKind_MOUNT_KIND_BIND}
	if s.config.Block {
		kinds = []preparev1alpha1.MountKind{preparev1alpha1.MountKind_MOUNT_KIND_BLOCK_DEVICE, preparev1alpha1.MountKind_MOUNT_KIND_FILESYSTEM}
	}
	for _, k := range kinds {
		answer.Capabilities = append(answer.Capabilities, &preparev1alpha1.NodePrepareServiceCapability{
			Type: &preparev1alpha1.NodePrepareServiceCapability_Kind_{Kind: &preparev1alpha1.NodePrepareServiceCapability_Kind{Kind: k}},
		})
	}
	return answer, nil
}

// NodePrepareVolume implements preparev1alpha1.NodePrepareServer.
func (s *Server) NodePrepareVolume(_ context.Context, r *preparev1alpha1.NodePrepareVolumeRequest) (*preparev1alpha1.NodePrepareVolumeResponse, error) {
	attributes, err := s.check(r)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	v := s.state.volumes[r.GetVolumeId()]
	if v == nil {
		return nil, noVolume(r.GetVolumeId())
	}
	key := pair{r.GetVolumeId(), r.GetPrepareId()}
	if was := s.state.prepared[key]; was != nil {
		if !s.rules.same(was, lasting(r)) {
			return nil, status.Error(codes.AlreadyExists, "prepare_id: is in use with other arguments; unprepare it first or choose another")
		}
	} else if err := s.admit(r); err != nil {
		if err := s.rules.refuse(s, r, err); err != nil {
			return nil, err
		}
	}
	spec, err := s.spec(v, r, attributes)
	if err != nil {
		return nil, err
	}
	if !s.rules.accepts(r.GetPerformer(), spec) {
		if s.state.prepared[key] == nil && s.config.Block {
			if err := s.rules.release(s, v, r.GetPrepareId()); err != nil {
				return nil, err
			}
		}
		return nil, s.rules.refuse(s, r, status.Errorf(codes.FailedPrecondition,
			"performer: the volume is a %T, which the performer does not offer as it is", spec.GetKind()))
	}
	if _, err := os.Stat(s.directory(v)); err != nil {
		return nil, status.Errorf(codes.Internal, "the data of the volume: %v", err)
	}
	s.state.prepared[key] = lasting(r)
	return &preparev1alpha1.NodePrepareVolumeResponse{MountSpecs: []*preparev1alpha1.MountSpec{spec}}, s.save()
}

// NodeUnprepareVolume implements preparev1alpha1.NodePrepareServer. Nothing
// was ever made in prepare_path, so nothing is removed from it.
func (s *Server) NodeUnprepareVolume(_ context.Context, r *preparev1alpha1.NodeUnprepareVolumeRequest) (*preparev1alpha1.NodeUnprepareVolumeResponse, error) {
	switch {
	case r.GetVolumeId() == "":
		return nil, invalid("volume_id", "is required")
	case r.GetPrepareId() == "":
		return nil, invalid("prepare_id", "is required")
	case r.GetPreparePath() == "":
		return nil, invalid("prepare_path", "is required")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	key := pair{r.GetVolumeId(), r.GetPrepareId()}
	was := s.state.prepared[key]
	if was == nil {
		return &preparev1alpha1.NodeUnprepareVolumeResponse{}, nil
	}
	if was.GetPreparePath() != r.GetPreparePath() {
		return nil, invalid("prepare_path", "is not that of the preparation: NodeListPreparedVolumes tells it")
	}
	if v := s.state.volumes[r.GetVolumeId()]; v != nil && s.config.Block {
		if err := s.rules.release(s, v, r.GetPrepareId()); err != nil {
			return nil, err
		}
	}
	delete(s.state.prepared, key)
	return &preparev1alpha1.NodeUnprepareVolumeResponse{}, s.save()
}

// NodeListPreparedVolumes implements preparev1alpha1.NodePrepareServer.
func (s *Server) NodeListPreparedVolumes(_ context.Context, r *preparev1alpha1.NodeListPreparedVolumesRequest) (*preparev1alpha1.NodeListPreparedVolumesResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	// Neither part of a pair can hold the separator: a volume id is
	// hexadecimal and the alphabet of a prepare_id lacks it.
	keys := make(map[string]pair, len(s.state.prepared))
	for p := range s.state.prepared {
		keys[p.volume+"/"+p.prepare] = p
	}
	found, next, err := page(maps.Keys(keys), r.GetMaxEntries(), r.GetStartingToken())
	if err != nil {
		return nil, err
	}
	answer := &preparev1alpha1.NodeListPreparedVolumesResponse{NextToken: next}
	for _, k := range found {
		p := s.state.prepared[keys[k]]
		answer.Entries = append(answer.Entries, &preparev1alpha1.NodeListPreparedVolumesResponse_Entry{
			VolumeId:          p.GetVolumeId(),
			PrepareId:         p.GetPrepareId(),
			Readonly:          p.GetReadonly(),
			PreparePath:       p.GetPreparePath(),
			StagingTargetPath: p.GetStagingTargetPath(),
		})
	}
	return answer, nil
}

// check applies the rules of the fields and returns the attributes they ask
// for.
func (s *Server) check(r *preparev1alpha1.NodePrepareVolumeRequest) (*preparev1alpha1.MountAttributes, error) {
	switch kernel := r.GetPerformer().GetKernel(); {
	case r.GetVolumeId() == "":
		return nil, invalid("volume_id", "is required")
	case r.GetPrepareId() == "":
		return nil, invalid("prepare_id", "is required")
	case !prepareID.MatchString(r.GetPrepareId()):
		return nil, invalid("prepare_id", "has to be 1 to 128 bytes of [A-Za-z0-9._-], the first not '.'")
	case r.GetVolumeCapability() == nil:
		return nil, invalid("volume_capability", "is required")
	case r.GetPreparePath() == "":
		return nil, invalid("prepare_path", "is required")
	case !path.IsAbs(r.GetPreparePath()):
		return nil, invalid("prepare_path", "has to be absolute")
	case r.GetPerformer() == nil:
		return nil, invalid("performer", "is required")
	case kernel != preparev1alpha1.Performer_NODE && kernel != preparev1alpha1.Performer_OTHER:
		return nil, invalid("performer.kernel", "has to be NODE or OTHER")
	case len(r.GetPerformer().GetKinds()) == 0:
		return nil, invalid("performer.kinds", "needs at least one kind")
	case r.GetVolumeCapability().GetMount().GetVolumeMountGroup() != "":
		return nil, invalid("volume_capability.mount.volume_mount_group", "cannot be honoured: leave it unset")
	}
	attributes := new(preparev1alpha1.MountAttributes)
	for _, flag := range r.GetVolumeCapability().GetMount().GetMountFlags() {
		set := flags[flag]
		if set == nil && s.config.Block && slices.Contains(ext4Flags, flag) {
			continue
		}
		if set == nil {
			word, _, _ := strings.Cut(flag, "=")
			return nil, invalid("volume_capability.mount.mount_flags", "cannot honour "+word)
		}
		set(attributes)
	}
	if r.GetReadonly() || readerOnly(r.GetVolumeCapability()) {
		attributes.Readonly = true
	}
	return attributes, nil
}

// flags are the mount flags that are attributes of a mount. There is no
// superblock of ours for any other to go to.
var flags = map[string]func(*preparev1alpha1.MountAttributes){
	"ro":          func(a *preparev1alpha1.MountAttributes) { a.Readonly = true },
	"nosuid":      func(a *preparev1alpha1.MountAttributes) { a.Nosuid = true },
	"nodev":       func(a *preparev1alpha1.MountAttributes) { a.Nodev = true },
	"noexec":      func(a *preparev1alpha1.MountAttributes) { a.Noexec = true },
	"nosymfollow": func(a *preparev1alpha1.MountAttributes) { a.Nosymfollow = true },
	"nodiratime":  func(a *preparev1alpha1.MountAttributes) { a.Nodiratime = true },
	"relatime":    func(a *preparev1alpha1.MountAttributes) { a.Atime = preparev1alpha1.MountAttributes_RELATIME },
	"noatime":     func(a *preparev1alpha1.MountAttributes) { a.Atime = preparev1alpha1.MountAttributes_NOATIME },
	"strictatime": func(a *preparev1alpha1.MountAttributes) { a.Atime = preparev1alpha1.MountAttributes_STRICTATIME },
}

// admit decides on a preparation that is not there yet; the caller holds
// s.mu.
func (s *Server) admit(r *preparev1alpha1.NodePrepareVolumeRequest) error {
	if why := s.unsupported(r.GetVolumeCapability()); why != "" {
		return status.Error(codes.FailedPrecondition, "volume_capability: "+why)
	}
	if s.config.Staging {
		staged := s.state.staged[r.GetVolumeId()]
		switch {
		case r.GetStagingTargetPath() == "":
			return status.Error(codes.FailedPrecondition, "staging_target_path: is missing: stage the volume first")
		case staged.GetStagingTargetPath() != r.GetStagingTargetPath():
			return status.Error(codes.FailedPrecondition, "staging_target_path: the volume is not staged there")
		}
	}
	inside, err := os.ReadDir(r.GetPreparePath())
	if err != nil {
		return status.Errorf(codes.FailedPrecondition, "prepare_path: %v", err)
	}
	if len(inside) > 0 {
		return status.Errorf(codes.FailedPrecondition, "prepare_path: is not empty: it holds %q", inside[0].Name())
	}
	if err := s.rules.agree(s, r); err != nil {
		return err
	}
	staged := s.state.staged[r.GetVolumeId()]
	if s.config.Block && (staged.GetVolumeCapability().GetBlock() != nil) != (r.GetVolumeCapability().GetBlock() != nil) {
		return status.Error(codes.FailedPrecondition, "volume_capability: the volume is staged for the other access type")
	}
	for key, other := range s.state.of(r.GetVolumeId()) {
		if s.exclusive(r.GetVolumeCapability()) || s.exclusive(other.GetVolumeCapability()) {
			return status.Errorf(codes.FailedPrecondition, "volume_capability.access_mode: the volume is prepared already, as %q", key.prepare)
		}
	}
	return nil
}

// exclusive reports whether a capability leaves room for no other
// preparation on the node.
func (s *Server) exclusive(c *csi.VolumeCapability) bool {
	switch c.GetAccessMode().GetMode() {
	case csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER:
		return true
	case csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER, csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY:
		return !s.config.LegacyWriters
	default:
		return false
	}
}

func readerOnly(c *csi.VolumeCapability) bool {
	switch c.GetAccessMode().GetMode() {
	case csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY, csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY:
		return true
	default:
		return false
	}
}

func (s *Server) spec(v *volume, r *preparev1alpha1.NodePrepareVolumeRequest, a *preparev1alpha1.MountAttributes) (*preparev1alpha1.MountSpec, error) {
	if s.config.Block {
		return s.blockSpec(v, r, a)
	}
	return &preparev1alpha1.MountSpec{
		Kind: &preparev1alpha1.MountSpec_Bind{Bind: &preparev1alpha1.BindMount{
			Source: &preparev1alpha1.PathRef{
				Base: preparev1alpha1.PathRef_GRANTED, Grant: v.Grant, Relative: v.ID,
			},
		}},
		Attributes: a,
	}, nil
}

// accepts reports whether the performer can perform spec, a BIND of a
// granted directory. What else it offers, known or not, does not matter.
func accepts(p *preparev1alpha1.Performer, spec *preparev1alpha1.MountSpec) bool {
	return p.GetKernel() == preparev1alpha1.Performer_NODE &&
		slices.Contains(p.GetKinds(), preparev1alpha1.MountKind_MOUNT_KIND_BIND) &&
		slices.Contains(p.GetGrants(), spec.GetBind().GetSource().GetGrant())
}

// lasting returns the part of a request that a repeat has to agree with.
func lasting(r *preparev1alpha1.NodePrepareVolumeRequest) *preparev1alpha1.NodePrepareVolumeRequest {
	l := proto.CloneOf(r)
	l.Secrets, l.Performer = nil, nil
	l.HandleSocket, l.HandoffToken, l.HeldHandles = "", nil, nil
	delete(l.VolumeContext, refreshable)
	return l
}

func sameRequest(a, b *preparev1alpha1.NodePrepareVolumeRequest) bool { return proto.Equal(a, b) }
