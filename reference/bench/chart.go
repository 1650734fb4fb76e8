package main

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// chart draws panels side by side: for each, the cost of its cases against the
// number of mounts in the namespace, one line a variant, both axes logarithmic
// and the same for all.
func chart(path string, panels ...panel) error {
	panels = slices.DeleteFunc(panels, func(p panel) bool { return len(p.lines) == 0 })
	if len(panels) == 0 {
		return nil
	}
	a := axesOf(panels)
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %g %g" font-family="sans-serif" font-size="12">`+"\n",
		left+panelWidth*float64(len(panels)), height)
	fmt.Fprintf(&b, `<rect width="100%%" height="100%%" fill="#ffffff"/>`+"\n")
	for i, p := range panels {
		fmt.Fprintf(&b, `<g transform="translate(%g 0)">`+"\n", left+panelWidth*float64(i))
		p.draw(&b, a, i == 0)
		b.WriteString("</g>\n")
	}
	b.WriteString("</svg>\n")
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, []byte(b.String()), 0o644)
}

// Sizes in the drawing: of the room at the left, of a panel with the names of
// its lines, and of what is around a panel's field.
const (
	left, panelWidth, names      = 64.0, 540.0, 190.0
	height, fieldTop, fieldBelow = 420.0, 48.0, 52.0
)

// panel is one field of the drawing.
type panel struct {
	title string
	lines []line
}

// line is a variant: the logarithms of mounts and microseconds.
type line struct {
	name string
	x, y []float64
}

// panelOf takes the lines from results of one case, without the variants that
// are left out.
func panelOf(title string, results []Result, without ...string) panel {
	p := panel{title: title}
	for _, r := range results {
		for _, s := range r.Series {
			if s.Variant.Missing != "" || slices.Contains(without, s.Variant.Name) {
				continue
			}
			at := slices.IndexFunc(p.lines, func(l line) bool { return l.name == s.Variant.Name })
			if at < 0 {
				at = len(p.lines)
				p.lines = append(p.lines, line{name: s.Variant.Name})
			}
			l := &p.lines[at]
			l.x = append(l.x, math.Log10(float64(max(r.Case.N, fewest))))
			l.y = append(l.y, math.Log10(s.Median()/1000))
		}
	}
	return p
}

// fewest is where no other mounts are drawn, since zero has no logarithm.
const fewest = 10

type axes struct{ lowX, highX, lowY, highY float64 }

func axesOf(panels []panel) axes {
	a := axes{math.Inf(1), math.Inf(-1), math.Inf(1), math.Inf(-1)}
	for _, p := range panels {
		for _, l := range p.lines {
			a.lowX, a.highX = min(a.lowX, slices.Min(l.x)), max(a.highX, slices.Max(l.x))
			a.lowY, a.highY = min(a.lowY, slices.Min(l.y)), max(a.highY, slices.Max(l.y))
		}
	}
	a.lowY, a.highY = math.Floor(a.lowY), math.Ceil(a.highY)
	if a.highX == a.lowX {
		a.highX++
	}
	return a
}

const fieldWidth = panelWidth - names

func (a axes) x(v float64) float64 { return (v - a.lowX) / (a.highX - a.lowX) * fieldWidth }

func (a axes) y(v float64) float64 {
	return height - fieldBelow - (v-a.lowY)/(a.highY-a.lowY)*(height-fieldTop-fieldBelow)
}

func (p panel) draw(b *strings.Builder, a axes, first bool) {
	fmt.Fprintf(b, `<text x="0" y="24" font-size="15" fill="#222222">%s</text>`+"\n", p.title)
	for y := a.lowY; y <= a.highY; y++ {
		fmt.Fprintf(b, `<line x1="0" x2="%g" y1="%.1f" y2="%.1f" stroke="#dddddd"/>`+"\n", fieldWidth, a.y(y), a.y(y))
		if first {
			fmt.Fprintf(b, `<text x="-8" y="%.1f" text-anchor="end" fill="#555555">%s</text>`+"\n", a.y(y)+4, duration(math.Pow(10, y)))
		}
	}
	for x := math.Ceil(a.lowX); x <= a.highX+0.001; x++ {
		mounts := math.Pow(10, x)
		if mounts == fewest {
			mounts = 0
		}
		fmt.Fprintf(b, `<text x="%.1f" y="%g" text-anchor="middle" fill="#555555">%g</text>`+"\n", a.x(x), height-fieldBelow+18, mounts)
	}
	fmt.Fprintf(b, `<text x="%g" y="%g" text-anchor="middle" fill="#222222">other mounts in the namespace</text>`+"\n", fieldWidth/2, height-12)
	colours := []string{"#888888", "#c0392b", "#8e44ad", "#2471a3", "#d68910", "#117a65"}
	at := p.nameRows(a)
	for i, l := range p.lines {
		stroke, weight := colours[i%len(colours)], 1.5
		if l.name == product {
			stroke, weight = "#1e8449", 3.0
		}
		points := make([]string, len(l.x))
		for k := range l.x {
			points[k] = fmt.Sprintf("%.1f,%.1f", a.x(l.x[k]), a.y(l.y[k]))
			fmt.Fprintf(b, `<circle cx="%.1f" cy="%.1f" r="3" fill="%s"/>`, a.x(l.x[k]), a.y(l.y[k]), stroke)
		}
		fmt.Fprintf(b, `<polyline points="%s" fill="none" stroke="%s" stroke-width="%g"/>`, strings.Join(points, " "), stroke, weight)
		fmt.Fprintf(b, `<text x="%g" y="%.1f" fill="%s">%s</text>`+"\n", fieldWidth+8, at[i]+4, stroke, l.name)
	}
}

// nameRows places the names of the lines beside their ends, none on another.
func (p panel) nameRows(a axes) []float64 {
	const row = 15
	order := make([]int, len(p.lines))
	at := make([]float64, len(p.lines))
	for i, l := range p.lines {
		order[i], at[i] = i, a.y(l.y[len(l.y)-1])
	}
	slices.SortFunc(order, func(i, k int) int { return int(math.Copysign(1, at[k]-at[i])) })
	// From the bottom up, each at least a row above the one before.
	for n := 1; n < len(order); n++ {
		at[order[n]] = min(at[order[n]], at[order[n-1]]-row)
	}
	return at
}

func duration(us float64) string {
	if us >= 1e6 {
		return fmt.Sprintf("%g s", us/1e6)
	}
	if us >= 1000 {
		return fmt.Sprintf("%g ms", us/1000)
	}
	return fmt.Sprintf("%g us", us)
}
