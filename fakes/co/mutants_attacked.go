package co

import (
	"github.com/csi-prepare/csi-prepare/fakes/mutant"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// What goes wrong where something does not answer, or comes from before.
var attackedMutants = []Mutant{
	seat("waits-on-the-way", mutant.Concurrency, requirement.PerformDeadline,
		"the way to the target is walked in the executor itself: where a server on it is gone, a thread waits for ever, one for each repeat",
		func(p *Plain, _ *Server) { p.find = resolve }),
	func() Mutant {
		m := seat("trusts-another-boot", mutant.Restart, requirement.CrashCOBootID,
			"what was performed before a reboot is taken for performed: the consumer starts on the directory below",
			func(*Plain, *Server) {})
		m.void = func(record, string) bool { return false }
		return m
	}(),
}
