package sanity

import (
	"fmt"
	"math"
	"path/filepath"
	"regexp"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/reference/mountns"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// Features of CSI itself.
const (
	ListVolumes    Feature = "controller.list-volumes"
	GetVolume      Feature = "controller.get-volume"
	GetCapacity    Feature = "controller.get-capacity"
	ModifyVolume   Feature = "controller.modify-volume"
	Snapshots      Feature = "controller.create-delete-snapshot"
	ListSnapshots  Feature = "controller.list-snapshots"
	GetSnapshot    Feature = "controller.get-snapshot"
	CloneVolume    Feature = "controller.clone-volume"
	GroupSnapshots Feature = "plugin.group-controller-service"
)

// everyProfile are those of all plugins.
var everyProfile = append([]Profile{Controller, NodePublish}, preparing...)

var pluginName = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9.-]{0,61}[A-Za-z0-9])?$`)

// identitySpecs are about the plugin itself.
func identitySpecs(s *section) {
	s.in(everyProfile...)
	s.spec("the plugin has a name that others can use", Covers(requirement.CSIName), func(t *trial) {
		info, err := t.clients.identity.GetPluginInfo(t.ctx, &csi.GetPluginInfoRequest{})
		t.wantCode(requirement.CSIName, err, codes.OK)
		t.want(requirement.CSIName, pluginName.MatchString(info.GetName()), "1 to 63 of [A-Za-z0-9.-], beginning and ending with a letter or digit", "%q", info.GetName())
	})
	s.spec("the node has one id", Covers(requirement.CSINodeID), func(t *trial) {
		first, err := t.clients.node.NodeGetInfo(t.ctx, &csi.NodeGetInfoRequest{})
		t.wantCode(requirement.CSINodeID, err, codes.OK)
		n := len(first.GetNodeId())
		t.want(requirement.CSINodeID, n > 0 && n <= 256, "1 to 256 bytes", "%s", count(n, "byte"))
		again, err := t.clients.node.NodeGetInfo(t.ctx, &csi.NodeGetInfoRequest{})
		t.wantCode(requirement.CSINodeID, err, codes.OK)
		t.want(requirement.CSINodeID, again.GetNodeId() == first.GetNodeId(), "the same id each time: "+first.GetNodeId(), "%s", again.GetNodeId())
	}, NodeService)
	s.spec("what is reported is served", Covers(requirement.CSIServed), servedSpec)
}

// servedSpec makes the call of each capability, without arguments: what is
// served refuses them, or answers.
func servedSpec(t *trial) {
	c := t.clients
	calls := map[Feature]func() error{
		CreateDeleteVolume: func() error { return only(c.controller.DeleteVolume(t.ctx, &csi.DeleteVolumeRequest{})) },
		PublishVolume: func() error {
			return only(c.controller.ControllerPublishVolume(t.ctx, &csi.ControllerPublishVolumeRequest{}))
		},
		ListVolumes: func() error { return only(c.controller.ListVolumes(t.ctx, &csi.ListVolumesRequest{MaxEntries: 1})) },
		GetVolume:   func() error { return only(c.controller.ControllerGetVolume(t.ctx, &csi.ControllerGetVolumeRequest{})) },
		GetCapacity: func() error { return only(c.controller.GetCapacity(t.ctx, &csi.GetCapacityRequest{})) },
		ModifyVolume: func() error {
			return only(c.controller.ControllerModifyVolume(t.ctx, &csi.ControllerModifyVolumeRequest{}))
		},
		Snapshots:     func() error { return only(c.controller.DeleteSnapshot(t.ctx, &csi.DeleteSnapshotRequest{})) },
		ListSnapshots: func() error { return only(c.controller.ListSnapshots(t.ctx, &csi.ListSnapshotsRequest{MaxEntries: 1})) },
		GetSnapshot:   func() error { return only(c.controller.GetSnapshot(t.ctx, &csi.GetSnapshotRequest{})) },
		ExpandVolume: func() error {
			return only(c.controller.ControllerExpandVolume(t.ctx, &csi.ControllerExpandVolumeRequest{}))
		},
		GroupSnapshots: func() error {
			return only(c.group.GroupControllerGetCapabilities(t.ctx, &csi.GroupControllerGetCapabilitiesRequest{}))
		},
		StageVolume:      func() error { return only(c.node.NodeStageVolume(t.ctx, &csi.NodeStageVolumeRequest{})) },
		VolumeStats:      func() error { return only(c.node.NodeGetVolumeStats(t.ctx, &csi.NodeGetVolumeStatsRequest{})) },
		NodeExpandVolume: func() error { return only(c.node.NodeExpandVolume(t.ctx, &csi.NodeExpandVolumeRequest{})) },
	}
	for _, name := range t.features.names() {
		call := calls[Feature(name)]
		if call == nil {
			continue
		}
		err := call()
		t.alive(err)
		t.want(requirement.CSIServed, status.Code(err) != codes.Unimplemented, "an answer or a refusal, since the plugin reports "+name, "%s", answered(err))
	}
}

// only drops the answer of a call.
func only[T any](_ T, err error) error { return err }

// publishes reports whether volumes of the spec are seen where the plugin
// publishes them: mounts of the plugin have to get there.
func (t *trial) publishes() bool {
	return slices.Contains(t.definition.profiles, NodePublish) || !t.features[NodePrepare] && t.features[PublishOnNode]
}

// atNode runs f where what the plugin publishes is to be seen: the namespace of
// the spec, which gets the mounts of a plugin that the suite started, or that
// of a plugin that was there before.
func (t *trial) atNode(f func()) {
	if t.process != nil {
		f()
		return
	}
	t.inPlugin(f)
}

// inPlugin runs f in the namespace of the plugin.
func (t *trial) inPlugin(f func()) {
	ns := t.pluginNamespace()
	var e *ending
	if err := ns.Do(t.ctx, func() error { e = caught(f); return nil }); err != nil {
		end(couldNotRun("entering the mount namespace of the plugin: %v", err))
	}
	if e != nil {
		end(e)
	}
}

func (t *trial) pluginNamespace() *mountns.Namespace {
	switch {
	case t.beyond != nil:
		return t.beyond
	case t.pluginNS == nil:
		end(couldNotRun("what the plugin mounts cannot be looked at: its process is not known; --exec 'CMD …' lets the suite start it"))
	}
	return t.pluginNS
}

// use lets f see the volume as a consumer does, by whichever way the plugin
// has.
func (t *trial) use(v *volume, readonly bool, f func(*consumer)) {
	switch {
	case t.features[NodePrepare]:
		t.withVolume(v, readonly, f)
	case t.features[PublishOnNode]:
		r := t.publication(v)
		r.Readonly = readonly
		t.publishedOK(r)
		t.atNode(func() { f(&consumer{target: r.GetTargetPath(), volume: v.id}) })
		t.unpublished(r)
	default:
		end(couldNotRun("what is in a volume cannot be looked at: the endpoint serves neither NodePrepare nor NodePublishVolume"))
	}
}

// filled puts a text into a volume.
func (t *trial) filled(v *volume) (text string) {
	text = t.nonce()
	t.use(v, false, func(c *consumer) { t.putBy(requirement.CSIPublishData, c, text) })
	return text
}

// wantText wants a volume to hold a text.
func (t *trial) wantText(id requirement.ID, v *volume, text, expected string) {
	t.use(v, true, func(c *consumer) {
		same, found := t.shows(c, text)
		t.want(id, same, expected, "%s", found)
	})
}

// publication is a call that keeps every rule, with a target_path of its own.
func (t *trial) publication(v *volume) *csi.NodePublishVolumeRequest {
	return &csi.NodePublishVolumeRequest{
		VolumeId: v.id, PublishContext: v.published, StagingTargetPath: v.staging, VolumeContext: v.context,
		TargetPath: filepath.Join(t.mkdir("published"), "target"), VolumeCapability: v.capability,
		Secrets: t.config.secrets("NodePublishVolume"),
	}
}

// publishAt makes the call. Whatever comes of it, it is unpublished when the
// spec ends.
func (t *trial) publishAt(r *csi.NodePublishVolumeRequest) error {
	t.cleanup(func() error {
		if r.GetVolumeId() == "" || r.GetTargetPath() == "" {
			return nil
		}
		err := t.unpublish(r)
		if c := status.Code(err); c == codes.NotFound || c == codes.InvalidArgument {
			return nil // of a call that was refused
		}
		return wrap("NodeUnpublishVolume", err)
	})
	_, err := t.clients.node.NodePublishVolume(t.ctx, r)
	return err
}

func (t *trial) publishedOK(r *csi.NodePublishVolumeRequest) {
	t.need(requirement.CSIPublishData, t.publishAt(r), "OK to a call that keeps every rule")
}

func (t *trial) unpublish(r *csi.NodePublishVolumeRequest) error {
	_, err := t.clients.node.NodeUnpublishVolume(t.ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: r.GetVolumeId(), TargetPath: r.GetTargetPath()})
	return err
}

func (t *trial) unpublished(r *csi.NodePublishVolumeRequest) {
	t.need(requirement.CSIUnpublishClean, t.unpublish(r), "OK")
}

// putBy is put where another requirement than that of NodePrepare is broken if
// the volume cannot be written to.
func (t *trial) putBy(id requirement.ID, c *consumer, text string) {
	if t.features[NodePrepare] {
		t.put(c, text)
		return
	}
	if err := t.tryPut(c, text); err != nil {
		t.kernel = errnoName(err)
		t.fail(id, "a volume that can be written to", "writing into it fails")
	}
}

// creation is a call for a new volume of the run.
func (t *trial) creation(c *csi.VolumeCapability) *csi.CreateVolumeRequest {
	r := &csi.CreateVolumeRequest{
		Name: t.name("volume"), VolumeCapabilities: []*csi.VolumeCapability{c},
		Parameters: t.config.VolumeParameters, Secrets: t.config.secrets("CreateVolume"),
	}
	if t.config.VolumeSize > 0 {
		r.CapacityRange = &csi.CapacityRange{RequiredBytes: t.config.VolumeSize}
	}
	return r
}

// create makes the call, and deletes what came of it when the spec ends.
func (t *trial) create(r *csi.CreateVolumeRequest) (*volume, error) {
	answer, err := t.clients.controller.CreateVolume(t.ctx, r)
	t.alive(err)
	if err != nil {
		return nil, err
	}
	got := answer.GetVolume()
	v := &volume{id: got.GetVolumeId(), context: got.GetVolumeContext(), capacity: got.GetCapacityBytes(), createdNow: true, source: got.GetContentSource()}
	if len(r.GetVolumeCapabilities()) > 0 {
		v.capability = r.GetVolumeCapabilities()[0]
	}
	t.cleanup(func() error { return wrap("DeleteVolume", t.deleteVolume(v.id)) })
	t.cleanup(func() error { return t.sweep(v.id) })
	return v, nil
}

func (t *trial) deleteVolume(id string) error {
	_, err := t.clients.controller.DeleteVolume(t.ctx, &csi.DeleteVolumeRequest{VolumeId: id, Secrets: t.config.secrets("DeleteVolume")})
	return err
}

// pages walks over a list in pages of at most two, and returns how often each
// id was in it.
func (t *trial) pages(id requirement.ID, page func(most int32, token string) (ids []string, next string, err error)) map[string]int {
	seen := map[string]int{}
	token := ""
	for range 1000 {
		const most = 2
		ids, next, err := page(most, token)
		t.wantCode(id, err, codes.OK)
		t.want(id, len(ids) <= most, fmt.Sprintf("at most %d entries in a page", most), "%s", count(len(ids), "entry"))
		for _, i := range ids {
			seen[i]++
		}
		if token = next; token == "" {
			return seen
		}
	}
	t.fail(id, "a last page", "1000 pages, and still a next_token")
	return nil
}

// larger is a capacity to grow a volume to.
func (t *trial) larger(v *volume) int64 {
	now := max(v.capacity, t.config.VolumeSize, 1<<20)
	if now > math.MaxInt64/2 {
		end(couldNotRun("the volume has %d bytes already", now))
	}
	return now + max(now/2, 1<<20)
}

// ignored is for what a clean-up may find gone.
func ignored(err error, these ...codes.Code) error {
	if slices.Contains(these, status.Code(err)) {
		return nil
	}
	return err
}
