package vectors

import (
	"os"
	"strings"
	"testing"

	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

func TestAllAreReadable(t *testing.T) {
	all, err := All()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range all {
		if c.Description == "" || c.Request.Performer == nil {
			t.Errorf("%s: no description or no performer", c.Name)
		}
		if strings.HasPrefix(c.Name, "valid/") != (len(c.Expect) == 0) {
			t.Errorf("%s: %d violations expected in this directory", c.Name, len(c.Expect))
		}
		for _, e := range c.Expect {
			if r, known := requirement.Lookup(e.Requirement); !known || r.Actor != requirement.SP {
				t.Errorf("%s: %q is no requirement of the Plugin", c.Name, e.Requirement)
			}
			if e.Index < -1 || e.Index >= len(c.MountSpecs) {
				t.Errorf("%s: no mount_specs[%d]", c.Name, e.Index)
			}
		}
	}
	if len(all) < 200 {
		t.Errorf("only %d cases", len(all))
	}
}

// TestTheExampleIsACase keeps README.md true.
func TestTheExampleIsACase(t *testing.T) {
	text, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(text), "```json\n")
	example, _, found := strings.Cut(rest, "```")
	if !found {
		t.Fatal("no example")
	}
	c, err := parse([]byte(example))
	if err != nil {
		t.Fatal(err)
	}
	if len(c.MountSpecs) != 1 || len(c.Expect) != 1 || c.Expect[0].Requirement != requirement.BindGrantOffered {
		t.Errorf("read as %+v", c)
	}
}

func TestParseIsStrict(t *testing.T) {
	for name, text := range map[string]string{
		"misspelt name":     `{"request":{"performer":{}},"mount_spec":[],"expect":[]}`,
		"misspelt request":  `{"request":{"performer":{},"read_only":true},"mount_specs":[]}`,
		"misspelt field":    `{"request":{"performer":{}},"mount_specs":[{"targets":"a"}]}`,
		"no specs":          `{"request":{"performer":{}}}`,
		"specs twice":       `{"request":{"performer":{}},"mount_specs":[],"mount_specs_wire":[]}`,
		"no performer":      `{"request":{},"mount_specs":[]}`,
		"wire not base64":   `{"request":{"performer":{}},"mount_specs_wire":["*"]}`,
		"wire no message":   `{"request":{"performer":{}},"mount_specs_wire":["/w=="]}`,
		"unknown enum word": `{"request":{"performer":{"kernel":"NODES"}},"mount_specs":[]}`,
	} {
		if _, err := parse([]byte(text)); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}
