package main

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// sound is a document without a fault, of 10 lines.
const sound = "# Title\n" +
	"\n" +
	"## Undo `exactly`\n" +
	"* <a id=\"undo.by-id\"></a>The CO MUST undo by id, see `undo.path` of 6.8.\n" +
	"```protobuf\n" +
	"syntax = \"proto3\"; // REQUIRED here is no normative word\n" +
	"```\n" +
	tableBegin + "\n" +
	"| x | MUST |\n" +
	tableEnd + "\n"

func TestSoundDocumentHasNoFault(t *testing.T) {
	d := parse(sound, nil)
	if len(d.faults) > 0 {
		t.Fatalf("faults: %v", d.faults)
	}
	want := []anchored{{requirement.Requirement{
		ID: "undo.by-id", Level: requirement.Must, Actor: requirement.CO, Section: "Undo exactly",
		Text: "The CO MUST undo by id, see `undo.path` of 6.8.",
	}, 4}}
	if diff := cmp.Diff(want, d.requirements, cmp.AllowUnexported(anchored{})); diff != "" {
		t.Error(diff)
	}
}

func TestEachFaultIsFoundOnItsLine(t *testing.T) {
	retired := map[requirement.ID]int{"undo.lazily": 7}
	for _, c := range []struct {
		name, line string // put after line 4 of the sound document
		want       string
	}{
		{"no id", "The CO MUST undo.", "MUST without an id"},
		{"no id, other words", "This is OPTIONAL.", "OPTIONAL without an id"},
		{"two anchors", `<a id="a.b"></a>The CO MUST go. <a id="a.c"></a>The CO MUST stay.`, "two anchors in one line"},
		{"two words", `<a id="a.b"></a>The CO MUST go and SHOULD run.`, "two requirements in one line (MUST, SHOULD)"},
		{"two sentences", `<a id="a.b"></a>The CO MUST go. It runs.`, "exactly one sentence"},
		{"no full stop", `<a id="a.b"></a>The CO MUST go`, "exactly one sentence"},
		{"no word", `<a id="a.b"></a>The CO goes.`, "no word of RFC 2119"},
		{"a word in code only", "<a id=\"a.b\"></a>The CO says `MUST`.", "no word of RFC 2119"},
		{"SHALL", `<a id="a.b"></a>The CO SHALL go.`, "SHALL is not used here"},
		{"REQUIRED", `<a id="a.b"></a>The CO is REQUIRED to go.`, "REQUIRED is not used here"},
		{"no actor", `<a id="a.b"></a>It MUST go.`, "begins with its subject"},
		{"actor later", `<a id="a.b"></a>After a crash the CO MUST go.`, "begins with its subject"},
		{"duplicate", `<a id="undo.by-id"></a>The CO MUST go.`, "duplicate id undo.by-id: first on line 4"},
		{"retired", `<a id="undo.lazily"></a>The CO MUST go.`, "undo.lazily is retired (spec/retired.txt:7)"},
		{"one part", `<a id="undo"></a>The CO MUST go.`, `malformed id "undo"`},
		{"upper case", `<a id="undo.ByID"></a>The CO MUST go.`, `malformed id "undo.ByID"`},
		{"number", `<a id="undo.4"></a>The CO MUST go.`, `malformed id "undo.4"`},
		{"one Go name", `<a id="undo-by.id"></a>The CO MUST go.`, "undo.by-id and undo-by.id make one Go name, UndoByID"},
		{"anchor inside", `The CO MUST go. <a id="a.b"></a>`, "malformed anchor"},
		{"other anchor", `<a name="a.b"></a>The CO MUST go.`, "malformed anchor"},
		{"dangling link", "See [there](#nowhere).", "link to #nowhere"},
	} {
		t.Run(c.name, func(t *testing.T) {
			lines := strings.Split(sound, "\n")
			text := strings.Join(append(append(append([]string{}, lines[:4]...), c.line), lines[4:]...), "\n")
			d := parse(text, retired)
			if len(d.faults) != 1 {
				t.Fatalf("want one fault, got %v", d.faults)
			}
			if f := d.faults[0]; f.line != 5 || f.file != specFile || !strings.Contains(f.text, c.want) {
				t.Errorf("got %v, want %s:5 with %q", f, specFile, c.want)
			}
		})
	}
}

func TestEveryFaultIsReported(t *testing.T) {
	d := parse("The CO MUST a.\n\nThe CO MAY b.\n```protobuf\n"+strings.Repeat("x", 73)+"\n", nil)
	got := []string{}
	for _, f := range d.faults {
		got = append(got, fmt.Sprintf("%d %s", f.line, strings.Fields(f.text)[0]))
	}
	want := []string{"1 MUST", "3 MAY", "5 proto", "4 this", "0 no"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestProtoLineOfSeventyTwoColumnsIsAllowed(t *testing.T) {
	for columns, faults := range map[int]int{72: 0, 73: 1} {
		text := strings.Replace(sound, "syntax", "// "+strings.Repeat("é", columns-3)+"\nsyntax", 1)
		if d := parse(text, nil); len(d.faults) != faults {
			t.Errorf("%d columns: %v", columns, d.faults)
		}
	}
}

func TestFencesInOrderAreTheProto(t *testing.T) {
	d := parse("```protobuf\na\nb\n```\n```proto\nno\n```\ntext\n```protobuf\nc\n```\n"+tableBegin+"\n"+tableEnd+"\n", nil)
	if got, want := d.protoText(), protoHeader+"a\nb\n\nc\n"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	for protoLine, specLine := range map[int]int{1: 0, 2: 2, 3: 3, 5: 10, 6: 0} {
		if got := d.specLine(protoLine); got != specLine {
			t.Errorf("line %d of the proto is line %d of SPEC.md, want %d", protoLine, got, specLine)
		}
	}
}

func TestLevelAndActorComeFromTheSentence(t *testing.T) {
	for text, want := range map[string]requirement.Requirement{
		"The Plugin MUST go.":                 {Actor: requirement.SP, Level: requirement.Must},
		"A Plugin that runs MUST NOT go.":     {Actor: requirement.SP, Level: requirement.MustNot},
		"A CO SHOULD NOT go.":                 {Actor: requirement.CO, Level: requirement.ShouldNot},
		"The CO SHOULD tell the Plugin so.":   {Actor: requirement.CO, Level: requirement.Should},
		"The Plugin MAY answer what CO asks.": {Actor: requirement.SP, Level: requirement.May},
	} {
		d := parse("# S\n<a id=\"a.b\"></a>"+text+"\n"+tableBegin+"\n"+tableEnd+"\n", nil)
		if len(d.faults) > 0 || len(d.requirements) != 1 {
			t.Errorf("%s: %v", text, d.faults)
			continue
		}
		want.ID, want.Section, want.Text = "a.b", "S", text
		if diff := cmp.Diff(want, d.requirements[0].Requirement); diff != "" {
			t.Error(diff)
		}
	}
}

func TestConstantNames(t *testing.T) {
	for id, want := range map[requirement.ID]string{
		"undo.by-id":                 "UndoByID",
		"capabilities.rpc":           "CapabilitiesRPC",
		"security.secrets-sp":        "SecuritySecretsSP",
		"crash.co-boot-id":           "CrashCOBootID",
		"fuse.id":                    "FUSEID",
		"bind.mount-fs-type":         "BindMountFSType",
		"filesystem.no-idmap-words":  "FilesystemNoIDMapWords",
		"attributes.nosuid-nodev":    "AttributesNosuidNodev",
		"discovery.not-again":        "DiscoveryNotAgain",
		"prepare.prepare-id-missing": "PreparePrepareIDMissing",
	} {
		if got := constant(id); got != want {
			t.Errorf("%s: got %s, want %s", id, got, want)
		}
	}
}

func TestTableIsMadeFromTheRequirements(t *testing.T) {
	got := parse(sound, nil).withTable()
	for _, want := range []string{
		"1 requirements: 0 bind the Plugin, 1 bind the CO.",
		"| [undo.by-id](#undo.by-id) | MUST | CO | Undo exactly |",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in\n%s", want, got)
		}
	}
	if strings.Contains(got, "| x | MUST |") {
		t.Error("the old table was kept")
	}
	if again := parse(got, nil).withTable(); again != got {
		t.Error("made again, the table differs")
	}
}
