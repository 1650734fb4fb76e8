package sanity

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// pluginSections writes the specs of the plugin's seat, in the order of
// SPEC.md.
var pluginSections = []writer{
	{"Discovery and coexistence", discoverySpecs},
	{"NodePrepareGetCapabilities", capabilitySpecs},
	{"NodePrepareVolume, arguments", argumentSpecs},
	{"NodePrepareVolume, answer", answerSpecs},
	{"NodePrepareVolume, performed", performedSpecs},
	{"NodeUnprepareVolume", unprepareSpecs},
	{"NodeListPreparedVolumes", listSpecs},
	{"Mount specs", mountSpecSpecs},
	{"Devices", blockSpecs},
	{"Networks", networkSpecs},
	{"Handoff and FUSE", fuseSpecs},
	{"Concurrency", concurrencySpecs},
	{"Idempotency", idempotencySpecs},
	{"Crash and reboot", crashSpecs},
	{"Security", securitySpecs},
	{"Statistics", statsSpecs},
	{"The plugin itself", identitySpecs},
	{"Volumes", volumeSpecs},
	{"Snapshots and copies", snapshotSpecs},
	{"Growing", growSpecs},
	{"Attaching to a node", attachSpecs},
	{"On the node, staging", stageSpecs},
	{"On the node, publishing", publishSpecs},
}

func discoverySpecs(s *section) {
	s.spec("NodePrepare is served where the Node service is", Covers(requirement.DiscoverySameEndpoint), func(t *trial) {
		_, err := t.clients.node.NodeGetCapabilities(t.ctx, &csi.NodeGetCapabilitiesRequest{})
		if status.Code(err) == codes.Unimplemented {
			t.fail(requirement.DiscoverySameEndpoint, "the Node service at the endpoint that serves NodePrepare", answered(err))
		}
		t.sysfail("asking the Node service for its capabilities", err)
		_, err = t.capabilities()
		t.wantCode(requirement.DiscoverySameEndpoint, err, codes.OK)
	})
}

func (t *trial) capabilities() ([]*preparev1alpha1.NodePrepareServiceCapability, error) {
	answer, err := t.clients.prepare.NodePrepareGetCapabilities(t.ctx, &preparev1alpha1.NodePrepareGetCapabilitiesRequest{})
	return answer.GetCapabilities(), err
}

// reported returns the kinds the capabilities report.
func (t *trial) reported() map[preparev1alpha1.MountKind]bool {
	caps, err := t.capabilities()
	t.sysfail("NodePrepareGetCapabilities", err)
	kinds := map[preparev1alpha1.MountKind]bool{}
	for _, c := range caps {
		if k := c.GetKind(); k != nil {
			kinds[k.GetKind()] = true
		}
	}
	return kinds
}

func capabilitySpecs(s *section) {
	s.spec("PREPARE_UNPREPARE_VOLUME is reported", Covers(requirement.CapabilitiesRPC), func(t *trial) {
		caps, err := t.capabilities()
		t.wantCode(requirement.CapabilitiesRPC, err, codes.OK)
		for _, c := range caps {
			if c.GetRpc().GetType() == preparev1alpha1.NodePrepareServiceCapability_RPC_PREPARE_UNPREPARE_VOLUME {
				return
			}
		}
		t.fail(requirement.CapabilitiesRPC, "a capability rpc:{type:PREPARE_UNPREPARE_VOLUME}", count(len(caps), "capability")+", and none is that")
	})
	s.spec("every capability has a known type", Covers(requirement.CapabilitiesTyped), func(t *trial) {
		caps, err := t.capabilities()
		t.wantCode(requirement.CapabilitiesTyped, err, codes.OK)
		for i, c := range caps {
			if why := untyped(c); why != "" {
				t.fail(requirement.CapabilitiesTyped, "a type that SPEC.md defines in each capability", "capabilities["+itoa(i)+"] "+why)
			}
		}
	})
	s.spec("the capabilities stay the same", Covers(requirement.CapabilitiesStable), func(t *trial) {
		first, err := t.capabilities()
		t.wantCode(requirement.CapabilitiesStable, err, codes.OK)
		v := t.volume()
		t.prepared(t.request(v))
		for range 5 {
			again, err := t.capabilities()
			t.wantCode(requirement.CapabilitiesStable, err, codes.OK)
			same := len(first) == len(again)
			for i := range first {
				same = same && proto.Equal(first[i], again[i])
			}
			t.want(requirement.CapabilitiesStable, same, "the same answer each time", "another one: %s, then %s", count(len(first), "capability"), count(len(again), "capability"))
		}
	})
	s.spec("what is returned has been reported", Covers(requirement.CapabilitiesKinds, requirement.PrepareKindReported), func(t *trial) {
		reported := t.reported()
		v := t.volume()
		offers := [][]preparev1alpha1.MountKind{t.performer().GetKinds()}
		for _, k := range t.performer().GetKinds() {
			offers = append(offers, []preparev1alpha1.MountKind{k})
		}
		for _, kinds := range offers {
			r := t.request(v)
			r.Performer.Kinds = kinds
			answer, err := t.prepare(r)
			if status.Code(err) == codes.FailedPrecondition {
				continue
			}
			t.need(requirement.PrepareAnswered, err, "OK or FAILED_PRECONDITION")
			for _, spec := range answer.GetMountSpecs() {
				k := kindOf(spec)
				if k == preparev1alpha1.MountKind_MOUNT_KIND_UNKNOWN {
					continue // another rule
				}
				id := requirement.PrepareKindReported
				if len(reported) == 0 {
					id = requirement.CapabilitiesKinds
				}
				t.want(id, reported[k], "only kinds the capabilities report", "a mount spec of %s", k)
			}
			t.unprepared(r)
		}
	})
}

// untyped says what is wrong with the type of a capability.
func untyped(c *preparev1alpha1.NodePrepareServiceCapability) string {
	switch {
	case c.GetType() == nil:
		return "has no type, or one this version does not know"
	case len(c.ProtoReflect().GetUnknown()) > 0:
		return "has fields SPEC.md does not define"
	case c.GetRpc() != nil && c.GetRpc().GetType() != preparev1alpha1.NodePrepareServiceCapability_RPC_PREPARE_UNPREPARE_VOLUME:
		return "is an rpc of type " + c.GetRpc().GetType().String()
	case c.GetKind() != nil:
		k := c.GetKind().GetKind()
		if _, known := preparev1alpha1.MountKind_name[int32(k)]; !known || k == preparev1alpha1.MountKind_MOUNT_KIND_UNKNOWN {
			return "is a kind of " + k.String()
		}
	}
	return ""
}

// parallel makes a call atOnce times at once and returns the errors.
func parallel(ctx context.Context, call func(context.Context) error) []error {
	done := make(chan error, atOnce)
	for range atOnce {
		go func() { done <- call(ctx) }()
	}
	errs := make([]error, atOnce)
	for i := range errs {
		errs[i] = <-done
	}
	return errs
}
