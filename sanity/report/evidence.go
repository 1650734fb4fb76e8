package report

import (
	"fmt"
	"strings"

	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// Evidence is what a failed spec has to show: one thing that does not hold.
type Evidence struct {
	// Requirement is the one that does not hold.
	Requirement requirement.ID `json:"requirement"`
	// Plugin is who was tested, with its process and mount namespace.
	Plugin   string `json:"plugin"`
	Call     string `json:"call"`
	Expected string `json:"expected"`
	Actual   string `json:"actual"`
	// Table is how mount tables differ, a line for each change: "+ " for what
	// is new, "- " for what is gone, "~ " for what has changed.
	Table []string `json:"table"`
	// Kernel is what the kernel said to a system call that failed.
	Kernel string `json:"kernel,omitempty"`
	// KnownAs is a public report of what the fault has done to users.
	KnownAs string `json:"knownAs,omitempty"`
	// Rerun is the command that runs the spec again.
	Rerun string `json:"rerun"`
	// ByHand are shell commands that make the last calls of the spec without
	// the suite. Secrets are left out of them.
	ByHand []string `json:"byHand,omitempty"`
	// Calls are the last calls of the spec, the oldest first.
	Calls []string `json:"calls,omitempty"`
}

// String is the failure message. Its lines always stand in the same order, and
// none is left out but those by hand, which not every seat has.
func (e Evidence) String() string {
	q, ok := requirement.Lookup(e.Requirement)
	if !ok {
		q = requirement.Requirement{ID: e.Requirement, Text: "(not in this version of SPEC.md)"}
	}
	var b strings.Builder
	fmt.Fprintf(&b, "[%s] %s   SPEC.md#%s   since %s\n", q.ID, q.Level, q.ID, orElse(q.Since, "unknown"))
	fmt.Fprintf(&b, "  %s\n", q.Text)
	line := func(name, text string) {
		text = strings.ReplaceAll(strings.TrimRight(text, "\n"), "\n", "\n            ")
		fmt.Fprintf(&b, "  %-9s %s\n", name, text)
	}
	line("plugin", orElse(e.Plugin, "unknown"))
	line("call", orElse(e.Call, "none"))
	line("expected", orElse(e.Expected, "unknown"))
	line("actual", orElse(e.Actual, "unknown"))
	line("table", orElse(strings.Join(e.Table, "\n"), "no change"))
	line("kernel", orElse(e.Kernel, "no error"))
	line("known as", orElse(e.KnownAs, "no known case"))
	line("rerun", e.Rerun)
	if len(e.ByHand) > 0 {
		line("by hand", strings.Join(e.ByHand, "\n"))
	}
	return strings.TrimRight(b.String(), "\n")
}

// Each replaces every text of the evidence by what change makes of it.
func (e *Evidence) Each(change func(string) string) {
	for _, s := range []*string{&e.Plugin, &e.Call, &e.Expected, &e.Actual, &e.Kernel, &e.Rerun} {
		*s = change(*s)
	}
	for _, list := range [][]string{e.Table, e.ByHand, e.Calls} {
		for i := range list {
			list[i] = change(list[i])
		}
	}
}

func orElse(s, other string) string {
	if s == "" {
		return other
	}
	return s
}
