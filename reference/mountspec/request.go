package mountspec

import (
	"fmt"

	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// Performer is what the party that performs is able to do.
type Performer struct {
	// OtherKernel is true if the consumer runs on a kernel of its own.
	OtherKernel   bool
	Kinds         []KindName
	FSTypes       []string // allowed for Filesystem; empty allows none
	UserNamespace bool
	IDMap         bool
	Extensions    []string // type URLs
	Grants        []string // names
}

// Request is the part of a NodePrepareVolume call that its mount specs have
// to agree with.
type Request struct {
	Performer Performer
	// Readonly is true if readonly was set or the access mode is a
	// READER_ONLY one.
	Readonly bool
	// Block is true for a volume of block access type.
	Block bool
	// Staging is true if the call had a staging_target_path.
	Staging bool
}

// Violation is one rule broken by one mount spec.
type Violation struct {
	Index       int // of the spec; -1 for the response as a whole
	Requirement requirement.ID
	Field       string // as on the wire, for example "filesystem.fs_type"
	Detail      string // what was found and what to do; never a secret
}

// Error makes a Violation an error of its own.
func (v Violation) Error() string {
	where := "mount_specs"
	if v.Index >= 0 {
		where = fmt.Sprintf("mount_specs[%d]", v.Index)
	}
	if v.Field != "" {
		where += "." + v.Field
	}
	return fmt.Sprintf("%s: %s [%s]", where, v.Detail, v.Requirement)
}
