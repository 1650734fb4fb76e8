package sanity

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/onsi/ginkgo/v2"
	"github.com/onsi/ginkgo/v2/types"
	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/sanity/report"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// specTimeout bounds a spec, whatever goes wrong with the deadlines in it.
const specTimeout = 3 * time.Minute

// entry is the name under which a result hangs on Ginkgo's report of a spec.
const entry = "csi-prepare result"

// Run tests what the configurations name, in one run of Ginkgo, and fails t
// if anything does not hold. Ginkgo runs once in a process, so call it once
// in a test package.
func Run(t ginkgo.GinkgoTestingT, configs ...*Config) bool {
	for _, c := range configs {
		Register(c)
	}
	return ginkgo.RunSpecs(t, "csi-prepare")
}

// Register adds the specs to the Ginkgo suite of the caller. It is called
// while the tree of specs is built. Of the configuration only Performer is
// read at once, since it decides which specs there are; the rest is read
// when the first spec runs, so that a BeforeSuite can fill it in.
func Register(c *Config) *Suite {
	s := newSuite(c)
	s.register()
	return s
}

func (s *Suite) register() {
	line := 0
	// Ginkgo orders specs by the place they are written at and shows it; ours
	// is the sentence of SPEC.md.
	at := func(anchor requirement.ID) types.CodeLocation {
		line++
		return types.CodeLocation{FileName: "SPEC.md", LineNumber: line, CustomMessage: "SPEC.md#" + string(anchor)}
	}
	ginkgo.Describe(s.title(), func() {
		for _, sec := range sections(s.actor) {
			ginkgo.Context(sec.name, at(sec.specs[0].covers[0]), func() {
				for _, d := range sec.specs {
					s.profilesOf[sec.name+": "+d.name] = d.profiles
					ginkgo.It(d.name, at(d.covers[0]), d.covers.labels(), ginkgo.SpecTimeout(specTimeout), s.leaf(d))
				}
			})
		}
		ginkgo.ReportAfterEach(func(r ginkgo.SpecReport) {
			if s.given.Progress != nil {
				spec, _ := s.specOf(r)
				s.given.Progress(spec)
			}
		})
	})
	ginkgo.ReportAfterSuite(s.title(), func(r ginkgo.Report) {
		if err := s.finish(r); err != nil {
			ginkgo.Fail(err.Error())
		}
	})
}

func (s *Suite) title() string {
	if s.actor == requirement.CO {
		return "csi-prepare executor"
	}
	return "csi-prepare plugin"
}

// leaf is the body of a Ginkgo node. Only here does a spec meet Ginkgo.
func (s *Suite) leaf(d definition) func(ginkgo.SpecContext) {
	return func(ctx ginkgo.SpecContext) {
		r := s.run(ctx, d)
		text, err := json.Marshal(r)
		if err != nil {
			ginkgo.Fail(err.Error())
		}
		ginkgo.AddReportEntry(entry, string(text), ginkgo.ReportEntryVisibilityNever)
		switch r.Outcome {
		case report.Passed:
		case report.Failed:
			ginkgo.Fail(r.Message)
		default:
			ginkgo.Skip(string(r.Outcome) + ": " + r.Message)
		}
	}
}

// specOf turns Ginkgo's report of a spec into ours.
func (s *Suite) specOf(r ginkgo.SpecReport) (report.Spec, result) {
	spec := report.Spec{Name: r.LeafNodeText, Seconds: r.RunTime.Seconds(), Outcome: report.Filtered, Message: "left out by a filter of Ginkgo"}
	if n := len(r.ContainerHierarchyTexts); n > 0 {
		spec.Section = r.ContainerHierarchyTexts[n-1]
		spec.Name = spec.Section + ": " + spec.Name
	}
	for _, p := range s.profilesOf[spec.Name] {
		spec.Profiles = append(spec.Profiles, string(p))
	}
	for _, label := range r.Labels() {
		if _, ok := requirement.Lookup(requirement.ID(label)); ok {
			spec.Requirements = append(spec.Requirements, requirement.ID(label))
		}
	}
	for _, e := range r.ReportEntries {
		var out result
		text, ok := e.GetRawValue().(string)
		if e.Name != entry || !ok || json.Unmarshal([]byte(text), &out) != nil {
			continue
		}
		spec.Outcome, spec.Message, spec.Breaks, spec.Evidence = out.Outcome, out.Message, out.Breaks, out.Evidence
		return spec, out
	}
	switch {
	case r.State.Is(types.SpecStateInterrupted | types.SpecStateAborted):
		spec.Outcome, spec.Message = report.CouldNotRun, "interrupted"
	case r.State.Is(types.SpecStateFailureStates):
		spec.Outcome, spec.Message = report.Failed, "the suite itself failed: "+r.Failure.Message+" "+r.Failure.ForwardedPanic
	}
	return spec, result{}
}

// finish stops what was started, and writes the report.
func (s *Suite) finish(all ginkgo.Report) error {
	s.stop()
	now, err := leaderNamespace()
	if err == nil && s.nsBefore != 0 && now != s.nsBefore {
		err = fmt.Errorf("a fault of the suite: the process began in mount namespace %d and is in %d now", s.nsBefore, now)
	}
	s.err = errors.Join(s.err, err, s.startErr)
	r := &report.Report{
		Suite:    report.Suite{Version: Version(), SpecDigest: requirement.SpecDigest, Seed: s.config.Seed},
		Plugin:   report.Plugin{Name: s.name, Version: s.version},
		Kernel:   kernelRelease(),
		Features: s.features.names(),
		Seconds:  all.RunTime.Seconds(),
	}
	var overheads []time.Duration
	slices.SortStableFunc(all.SpecReports, func(a, b ginkgo.SpecReport) int {
		return cmp.Compare(a.LeafNodeLocation.LineNumber, b.LeafNodeLocation.LineNumber)
	})
	for _, spec := range all.SpecReports {
		if spec.LeafNodeType.Is(types.NodeTypeIt) && len(spec.ContainerHierarchyTexts) > 0 && spec.ContainerHierarchyTexts[0] == s.title() {
			done, how := s.specOf(spec)
			r.Specs = append(r.Specs, done)
			if how.Body > 0 {
				overheads = append(overheads, spec.RunTime-time.Duration(how.Body*float64(time.Second)))
			}
		}
	}
	if n := len(overheads); n > 0 {
		slices.Sort(overheads)
		s.overhead = overheads[n/2]
	}
	listed := s.config.KnownFailing.Apply(r.Specs)
	r.Judge(s.actor)
	r.Profiles = s.verdicts(r)
	s.err = errors.Join(s.err, listed)
	if s.given.Report != nil {
		s.err = errors.Join(s.err, s.given.Report(r))
	}
	return s.err
}

func kernelRelease() string {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return "unknown"
	}
	return unix.ByteSliceToString(u.Sysname[:]) + " " + unix.ByteSliceToString(u.Release[:])
}
