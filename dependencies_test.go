package csiprepare_test

import (
	"os/exec"
	"strings"
	"testing"
)

const module = "github.com/csi-prepare/csi-prepare/"

// TestDependencyDirection holds the packages to the direction of
// docs/design.md through everything they import, also indirectly: the linter
// sees direct imports only.
func TestDependencyDirection(t *testing.T) {
	for _, rule := range []struct {
		pkg     string
		without []string // import paths or prefixes that must not be reached
		reason  string
	}{
		{
			"spec/requirement",
			[]string{module, "google.golang.org/", "golang.org/x/sys"},
			"ids are data",
		},
		{
			"reference/mountspec",
			[]string{module + "reference/", "google.golang.org/", "golang.org/x/sys"},
			"mount specs are pure and run on any system",
		},
		{
			"reference/kernel",
			[]string{module},
			"kernel is a leaf",
		},
		{
			"reference/mountns",
			[]string{module + "reference/perform", module + "spec", "google.golang.org/"},
			"mountns knows mounts, not mount specs",
		},
		{
			"reference/perform",
			[]string{"google.golang.org/", module + "spec/preparev1alpha1", module + "reference/mountspec/wire"},
			"a runtime takes the executor without gRPC",
		},
		{
			"drivers/...",
			[]string{module + "reference/perform", module + "reference/co", module + "sanity", module + "fakes"},
			"a reference driver that could perform would disprove the point",
		},
	} {
		t.Run(rule.pkg, func(t *testing.T) {
			list := exec.CommandContext(t.Context(), "go", "list", "-deps", "./"+rule.pkg)
			list.Env = append(list.Environ(), "GOOS=linux", "GOFLAGS=-buildvcs=false")
			out, err := list.Output()
			if err != nil {
				t.Fatalf("go list: %v", err)
			}
			self := strings.TrimSuffix(module+rule.pkg, "/...")
			for dep := range strings.FieldsSeq(string(out)) {
				if dep == self || strings.HasPrefix(dep, self+"/") {
					continue
				}
				for _, forbidden := range rule.without {
					if strings.HasPrefix(dep, forbidden) && !allowed(rule.pkg, dep) {
						t.Errorf("%s reaches %s: %s", rule.pkg, dep, rule.reason)
					}
				}
			}
		})
	}
}

// allowed names the one exception to a prefix: the requirement ids are part
// of what mountspec says.
func allowed(pkg, dep string) bool {
	return pkg == "reference/mountspec" && dep == module+"spec/requirement"
}

// TestPeersStayOut sees that the modules this project is measured against
// never reach its users.
func TestPeersStayOut(t *testing.T) {
	out, err := exec.CommandContext(t.Context(), "go", "list", "-m", "all").Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	for line := range strings.Lines(string(out)) {
		name, _, _ := strings.Cut(strings.TrimSpace(line), " ")
		switch name {
		case "k8s.io/mount-utils", "github.com/containerd/containerd/v2", "github.com/moby/sys/mount":
			t.Errorf("go.mod brings %s, which belongs in a nested module", name)
		}
	}
}
