package sanity

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

type (
	prepareRequest   = preparev1alpha1.NodePrepareVolumeRequest
	prepareResponse  = preparev1alpha1.NodePrepareVolumeResponse
	unprepareRequest = preparev1alpha1.NodeUnprepareVolumeRequest
	listEntry        = preparev1alpha1.NodeListPreparedVolumesResponse_Entry
	accessMode       = csi.VolumeCapability_AccessMode_Mode
)

// Access modes by their short names.
const (
	singleWriter     = csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER
	multiWriter      = csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER
	nodeWriter       = csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER
	nodeReader       = csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY
	manyReaders      = csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY
	manyReadersOne   = csi.VolumeCapability_AccessMode_MULTI_NODE_SINGLE_WRITER
	manyNodesWriters = csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER
)

// volume is one that a spec may use.
type volume struct {
	id         string
	context    map[string]string
	published  map[string]string // publish_context
	staging    string            // staging_target_path, where the plugin stages
	capacity   int64             // as CreateVolume answered it
	capability *csi.VolumeCapability
	createdNow bool
	source     *csi.VolumeContentSource
}

// mountCapability is a filesystem volume without flags.
func mountCapability(mode accessMode) *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: mode},
	}
}

func blockCapability(mode accessMode) *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}},
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: mode},
	}
}

// defaultMode is one that every plugin knows and that two consumers never
// share by accident.
func (t *trial) defaultMode() accessMode { return nodeWriter }

// volume provides a volume, published and staged as far as the plugin wants
// that, for the default access mode.
func (t *trial) volume() *volume { return t.volumeFor(t.capability(t.defaultMode())) }

// volumeFor provides a volume with a capability.
func (t *trial) volumeFor(c *csi.VolumeCapability) *volume {
	v := t.bareVolume(c)
	t.publish(v)
	t.stage(v)
	return v
}

// bareVolume provides a volume that is neither published nor staged.
func (t *trial) bareVolume(c *csi.VolumeCapability) *volume {
	if !t.features[CreateDeleteVolume] {
		return t.givenVolume(c)
	}
	request := &csi.CreateVolumeRequest{
		Name:               t.name("volume"),
		VolumeCapabilities: []*csi.VolumeCapability{c},
		Parameters:         t.config.VolumeParameters,
		Secrets:            t.config.secrets("CreateVolume"),
	}
	if t.config.VolumeSize > 0 {
		request.CapacityRange = &csi.CapacityRange{RequiredBytes: t.config.VolumeSize}
	}
	answer, err := t.clients.controller.CreateVolume(t.ctx, request)
	if err != nil {
		t.alive(err)
		if code := status.Code(err); code == codes.InvalidArgument || code == codes.FailedPrecondition {
			why := fmt.Sprintf("the plugin creates no volume with %s: %s", capabilityText(c), status.Convert(err).Message())
			if c.GetAccessMode().GetMode() != t.defaultMode() {
				t.unsupported(why)
			}
			end(couldNotRun("%s", why))
		}
		end(couldNotRun("CreateVolume failed: %s", answered(err)))
	}
	v := &volume{id: answer.GetVolume().GetVolumeId(), context: answer.GetVolume().GetVolumeContext(), capacity: answer.GetVolume().GetCapacityBytes(), capability: c, createdNow: true}
	t.cleanup(func() error {
		_, err := t.clients.controller.DeleteVolume(t.ctx, &csi.DeleteVolumeRequest{VolumeId: v.id, Secrets: t.config.secrets("DeleteVolume")})
		return wrap("DeleteVolume", err)
	})
	t.cleanup(func() error { return t.sweep(v.id) })
	return v
}

// givenVolume hands out the volumes the user named, each once a spec.
func (t *trial) givenVolume(c *csi.VolumeCapability) *volume {
	if t.given >= len(t.config.VolumeIDs) {
		end(couldNotRun("needs %s; name another with --volume-id", count(t.given+1, "volume")))
	}
	id := t.config.VolumeIDs[t.given]
	t.given++
	t.cleanup(func() error { return t.sweep(id) })
	return &volume{id: id, context: t.config.VolumeContexts[id], capability: c}
}

func capabilityText(c *csi.VolumeCapability) string {
	kind := "mount access"
	if c.GetBlock() != nil {
		kind = "block access"
	}
	return kind + " and " + c.GetAccessMode().GetMode().String()
}

// publish attaches the volume to the node, where the plugin has that step.
func (t *trial) publish(v *volume) {
	if !t.features[PublishVolume] {
		return
	}
	answer, err := t.clients.controller.ControllerPublishVolume(t.ctx, &csi.ControllerPublishVolumeRequest{
		VolumeId: v.id, NodeId: t.node, VolumeCapability: v.capability, VolumeContext: v.context,
		Secrets: t.config.secrets("ControllerPublishVolume"),
	})
	if err != nil {
		t.alive(err)
		end(couldNotRun("ControllerPublishVolume failed: %s", answered(err)))
	}
	v.published = answer.GetPublishContext()
	t.cleanup(func() error {
		_, err := t.clients.controller.ControllerUnpublishVolume(t.ctx, &csi.ControllerUnpublishVolumeRequest{
			VolumeId: v.id, NodeId: t.node, Secrets: t.config.secrets("ControllerUnpublishVolume"),
		})
		return wrap("ControllerUnpublishVolume", err)
	})
}

// stage stages the volume, where the plugin has that step.
func (t *trial) stage(v *volume) {
	if !t.features[StageVolume] {
		return
	}
	v.staging = t.mkdir("staging")
	// A call that fails, or that an interrupt cuts off, may have staged it.
	t.cleanup(func() error {
		var err error
		t.poll(t.config.Timeout, func() bool {
			err = t.unstage(v)
			return status.Code(err) != codes.Aborted
		})
		return wrap("NodeUnstageVolume", err)
	})
	_, err := t.clients.node.NodeStageVolume(t.ctx, &csi.NodeStageVolumeRequest{
		VolumeId: v.id, PublishContext: v.published, StagingTargetPath: v.staging,
		VolumeCapability: v.capability, VolumeContext: v.context, Secrets: t.config.secrets("NodeStageVolume"),
	})
	if err != nil {
		t.alive(err)
		end(couldNotRun("NodeStageVolume failed: %s", answered(err)))
	}
}

func (t *trial) unstage(v *volume) error {
	_, err := t.clients.node.NodeUnstageVolume(t.ctx, &csi.NodeUnstageVolumeRequest{VolumeId: v.id, StagingTargetPath: v.staging})
	return err
}

// sweep ends preparations of a volume that the spec did not end itself, as
// after a failure, or of a call that should have been refused.
func (t *trial) sweep(volumeID string) error {
	if !t.features[NodePrepare] {
		return nil
	}
	entries, err := t.listed()
	if err != nil {
		return wrap("NodeListPreparedVolumes", err)
	}
	for _, e := range entries {
		if e.GetVolumeId() != volumeID {
			continue
		}
		_, err = t.clients.prepare.NodeUnprepareVolume(t.ctx, &unprepareRequest{
			VolumeId: e.GetVolumeId(), PrepareId: e.GetPrepareId(), PreparePath: e.GetPreparePath(), StagingTargetPath: e.GetStagingTargetPath(),
		})
	}
	return wrap("NodeUnprepareVolume of what was left", err)
}

// listed returns the list of preparations, all pages of it.
func (t *trial) listed() ([]*listEntry, error) {
	var all []*listEntry
	token := ""
	for range 1000 {
		answer, err := t.clients.prepare.NodeListPreparedVolumes(t.ctx, &preparev1alpha1.NodeListPreparedVolumesRequest{StartingToken: token})
		if err != nil {
			return nil, err
		}
		all = append(all, answer.GetEntries()...)
		if token = answer.GetNextToken(); token == "" {
			return all, nil
		}
	}
	return nil, errors.New("the list has no end: 1000 pages, and still a next_token")
}

// performer is everything this suite is able to perform.
func (t *trial) performer() *preparev1alpha1.Performer {
	p := &preparev1alpha1.Performer{
		Kernel: preparev1alpha1.Performer_NODE,
		Kinds: []preparev1alpha1.MountKind{
			preparev1alpha1.MountKind_MOUNT_KIND_FILESYSTEM,
			preparev1alpha1.MountKind_MOUNT_KIND_BIND,
			preparev1alpha1.MountKind_MOUNT_KIND_BLOCK_DEVICE,
		},
		FsTypes: []string{"ext4", "xfs", "btrfs", "tmpfs", "nfs", "nfs4", "cifs", "smb3"},
		Grants:  slices.Sorted(maps.Keys(t.config.Grants)),
	}
	if t.handsOver() {
		p.Kinds = append(p.Kinds, preparev1alpha1.MountKind_MOUNT_KIND_HANDLE, preparev1alpha1.MountKind_MOUNT_KIND_FUSE)
	}
	return p
}

// request is a call that keeps every rule, for a prepare_id and a
// prepare_path of its own.
func (t *trial) request(v *volume) *prepareRequest {
	return &prepareRequest{
		VolumeId: v.id, PublishContext: v.published, StagingTargetPath: v.staging,
		PrepareId: t.name("prepare"), VolumeCapability: v.capability,
		Secrets: t.config.secrets("NodePrepareVolume"), VolumeContext: v.context,
		PreparePath: t.mkdir("prepare"), Performer: t.performer(),
	}
}

// prepare makes the call. Whatever comes of it, the pair is unprepared when
// the spec ends.
func (t *trial) prepare(r *prepareRequest) (*prepareResponse, error) {
	// Once a pair: a repeat is ended with it, after what was performed of both.
	again := t.ending[keyOf(r)]
	t.ending[keyOf(r)] = true
	t.cleanup(func() error {
		if again || r.GetVolumeId() == "" || r.GetPrepareId() == "" || r.GetPreparePath() == "" {
			return nil
		}
		err := t.unprepare(r)
		if status.Code(err) == codes.InvalidArgument {
			// A call that was malformed on purpose has left no pair that
			// could be named.
			return nil
		}
		return wrap("NodeUnprepareVolume", err)
	})
	return t.clients.prepare.NodePrepareVolume(t.ctx, r)
}

// unprepare ends the preparation of a request.
func (t *trial) unprepare(r *prepareRequest) error {
	_, err := t.clients.prepare.NodeUnprepareVolume(t.ctx, &unprepareRequest{
		VolumeId: r.GetVolumeId(), PrepareId: r.GetPrepareId(),
		PreparePath: r.GetPreparePath(), StagingTargetPath: r.GetStagingTargetPath(),
	})
	return err
}

// prepared makes a call that has to be OK for the spec to go on.
func (t *trial) prepared(r *prepareRequest) *prepareResponse {
	answer, err := t.prepare(r)
	t.need(requirement.PrepareAnswered, err, "OK to a call that keeps every rule")
	return answer
}

// unprepared ends a preparation, which has to be OK for the spec to go on.
func (t *trial) unprepared(r *prepareRequest) {
	t.need(requirement.IdempotencyUnprepare, t.unprepare(r), "OK")
}

func wrap(what string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %s", what, answered(err))
}
