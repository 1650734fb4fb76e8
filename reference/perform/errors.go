package perform

import (
	"errors"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/mountns"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
)

// Error is a performance or an undo that failed at one step. Nothing of the
// performance is left, unless a *LeftError is in the chain.
type Error struct {
	// Index is that of the mount spec or receipt, -1 where it is not one of
	// them that failed.
	Index int
	// Step names what was being done, in most cases a step of the plan.
	Step string
	// Err is the reason, with the kernel's own words where it gave any.
	Err error
}

// Error implements error.
func (e *Error) Error() string {
	if e.Index < 0 {
		return fmt.Sprintf("%s: %v", e.Step, e.Err)
	}
	return fmt.Sprintf("mount_specs[%d]: %s: %v", e.Index, e.Step, e.Err)
}

// Unwrap returns the reason.
func (e *Error) Unwrap() error { return e.Err }

// InvalidError is a list of mount specs that breaks rules of the contract.
// Nothing of it has been performed.
type InvalidError struct {
	Violations []mountspec.Violation // all of them
}

// Error implements error.
func (e *InvalidError) Error() string {
	all := make([]string, len(e.Violations))
	for i, v := range e.Violations {
		all[i] = v.Error()
	}
	return strings.Join(all, "; ")
}

// What a source, a target or a receipt can be besides refused by the kernel.
// They are found with errors.Is in the chain of an *Error.
var (
	// ErrTarget is a target that names no place below the consumer's root,
	// is of the wrong type, or lies on a filesystem of the kernel's own.
	ErrTarget = errors.New("not a place to attach to")
	// ErrTargetKernel is an ErrTarget on a filesystem of the kernel's own,
	// ErrTargetType one of the wrong type.
	ErrTargetKernel = fmt.Errorf("%w: on a filesystem of the kernel", ErrTarget)
	ErrTargetType   = fmt.Errorf("%w: of the wrong type", ErrTarget)
	// ErrSource is a source of the wrong type, or one that is not covered by
	// the mount it should be.
	ErrSource = errors.New("not the source the spec describes")
	// ErrSourceLink is an ErrSource that a link, or "..", leads to,
	// ErrSourceType one of the wrong type, and ErrSourceMount one that the
	// mount it should be of does not cover.
	ErrSourceLink  = fmt.Errorf("%w: reached through a link, or outside its base", ErrSource)
	ErrSourceType  = fmt.Errorf("%w: of the wrong type", ErrSource)
	ErrSourceMount = fmt.Errorf("%w: not of the mount it should be", ErrSource)
	// ErrDevice is a device that is not there, or is another one by now.
	ErrDevice = errors.New("not the device the spec describes")
	// ErrWritable is a device that takes writes and is to be read-only.
	ErrWritable = errors.New("the device takes writes")
	// ErrParameters is a superblock that is in use with other parameters.
	ErrParameters = errors.New("mounted already with other parameters")
	// ErrChanged is a mount that, read back, is not what was made: somebody
	// else changed the place while it was performed.
	ErrChanged = errors.New("the mount is not as it was made")
	// ErrForeign is a receipt of another mount namespace.
	ErrForeign = errors.New("the receipt is of another mount namespace")
	// ErrReceipt is a receipt that cannot have been written by Perform.
	ErrReceipt = errors.New("not a receipt of this executor")
)

// BusyError is a mount that is in use and was left where it is, with
// everything below and above it. It is unix.EBUSY to errors.Is.
type BusyError struct {
	// Index is that of the receipt.
	Index int
	// MountID is the mount that is busy, by unique id.
	MountID uint64
	// Target is where it is attached.
	Target string
	// Covered says that the path of the mount leads elsewhere, because
	// something is mounted over a directory above it: it cannot be reached.
	Covered bool
	// Mounts are the mounts on it that are no part of the performance, by
	// unique id: somebody else's, which are never taken away.
	Mounts []uint64
	// Holders are the processes found to use it, as far as that could be
	// seen in half a second: the list may be empty or incomplete.
	Holders []mountns.Holder
}

// Error implements error.
func (e *BusyError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "mount %d on %q is in use", e.MountID, e.Target)
	if e.Covered {
		b.WriteString(": its path leads elsewhere")
	}
	for i, h := range e.Holders {
		sep := ", "
		if i == 0 {
			sep = " by "
		}
		b.WriteString(sep + h.String())
	}
	for i, id := range e.Mounts {
		sep := ", "
		if i == 0 {
			sep = "; mounted on it by others: "
		}
		fmt.Fprintf(&b, "%s%d", sep, id)
	}
	return b.String()
}

// Is makes a BusyError the EBUSY it stands for.
func (e *BusyError) Is(target error) bool { return target == unix.EBUSY }

// LeftError is a performance that failed after something of it became
// visible, and whose undo failed too: Receipts, which Undo takes again, are
// what is left.
type LeftError struct {
	Receipts []Receipt
	Err      error // of the undo
}

// Error implements error.
func (e *LeftError) Error() string {
	return fmt.Sprintf("%d mounts are left of it: %v", len(e.Receipts), e.Err)
}

// Unwrap returns the error of the undo.
func (e *LeftError) Unwrap() error { return e.Err }
