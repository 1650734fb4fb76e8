package server

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// Identity serves the CSI Identity service.
type Identity struct {
	csi.UnimplementedIdentityServer

	// Name is the plugin's, in domain name notation, at most 63 bytes.
	Name string
	// Capabilities of the plugin.
	Capabilities []csi.PluginCapability_Service_Type
	// Expansion is how volumes can be expanded, if at all.
	Expansion csi.PluginCapability_VolumeExpansion_Type
}

// GetPluginInfo implements csi.IdentityServer.
func (i *Identity) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	return &csi.GetPluginInfoResponse{Name: i.Name, VendorVersion: Version()}, nil
}

// GetPluginCapabilities implements csi.IdentityServer.
func (i *Identity) GetPluginCapabilities(context.Context, *csi.GetPluginCapabilitiesRequest) (*csi.GetPluginCapabilitiesResponse, error) {
	resp := &csi.GetPluginCapabilitiesResponse{}
	for _, t := range i.Capabilities {
		resp.Capabilities = append(resp.Capabilities, &csi.PluginCapability{Type: &csi.PluginCapability_Service_{
			Service: &csi.PluginCapability_Service{Type: t},
		}})
	}
	if i.Expansion != csi.PluginCapability_VolumeExpansion_UNKNOWN {
		resp.Capabilities = append(resp.Capabilities, &csi.PluginCapability{Type: &csi.PluginCapability_VolumeExpansion_{
			VolumeExpansion: &csi.PluginCapability_VolumeExpansion{Type: i.Expansion},
		}})
	}
	return resp, nil
}

// Probe implements csi.IdentityServer. A driver that serves is ready.
func (i *Identity) Probe(context.Context, *csi.ProbeRequest) (*csi.ProbeResponse, error) {
	return &csi.ProbeResponse{Ready: wrapperspb.Bool(true)}, nil
}
