// Package requirement names every normative sentence of SPEC.md.
//
// The constants are generated from the anchors of SPEC.md, so that a test
// or a violation that names a requirement which does not exist fails to
// compile. IDs are dotted and semantic; they are never renumbered and
// never reused once retired.
package requirement

// ID names one normative sentence, for example "undo.reverse-order".
// It is also the anchor of that sentence in SPEC.md.
type ID string

// Level is the RFC 2119 word of a requirement.
type Level uint8

// The levels that SPEC.md uses.
const (
	Must Level = iota + 1
	MustNot
	Should
	ShouldNot
	May
)

// String returns the level as it stands in SPEC.md, for example "MUST NOT".
func (l Level) String() string {
	switch l {
	case Must:
		return "MUST"
	case MustNot:
		return "MUST NOT"
	case Should:
		return "SHOULD"
	case ShouldNot:
		return "SHOULD NOT"
	case May:
		return "MAY"
	default:
		return "unknown"
	}
}

// Mandatory reports whether conformance depends on the requirement.
func (l Level) Mandatory() bool { return l == Must || l == MustNot }

// Actor is the party a requirement binds.
type Actor string

// The two seats of the contract.
const (
	SP Actor = "SP" // the storage plugin
	CO Actor = "CO" // the orchestrator, or whoever performs for it
)

// Requirement is one normative sentence of SPEC.md.
type Requirement struct {
	ID      ID
	Level   Level
	Actor   Actor
	Section string // the heading of SPEC.md it stands under
	Text    string // the sentence
	Since   string // the version of the contract that brought it
}

var byID = func() map[ID]Requirement {
	m := make(map[ID]Requirement, len(all))
	for _, r := range all {
		m[r.ID] = r
	}
	return m
}()

// All returns every requirement in the order of SPEC.md.
func All() []Requirement { return append([]Requirement(nil), all...) }

// Lookup returns the requirement with the given ID.
func Lookup(id ID) (Requirement, bool) {
	r, ok := byID[id]
	return r, ok
}
