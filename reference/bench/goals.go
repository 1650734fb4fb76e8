package main

import (
	"fmt"
	"regexp"
	"testing"
)

// goals are what the product claims, all of them ratios within one run.
func (s *suite) goals() []Goal {
	var all []Goal
	for _, n := range fills {
		all = append(
			all,
			Goal{fmt.Sprintf("one bind, in-root resolve, verify and exact undo, %d mounts", n), caseBind, n, 1, product, raw, 1.45, true, false},
			Goal{fmt.Sprintf("one bind, root at the target's parent, %d mounts", n), caseBind, n, 1, atParent, raw, 1.2, true, false},
			Goal{fmt.Sprintf("one tmpfs, %d mounts", n), caseTmpfs, n, 1, product, raw, 1.45, true, false},
		)
	}
	all = append(all, fuseGoals()...)
	return append(
		all,
		Goal{"one bind in another namespace", caseNamespace, 0, 1, elsewhere, raw, 1.9, true, false},
		Goal{"10 nested specs as one transaction", caseList, 0, 10, product, raw, 0.55, true, false},
		Goal{"bind from a source with 10000 children, floor to ours", caseBusySource, 10000, 1, raw, product, 15, false, false},
		Goal{"bind from a source with 30000 children, floor to ours", caseBusySource, 30000, 1, raw, product, 50, false, false},
		Goal{"one bind, mount-utils to ours", caseBind, 0, 1, mountUtils, product, 60, false, false},
		Goal{"10 specs with audit at 10000 mounts, mount-utils to ours", caseAudited, 10000, 10, withList, product, 250, false, false},
		Goal{"10 specs with audit at 10000 mounts, containerd to ours", caseAudited, 10000, 10, withInfo, product, 150, false, false},
		Goal{"incremental audit at 10000 mounts, GetMounts to ours", caseIncremental, 10000, 0, getMounts, product, 5000, false, false},
		Goal{"exact difference at 10000 mounts, GetMounts to ours", caseExact, 10000, 0, getMounts, product, 50, false, false},
		Goal{"exact difference at 30000 mounts, GetMounts to ours", caseExact, 30000, 0, getMounts, product, 20, false, false},
		Goal{"reads of a raw volume in its consumer, to the device itself", caseReads, 0, 0, inConsumer, itself, 1.03, true, true},
		Goal{"writes to a raw volume in its consumer, to the device itself", caseWrites, 0, 0, inConsumer, itself, 1.03, true, true},
		Goal{"machine-wide audit, /proc walk to ours", caseMachine, 50, 0, procWalk, product, 200, false, false},
	)
}

// growth judges what must not depend on the number of mounts. The two cases
// cannot share a round, so it compares their minima.
func growth(results []Result) []Verdict {
	var few, many Series
	for _, r := range ofCase(results, caseIncremental) {
		s, _ := r.Of(product)
		switch r.Case.N {
		case 0:
			few = s
		case 30000:
			many = s
		}
	}
	if few.Rounds == nil || many.Rounds == nil {
		return nil
	}
	g := Goal{"incremental audit, 30000 mounts to none", caseIncremental, 30000, 0, product, product, 1.2, true, true}
	return []Verdict{{
		Goal: g, Ratio: Ratio{OfMinima: many.Min / few.Min},
		OursNS: many.Median(), OursMin: many.Min, PeerNS: few.Median(), PeerMin: few.Min,
	}}
}

// allocations counts those of one bind, performed and undone.
func allocations(s *suite, focus *regexp.Regexp) []Verdict {
	if !focus.MatchString("allocations") {
		return nil
	}
	v := s.ours.binds(product, nil, nil, s.ground.Dir("one"), "")
	var failed error
	n := testing.AllocsPerRun(200, func() {
		if err := v.Cycle(); err != nil {
			failed = err
		}
	})
	g := Goal{"allocations of a one-bind perform and undo", "allocations", 0, 1, product, "one", 40, true, true}
	if failed != nil {
		return []Verdict{{Goal: g, Missing: failed.Error()}}
	}
	return []Verdict{{Goal: g, Ratio: Ratio{OfMinima: n}}}
}
