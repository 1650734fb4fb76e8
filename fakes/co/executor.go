package co

import (
	"context"
	"fmt"
	"strings"

	"github.com/csi-prepare/csi-prepare/reference/mountspec"
)

// Executor performs mount specs and undoes what it performed. There are two:
// the reference executor, and [Plain], which shares nothing with it but the
// system calls.
type Executor interface {
	// Perform performs all of the specs or none. It gives the receipts to
	// journal when everything is made and nothing is visible yet; should
	// journal fail, nothing is performed.
	Perform(ctx context.Context, p Performance, journal func(receipts []string) error) ([]string, error)
	// Undo undoes what receipts record, in reverse. What is gone already is
	// no error.
	Undo(ctx context.Context, t Target, receipts []string) error
	// Whole reports whether everything receipts record is there.
	Whole(ctx context.Context, t Target, receipts []string) (bool, error)
}

// Target is where mount specs are performed.
type Target struct {
	// Namespace is an nsfs file of the mount namespace, "" for the
	// executor's own.
	Namespace string `json:"namespace,omitempty"`
	// Root is the consumer's root directory in it, "" for "/".
	Root string `json:"root,omitempty"`
	// Path is the place in the consumer.
	Path string `json:"path"`
}

// Performance is one list of mount specs to perform.
type Performance struct {
	Target  Target
	Request mountspec.Request
	// Staging, Prepare and Grants are the directories sources are relative
	// to, in the executor's own mount namespace.
	Staging, Prepare string
	Grants           map[string]string
	Specs            []mountspec.Spec
}

// RefusedError says that the mount specs break rules.
type RefusedError struct{ Violations []mountspec.Violation }

// Error lists every violation.
func (e *RefusedError) Error() string {
	var texts []string
	for _, v := range e.Violations {
		texts = append(texts, v.Error())
	}
	return strings.Join(texts, "; ")
}

// StateError says that a target, a source or a mount is not as it has to be.
type StateError struct {
	What string // what was looked at, if Err does not say that
	Err  error  // what was found
}

// Error names what was looked at and what was found.
func (e *StateError) Error() string {
	if e.What == "" {
		return e.Err.Error()
	}
	return fmt.Sprintf("%s: %v", e.What, e.Err)
}

// Unwrap returns what was found.
func (e *StateError) Unwrap() error { return e.Err }
