package sanity

import (
	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

func statsSpecs(s *section) {
	s.spec("statistics are had by the path of a living preparation", Covers(requirement.StatsByPreparePath), func(t *trial) {
		r := t.request(t.volume())
		t.prepared(r)
		path := r.GetPreparePath()
		if t.features[StageVolume] {
			path = r.GetStagingTargetPath()
		}
		answer, err := t.clients.node.NodeGetVolumeStats(t.ctx, &csi.NodeGetVolumeStatsRequest{
			VolumeId: r.GetVolumeId(), VolumePath: path, StagingTargetPath: r.GetStagingTargetPath(),
		})
		t.wantCode(requirement.StatsByPreparePath, err, codes.OK)
		t.want(requirement.StatsByPreparePath, len(answer.GetUsage()) > 0, "usage in the answer", "none")
	}, VolumeStats)
}
