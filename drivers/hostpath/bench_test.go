package hostpath

import (
	"fmt"
	"testing"

	prepare "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// BenchmarkPrepare is the price of one NodePrepareVolume and its
// NodeUnprepareVolume over the socket, records included.
func BenchmarkPrepare(b *testing.B) {
	s := newSite(b)
	s.start()
	id := s.create("v").GetVolumeId()
	for _, state := range []string{"first", "repeated"} {
		b.Run(state, func(b *testing.B) {
			req := s.request(id, state)
			for i := 0; b.Loop(); i++ {
				if state == "first" {
					req.PrepareId = fmt.Sprint(i)
				}
				if _, err := s.prepares.NodePrepareVolume(b.Context(), req); err != nil {
					b.Fatal(err)
				}
				if state == "first" {
					if _, err := s.prepares.NodeUnprepareVolume(b.Context(), &prepare.NodeUnprepareVolumeRequest{
						VolumeId: id, PrepareId: req.PrepareId, PreparePath: req.PreparePath,
					}); err != nil {
						b.Fatal(err)
					}
				}
			}
		})
	}
}
