package sanity

import (
	"path/filepath"

	"google.golang.org/grpc/codes"

	"github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

func answerSpecs(s *section) {
	s.spec("a call that keeps every rule is OK", Covers(requirement.PrepareAnswered), func(t *trial) {
		v := t.volume()
		for _, readonly := range []bool{false, true} {
			r := t.request(v)
			r.Readonly = readonly
			t.prepared(r)
			t.unprepared(r)
		}
	})
	s.spec("a kind that is not offered is not returned", Covers(requirement.PrepareKindOffered, requirement.PrepareNoAcceptedKind), func(t *trial) {
		v := t.volume()
		usual := t.usualKinds(v)
		var others []preparev1alpha1.MountKind
		for _, k := range t.performer().GetKinds() {
			if !usual[k] {
				others = append(others, k)
			}
		}
		r := t.request(v)
		r.Performer.Kinds = others
		answer, err := t.prepare(r)
		if err == nil {
			for _, spec := range answer.GetMountSpecs() {
				t.want(requirement.PrepareKindOffered, !usual[kindOf(spec)], "a kind of performer.kinds, or FAILED_PRECONDITION", "a mount spec of %s", kindOf(spec))
			}
			return
		}
		t.wantCode(requirement.PrepareNoAcceptedKind, err, codes.FailedPrecondition)
	})
	s.spec("a performer that accepts nothing is FAILED_PRECONDITION", Covers(requirement.PrepareNoAcceptedKind), func(t *trial) {
		r := t.request(t.volume())
		// An extension that nobody offers by type is nothing at all.
		r.Performer = &preparev1alpha1.Performer{
			Kernel: preparev1alpha1.Performer_NODE,
			Kinds:  []preparev1alpha1.MountKind{preparev1alpha1.MountKind_MOUNT_KIND_EXTENSION},
		}
		_, err := t.prepare(r)
		t.wantCode(requirement.PrepareNoAcceptedKind, err, codes.FailedPrecondition)
	})
	s.spec("a kind the plugin does not know is ignored", Covers(requirement.PrepareUnknownKindIgnored), func(t *trial) {
		v := t.volume()
		t.usualKinds(v)
		r := t.request(v)
		r.Performer.Kinds = append(r.Performer.Kinds, 4711)
		_, err := t.prepare(r)
		t.wantCode(requirement.PrepareUnknownKindIgnored, err, codes.OK)
	})
	s.spec("a grant the plugin does not know is ignored", Covers(requirement.PrepareUnknownGrantIgnored), func(t *trial) {
		v := t.volume()
		t.usualKinds(v)
		r := t.request(v)
		r.Performer.Grants = append(r.Performer.Grants, "nobody-made-this")
		_, err := t.prepare(r)
		t.wantCode(requirement.PrepareUnknownGrantIgnored, err, codes.OK)
	})
	s.spec("another kernel gets a block device or nothing", Covers(requirement.PrepareOtherKernel), func(t *trial) {
		r := t.request(t.volume())
		r.Performer.Kernel = preparev1alpha1.Performer_OTHER
		answer, err := t.prepare(r)
		if err != nil {
			t.wantCode(requirement.PrepareOtherKernel, err, codes.FailedPrecondition)
			return
		}
		for _, spec := range answer.GetMountSpecs() {
			onDevice := spec.GetBlockDevice() != nil || spec.GetFilesystem().GetDevice() != nil
			t.want(requirement.PrepareOtherKernel, onDevice, "a FILESYSTEM on a block device, a BLOCK_DEVICE, or FAILED_PRECONDITION", "a mount spec of %s", kindOf(spec))
		}
	})
	s.spec("nothing is made outside prepare_path", Covers(requirement.PrepareStaysBelow), func(t *trial) {
		r := t.request(t.volume())
		t.prepared(r)
		for _, dir := range []string{t.dir, t.Suite.dir} {
			for _, entry := range names(dir) {
				t.want(requirement.PrepareStaysBelow, t.madeBySuite(filepath.Join(dir, entry)),
					"nothing beside the directories of the suite", "%s is there", filepath.Join(dir, entry))
			}
		}
	})
	s.spec("no mount is made for a preparation", Covers(requirement.PrepareNoMount, requirement.CapabilitiesPropagation), func(t *trial) {
		if t.features[RequiresPropagation] {
			t.unsupported("the plugin reports requires_propagation: its mounts are to be seen")
		}
		r := t.request(t.volume())
		t.prepared(r)
		t.noMount("while a preparation lives")
		t.unprepared(r)
		t.noMount("after it ended")
	})
	s.spec("a preparation that was refused is not kept", Covers(requirement.PrepareNothingLeft), func(t *trial) {
		v := t.volume()
		t.prepared(t.request(v)) // so that a refusal has its own reason
		for _, spoil := range []func(*prepareRequest){
			func(r *prepareRequest) { r.PreparePath = filepath.Join(r.PreparePath, "missing") },
			func(r *prepareRequest) { r.Performer.Kernel = preparev1alpha1.Performer_KERNEL_UNKNOWN },
			func(r *prepareRequest) {
				r.Performer.Kinds = []preparev1alpha1.MountKind{preparev1alpha1.MountKind_MOUNT_KIND_EXTENSION}
			},
			func(r *prepareRequest) { r.VolumeCapability = t.withFlags(r, "no_such_flag_at_all") },
			func(r *prepareRequest) { r.VolumeCapability = t.otherCapability(t.defaultMode()) },
		} {
			r := t.request(t.volume())
			spoil(r)
			if _, err := t.prepare(r); err == nil {
				continue // another rule
			}
			refusal := t.lastCall()
			if e := t.entry(r); e != nil {
				t.failCall(requirement.PrepareNothingLeft, refusal, "no such pair in the list", "the pair is listed")
			}
			t.want(requirement.PrepareNothingLeft, contents(r.PreparePath) == "nothing" || !exists(r.PreparePath),
				"an empty prepare_path after the refusal", "it holds %s", contents(r.PreparePath))
		}
	})
}

// usualKinds prepares a volume as the suite usually does and returns the
// kinds of the answer: what the plugin returns when it may choose.
func (t *trial) usualKinds(v *volume) map[preparev1alpha1.MountKind]bool {
	r := t.request(v)
	kinds := map[preparev1alpha1.MountKind]bool{}
	for _, spec := range t.prepared(r).GetMountSpecs() {
		kinds[kindOf(spec)] = true
	}
	t.unprepared(r)
	if len(kinds) == 0 {
		end(couldNotRun("the plugin answers without mount specs, which breaks %s", requirement.SpecCount))
	}
	return kinds
}

// noMount fails the spec if anything was mounted anywhere since it began.
func (t *trial) noMount(when string) {
	changes, err := t.changes(t.ctx, nil)
	t.sysfail("reading the mount tables", err)
	if changes == "" {
		return
	}
	t.want(requirement.PrepareNoMount, false, "no mount in any namespace "+when, "mount tables changed")
}

// entry returns what the list has of the pair of a request, nil for nothing.
func (t *trial) entry(r *prepareRequest) *listEntry {
	entries, err := t.listed()
	t.need(requirement.ListComplete, err, "OK")
	for _, e := range entries {
		if e.GetVolumeId() == r.GetVolumeId() && e.GetPrepareId() == r.GetPrepareId() {
			return e
		}
	}
	return nil
}
