package perform

import (
	"errors"
)

// Keep says what an Executor keeps between calls, to be faster.
type Keep struct {
	// Sources keeps a clone of each directory that binds start from. Binding
	// costs the kernel time in proportion to the mounts attached to the
	// source's mount, thousands on a busy node; a clone has none. A clone
	// keeps the filesystem in use after its last mount is gone: call
	// Executor.Drop before a volume is unstaged or unprepared.
	Sources bool
	// Trash is a directory in the calling thread's namespace where several
	// mounts are taken away at once: they are moved there out of everybody's
	// reach, seen to be idle, and detached by one call, where one after
	// another each costs a grace period of the kernel. It must be a
	// directory that only this executor and root can enter. Empty takes
	// mounts away one after another.
	Trash string
}

// NewExecutor returns an executor that keeps something. It has to be closed.
func NewExecutor(k Keep) (*Executor, error) {
	e := &Executor{watches: &watches{}}
	if k.Sources {
		e.cache = &cache{}
	}
	if k.Trash != "" {
		t, err := newTrash(k.Trash, e)
		if err != nil {
			return nil, &Error{-1, "make the trash", err}
		}
		e.trash = t
	}
	return e, nil
}

// Drop lets go of all sources that are kept, and so of their filesystems. What
// is performed stays. The next performances keep sources anew.
func (e *Executor) Drop() {
	if e.cache != nil {
		e.cache.drop()
	}
}

// Close lets go of everything that is kept. The executor must not be in use,
// and is of no use afterwards.
func (e *Executor) Close() error {
	e.Drop()
	var err error
	if e.trash != nil {
		err = errors.Join(err, e.trash.close(e))
		e.trash = nil
	}
	if e.watches != nil {
		e.watches.close()
	}
	return err
}
