package perform

import (
	"context"
	"errors"
	"os"
	"syscall"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
	"github.com/csi-prepare/csi-prepare/reference/mountns"
)

// errMayHang says that a path to a mount leads through a filesystem whose
// server has to be asked.
var errMayHang = errors.New("a server has to be asked")

// childUndo is the outcome of an undo that a child has made.
type childUndo struct {
	Failed bool
	Index  int
	Step   string
	Text   string
	Errno  syscall.Errno `json:",omitempty"`
	Busy   *BusyError    `json:",omitempty"`
}

// undo undoes in the child.
func (t *childTask) undo(fd int) *childUndo {
	ns, err := mountns.FromFile(os.NewFile(uintptr(fd), "namespace"))
	if err == nil && t.Features == nil {
		err = errors.New("no features came along")
	}
	if err == nil {
		defer func() { _ = ns.Close() }()
		e := Executor{patient: true, features: func() kernel.Features { return *t.Features }}
		if t.Force == Exact {
			err = e.Undo(context.Background(), ns, t.Undo)
		} else {
			err = e.forceHere(context.Background(), ns, &t.Undo[0], t.Force)
		}
	}
	if err == nil {
		return &childUndo{}
	}
	o := &childUndo{Failed: true, Index: -1, Text: err.Error()}
	var step *Error
	if errors.As(err, &step) {
		o.Index, o.Step, o.Text = step.Index, step.Step, step.Err.Error()
	}
	_ = errors.As(err, &o.Busy)
	_ = errors.As(err, &o.Errno)
	return o
}

// childError is an error of a child that has a text and perhaps an errno.
type childError struct {
	text  string
	errno syscall.Errno
}

func (e *childError) Error() string { return e.text }

func (e *childError) Unwrap() error {
	if e.errno == 0 {
		return nil
	}
	return e.errno
}

func (o *childUndo) error() error {
	switch {
	case !o.Failed:
		return nil
	case o.Busy != nil:
		return &Error{o.Index, o.Step, o.Busy}
	}
	return &Error{o.Index, o.Step, &childError{o.Text, o.Errno}}
}

// undoInChild undoes in a child that the deadline can kill.
func (e *Executor) undoInChild(ctx context.Context, ns *mountns.Namespace, receipts []Receipt, force Force) error {
	if ns == nil {
		own, err := mountns.Own()
		if err != nil {
			return &Error{-1, "find the namespace", err}
		}
		defer func() { _ = own.Close() }()
		ns = own
	}
	f := kernel.Probe()
	if e.features != nil {
		f = e.features()
	}
	_, answer, err := inChild(ctx, &childTask{Undo: receipts, Force: force, Features: &f}, ns.FD(), defaultTimeout)
	if err == nil && answer.Undo != nil {
		return answer.Undo.error()
	}
	if err == nil {
		err = errors.New("the child did not say how it went")
	}
	return &Error{-1, "undo in a child", err}
}
