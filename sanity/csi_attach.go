package sanity

import (
	"maps"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/csi-prepare/csi-prepare/reference/mountns"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// attachment is a call that keeps every rule.
func (t *trial) attachment(v *volume) *csi.ControllerPublishVolumeRequest {
	return &csi.ControllerPublishVolumeRequest{
		VolumeId: v.id, NodeId: t.node, VolumeCapability: v.capability, VolumeContext: v.context,
		Secrets: t.config.secrets("ControllerPublishVolume"),
	}
}

// attach makes the call, and detaches when the spec ends.
func (t *trial) attach(r *csi.ControllerPublishVolumeRequest) (map[string]string, error) {
	t.cleanup(func() error {
		if r.GetVolumeId() == "" {
			return nil
		}
		return wrap("ControllerUnpublishVolume", ignored(t.detachFrom(r), codes.NotFound, codes.InvalidArgument))
	})
	answer, err := t.clients.controller.ControllerPublishVolume(t.ctx, r)
	return answer.GetPublishContext(), err
}

func (t *trial) detachFrom(r *csi.ControllerPublishVolumeRequest) error {
	_, err := t.clients.controller.ControllerUnpublishVolume(t.ctx, &csi.ControllerUnpublishVolumeRequest{
		VolumeId: r.GetVolumeId(), NodeId: r.GetNodeId(), Secrets: t.config.secrets("ControllerUnpublishVolume"),
	})
	return err
}

// attachSpecs are about volumes on their way to a node.
func attachSpecs(s *section) {
	s.in(Controller)
	for what, change := range map[string]func(*csi.ControllerPublishVolumeRequest){
		"volume_id":         func(r *csi.ControllerPublishVolumeRequest) { r.VolumeId = "" },
		"node_id":           func(r *csi.ControllerPublishVolumeRequest) { r.NodeId = "" },
		"volume_capability": func(r *csi.ControllerPublishVolumeRequest) { r.VolumeCapability = nil },
	} {
		s.spec("ControllerPublishVolume without "+what+" is INVALID_ARGUMENT", Covers(requirement.CSIAttachArguments), func(t *trial) {
			r := t.attachment(t.bareVolume(t.capability(t.defaultMode())))
			change(r)
			_, err := t.attach(r)
			t.wantCode(requirement.CSIAttachArguments, err, codes.InvalidArgument)
		}, PublishVolume, NodeService)
	}
	s.spec("a volume or a node that does not exist is NOT_FOUND", Covers(requirement.CSIAttachUnknown), func(t *trial) {
		r := t.attachment(t.goneVolume())
		_, err := t.attach(r)
		t.wantCode(requirement.CSIAttachUnknown, err, codes.NotFound)
		r = t.attachment(t.bareVolume(t.capability(t.defaultMode())))
		r.NodeId = t.canary()
		_, err = t.attach(r)
		t.wantCode(requirement.CSIAttachUnknown, err, codes.NotFound)
	}, PublishVolume, NodeService)
	s.spec("a volume is attached again as it was", Covers(requirement.CSIAttachRepeated), func(t *trial) {
		r := t.attachment(t.bareVolume(t.capability(t.defaultMode())))
		first, err := t.attach(r)
		t.wantCode(requirement.CSIAttachRepeated, err, codes.OK)
		again, err := t.attach(r)
		t.wantCode(requirement.CSIAttachRepeated, err, codes.OK)
		t.want(requirement.CSIAttachRepeated, maps.Equal(first, again), "the same publish_context", "another one")
	}, PublishVolume, NodeService)
	s.spec("a volume is not attached for writing and for reading", Covers(requirement.CSIAttachIncompatible), func(t *trial) {
		if !t.features["controller.publish-readonly"] {
			// A plugin that cannot attach read-only may not tell the two apart.
			r := t.attachment(t.bareVolume(t.capability(t.defaultMode())))
			r.Readonly = true
			if _, err := t.attach(r); err != nil {
				t.unsupported("the plugin does not claim PUBLISH_READONLY, and refuses readonly")
			}
		}
		r := t.attachment(t.bareVolume(t.capability(t.defaultMode())))
		_, err := t.attach(r)
		t.need(requirement.CSIAttachRepeated, err, "OK")
		r.Readonly = true
		_, err = t.attach(r)
		t.wantCode(requirement.CSIAttachIncompatible, err, codes.AlreadyExists)
	}, PublishVolume, NodeService)
	s.spec("a volume is detached again", Covers(requirement.CSIDetachRepeated), func(t *trial) {
		r := t.attachment(t.bareVolume(t.capability(t.defaultMode())))
		_, err := t.attach(r)
		t.need(requirement.CSIAttachRepeated, err, "OK")
		for range 3 {
			t.wantCode(requirement.CSIDetachRepeated, t.detachFrom(r), codes.OK)
		}
	}, PublishVolume, NodeService)
}

// staging is a call that keeps every rule, for a volume that is attached.
func (t *trial) staging(v *volume) *csi.NodeStageVolumeRequest {
	if v.staging == "" {
		v.staging = t.mkdir("staging")
	}
	return &csi.NodeStageVolumeRequest{
		VolumeId: v.id, PublishContext: v.published, StagingTargetPath: v.staging,
		VolumeCapability: v.capability, VolumeContext: v.context, Secrets: t.config.secrets("NodeStageVolume"),
	}
}

// stageAt makes the call, and unstages when the spec ends.
func (t *trial) stageAt(r *csi.NodeStageVolumeRequest) error {
	t.cleanup(func() error {
		if r.GetVolumeId() == "" || r.GetStagingTargetPath() == "" {
			return nil
		}
		return wrap("NodeUnstageVolume", ignored(t.unstage(&volume{id: r.GetVolumeId(), staging: r.GetStagingTargetPath()}), codes.NotFound, codes.InvalidArgument))
	})
	_, err := t.clients.node.NodeStageVolume(t.ctx, r)
	return err
}

// mountsAt returns the mounts at a path as the plugin's node has them.
func (t *trial) mountsAt(path string) (stack []mountns.Mount) {
	table, err := t.pluginNamespace().Table(t.ctx)
	t.sysfail("reading the mount table", err)
	return table.At(path)
}

// stageSpecs are about the step before volumes are published or prepared.
func stageSpecs(s *section) {
	s.in(append([]Profile{NodePublish}, preparing...)...)
	for what, change := range map[string]func(*csi.NodeStageVolumeRequest){
		"volume_id":           func(r *csi.NodeStageVolumeRequest) { r.VolumeId = "" },
		"staging_target_path": func(r *csi.NodeStageVolumeRequest) { r.StagingTargetPath = "" },
		"volume_capability":   func(r *csi.NodeStageVolumeRequest) { r.VolumeCapability = nil },
	} {
		s.spec("NodeStageVolume without "+what+" is INVALID_ARGUMENT", Covers(requirement.CSIStageArguments), func(t *trial) {
			v := t.bareVolume(t.capability(t.defaultMode()))
			t.publish(v)
			r := t.staging(v)
			change(r)
			t.wantCode(requirement.CSIStageArguments, t.stageAt(r), codes.InvalidArgument)
		}, StageVolume)
	}
	s.spec("NodeStageVolume of a volume that does not exist is NOT_FOUND", Covers(requirement.CSIStageUnknown), func(t *trial) {
		gone := t.goneVolume()
		if t.features[PublishVolume] {
			t.unsupported("a volume that does not exist cannot be attached, and the plugin has that step")
		}
		t.wantCode(requirement.CSIStageUnknown, t.stageAt(t.staging(gone)), codes.NotFound)
	}, StageVolume)
	s.spec("a volume is staged once, however often it is asked for", Covers(requirement.CSIStageRepeated), func(t *trial) {
		v := t.bareVolume(t.capability(t.defaultMode()))
		t.publish(v)
		r := t.staging(v)
		t.wantCode(requirement.CSIStageRepeated, t.stageAt(r), codes.OK)
		before := len(t.mountsAt(v.staging))
		for range 2 {
			_, err := t.clients.node.NodeStageVolume(t.ctx, r)
			t.wantCode(requirement.CSIStageRepeated, err, codes.OK)
		}
		now := len(t.mountsAt(v.staging))
		t.want(requirement.CSIStageRepeated, now == before, count(before, "mount")+" at staging_target_path", "%s", count(now, "mount"))
	}, StageVolume)
	s.spec("what is not staged is unstaged", Covers(requirement.CSIUnstageRepeated), func(t *trial) {
		v := t.bareVolume(t.capability(t.defaultMode()))
		t.publish(v)
		v.staging = t.mkdir("staging")
		t.wantCode(requirement.CSIUnstageRepeated, t.unstage(v), codes.OK)
		t.stage(v)
		for range 3 {
			t.wantCode(requirement.CSIUnstageRepeated, t.unstage(v), codes.OK)
		}
	}, StageVolume)
	s.spec("nothing is mounted where a volume was staged", Covers(requirement.CSIUnstageClean), func(t *trial) {
		v := t.volume()
		t.wantCode(requirement.CSIUnstageClean, t.unstage(v), codes.OK)
		n := len(t.mountsAt(v.staging))
		t.want(requirement.CSIUnstageClean, n == 0, "no mount at staging_target_path", "%s", count(n, "mount"))
	}, StageVolume)
}
