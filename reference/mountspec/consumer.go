package mountspec

import "fmt"

// Place is what a CO knows of one mount spec when it asks a container
// runtime to attach it: where it has performed the spec already, or where it
// found what the spec speaks of. The CO resolves a path once and checks it;
// the consumer gets the result and nothing that has to be resolved again.
type Place struct {
	// Performed is where the CO has performed the spec, in a directory of its
	// own; the consumer binds it. It is an absolute path free of links or, for
	// a mount the CO made with fsmount(2), "/proc/PID/fd/N" with the PID of
	// the CO, which keeps the descriptor open until the consumer is done.
	Performed string
	// Found is used where Performed is empty: the absolute path, free of
	// links, of a Bind's source, or the node of a block device whose number
	// the CO has compared. A node's path is the CO's own and not the Plugin's
	// DevicePath.
	Found string
	// Attributes are those of the mount at that path. A runtime that is given
	// any attribute drops those of the source, so they are all given again.
	Attributes Attr
	// Private is true if the mount at that path is private in propagation.
	Private bool
}

// Path returns the path a consumer binds, "" if there is none.
func (p Place) Path() string {
	if p.Performed != "" {
		return p.Performed
	}
	return p.Found
}

// ConsumerError says that a consumer cannot carry a mount spec as it is. The
// converters return it rather than drop or approximate a field; the CO then
// performs the spec itself and lets the consumer bind the result, which every
// consumer can.
type ConsumerError struct {
	Index    int    // of the mount spec
	Field    string // as on the wire, or a field of Place
	Consumer string // "OCI", "containerd", "CRI"
	Reason   string // and what to do; never a secret
}

// Error implements error.
func (e *ConsumerError) Error() string {
	return fmt.Sprintf("mount_specs[%d].%s: not carried by %s: %s", e.Index, e.Field, e.Consumer, e.Reason)
}
