package co

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// packageFiles parses the files of this package, tests or not.
func packageFiles(t *testing.T, dir string, tests bool) (files []*ast.File) {
	t.Helper()
	names, err := filepath.Glob(dir + "/*.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") != tests {
			continue
		}
		f, err := parser.ParseFile(token.NewFileSet(), name, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, f)
	}
	return files
}

// TestRulesHaveTests holds the page that lists what this package keeps to
// against its tests and SPEC.md.
func TestRulesHaveTests(t *testing.T) {
	page, err := os.ReadFile("../../docs/reference-co.md")
	if err != nil {
		t.Fatal(err)
	}
	tests := map[string]bool{}
	for _, f := range packageFiles(t, ".", true) {
		for _, d := range f.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok && fn.Recv == nil {
				tests[fn.Name.Name] = true
			}
		}
	}
	named := regexp.MustCompile("`(Test[A-Za-z0-9]+)`").FindAllStringSubmatch(string(page), -1)
	for _, m := range named {
		if !tests[m[1]] {
			t.Errorf("the page names %s, which is no test", m[1])
		}
	}
	for n := 1; n <= 14; n++ {
		if !regexp.MustCompile(`\| ` + strconv.Itoa(n) + " \\|.*`TestRule" + strconv.Itoa(n) + "[A-Z]").Match(page) {
			t.Errorf("rule %d has no test on the page", n)
		}
	}
	for _, m := range regexp.MustCompile("`([a-z]+\\.[a-z-]+)`").FindAllStringSubmatch(string(page), -1) {
		if _, found := requirement.Lookup(requirement.ID(m[1])); !found {
			t.Errorf("the page names %s, which is no sentence of SPEC.md", m[1])
		}
	}
}

// TestPolicyIsDocumented holds the page about the policy against its fields.
func TestPolicyIsDocumented(t *testing.T) {
	page, err := os.ReadFile("../../docs/policy.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range packageFiles(t, ".", false) {
		ast.Inspect(f, func(n ast.Node) bool {
			spec, ok := n.(*ast.TypeSpec)
			if !ok || spec.Name.Name != "Settings" {
				return true
			}
			for _, field := range spec.Type.(*ast.StructType).Fields.List {
				name := strings.TrimSuffix(strings.TrimPrefix(field.Tag.Value, "`json:\""), "\"`")
				if !strings.Contains(string(page), "`"+name+"`") {
					t.Errorf("field %s is not on the page", name)
				}
			}
			return false
		})
	}
	example := regexp.MustCompile("(?s)```yaml\n(.*?)```").FindStringSubmatch(string(page))
	if example == nil {
		t.Fatal("the page has no example")
	}
	if _, err := ParsePolicy([]byte(example[1])); err != nil {
		t.Errorf("the example: %v", err)
	}
}

// TestNoProgramIsStarted sees that whoever acts on a plugin's text starts no
// program but itself.
func TestNoProgramIsStarted(t *testing.T) {
	for _, dir := range []string{".", "../perform", "../mountns", "../kernel", "../handoff", "../fusemount", "../master"} {
		for _, f := range packageFiles(t, dir, false) {
			ast.Inspect(f, func(n ast.Node) bool {
				var program ast.Expr
				switch n := n.(type) {
				case *ast.CallExpr:
					if s, ok := n.Fun.(*ast.SelectorExpr); ok && (s.Sel.Name == "Command" || s.Sel.Name == "CommandContext" || s.Sel.Name == "StartProcess" || s.Sel.Name == "ForkExec") {
						program = n.Args[0]
					}
				case *ast.CompositeLit:
					if s, ok := n.Type.(*ast.SelectorExpr); ok && s.Sel.Name == "Cmd" {
						for _, e := range n.Elts {
							if kv := e.(*ast.KeyValueExpr); kv.Key.(*ast.Ident).Name == "Path" {
								program = kv.Value
							}
						}
					}
				}
				if program == nil {
					return true
				}
				if lit, ok := program.(*ast.BasicLit); !ok || lit.Value != `"/proc/self/exe"` {
					t.Errorf("%s: package %s starts a program", dir, f.Name.Name)
				}
				return true
			})
		}
	}
}
