package kernel

import (
	"runtime"

	"golang.org/x/sys/unix"
)

// StartThread runs fn on a thread of its own that is not the leader of the
// process, and ends that thread when fn returns, so fn may give it another
// mount namespace, root or file system state and need not put anything back.
// It does not wait for fn. Goroutines that fn starts run on other threads.
//
// The leader is avoided because it cannot be ended alone and because
// /proc/self and the process's pidfd show the leader's namespaces.
func StartThread(fn func()) { go onThread(fn, nil) }

func onThread(fn func(), started chan<- struct{}) {
	runtime.LockOSThread()
	if started != nil {
		close(started)
	}
	if unix.Gettid() == unix.Getpid() {
		// While this goroutine holds the leader, another one has to run on
		// another thread.
		next := make(chan struct{})
		go onThread(fn, next)
		<-next
		runtime.UnlockOSThread()
		return
	}
	fn() // never unlocked: the runtime ends the thread
}
