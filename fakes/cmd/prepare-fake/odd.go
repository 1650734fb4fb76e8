package main

import (
	"context"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/spf13/cobra"
	"google.golang.org/grpc"

	preparev1alpha1 "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// odd is what a plugin may be and still conform: a suite that minds fails
// plugins that have no fault.
type odd struct {
	delay  time.Duration
	name   string
	sparse bool
}

func (o *odd) flags(cmd *cobra.Command) {
	cmd.Flags().DurationVar(&o.delay, "delay", 0, "wait this long before each answer")
	cmd.Flags().StringVar(&o.name, "name", "", "be called this by GetPluginInfo")
	cmd.Flags().BoolVar(&o.sparse, "sparse", false, "leave every optional field of an answer empty")
}

// option is how gRPC applies it.
func (o *odd) option() grpc.ServerOption {
	return grpc.ChainUnaryInterceptor(func(ctx context.Context, request any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
		if o.delay > 0 {
			select {
			case <-time.After(o.delay):
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		}
		answer, err := next(ctx, request)
		if info, ok := answer.(*csi.GetPluginInfoResponse); ok && info != nil && o.name != "" {
			info.Name = o.name
		}
		if o.sparse && err == nil {
			thin(answer)
		}
		return answer, err
	})
}

// thin empties the optional fields of an answer.
func thin(answer any) {
	switch r := answer.(type) {
	case *csi.GetPluginInfoResponse:
		r.Manifest = nil
	case *csi.ProbeResponse:
		r.Ready = nil // "assume that the plugin is ready"
	case *csi.NodeGetInfoResponse:
		r.MaxVolumesPerNode, r.AccessibleTopology = 0, nil
	case *preparev1alpha1.NodePrepareVolumeResponse:
		for _, s := range r.GetMountSpecs() {
			if a := s.GetAttributes(); a != nil && !a.GetReadonly() && !a.GetNosuid() && !a.GetNodev() && !a.GetNoexec() {
				s.Attributes = nil
			}
		}
	}
}
