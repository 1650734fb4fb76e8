package mountspec

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// everything offers all that a performer can.
func everything() Request {
	return Request{
		Performer: Performer{
			Kinds: []KindName{
				KindFilesystem, KindBind, KindBlockDevice, KindHandle, KindFUSE, KindExtension,
			},
			FSTypes:    []string{"ext4", "tmpfs", "nfs4", "cifs", "overlay"},
			Extensions: []string{"example.com/a"},
			Grants:     []string{"scratch"},
		},
		Staging: true,
	}
}

// lines renders violations for comparison; index, id and field, one a line.
func lines(all []Violation) string {
	var b strings.Builder
	for _, v := range all {
		fmt.Fprintf(&b, "%d %s %s\n", v.Index, v.Requirement, v.Field)
	}
	return b.String()
}

// TestValidateAllocatesNothingWithoutViolation guards the path every
// performance takes.
func TestValidateAllocatesNothingWithoutViolation(t *testing.T) {
	for _, tc := range []struct {
		name  string
		specs []Spec
	}{
		{"bind", []Spec{{Kind: &Bind{Source: PathRef{Base: BaseGranted, Grant: "scratch", Relative: "v/1"}}}}},
		{"one of each", []Spec{
			{Kind: &Filesystem{
				Type:       "ext4",
				Device:     &BlockDevice{Major: 8, Minor: 16, Diskseq: 9, DevicePath: "/dev/sdb"},
				Parameters: []Parameter{{Key: "discard"}, {Key: "errors", Text: "remount-ro"}},
			}},
			{Target: "nfs", Kind: &Filesystem{
				Type: "nfs4", Source: "[2001:db8::1]:/v", Parameters: []Parameter{{Key: "addr", Text: "2001:db8::1"}, {Key: "vers", Text: "4.2"}},
			}},
			{Target: "cifs", Kind: &Filesystem{
				Type: "cifs", Source: "//192.0.2.1/v",
				Parameters: []Parameter{{Key: "ip", Text: "192.0.2.1"}, {Key: "password", Secret: NewSecret("s")}},
			}},
			{Target: "bind", Kind: &Bind{Source: PathRef{Base: BaseStaging, Relative: "a/b"}, MountFSType: "ext4"}},
			{Target: "handle", Kind: &Handle{ID: "h1", FSType: "overlay"}},
			{Target: "fuse", Kind: &FUSE{ID: "f1"}},
			{Target: "fuse/x", Kind: &Extension{TypeURL: "example.com/a"}},
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			req := everything()
			if got := Validate(tc.specs, req); got != nil {
				t.Fatalf("violations:\n%v", got)
			}
			if n := testing.AllocsPerRun(100, func() { Validate(tc.specs, req) }); n != 0 {
				t.Errorf("%v allocations, want none", n)
			}
		})
	}
}

// TestValidateRefusesValuesTheWireCannotHold covers what only Go code can
// make; the vectors cover the rest.
func TestValidateRefusesValuesTheWireCannotHold(t *testing.T) {
	for _, tc := range []struct {
		name string
		spec Spec
		want string
	}{
		{"no kind", Spec{}, "0 spec.kind-set \n"},
		{"nil filesystem", Spec{Kind: (*Filesystem)(nil)}, "0 spec.kind-set \n"},
		{"nil bind", Spec{Kind: (*Bind)(nil)}, "0 spec.kind-set \n"},
		{"nil device", Spec{Kind: (*BlockDevice)(nil)}, "0 spec.kind-set \n"},
		{"nil handle", Spec{Kind: (*Handle)(nil)}, "0 spec.kind-set \n"},
		{"nil FUSE", Spec{Kind: (*FUSE)(nil)}, "0 spec.kind-set \n"},
		{"nil extension", Spec{Kind: (*Extension)(nil)}, "0 spec.kind-set \n"},
		{
			"kind of a stranger",
			Spec{Kind: struct{ Kind }{&FUSE{ID: "f"}}},
			"0 spec.kind-set \n",
		},
		{
			"undefined atime",
			Spec{Kind: &FUSE{ID: "f"}, Attributes: Attributes{Atime: 9}},
			"0 spec.no-unknown-fields attributes.atime\n",
		},
		{
			"undefined base",
			Spec{Kind: &Bind{Source: PathRef{Base: 9}}},
			"0 bind.base-known bind.source.base\n",
		},
		{
			"text and secret",
			Spec{Kind: &Filesystem{
				Type: "tmpfs", Parameters: []Parameter{{Key: "size", Text: "1", Secret: NewSecret("2")}},
			}},
			"0 filesystem.parameter-value filesystem.parameters[0].text\n",
		},
		{
			"two sources",
			Spec{Kind: &Filesystem{
				Type: "tmpfs", Source: "none", Device: &BlockDevice{Major: 8},
			}},
			"0 filesystem.source-no-path filesystem.opaque\n",
		},
		{
			"invalid UTF-8 in every text of a bind",
			Spec{
				Kind: &Bind{
					Source:      PathRef{Base: BaseGranted, Relative: "a\xff", Grant: "scratch\xff"},
					MountFSType: "\xff",
				},
			},
			"0 bind.grant-offered bind.source.grant\n0 spec.text bind.source.grant\n" +
				"0 spec.text bind.source.relative\n0 spec.text bind.mount_fs_type\n",
		},
		{
			"invalid UTF-8 in every text of a filesystem",
			Spec{
				Kind: &Filesystem{
					Type: "tmpfs\xff", Source: "\xff", Parameters: []Parameter{
						{Key: "a\xff"}, {Key: "b", Text: "\xff"}, {Key: "c", Secret: NewSecret("\xff")},
					},
				},
			},
			"0 spec.text filesystem.fs_type\n0 filesystem.type-charset filesystem.fs_type\n" +
				"0 filesystem.type-offered filesystem.fs_type\n0 spec.text filesystem.opaque\n" +
				"0 spec.text filesystem.parameters[0].key\n0 filesystem.parameter-key filesystem.parameters[0].key\n" +
				"0 spec.text filesystem.parameters[1].text\n0 spec.text filesystem.parameters[2].secret\n",
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got := Validate([]Spec{tc.spec}, everything())
			if diff := cmp.Diff(tc.want, lines(got)); diff != "" {
				t.Errorf("violations (-want +got):\n%s", diff)
			}
		})
	}
}

func TestValidateReportsAllInOrder(t *testing.T) {
	req := everything()
	req.Readonly, req.Block = true, true
	req.Performer.OtherKernel = true
	specs := []Spec{
		{Target: "a/b", Kind: &Handle{}},
		{Target: "a", Kind: &Bind{}, Attributes: Attributes{Readonly: true}},
	}
	const want = `-1 spec.block-volume 
0 spec.first-target target
0 spec.block-volume handle
0 prepare.other-kernel handle
0 handle.id handle.handle_id
0 handle.fs-type handle.fs_type
0 prepare.readonly attributes.readonly
1 spec.target-order target
1 spec.block-volume bind
1 prepare.other-kernel bind
1 bind.base-known bind.source.base
`
	for range 5 {
		if diff := cmp.Diff(want, lines(Validate(specs, req))); diff != "" {
			t.Fatalf("violations (-want +got):\n%s", diff)
		}
	}
}

// TestValidateIsBounded lets a hostile Plugin send a great deal.
func TestValidateIsBounded(t *testing.T) {
	specs := make([]Spec, 100_000)
	bad := Spec{Target: strings.Repeat("/", 1000), Kind: &Extension{TypeURL: strings.Repeat("x", 1000)}}
	for i := range specs {
		specs[i] = bad
	}
	found := Validate(specs, everything())
	if found[0].Requirement != requirement.SpecCount {
		t.Errorf("first violation %v, want %v", found[0], requirement.SpecCount)
	}
	if last := found[len(found)-1].Index; last != MaxSpecs-1 {
		t.Errorf("last violation is of mount_specs[%d], want %d", last, MaxSpecs-1)
	}
	for _, v := range found {
		if len(v.Detail) > 300 {
			t.Errorf("detail of %d bytes: %s", len(v.Detail), v.Detail)
		}
	}

	many := make([]Parameter, 100_000)
	for i := range many {
		many[i].Key = fmt.Sprintf("k%d", i)
	}
	many[len(many)-1].Key = "ro" // never reached, and the list is refused
	found = Validate([]Spec{{Kind: &Filesystem{Type: "tmpfs", Parameters: many}}}, everything())
	if diff := cmp.Diff("0 filesystem.parameters-length filesystem.parameters\n", lines(found)); diff != "" {
		t.Errorf("violations (-want +got):\n%s", diff)
	}
}

// TestDetailsHoldNoValue puts a canary wherever a value or a secret may
// stand, and into keys after '='.
func TestDetailsHoldNoValue(t *testing.T) {
	const canary = "hunter2"
	var all []Parameter
	for _, tail := range []string{"", ",ro", "\x00", "\n", "\xff", strings.Repeat("x", 300)} {
		n := len(all)
		all = append(all,
			Parameter{Key: fmt.Sprintf("k%d", n), Text: canary + tail},
			Parameter{Key: fmt.Sprintf("k%d", n+1), Secret: NewSecret(canary + tail)},
			Parameter{Key: "password=" + canary + tail},
			Parameter{Key: "addr", Text: canary + tail},
			Parameter{Key: "subvol", Text: "../" + canary},
			Parameter{Key: "x-" + "secret=" + canary},
		)
	}
	found := Validate([]Spec{{Kind: &Filesystem{Type: "nfs4", Source: "a:/b", Parameters: all}}}, everything())
	if len(found) < len(all) {
		t.Fatalf("%d violations for %d bad parameters", len(found), len(all))
	}
	for _, v := range found {
		if strings.Contains(v.Error(), canary) {
			t.Errorf("shows a value: %v", v)
		}
		if v.Detail == "" || v.Requirement == "" {
			t.Errorf("says too little: %+v", v)
		}
	}
}

func TestViolationNamesIndexFieldRuleAndRemedy(t *testing.T) {
	found := Validate([]Spec{{Target: "../etc", Kind: &FUSE{ID: "f"}}}, everything())
	const want = `mount_specs[0].target: "../etc": the first mount spec goes to the place itself and has an empty target [spec.first-target]
mount_specs[0].target: "../etc" has the component "..": give plain names separated by single '/' [spec.target-relative]`
	got := make([]string, len(found))
	for i, v := range found {
		got[i] = v.Error()
	}
	if diff := cmp.Diff(want, strings.Join(got, "\n")); diff != "" {
		t.Errorf("errors (-want +got):\n%s", diff)
	}
}

// TestForbiddenListsAreDisjoint keeps one reason for each word, and keeps a
// type from being both forbidden and known.
func TestForbiddenListsAreDisjoint(t *testing.T) {
	seen := make(map[string]bool)
	for _, list := range wordLists {
		if list.rule == "" || list.reason == "" || list.instead == "" {
			t.Errorf("list %q says no reason", list.words)
		}
		for w := range strings.FieldsSeq(list.words) {
			if seen[w] {
				t.Errorf("%q is in two lists", w)
			}
			seen[w] = true
		}
	}
	for _, known := range deviceTypes {
		if _, no := forbiddenTypes[known]; no {
			t.Errorf("%q is forbidden and a type of devices", known)
		}
	}
}
