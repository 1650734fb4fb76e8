package main

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/descriptorpb"

	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

const checkout = "../../.."

func project(t *testing.T) *tree {
	t.Helper()
	tr, err := readTree(checkout)
	if err != nil {
		t.Fatal(err)
	}
	return tr
}

// TestProjectHasNoFaultAndNoDrift also sees that what is made here, from
// this directory and by this machine's Go, is what was committed.
func TestProjectHasNoFaultAndNoDrift(t *testing.T) {
	tr := project(t)
	files, faults, err := tr.derive(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range append(faults, tr.drift(files)...) {
		t.Error(f)
	}
	root, err := filepath.Abs(checkout)
	if err != nil {
		t.Fatal(err)
	}
	if len(files) != 7 {
		t.Errorf("%d files, want SPEC.md, the proto, the ids and two Go files a proto", len(files))
	}
	for _, f := range files {
		for _, word := range []string{root, "/pkg/mod/"} {
			if bytes.Contains(f.content, []byte(word)) {
				t.Errorf("%s names a place of this machine, %s", f.path, word)
			}
		}
	}
}

func TestRequirementTextIsItsLine(t *testing.T) {
	tr := project(t)
	if n := len(requirement.All()); n < 80 {
		t.Errorf("%d requirements, want 80 or more", n)
	}
	if len(tr.doc.requirements) != len(requirement.All()) {
		t.Fatalf("SPEC.md has %d requirements, the package %d", len(tr.doc.requirements), len(requirement.All()))
	}
	for i, r := range requirement.All() {
		line := tr.doc.lines[tr.doc.requirements[i].line-1]
		if want := `* <a id="` + string(r.ID) + `"></a>` + r.Text; line != want {
			t.Errorf("SPEC.md:%d:\n have %s\n want %s", tr.doc.requirements[i].line, line, want)
		}
		if r.Since == "" || r.Section == "" || !strings.Contains(r.Text, r.Level.String()) {
			t.Errorf("%s is not complete: %+v", r.ID, r)
		}
	}
}

// copyTree makes a checkout that a test may change.
func copyTree(t *testing.T, change func(spec string) string) string {
	t.Helper()
	root := t.TempDir()
	for _, path := range []string{
		specFile, retiredFile, acceptedProto, acceptedIDs, "go.mod", "go.sum",
		filepath.Join(protoDir, performerProto),
	} {
		b, err := os.ReadFile(filepath.Join(checkout, path))
		if err != nil {
			t.Fatal(err)
		}
		if path == specFile {
			was := string(b)
			b = []byte(change(was))
			if string(b) == was {
				t.Fatal("nothing was changed")
			}
		}
		write(t, filepath.Join(root, path), b)
	}
	return root
}

func write(t *testing.T, path string, b []byte) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
}

func command(t *testing.T, args ...string) (status int, out string) {
	t.Helper()
	var b bytes.Buffer
	status = run(t.Context(), args, &b, &b)
	return status, b.String()
}

func TestCheckReportsWhatIsWrong(t *testing.T) {
	t.Setenv("PATH", withoutNPM(t))
	for _, c := range []struct {
		name     string
		old, new string
		want     []string
	}{
		{
			"faulty proto", "string volume_id = 1;", "strong volume_id = 1;",
			[]string{"SPEC.md:", "strong"},
		},
		{
			"lost id", `<a id="undo.by-id"></a>The CO MUST undo`, "The CO undoes",
			[]string{"spec/accepted/ids.txt:", "undo.by-id is gone"},
		},
		{
			"drift", "string volume_id = 1;", "// Changed.\nstring volume_id = 1;",
			[]string{"spec/preparev1alpha1/prepare.pb.go: missing: run make generate", "SPEC.md: "},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			root := copyTree(t, func(s string) string { return strings.Replace(s, c.old, c.new, 1) })
			status, out := command(t, "check", "--root", root)
			if status != 1 {
				t.Errorf("status %d, want 1", status)
			}
			for _, want := range c.want {
				if !strings.Contains(out, want) {
					t.Errorf("no %q in:\n%s", want, out)
				}
			}
		})
	}
}

// withoutNPM is a PATH with the go command alone.
func withoutNPM(t *testing.T) string {
	t.Helper()
	out, err := goOutput(context.Background(), checkout, nil, "env", "GOROOT")
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Join(strings.TrimSpace(string(out)), "bin")
}

func TestWithoutNPMTheComparisonIsNotPassed(t *testing.T) {
	t.Setenv("PATH", withoutNPM(t))
	root := copyTree(t, func(s string) string { return s + "\n" })
	if status, out := command(t, "generate", "--root", root); status != 0 {
		t.Fatalf("generate: status %d:\n%s", status, out)
	}
	status, out := command(t, "check", "--root", root)
	if status != 0 || !strings.Contains(out, "breaking changes: COULD NOT RUN: npm") || strings.Contains(out, "none against") {
		t.Errorf("status %d, want 0 and a line that says so:\n%s", status, out)
	}
	if status, out = command(t, "check", "--complete", "--root", root); status != 1 {
		t.Errorf("--complete: status %d, want 1:\n%s", status, out)
	}
}

func TestGenerateRefusesAFaultyDocument(t *testing.T) {
	root := copyTree(t, func(s string) string { return "The CO MUST.\n" + s })
	status, out := command(t, "generate", "--root", root)
	if status != 1 || !strings.Contains(out, "SPEC.md:1: MUST without an id") {
		t.Errorf("status %d:\n%s", status, out)
	}
	if _, err := os.Stat(filepath.Join(root, idsFile)); err == nil {
		t.Error("ids.go was written")
	}
}

func TestUsageIsToldFromFaults(t *testing.T) {
	for _, args := range [][]string{{"nonsense"}, {"check", "--nonsense"}, {"check", "argument"}} {
		if status, out := command(t, args...); status != 2 {
			t.Errorf("%v: status %d, want 2:\n%s", args, status, out)
		}
	}
	if status, out := command(t, "check", "--root", t.TempDir()); status != 1 {
		t.Errorf("no SPEC.md: status %d, want 1:\n%s", status, out)
	}
}

func TestFindingsOfBufCarryTheLineOfSPEC(t *testing.T) {
	tr := &tree{doc: parse("text\n```protobuf\na\nb\n```\n", nil)}
	got, err := tr.bufFaults([]byte(`{"path":"csi/prepare/v1alpha1/prepare.proto","start_line":3,"type":"FIELD_NO_DELETE","message":"Previously present field \"1\" was deleted."}` + "\n"))
	if err != nil {
		t.Fatal(err)
	}
	want := []fault{{specFile, 4, `breaking change: Previously present field "1" was deleted. (FIELD_NO_DELETE); if it is meant, run speccheck accept`}}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(fault{})); diff != "" {
		t.Error(diff)
	}
	if _, err := tr.bufFaults([]byte("panic: no JSON\n")); err == nil {
		t.Error("what is no finding was taken for none")
	}
}

func TestImageHoldsTheImportsUnderUpstreamsNames(t *testing.T) {
	dir, err := csiDir(t.Context(), checkout)
	if err != nil {
		t.Fatal(err)
	}
	b, faults, err := image(t.Context(), dir, project(t).doc.protoText())
	if err != nil || len(faults) > 0 {
		t.Fatal(err, faults)
	}
	var set descriptorpb.FileDescriptorSet
	if err := proto.Unmarshal(b, &set); err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, f := range set.File {
		names = append(names, f.GetName())
	}
	want := []string{
		"google/protobuf/descriptor.proto", "google/protobuf/timestamp.proto", "google/protobuf/wrappers.proto",
		"csi.proto", "google/protobuf/any.proto", "csi/prepare/v1alpha1/prepare.proto",
	}
	if diff := cmp.Diff(want, names); diff != "" {
		t.Error(diff)
	}
}
