package device

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// ErrGone says that a loop device was detached, or that its number belongs to
// another one.
var ErrGone = errors.New("the loop device is gone")

// patience is how long a device that is to be detached may be open in another
// program: those that look at each new device for a moment are no users.
const patience = 2 * time.Second

// Detach ends l, wherever it is, and is no error if there is none. Where it is
// in use nothing is changed: a *BusyError. What was written to it is in its
// file when Detach returns.
func (n *Nodes) Detach(ctx context.Context, l Loop) error {
	known, err := n.Attached(l)
	if err != nil {
		return err
	}
	if !known {
		// Its number may not have been recorded, or be that of another.
		found := false
		if l, found, err = n.Find(l); err != nil || !found {
			return err
		}
	}
	// LOOP_CLR_FD on a device that somebody has open succeeds, and detaches
	// it when that one closes it: not proof of anything.
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for cleared := false; ; {
		var busy *BusyError
		if !cleared {
			switch err := n.clear(l); {
			case err == nil:
				cleared = true
			case !errors.As(err, &busy):
				return err
			}
		}
		if cleared {
			there, err := n.Attached(l)
			if err != nil || !there {
				return err
			}
		}
		select {
		case <-ctx.Done():
			if busy != nil {
				return busy
			}
			return n.keep(l)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// clear flushes a device that nobody has claimed and asks for its end.
func (n *Nodes) clear(l Loop) error {
	flags := unix.O_RDWR
	if l.Readonly {
		flags = unix.O_RDONLY
	}
	f, err := n.Claim(l.Number, flags)
	if errors.Is(err, unix.ENXIO) || errors.Is(err, unix.ENODEV) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := unix.IoctlLoopGetStatus64(int(f.Fd()))
	if errors.Is(err, unix.ENXIO) || err == nil && !l.is(info) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("status of %s: %w", l.Number, err)
	}
	if err := f.Sync(); err != nil {
		return fmt.Errorf("flush %s before it is detached: %w", l.Number, err)
	}
	if _, err := unix.IoctlRetInt(int(f.Fd()), unix.LOOP_CLR_FD); err != nil && !errors.Is(err, unix.ENXIO) {
		return fmt.Errorf("detach %s: %w", l.Number, err)
	}
	return nil
}

// keep takes back what clear asked for.
func (n *Nodes) keep(l Loop) error {
	f, info, err := n.openIf(l, l.Number, unix.O_RDONLY)
	if err != nil || f == nil {
		return err
	}
	defer f.Close()
	info.Flags &^= unix.LO_FLAGS_AUTOCLEAR
	if err := unix.IoctlLoopSetStatus64(int(f.Fd()), info); err != nil {
		return fmt.Errorf("keep %s, which is in use: %w", l.Number, err)
	}
	return &BusyError{l.Number, "a process has it open"}
}
