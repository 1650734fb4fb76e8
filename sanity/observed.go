package sanity

import (
	"fmt"
	"strings"
	"sync"

	"google.golang.org/protobuf/proto"

	"github.com/csi-prepare/csi-prepare/reference/mountspec"
	"github.com/csi-prepare/csi-prepare/reference/mountspec/wire"
	"github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// observed holds every answer with mount specs that the run has seen, judged
// by the rules that need no kernel.
type observed struct {
	mu      sync.Mutex
	answers int
	// kinds returned so far.
	kinds map[preparev1alpha1.MountKind]bool
	// network is true once a network filesystem was returned.
	network bool
	// first answer that broke a rule.
	first map[requirement.ID]brokenRule
	// told are the rules some spec has failed because of, or is about to.
	told map[requirement.ID]bool
	// asked are the rules whose own spec has run.
	asked map[requirement.ID]bool
}

// brokenRule is one rule broken by one answer.
type brokenRule struct {
	id     requirement.ID
	call   string
	detail string
}

// answer judges one answer. It is called for each call that was OK.
func (o *observed) answer(req, reply proto.Message) {
	request, ok := req.(*preparev1alpha1.NodePrepareVolumeRequest)
	if !ok {
		return
	}
	answer, ok := reply.(*preparev1alpha1.NodePrepareVolumeResponse)
	if !ok {
		return
	}
	line := call{method: "NodePrepareVolume", request: describe(request), answer: brief(answer)}.String()
	o.mu.Lock()
	defer o.mu.Unlock()
	o.answers++
	if o.first == nil {
		o.first, o.kinds = map[requirement.ID]brokenRule{}, map[preparev1alpha1.MountKind]bool{}
		o.told, o.asked = map[requirement.ID]bool{}, map[requirement.ID]bool{}
	}
	for _, s := range answer.GetMountSpecs() {
		o.kinds[kindOf(s)] = true
	}
	o.network = o.network || overNetwork(answer)
	for _, v := range violations(request, answer) {
		if _, known := o.first[v.Requirement]; !known {
			o.first[v.Requirement] = brokenRule{v.Requirement, line, v.Error() + "\nin " + specText(answer, v.Index)}
		}
	}
}

// violations returns the rules an answer breaks.
func violations(request *preparev1alpha1.NodePrepareVolumeRequest, answer *preparev1alpha1.NodePrepareVolumeResponse) []mountspec.Violation {
	_, found := wire.Validate(answer.GetMountSpecs(), wire.RequestFromProto(request))
	if request.GetReadonly() {
		return found
	}
	for i := range found {
		// Read-only only by its access mode: another sentence of SPEC.md.
		if found[i].Requirement == requirement.PrepareReadonly {
			found[i].Requirement = requirement.PrepareReaderOnly
		}
	}
	return found
}

// overNetwork reports whether a network filesystem was returned so far.
func (o *observed) overNetwork() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.network
}

// broke returns the first answer that broke a rule, and takes note that it is
// being told.
func (o *observed) broke(id requirement.ID) (brokenRule, bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.asked == nil {
		return brokenRule{}, false
	}
	o.asked[id] = true
	b, ok := o.first[id]
	if ok {
		o.told[id] = true
	}
	return b, ok
}

// late returns a broken rule whose own spec has run already, and found
// nothing.
func (o *observed) late() (brokenRule, bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for id, b := range o.first {
		if o.asked[id] && !o.told[id] {
			o.told[id] = true
			return b, true
		}
	}
	return brokenRule{}, false
}

// kindOf names the arm that is set.
func kindOf(s *preparev1alpha1.MountSpec) preparev1alpha1.MountKind {
	switch s.GetKind().(type) {
	case *preparev1alpha1.MountSpec_Filesystem:
		return preparev1alpha1.MountKind_MOUNT_KIND_FILESYSTEM
	case *preparev1alpha1.MountSpec_Bind:
		return preparev1alpha1.MountKind_MOUNT_KIND_BIND
	case *preparev1alpha1.MountSpec_BlockDevice:
		return preparev1alpha1.MountKind_MOUNT_KIND_BLOCK_DEVICE
	case *preparev1alpha1.MountSpec_Handle:
		return preparev1alpha1.MountKind_MOUNT_KIND_HANDLE
	case *preparev1alpha1.MountSpec_Fuse:
		return preparev1alpha1.MountKind_MOUNT_KIND_FUSE
	case *preparev1alpha1.MountSpec_Extension:
		return preparev1alpha1.MountKind_MOUNT_KIND_EXTENSION
	default:
		return preparev1alpha1.MountKind_MOUNT_KIND_UNKNOWN
	}
}

// specText renders one mount spec of an answer, or all of them, without
// secrets.
func specText(answer *preparev1alpha1.NodePrepareVolumeResponse, index int) string {
	var texts []string
	for i, s := range answer.GetMountSpecs() {
		if index < 0 || i == index {
			texts = append(texts, fmt.Sprintf("mount_specs[%d]: %s", i, describe(s)))
		}
	}
	if len(texts) == 0 {
		return "an answer without mount specs"
	}
	return strings.Join(texts, "\n")
}

// unreported fails a spec for an answer that broke a rule after the spec of
// that rule had run.
func (t *trial) unreported() *ending {
	b, ok := t.seen.late()
	if !ok {
		return nil
	}
	return caught(func() { t.failCall(b.id, b.call, "an answer that keeps the rule", b.detail) })
}

// kindText renders a mount spec wholly; secrets print as a mask.
func kindText(s mountspec.Spec) string {
	kind := s.Kind
	s.Kind = nil
	if kind == nil {
		return fmt.Sprintf("%+v no kind", s)
	}
	return fmt.Sprintf("%+v %s %+v", s, kind.Name(), kind)
}
