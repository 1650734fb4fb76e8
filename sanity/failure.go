package sanity

import (
	"fmt"
	"strings"

	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// failure is what a failed spec has to say. Its lines always stand in the
// same order, and none is left out.
type failure struct {
	requirement requirement.ID
	plugin      string
	call        string
	expected    string
	actual      string
	table       string // the difference of mount tables, a line for each change
	kernel      string // the kernel's own words about a system call that failed
	rerun       string
}

// String returns the message.
func (f failure) String() string {
	q, ok := requirement.Lookup(f.requirement)
	if !ok {
		q = requirement.Requirement{ID: f.requirement, Text: "(not in this version of SPEC.md)"}
	}
	var b strings.Builder
	fmt.Fprintf(&b, "[%s] %s   SPEC.md#%s   since %s\n", q.ID, q.Level, q.ID, orUnknown(q.Since))
	fmt.Fprintf(&b, "  %s\n", q.Text)
	for _, line := range []struct{ name, text string }{
		{"plugin", orUnknown(f.plugin)},
		{"call", orElse(f.call, "none")},
		{"expected", orUnknown(f.expected)},
		{"actual", orUnknown(f.actual)},
		{"table", orElse(f.table, "no change")},
		{"kernel", orElse(f.kernel, "no error")},
		{"known as", orElse(knownAs[f.requirement], "no known case")},
		{"rerun", f.rerun},
	} {
		text := strings.ReplaceAll(strings.TrimRight(line.text, "\n"), "\n", "\n            ")
		fmt.Fprintf(&b, "  %-9s %s\n", line.name, text)
	}
	return strings.TrimRight(b.String(), "\n")
}

func orElse(s, other string) string {
	if s == "" {
		return other
	}
	return s
}

func orUnknown(s string) string { return orElse(s, "unknown") }
