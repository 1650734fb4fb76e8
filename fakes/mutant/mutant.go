// Package mutant describes implementations that are wrong in exactly one way.
//
// A mutant is evidence about the suite, not about a driver: the specs that
// name the requirement it breaks have to fail because of it, and the same
// implementation without the fault has to pass them.
package mutant

import (
	"fmt"
	"os"

	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// Category groups mutants by what a consumer or an operator would suffer.
type Category string

// The categories of mutants.
const (
	Data        Category = "data"        // lost, exposed, or of another volume
	Attributes  Category = "attributes"  // read-only and its like not in force
	Repeats     Category = "repeats"     // a repeated call does something else
	Leaks       Category = "leaks"       // something stays behind
	Undoing     Category = "undo"        // too much, too little, or too quietly undone
	Specs       Category = "specs"       // a response that breaks a rule of mount specs
	Validation  Category = "validation"  // a wrong request, or response, let through
	Codes       Category = "codes"       // the right refusal under the wrong code
	Listing     Category = "listing"     // the list is not what is prepared
	Discovery   Category = "discovery"   // capabilities that are not so
	Restart     Category = "restart"     // lost or invented by a restart
	Escape      Category = "escape"      // reaches what it may not reach
	Secrets     Category = "secrets"     // shown where they must not be
	Concurrency Category = "concurrency" // calls disturb each other
)

// Volumes is what the volumes of a plugin are made of, and how the suite asks
// for them.
type Volumes string

// The kinds of volumes.
const (
	Directories Volumes = ""          // each is a directory
	Raw         Volumes = "raw"       // each is a device, of the block access type
	Formatted   Volumes = "formatted" // each is a device, of the mount access type
	Served      Volumes = "served"    // each is a directory served over FUSE
)

// Mutant says what is wrong with one implementation.
type Mutant struct {
	// Name is unique among all mutants, in words joined by hyphens.
	Name string `json:"name"`
	// Actor is the seat whose duty is broken.
	Actor    requirement.Actor `json:"actor"`
	Category Category          `json:"category"`
	// Breaks is the one requirement that does not hold.
	Breaks requirement.ID `json:"breaks"`
	// Volumes of the implementation.
	Volumes Volumes `json:"volumes,omitempty"`
	// Story is what the implementation does, and who suffers how.
	Story string `json:"story"`
}

// Title returns the name.
func (m Mutant) Title() string { return m.Name }

// Check reports the first thing that makes a set of mutants unusable as
// evidence: a name given twice, a requirement that does not exist or binds
// the other seat, a mutant without a story.
func Check(mutants []Mutant) error {
	seen := make(map[string]bool, len(mutants))
	for _, m := range mutants {
		r, known := requirement.Lookup(m.Breaks)
		switch {
		case m.Name == "":
			return fmt.Errorf("a mutant that breaks %s has no name", m.Breaks)
		case seen[m.Name]:
			return fmt.Errorf("mutant %s: the name is given twice", m.Name)
		case !known:
			return fmt.Errorf("mutant %s: breaks %q, which is no requirement", m.Name, m.Breaks)
		case r.Actor != m.Actor:
			return fmt.Errorf("mutant %s: sits in the seat of %s, but %s binds %s", m.Name, m.Actor, m.Breaks, r.Actor)
		case m.Story == "" || m.Category == "":
			return fmt.Errorf("mutant %s: needs a category and a story", m.Name)
		}
		seen[m.Name] = true
	}
	return nil
}

// Contained reports whether this process is in a mount namespace that was made
// for it, with which a leak ends. A mutant that leaks mounts does so only
// there. It compares with the first process, or where that may not be looked
// at with the parent.
func Contained() bool {
	own, err := os.Readlink("/proc/self/ns/mnt")
	if err != nil {
		return false
	}
	other, err := os.Readlink("/proc/1/ns/mnt")
	if err != nil {
		other, err = os.Readlink(fmt.Sprintf("/proc/%d/ns/mnt", os.Getppid()))
	}
	return err == nil && own != other
}
