package main

import (
	"fmt"
	"math"
	"runtime"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// Variant is one way to do the work of a case. After Perform and Undo the
// mount table is as before; the two together are a cycle.
type Variant struct {
	Name          string
	Perform, Undo func() error
	// Divide says how many units of work a cycle does; times are reported
	// for one unit. Zero means one.
	Divide int
	// Missing, if set, says why the variant cannot run here.
	Missing string
}

// Cycle performs and undoes once. A variant that only reads has no Undo.
func (v Variant) Cycle() error {
	if err := v.Perform(); err != nil {
		return err
	}
	if v.Undo == nil {
		return nil
	}
	return v.Undo()
}

// Case is a set of variants that do equal work. The first is the floor: the
// fewest system calls with the same effect and no check.
type Case struct {
	Section  string // the table the case belongs to
	Name     string
	N, K     int // mounts in the namespace besides; mounts of one cycle
	Rounds   int // rounds, each with every variant once
	Variants []Variant
	// Makes is how many mounts a variant adds between Perform and Undo, and
	// At is where the first of them is; with At set its attributes are
	// checked before anything is timed.
	Makes int
	At    string
	// Close takes away what the case set up.
	Close func() error
}

// Series is what was measured of one variant: the median time of a cycle in
// each round, in nanoseconds.
type Series struct {
	Variant Variant
	Rounds  []float64
	Min     float64
}

// Median of the rounds, in nanoseconds.
func (s Series) Median() float64 { return quantile(s.Rounds, 0.5) }

// Result is a measured case.
type Result struct {
	Case   Case
	Series []Series
}

// Of returns the series of the variant with the given name.
func (r Result) Of(name string) (Series, bool) {
	for _, s := range r.Series {
		if s.Variant.Name == name {
			return s, true
		}
	}
	return Series{}, false
}

// Ratio is a paired comparison: one ratio for each round, from times that
// were measured within that round.
type Ratio struct{ Median, P10, P90, OfMinima float64 }

// ratio compares two series of one result round by round.
func ratio(of, against Series) Ratio {
	paired := make([]float64, 0, len(of.Rounds))
	for i := range min(len(of.Rounds), len(against.Rounds)) {
		paired = append(paired, of.Rounds[i]/against.Rounds[i])
	}
	return Ratio{
		Median:   quantile(paired, 0.5),
		P10:      quantile(paired, 0.1),
		P90:      quantile(paired, 0.9),
		OfMinima: of.Min / against.Min,
	}
}

func quantile(values []float64, q float64) float64 {
	if len(values) == 0 {
		return math.NaN()
	}
	sorted := slices.Sorted(slices.Values(values))
	at := q * float64(len(sorted)-1)
	low := int(at)
	if low+1 >= len(sorted) {
		return sorted[len(sorted)-1]
	}
	return sorted[low] + (at-float64(low))*(sorted[low+1]-sorted[low])
}

// A round of a variant takes about this long, within the limits below: long
// enough for a median, short enough that a disturbance hits all variants.
const (
	roundTime = 12 * time.Millisecond
	minCycles = 5
	maxCycles = 200
)

// measure runs the rounds of a case. Within a round every variant runs once,
// in an order that rotates from round to round, after warm-up and a garbage
// collection.
func measure(c Case) (Result, error) {
	defer func() {
		if c.Close != nil {
			if err := c.Close(); err != nil {
				panic(fmt.Sprintf("%s: what was set up stays behind: %v", c.Name, err))
			}
		}
	}()
	result := Result{Case: c}
	cycles := make([]int, len(c.Variants))
	for i, v := range c.Variants {
		result.Series = append(result.Series, Series{Variant: v, Min: math.Inf(1)})
		if v.Missing != "" {
			continue
		}
		if err := effective(c, v); err != nil {
			return result, fmt.Errorf("%s, %s: %w", c.Name, v.Name, err)
		}
		took, err := warmUp(v)
		if err != nil {
			return result, fmt.Errorf("%s, %s: %w", c.Name, v.Name, err)
		}
		cycles[i] = min(max(int(roundTime/max(took, 1)), minCycles), maxCycles)
	}
	times := make([]float64, maxCycles)
	for round := range c.Rounds {
		for k := range c.Variants {
			i := (round + k) % len(c.Variants)
			if c.Variants[i].Missing != "" {
				continue
			}
			s := &result.Series[i]
			got, err := timed(c.Variants[i], times[:cycles[i]])
			if err != nil {
				return result, fmt.Errorf("%s, %s, round %d: %w", c.Name, c.Variants[i].Name, round, err)
			}
			s.Rounds = append(s.Rounds, quantile(got, 0.5))
			s.Min = min(s.Min, slices.Min(got))
		}
	}
	return result, nil
}

// effective asserts once, before anything is timed, that a variant makes
// what it says and leaves nothing.
func effective(c Case, v Variant) error {
	before, err := mountCount()
	if err != nil {
		return err
	}
	if err := v.Perform(); err != nil {
		return err
	}
	during, err := mountCount()
	if err != nil {
		return err
	}
	if during-before != c.Makes && c.Makes != anyNumber {
		return fmt.Errorf("made %d mounts, not %d", during-before, c.Makes)
	}
	if c.At != "" {
		var st unix.Statfs_t
		if err := unix.Statfs(c.At, &st); err != nil {
			return err
		}
		const want = unix.ST_NOSUID | unix.ST_NODEV
		if st.Flags&want != want {
			return fmt.Errorf("%s has attributes %#x, which lack some of %#x", c.At, st.Flags, want)
		}
	}
	if v.Undo == nil {
		return nil
	}
	if err := v.Undo(); err != nil {
		return err
	}
	after, err := mountCount()
	if err == nil && after != before {
		err = fmt.Errorf("%d mounts before, %d after", before, after)
	}
	return err
}

// warmUp runs a few cycles and returns about how long one takes.
func warmUp(v Variant) (time.Duration, error) {
	best := time.Duration(math.MaxInt64)
	deadline := time.Now().Add(roundTime)
	for n := 0; n < 3 || (n < 30 && time.Now().Before(deadline)); n++ {
		start := time.Now()
		if err := v.Cycle(); err != nil {
			return 0, err
		}
		best = min(best, time.Since(start))
	}
	return best, nil
}

func timed(v Variant, times []float64) ([]float64, error) {
	runtime.GC()
	divide := float64(max(v.Divide, 1))
	if err := v.Cycle(); err != nil { // the caches are this variant's own
		return nil, err
	}
	for i := range times {
		start := time.Now()
		err := v.Cycle()
		times[i] = float64(time.Since(start)) / divide
		if err != nil {
			return nil, err
		}
	}
	return times, nil
}
