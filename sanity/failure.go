package sanity

import (
	"fmt"
	"strings"

	"github.com/csi-prepare/csi-prepare/sanity/report"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// The most calls a failure shows, and gives commands for.
const (
	mostCalls  = 12
	mostByHand = 6
)

// failed is the end of a spec that found something that does not hold. The
// table is how mount tables differ, a line for each change.
func (t *trial) failed(id requirement.ID, call, expected, actual, table string) *ending {
	e := &report.Evidence{
		Requirement: id, Plugin: t.whom(), Call: call,
		Expected: expected, Actual: actual, Table: lines(table), Kernel: t.kernel, KnownAs: knownAs[id],
		Rerun:  fmt.Sprintf("%s --id %s --seed %d", t.config.Rerun, id, t.config.Seed),
		ByHand: t.byHand(), Calls: t.journal.lines(mostCalls),
	}
	return &ending{outcome: report.Failed, breaks: id, message: e.String(), evidence: e}
}

func lines(text string) []string {
	if text = strings.TrimRight(text, "\n"); text == "" {
		return nil
	}
	return strings.Split(text, "\n")
}

// byHand are commands that make the last calls of the spec again. Directories
// of the spec are made first, since they go with it.
func (t *trial) byHand() []string {
	if t.actor != requirement.SP {
		return nil // a namespace of a spec that has ended cannot be named
	}
	commands := t.journal.commands(mostByHand)
	if len(commands) == 0 {
		return nil
	}
	var made []string
	for _, dir := range t.directories {
		if strings.Contains(strings.Join(commands, " "), dir) {
			made = append(made, dir)
		}
	}
	if len(made) > 0 {
		commands = append([]string{"mkdir -p " + strings.Join(made, " ")}, commands...)
	}
	return commands
}

// hide keeps a text out of everything the run reports.
func (s *Suite) hide(secret string) {
	if secret == "" {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.secrets = append(s.secrets, secret, "[hidden]")
}

// redact replaces what is hidden. A plugin may show a secret in an error, and
// that error is what a failure quotes.
func (s *Suite) redact(r *result) {
	s.mu.Lock()
	hidden := strings.NewReplacer(s.secrets...)
	s.mu.Unlock()
	r.Message = hidden.Replace(r.Message)
	if r.Evidence != nil {
		r.Evidence.Each(hidden.Replace)
	}
}

func orElse(s, other string) string {
	if s == "" {
		return other
	}
	return s
}
