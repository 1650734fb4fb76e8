package sanity

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// Feature is something optional that a plugin claims, by a name made from the
// capability that claims it.
type Feature string

// The features specs ask for.
const (
	ControllerService     Feature = "plugin.controller-service"
	NodeService           Feature = "node"
	PublishOnNode         Feature = "node.publish-unpublish-volume"
	NodePrepare           Feature = "node-prepare"
	RequiresPropagation   Feature = "node-prepare.requires-propagation"
	RefreshableContext    Feature = "node-prepare.refreshable-context"
	KindFilesystem        Feature = "node-prepare.kind.filesystem"
	KindBind              Feature = "node-prepare.kind.bind"
	KindBlockDevice       Feature = "node-prepare.kind.block-device"
	KindHandle            Feature = "node-prepare.kind.handle"
	KindFUSE              Feature = "node-prepare.kind.fuse"
	KindExtension         Feature = "node-prepare.kind.extension"
	CreateDeleteVolume    Feature = "controller.create-delete-volume"
	PublishVolume         Feature = "controller.publish-unpublish-volume"
	ControllerMultiWriter Feature = "controller.single-node-multi-writer"
	StageVolume           Feature = "node.stage-unstage-volume"
	NodeMultiWriter       Feature = "node.single-node-multi-writer"
	VolumeStats           Feature = "node.get-volume-stats"
	VolumeMountGroup      Feature = "node.volume-mount-group"
	ExpandVolume          Feature = "controller.expand-volume"
	NodeExpandVolume      Feature = "node.expand-volume"
	// NetworkFilesystem is seen in what the plugin answers: no capability
	// tells it. To run with the profile node-network claims it.
	NetworkFilesystem Feature = "network-filesystem"
)

// features is a set of claims.
type features map[Feature]bool

func (f features) names() []string {
	names := make([]string, 0, len(f))
	for n := range f {
		if n != accessMount && n != accessBlock {
			names = append(names, string(n))
		}
	}
	slices.Sort(names)
	return names
}

// missing returns the first of the wanted features that is not claimed.
func (f features) missing(want []Feature) (Feature, bool) {
	for _, w := range want {
		if !f[w] {
			return w, true
		}
	}
	return "", false
}

// word turns the name of an enum value into part of a feature's name.
func word(enum string) string { return strings.ToLower(strings.ReplaceAll(enum, "_", "-")) }

// discover asks the plugin what it can do. Capabilities of no type are left
// for a spec to complain about.
func discover(ctx context.Context, c *clients) (features, error) {
	f := features{}
	plugin, err := c.identity.GetPluginCapabilities(ctx, &csi.GetPluginCapabilitiesRequest{})
	if err != nil {
		return nil, fmt.Errorf("GetPluginCapabilities: %w", err)
	}
	controller := false
	for _, p := range plugin.GetCapabilities() {
		if s := p.GetService(); s != nil {
			f[Feature("plugin."+word(s.GetType().String()))] = true
			controller = controller || s.GetType() == csi.PluginCapability_Service_CONTROLLER_SERVICE
		}
	}
	if controller {
		answer, err := c.controller.ControllerGetCapabilities(ctx, &csi.ControllerGetCapabilitiesRequest{})
		if err != nil {
			return nil, fmt.Errorf("ControllerGetCapabilities: %w", err)
		}
		for _, k := range answer.GetCapabilities() {
			if r := k.GetRpc(); r != nil {
				f[Feature("controller."+word(r.GetType().String()))] = true
			}
		}
	}
	if err := f.ofNode(ctx, c); err != nil {
		return nil, err
	}
	prepare, err := c.prepare.NodePrepareGetCapabilities(ctx, &preparev1alpha1.NodePrepareGetCapabilitiesRequest{})
	if status.Code(err) == codes.Unimplemented {
		return f, nil // a plugin of before NodePrepare
	}
	if err != nil {
		return nil, fmt.Errorf("NodePrepareGetCapabilities: %w", err)
	}
	f[NodePrepare] = true
	for _, k := range prepare.GetCapabilities() {
		switch k.GetType().(type) {
		case *preparev1alpha1.NodePrepareServiceCapability_Kind_:
			f[kindFeature(k.GetKind().GetKind())] = true
		case *preparev1alpha1.NodePrepareServiceCapability_RefreshableContext_:
			f[RefreshableContext] = true
		case *preparev1alpha1.NodePrepareServiceCapability_RequiresPropagation_:
			f[RequiresPropagation] = true
		}
	}
	return f, nil
}

// ofNode adds what the Node service claims. Whether the plugin publishes
// volumes itself is told by no capability: one that does not answers
// UNIMPLEMENTED before it looks at the arguments, and these are none.
func (f features) ofNode(ctx context.Context, c *clients) error {
	node, err := c.node.NodeGetCapabilities(ctx, &csi.NodeGetCapabilitiesRequest{})
	if status.Code(err) == codes.Unimplemented {
		return nil // a plugin of the Controller service alone
	}
	if err != nil {
		return fmt.Errorf("NodeGetCapabilities: %w", err)
	}
	f[NodeService] = true
	for _, k := range node.GetCapabilities() {
		if r := k.GetRpc(); r != nil {
			f[Feature("node."+word(r.GetType().String()))] = true
		}
	}
	switch _, err := c.node.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{}); status.Code(err) {
	case codes.Unimplemented:
	case codes.Unavailable, codes.DeadlineExceeded, codes.Canceled:
		return fmt.Errorf("NodePublishVolume: %w", err)
	default:
		f[PublishOnNode] = true
	}
	return nil
}

func kindFeature(k preparev1alpha1.MountKind) Feature {
	return Feature("node-prepare.kind." + word(strings.TrimPrefix(k.String(), "MOUNT_KIND_")))
}

// compareFeatures reports how what is claimed differs from what is declared.
func compareFeatures(declared []string, claimed features) error {
	var lacking, extra []string
	for _, d := range declared {
		if !claimed[Feature(d)] {
			lacking = append(lacking, d)
		}
	}
	for _, n := range claimed.names() {
		if !slices.Contains(declared, n) {
			extra = append(extra, n)
		}
	}
	switch {
	case len(lacking) > 0:
		return fmt.Errorf("features: the plugin does not report what is declared for it: %s", strings.Join(lacking, ", "))
	case len(extra) > 0:
		return fmt.Errorf("features: the plugin reports what is not declared for it; declare it too, or no features at all: %s", strings.Join(extra, ", "))
	}
	return nil
}
