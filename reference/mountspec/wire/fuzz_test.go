package wire

import (
	"reflect"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/csi-prepare/csi-prepare/reference/mountspec"
	"github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// FuzzFromProtoValidate takes an answer as it comes from a socket. Whatever
// it holds, validating it does not panic and reports only what is a requirement
// of the Plugin; and what it accepts means the same after another journey.
func FuzzFromProtoValidate(f *testing.F) {
	var offered mountspec.Performer
	for _, c := range allVectors(f) {
		data, err := proto.Marshal(&preparev1alpha1.NodePrepareVolumeResponse{MountSpecs: c.MountSpecs})
		if err != nil {
			f.Fatal(err)
		}
		if len(data) > 16<<10 {
			continue // long lists teach the fuzzer nothing and slow it down
		}
		f.Add(data, c.Request.Readonly, c.Request.Block, c.Request.Staging)
		p := PerformerFromProto(c.Request.Performer)
		if strings.HasPrefix(c.Name, "valid/") && len(p.Kinds) >= len(offered.Kinds) {
			extensions := append(offered.Extensions, p.Extensions...)
			offered = p
			offered.OtherKernel, offered.Extensions = false, extensions
		}
	}
	f.Fuzz(func(t *testing.T, data []byte, readonly, block, staging bool) {
		answer := new(preparev1alpha1.NodePrepareVolumeResponse)
		if proto.Unmarshal(data, answer) != nil {
			t.Skip("not a message")
		}
		req := mountspec.Request{Performer: offered, Readonly: readonly, Block: block, Staging: staging}
		specs, found := Validate(answer.MountSpecs, req)
		for _, v := range found {
			r, known := requirement.Lookup(v.Requirement)
			if !known || r.Actor != requirement.SP {
				t.Errorf("%v: not a requirement of the Plugin", v)
			}
		}
		if len(found) > 0 {
			return
		}
		again, found := Validate(Proto(specs), req)
		if len(found) > 0 {
			t.Errorf("accepted at first, then: %v", found)
		}
		if !reflect.DeepEqual(specs, again) {
			t.Errorf("specs changed on the way:\n%#v\n%#v", specs, again)
		}
	})
}
