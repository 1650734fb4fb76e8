package main

import "fmt"

// Goal is a claim about one case: the ratio of one variant to another.
type Goal struct {
	Name    string
	Case    string // Case.Name
	N, K    int
	Of      string // variant whose cost is judged
	Against string
	Limit   float64
	// AtMost is true where a smaller ratio is better (ours against the
	// floor), false where a larger one is (a peer against ours).
	AtMost bool
	// Minima judges by the ratio of minima, for what a busy machine
	// disturbs too much for medians.
	Minima bool
}

// Verdict is a judged goal.
type Verdict struct {
	Goal    Goal
	Ratio   Ratio
	OursNS  float64
	OursMin float64
	PeerNS  float64
	PeerMin float64
	// Floor is the ratio with the product's system calls alone in its place,
	// where that was measured.
	Floor Ratio
	// Missing says why it could not be judged.
	Missing string
}

// Value is the ratio the goal is judged by.
func (v Verdict) Value() float64 {
	if v.Goal.Minima {
		return v.Ratio.OfMinima
	}
	return v.Ratio.Median
}

// Met reports whether the goal is reached.
func (v Verdict) Met() bool {
	if v.Goal.AtMost {
		return v.Value() <= v.Goal.Limit
	}
	return v.Value() >= v.Goal.Limit
}

// Bounded reports whether the goal is out of reach here: the system calls
// alone miss it.
func (v Verdict) Bounded() bool {
	if v.Met() || v.Floor.Median == 0 {
		return false
	}
	if v.Goal.AtMost {
		return v.Floor.Median > v.Goal.Limit
	}
	return v.Floor.Median < v.Goal.Limit
}

// Word is the verdict for people.
func (v Verdict) Word() string {
	spans := v.Ratio.P10 <= v.Goal.Limit && v.Goal.Limit <= v.Ratio.P90
	switch {
	case v.Missing != "":
		return "n/a (" + v.Missing + ")"
	case v.Met() && spans && !v.Goal.Minima:
		return "ok (spread crosses the goal)"
	case v.Met():
		return "ok"
	case v.Bounded():
		return fmt.Sprintf("bounded: with %s %sx", callsAlone, number(v.Floor.Median))
	case spans && !v.Goal.Minima:
		return "inconclusive"
	default:
		return "FAIL"
	}
}

// Text is the goal for people, such as "<= 1.45x raw mount(2)".
func (g Goal) Text() string {
	if g.AtMost {
		return fmt.Sprintf("<= %gx", g.Limit)
	}
	return fmt.Sprintf(">= %gx", g.Limit)
}

// judge compares the goal with what was measured.
func judge(g Goal, results []Result) Verdict {
	v := Verdict{Goal: g, Missing: "not measured"}
	for _, r := range results {
		if r.Case.Name != g.Case || r.Case.N != g.N || r.Case.K != g.K {
			continue
		}
		of, found := r.Of(g.Of)
		against, foundToo := r.Of(g.Against)
		if !found || !foundToo {
			continue
		}
		if why := of.Variant.Missing + against.Variant.Missing; why != "" {
			v.Missing = why
			continue
		}
		v.Missing = ""
		v.Ratio = ratio(of, against)
		if floor, found := r.Of(callsAlone); found && floor.Variant.Missing == "" {
			v.Floor = ratio(floor, against)
			if !g.AtMost {
				v.Floor = ratio(of, floor)
			}
		}
		ours, peer := of, against
		if !g.AtMost {
			ours, peer = against, of
		}
		v.OursNS, v.OursMin = ours.Median(), ours.Min
		v.PeerNS, v.PeerMin = peer.Median(), peer.Min
	}
	return v
}
