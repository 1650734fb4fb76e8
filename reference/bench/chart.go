package main

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
)

// chart draws the cost of one case against the number of mounts in the
// namespace, one line a variant, both axes logarithmic.
func chart(path, title string, results []Result) error {
	type line struct {
		name string
		x, y []float64
	}
	var lines []line
	index := map[string]int{}
	for _, r := range results {
		for _, s := range r.Series {
			if s.Variant.Missing != "" {
				continue
			}
			at, ok := index[s.Variant.Name]
			if !ok {
				at = len(lines)
				index[s.Variant.Name] = at
				lines = append(lines, line{name: s.Variant.Name})
			}
			lines[at].x = append(lines[at].x, math.Log10(float64(max(r.Case.N, 10))))
			lines[at].y = append(lines[at].y, math.Log10(s.Median()/1000))
		}
	}
	if len(lines) == 0 {
		return nil
	}
	const width, height, left, top, right, bottom = 760.0, 420.0, 64.0, 48.0, 200.0, 52.0
	lowX, highX := math.Inf(1), math.Inf(-1)
	lowY, highY := math.Inf(1), math.Inf(-1)
	for _, l := range lines {
		for i := range l.x {
			lowX, highX = min(lowX, l.x[i]), max(highX, l.x[i])
			lowY, highY = min(lowY, l.y[i]), max(highY, l.y[i])
		}
	}
	lowY, highY = math.Floor(lowY), math.Ceil(highY)
	if highX == lowX {
		highX++
	}
	px := func(x float64) float64 { return left + (x-lowX)/(highX-lowX)*(width-left-right) }
	py := func(y float64) float64 { return height - bottom - (y-lowY)/(highY-lowY)*(height-top-bottom) }

	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %g %g" font-family="sans-serif" font-size="12">`+"\n", width, height)
	fmt.Fprintf(&b, `<rect width="%g" height="%g" fill="#ffffff"/>`+"\n", width, height)
	fmt.Fprintf(&b, `<text x="%g" y="24" font-size="15" fill="#222222">%s</text>`+"\n", left, title)
	for y := lowY; y <= highY; y++ {
		fmt.Fprintf(&b, `<line x1="%g" x2="%g" y1="%.1f" y2="%.1f" stroke="#dddddd"/>`, left, width-right, py(y), py(y))
		fmt.Fprintf(&b, `<text x="%g" y="%.1f" text-anchor="end" fill="#555555">%s</text>`+"\n", left-8, py(y)+4, duration(math.Pow(10, y)))
	}
	for x := math.Ceil(lowX); x <= highX+0.001; x++ {
		fmt.Fprintf(&b, `<text x="%.1f" y="%g" text-anchor="middle" fill="#555555">%g</text>`+"\n", px(x), height-bottom+18, math.Pow(10, x))
	}
	fmt.Fprintf(&b, `<text x="%.1f" y="%g" text-anchor="middle" fill="#222222">other mounts in the namespace</text>`+"\n", (left+width-right)/2, height-12)
	colours := []string{"#888888", "#c0392b", "#8e44ad", "#2471a3", "#d68910", "#117a65"}
	other := 0
	for _, l := range lines {
		stroke, weight := "#1e8449", 3.0
		if l.name != product {
			stroke, weight = colours[other%len(colours)], 1.5
			other++
		}
		points := make([]string, len(l.x))
		for i := range l.x {
			points[i] = fmt.Sprintf("%.1f,%.1f", px(l.x[i]), py(l.y[i]))
			fmt.Fprintf(&b, `<circle cx="%.1f" cy="%.1f" r="3" fill="%s"/>`, px(l.x[i]), py(l.y[i]), stroke)
		}
		fmt.Fprintf(&b, `<polyline points="%s" fill="none" stroke="%s" stroke-width="%g"/>`, strings.Join(points, " "), stroke, weight)
		last := len(l.x) - 1
		fmt.Fprintf(&b, `<text x="%.1f" y="%.1f" fill="%s">%s</text>`+"\n", px(l.x[last])+8, py(l.y[last])+4, stroke, l.name)
	}
	b.WriteString("</svg>\n")
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, []byte(b.String()), 0o644)
}

func duration(us float64) string {
	if us >= 1000 {
		return fmt.Sprintf("%g ms", us/1000)
	}
	return fmt.Sprintf("%g us", us)
}
