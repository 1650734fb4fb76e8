package sanity

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// Feature is something optional that a plugin claims, by a name made from the
// capability that claims it.
type Feature string

// The features specs ask for.
const (
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
	node, err := c.node.NodeGetCapabilities(ctx, &csi.NodeGetCapabilitiesRequest{})
	if err != nil {
		return nil, fmt.Errorf("NodeGetCapabilities: %w", err)
	}
	for _, k := range node.GetCapabilities() {
		if r := k.GetRpc(); r != nil {
			f[Feature("node."+word(r.GetType().String()))] = true
		}
	}
	prepare, err := c.prepare.NodePrepareGetCapabilities(ctx, &preparev1alpha1.NodePrepareGetCapabilitiesRequest{})
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

func kindFeature(k preparev1alpha1.MountKind) Feature {
	return Feature("node-prepare.kind." + word(strings.TrimPrefix(k.String(), "MOUNT_KIND_")))
}

// profile is a named set of features, with a verdict of its own.
type profile struct {
	name     string
	actor    requirement.Actor
	requires []Feature
	about    string
}

var profiles = []profile{
	{"node-mount", requirement.SP, []Feature{NodePrepare, accessMount}, "a plugin that prepares volumes for directories of consumers"},
	{"node-block", requirement.SP, []Feature{NodePrepare, KindBlockDevice, accessBlock}, "a plugin that prepares volumes as raw block devices"},
	{"co-executor", requirement.CO, nil, "whoever performs mount specs and undoes them"},
}

func profileByName(name string) *profile {
	if i := slices.IndexFunc(profiles, func(p profile) bool { return p.name == name }); i >= 0 {
		return &profiles[i]
	}
	return nil
}

func profileNames() []string {
	var names []string
	for _, p := range profiles {
		names = append(names, p.name)
	}
	return names
}

// Profiles returns the names of the profiles and what each is about.
func Profiles() map[string]string {
	about := map[string]string{}
	for _, p := range profiles {
		about[p.name] = p.about
	}
	return about
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
