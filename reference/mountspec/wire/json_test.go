package wire

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"
)

func TestUnmarshalIsStrictAndShowsNoValue(t *testing.T) {
	for _, tc := range []struct{ name, in, want string }{
		{"no array", `{"target":"hunter2"}`, "mount specs: not a JSON array of messages"},
		{"the word null", `null`, "mount specs: not a JSON array of messages"},
		{"not JSON", `[{"target":]`, "mount specs: not a JSON array of messages (at byte 12)"},
		{"more after it", `[] []`, "mount specs: not a JSON array of messages (at byte 4)"},
		{"unknown field", `[{},{"bogus":"hunter2"}]`, `mount_specs[1]: unknown field "bogus" (line 1:2)`},
		{"field twice", `[{"target":"hunter2","target":"b"}]`, `mount_specs[0]: duplicate field "target" (line 1:21)`},
		{
			"two arms", `[{"bind":{},"fuse":{}}]`,
			`mount_specs[0]: error parsing "fuse", oneof csi.prepare.v1alpha1.MountSpec.kind is already set (line 1:12)`,
		},
		{
			"number as a secret", `[{"filesystem":{"parameters":[{"key":"p","secret":31337}]}}]`,
			`mount_specs[0]: invalid value for string field secret (line 1:50)`,
		},
		{
			"unknown word of an enum", `[{"bind":{"source":{"base":"hunter2"}}}]`,
			`mount_specs[0]: invalid value for enum field base (line 1:27)`,
		},
		{
			"a secret that looks like an error", `[{"filesystem":{"parameters":[{"key":"p","secret":["unknown field "]}]}}]`,
			`mount_specs[0]: invalid value for string field secret (line 1:50)`,
		},
		{
			"an extension this program does not know", `[{"extension":{"@type":"example.com/z"}}]`,
			`mount_specs[0]: unable to resolve "example.com/z" (line 1:23)`,
		},
		{"no message", `[null]`, "mount_specs[0]: not a mount spec in protojson (line 1:1)"},
		{"broken escape", `[{"target":"\ud800"}]`, "mount_specs[0]: not a mount spec in protojson"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := Unmarshal([]byte(tc.in))
			if err == nil {
				t.Fatal("accepted")
			}
			// protojson varies the blanks of its errors.
			if got := strings.ReplaceAll(err.Error(), "\u00a0", " "); got != tc.want {
				t.Errorf("error is\n%s\nwant\n%s", got, tc.want)
			}
		})
	}
}

func TestMarshalWritesWhatUnmarshalReads(t *testing.T) {
	const text = `[
  {
    "bind": {
      "source": {
        "base": "GRANTED",
        "relative": "volumes/v1",
        "grant": "scratch"
      }
    },
    "attributes": {
      "readonly": true
    }
  },
  {
    "target": "a\u003cb",
    "filesystem": {
      "fs_type": "tmpfs",
      "parameters": [
        {
          "key": "size",
          "text": "1m"
        }
      ]
    }
  }
]
`
	msgs, err := Unmarshal([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	out, err := Marshal(msgs)
	if err != nil {
		t.Fatal(err)
	}
	again, err := Unmarshal(out)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(msgs, again, protocmp.Transform()); diff != "" {
		t.Errorf("changed on the way (-read +written):\n%s", diff)
	}
	for range 20 {
		same, err := Marshal(msgs)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(string(out), string(same)); diff != "" {
			t.Fatalf("not the same text each time:\n%s", diff)
		}
	}
	if !strings.HasPrefix(string(out), text[:30]) {
		t.Errorf("not indented by two blanks:\n%s", out)
	}
}

func TestMarshalRefusesSecrets(t *testing.T) {
	msgs, err := Unmarshal([]byte(`[{},{"filesystem":{"parameters":[{"key":"sec"},{"key":"password","secret":"hunter2"}]}}]`))
	if err != nil {
		t.Fatal(err)
	}
	out, err := Marshal(msgs)
	if err == nil {
		t.Fatalf("written:\n%s", out)
	}
	if got := err.Error(); !strings.HasPrefix(got, "mount_specs[1].filesystem.parameters[1].secret: ") || strings.Contains(got, "hunter2") {
		t.Error(got)
	}
}
