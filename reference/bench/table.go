package main

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
)

const product = "csi-prepare"

// printCase prints one row for each variant of a measured case.
func printCase(w io.Writer, r Result, goals []Goal) {
	var ours Series
	for _, s := range r.Series {
		if s.Variant.Name == product {
			ours = s
		}
	}
	for _, s := range r.Series {
		if s.Variant.Missing != "" {
			fmt.Fprintf(w, "| %s | %d | %d | – | – | – | – | | n/a (%s) |\n",
				s.Variant.Name, r.Case.N, r.Case.K, s.Variant.Missing)
			continue
		}
		floor := ratio(s, r.Series[0])
		toOurs := "–"
		if ours.Rounds != nil {
			toOurs = number(ratio(s, ours).Median)
		}
		goal, word := "", ""
		for _, g := range goals {
			if g.Case == r.Case.Name && g.N == r.Case.N && g.K == r.Case.K && g.Of == s.Variant.Name {
				goal, word = g.Text()+" "+g.Against, judge(g, []Result{r}).Word()
			}
		}
		fmt.Fprintf(w, "| %s | %d | %d | %s | %s | %s (%s..%s) | %s | %s | %s |\n",
			s.Variant.Name, r.Case.N, r.Case.K, micro(s.Median()), micro(s.Min),
			number(floor.Median), number(floor.P10), number(floor.P90), toOurs, goal, word)
	}
}

func printHead(w io.Writer, section string) {
	fmt.Fprintf(w, "\n## %s\n\n", section)
	fmt.Fprintln(w, "| variant | N | K | p50 us | min us | x first row (p10..p90) | x csi-prepare | goal | verdict |")
	fmt.Fprintln(w, "|---|---:|---:|---:|---:|---:|---:|---|---|")
}

func printVerdicts(w io.Writer, verdicts []Verdict) {
	fmt.Fprintf(w, "\n## Goals\n\n")
	fmt.Fprintln(w, "| goal | limit | measured | p10..p90 | verdict |")
	fmt.Fprintln(w, "|---|---|---:|---|---|")
	for _, v := range verdicts {
		measured, spread := "–", "–"
		if v.Missing == "" {
			measured = number(v.Value())
			spread = number(v.Ratio.P10) + ".." + number(v.Ratio.P90)
			if v.Goal.Minima {
				spread = "of minima"
			}
		}
		fmt.Fprintf(w, "| %s | %s %s | %s | %s | %s |\n",
			v.Goal.Name, v.Goal.Text(), v.Goal.Against, measured, spread, v.Word())
	}
}

// row is one element of bench.json.
type row struct {
	Name      string   `json:"name"`
	N         int      `json:"n"`
	OursNS    float64  `json:"ours_ns"`
	OursMinNS float64  `json:"ours_min_ns"`
	Peer      string   `json:"peer"`
	PeerNS    float64  `json:"peer_ns"`
	PeerMinNS float64  `json:"peer_min_ns"`
	Ratio     *float64 `json:"ratio"`           // null if it could not be measured
	Floor     *float64 `json:"floor,omitempty"` // ratio of the system calls alone
	Goal      float64  `json:"goal"`
	Direction string   `json:"direction"`
	Met       *bool    `json:"met"`
	Missing   string   `json:"missing,omitempty"`
}

func writeJSON(path string, verdicts []Verdict) error {
	rows := make([]row, 0, len(verdicts))
	for _, v := range verdicts {
		peer, direction := v.Goal.Against, "max"
		if !v.Goal.AtMost {
			peer, direction = v.Goal.Of, "min"
		}
		r := row{
			Name: v.Goal.Name, N: v.Goal.N, Peer: peer, Goal: v.Goal.Limit, Direction: direction,
			OursNS: v.OursNS, OursMinNS: v.OursMin, PeerNS: v.PeerNS, PeerMinNS: v.PeerMin,
			Missing: v.Missing,
		}
		if v.Missing == "" {
			value, met := v.Value(), v.Met()
			r.Ratio, r.Met = &value, &met
			if v.Floor.Median > 0 {
				r.Floor = &v.Floor.Median
			}
		}
		rows = append(rows, r)
	}
	text, err := json.MarshalIndent(rows, "", "  ")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, append(text, '\n'), 0o644)
}

func micro(ns float64) string { return number(ns / 1000) }

// number shows three significant digits.
func number(x float64) string {
	switch {
	case math.IsNaN(x):
		return "–"
	case x >= 100:
		return fmt.Sprintf("%.0f", x)
	case x >= 10:
		return fmt.Sprintf("%.1f", x)
	default:
		return fmt.Sprintf("%.2f", x)
	}
}
