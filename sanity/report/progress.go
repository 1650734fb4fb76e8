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

	done int
}

// Show reports the end of a spec. A filtered one is not worth a line.
func (p *Progress) Show(s Spec) {
	if s.Outcome == Filtered {
		return
	}
	p.done++
	if p.Terminal {
		fmt.Fprintf(p.Out, "\r\x1b[K[%d/%d] %s", p.done, p.Total, clip(s.Name, 68))
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
