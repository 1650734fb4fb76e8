package sanity

import (
	"strings"

	"google.golang.org/grpc/codes"

	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// networkSpecs are about what a network filesystem has in particular. The rules
// that its text has to keep are among the rules of mount specs.
func networkSpecs(s *section) {
	s.spec("a mount flag is one option, whatever it holds", Covers(requirement.PrepareMountFlagSingle), func(t *trial) {
		v := t.volume()
		for _, flag := range []string{"noatime,noexec", "timeo=600,softerr", "vers=4.2,softerr", "nodev,softerr,noexec"} {
			r := t.request(v)
			r.VolumeCapability = t.withFlags(r, flag)
			answer, err := t.prepare(r)
			if err != nil {
				t.wantCode(requirement.PrepareMountFlagSingle, err, codes.InvalidArgument)
				continue
			}
			for i, spec := range answer.GetMountSpecs() {
				taken := spec.GetAttributes().GetNoexec()
				for _, p := range spec.GetFilesystem().GetParameters() {
					taken = taken || p.GetKey() == "softerr"
				}
				t.want(requirement.PrepareMountFlagSingle, !taken, "INVALID_ARGUMENT to "+flag+", which is no option", "mount_specs[%d] has the option behind the comma: %s", i, specText(answer, i))
			}
			t.unprepared(r)
		}
	}, accessMount)
	s.spec("the end of one preparation leaves the others what they need", Covers(requirement.UnprepareOthersKept), func(t *trial) {
		v := t.sharedVolume()
		first, second := t.request(v), t.request(v)
		t.prepared(first)
		answer, err := t.prepare(second)
		t.need(requirement.IdempotencyOtherID, err, "OK to another prepare_id of a shared volume")
		t.unprepared(first)
		again, err := t.prepare(second)
		t.want(requirement.UnprepareOthersKept, err == nil, "OK to a repeat for the preparation that is left", "%s", answered(err))
		t.want(requirement.UnprepareOthersKept, len(again.GetMountSpecs()) == len(answer.GetMountSpecs()), "the mount specs of the first answer", "%s", specText(again, -1))
		t.want(requirement.UnprepareOthersKept, t.entry(second) != nil, "the preparation that is left in the list", "it is not listed")
	})
	s.spec("a consumer keeps its data when another one goes", Covers(requirement.UnprepareOthersKept), func(t *trial) {
		v := t.sharedVolume()
		first, second := t.request(v), t.request(v)
		a, b := t.consumer(), t.consumer()
		t.perform(a, first, t.prepared(first))
		t.perform(b, second, t.prepared(second))
		text := t.nonce()
		t.put(b, text)
		t.sysfail("undoing what was performed", t.undoAt(a))
		t.unprepared(first)
		same, found := t.shows(b, text)
		t.want(requirement.UnprepareOthersKept, same, "what the consumer wrote before the other one went", "%s", found)
		t.put(b, strings.ToUpper(text))
		t.clear(b)
	})
}
