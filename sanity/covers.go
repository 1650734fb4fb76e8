package sanity

import (
	"fmt"
	"slices"

	"github.com/onsi/ginkgo/v2"

	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// Coverage is the set of requirements a spec tests.
type Coverage []requirement.ID

// Covers names the requirements a spec tests. It is the only way to name
// them. The first is the one the spec is foremost about.
func Covers(ids ...requirement.ID) Coverage { return ids }

// labels are how Ginkgo knows the requirements: --ginkgo.label-filter takes
// them, and its reports show them.
func (c Coverage) labels() ginkgo.Labels {
	var l ginkgo.Labels
	for _, id := range c {
		l = append(l, string(id))
	}
	return l
}

// needs is the set of features a spec has no meaning without.
type needs []Feature

// definition is a spec before it runs.
type definition struct {
	name     string
	covers   Coverage
	needs    needs
	profiles []Profile
	body     func(*trial)
}

// section collects the specs of one section of SPEC.md.
type section struct {
	name     string
	profiles []Profile
	specs    []definition
}

// spec adds a spec. The arguments are one Coverage, at most one needs, and
// the body.
func (s *section) spec(name string, covers Coverage, body func(*trial), n ...Feature) {
	if len(covers) == 0 {
		panic(fmt.Sprintf("spec %q covers no requirement", name))
	}
	of := belong(s.profiles, n)
	if len(of) == 0 {
		panic(fmt.Sprintf("spec %q belongs to no profile: what it needs, none of %v has", name, s.profiles))
	}
	s.specs = append(s.specs, definition{name: name, covers: covers, needs: append(implied(of), n...), profiles: of, body: body})
}

// sections returns the specs of a seat, in the order of SPEC.md.
func sections(actor requirement.Actor) []section {
	if actor == requirement.CO {
		return collect(executorSections, []Profile{COExecutor})
	}
	return collect(pluginSections, preparing)
}

// writer writes the specs of a section.
type writer struct {
	name  string
	write func(*section)
}

func collect(writers []writer, of []Profile) []section {
	var all []section
	for _, w := range writers {
		s := section{name: w.name, profiles: of}
		w.write(&s)
		all = append(all, s)
	}
	return all
}

// Listing is a spec as `prepare-sanity list` shows it.
type Listing struct {
	Actor    requirement.Actor
	Section  string
	Name     string
	Covers   Coverage
	Features []Feature
	Profiles []Profile
}

// List returns every spec of both seats.
func List() []Listing {
	var all []Listing
	for _, actor := range []requirement.Actor{requirement.SP, requirement.CO} {
		for _, sec := range sections(actor) {
			for _, d := range sec.specs {
				all = append(all, Listing{actor, sec.name, d.name, slices.Clone(d.covers), slices.Clone(d.needs), slices.Clone(d.profiles)})
			}
		}
	}
	return all
}
