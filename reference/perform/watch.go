package perform

import (
	"sync"

	"golang.org/x/sys/unix"
)

// watch notices that the mounts of the thread's namespace change.
type watch struct {
	fd   int
	keep *watches // where it goes back to, if it is kept
	ns   uint64
}

// watches keeps the watch of one namespace for the next undo there.
type watches struct {
	mu   sync.Mutex
	free *watch
}

// watch begins to watch the namespace ns that the thread is in, where that is
// possible: in one that was entered on behalf of a consumer, /proc is whatever
// the consumer has put there.
func (v *view) watch(kept *watches, ns uint64) (*watch, error) {
	if v.ns != nil {
		return &watch{fd: -1}, nil
	}
	if kept != nil && ns != 0 {
		if w := kept.take(ns); w != nil {
			return w, nil
		}
	}
	fd, err := open(unix.AT_FDCWD, "/proc/thread-self/mountinfo", unix.O_RDONLY)
	return &watch{fd: fd, keep: kept, ns: ns}, err
}

// take returns the kept watch, brought up to date.
func (k *watches) take(ns uint64) *watch {
	k.mu.Lock()
	w := k.free
	if w != nil && w.ns == ns {
		k.free = nil
	} else {
		w = nil
	}
	k.mu.Unlock()
	if w != nil {
		w.quiet() // forget what has happened until now
	}
	return w
}

func (w *watch) close() {
	if k := w.keep; k != nil && w.ns != 0 {
		k.mu.Lock()
		w, k.free = k.free, w
		k.mu.Unlock()
	}
	if w != nil && w.fd >= 0 {
		_ = unix.Close(w.fd)
	}
}

func (k *watches) close() {
	if k.free != nil {
		_ = unix.Close(k.free.fd)
		k.free = nil
	}
}

// quiet reports whether certainly nothing has changed since watch, or since it
// was asked before. poll(2) on mountinfo tells of every attaching, moving and
// detaching once.
func (w *watch) quiet() bool {
	if w.fd < 0 {
		return false
	}
	fds := [1]unix.PollFd{{Fd: int32(w.fd), Events: unix.POLLPRI}}
	for {
		n, err := unix.Poll(fds[:], 0)
		if err != unix.EINTR {
			return err == nil && n == 0
		}
	}
}
