package wire

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/csi-prepare/csi-prepare/reference/mountspec"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
	"github.com/csi-prepare/csi-prepare/spec/vectors"
)

func allVectors(tb testing.TB) []vectors.Case {
	tb.Helper()
	all, err := vectors.All()
	if err != nil {
		tb.Fatal(err)
	}
	return all
}

func request(r vectors.Request) mountspec.Request {
	return mountspec.Request{
		Performer: PerformerFromProto(r.Performer),
		Readonly:  r.Readonly,
		Block:     r.Block,
		Staging:   r.Staging,
	}
}

// sorted makes a multiset comparable.
func sorted(all []string) string {
	slices.Sort(all)
	return strings.Join(all, "\n")
}

func TestVectors(t *testing.T) {
	for _, c := range allVectors(t) {
		t.Run(c.Name, func(t *testing.T) {
			specs, found := Validate(c.MountSpecs, request(c.Request))
			var got, want []string
			for _, v := range found {
				got = append(got, strings.Join([]string{strconv.Itoa(v.Index), string(v.Requirement), v.Field}, " "))
			}
			for _, e := range c.Expect {
				want = append(want, strings.Join([]string{strconv.Itoa(e.Index), string(e.Requirement), e.Field}, " "))
			}
			if diff := cmp.Diff(sorted(want), sorted(got)); diff != "" {
				t.Errorf("%s\nviolations (-want +got):\n%s\n%v", c.Description, diff, found)
			}
			if !slices.IsSortedFunc(found, func(a, b mountspec.Violation) int { return a.Index - b.Index }) {
				t.Errorf("violations out of order: %v", found)
			}
			if strings.HasPrefix(c.Name, "valid/") != (len(found) == 0) {
				t.Errorf("%d violations of a case in this directory", len(found))
			}
			if len(found) == 0 {
				if diff := cmp.Diff(c.MountSpecs, Proto(specs), protocmp.Transform()); diff != "" {
					t.Errorf("Proto gives back something else (-sent +got):\n%s", diff)
				}
			}
		})
	}
}

// TestEveryRuleHasAnInvalidVector takes the rules from the source: whatever
// requirement it names, it can report.
func TestEveryRuleHasAnInvalidVector(t *testing.T) {
	expected := make(map[requirement.ID]bool)
	for _, c := range allVectors(t) {
		for _, e := range c.Expect {
			if _, known := requirement.Lookup(e.Requirement); !known {
				t.Errorf("%s: no requirement %q", c.Name, e.Requirement)
			}
			expected[e.Requirement] = true
		}
	}
	names := constants(t)
	reported := 0
	for _, pattern := range []string{"../*.go", "*.go"} {
		for name := range requirementsNamed(t, pattern) {
			id, known := names[name]
			if !known {
				continue // the type ID, not a constant
			}
			reported++
			if !expected[id] {
				t.Errorf("no invalid vector for %s", id)
			}
		}
	}
	if reported < 30 {
		t.Errorf("only %d rules found in the source", reported)
	}
}

// constants maps the names of the ID constants to the IDs.
func constants(t *testing.T) map[string]requirement.ID {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), "../../../spec/requirement/ids.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	all := make(map[string]requirement.ID)
	ast.Inspect(file, func(n ast.Node) bool {
		spec, ok := n.(*ast.ValueSpec)
		if !ok || len(spec.Values) != 1 {
			return true
		}
		if lit, ok := spec.Values[0].(*ast.BasicLit); ok && lit.Kind == token.STRING {
			id, err := strconv.Unquote(lit.Value)
			if err != nil {
				t.Fatal(err)
			}
			all[spec.Names[0].Name] = requirement.ID(id)
		}
		return true
	})
	return all
}

// requirementsNamed is the set of X in requirement.X of the files that match,
// tests excepted.
func requirementsNamed(t *testing.T, pattern string) map[string]bool {
	t.Helper()
	files, err := filepath.Glob(pattern)
	if err != nil {
		t.Fatal(err)
	}
	named := make(map[string]bool)
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(file, func(n ast.Node) bool {
			if sel, ok := n.(*ast.SelectorExpr); ok {
				if pkg, ok := sel.X.(*ast.Ident); ok && pkg.Name == "requirement" {
					named[sel.Sel.Name] = true
				}
			}
			return true
		})
	}
	return named
}
