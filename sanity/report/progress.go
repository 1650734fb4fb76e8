package report

import (
	"fmt"
	"io"
	"strings"
)

// Progress shows specs as they end: on a terminal one line that is written
// over, elsewhere a line for each. Failures are shown whole, once.
type Progress struct {
	// Out is where to write.
	Out io.Writer
	// Terminal is true if Out understands carriage return and colour.
	Terminal bool
	// Total is the number of specs to come.
	Total int

	done, failed int
}

// Show reports the end of a spec. A filtered one is not worth a line.
func (p *Progress) Show(s Spec) {
	if s.Outcome == Filtered {
		return
	}
	p.done++
	if s.Outcome == Failed {
		p.failed++
	}
	if p.Terminal {
		fmt.Fprintf(p.Out, "\r\x1b[K%s %s", p.bar(), clip(s.Name, 52))
	} else {
		fmt.Fprintf(p.Out, "%-13s %6.0f ms  %s\n", s.Outcome, 1000*s.Seconds, s.Name)
	}
	if s.Outcome != Failed {
		return
	}
	if p.Terminal {
		fmt.Fprint(p.Out, "\r\x1b[K\x1b[31m", Failed, "\x1b[0m ", s.Name, "\n")
	}
	fmt.Fprintf(p.Out, "\n%s\n\n", indent(s.Message))
}

// bar is how far the run is, and how many specs failed so far.
func (p *Progress) bar() string {
	const width = 16
	full := width
	if p.Total > 0 {
		full = min(width, width*p.done/p.Total)
	}
	text := fmt.Sprintf("%s%s [%d/%d]", strings.Repeat("█", full), strings.Repeat("░", width-full), p.done, p.Total)
	if p.failed > 0 {
		text += fmt.Sprintf(" \x1b[31m%d failed\x1b[0m", p.failed)
	}
	return text
}

// End leaves the line that was written over.
func (p *Progress) End() {
	if p.Terminal {
		fmt.Fprint(p.Out, "\r\x1b[K")
	}
}

func clip(s string, n int) string {
	if r := []rune(s); len(r) > n {
		return string(r[:n-1]) + "…"
	}
	return s
}

func indent(s string) string {
	return "  " + strings.ReplaceAll(strings.TrimRight(s, "\n"), "\n", "\n  ")
}
