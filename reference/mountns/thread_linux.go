package mountns

import (
	"context"
	"encoding/binary"
	"fmt"
	"os"
	"runtime"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
)

const (
	// maxThreads bounds the threads that are inside namespaces at one time.
	// Mounting is serialised by the kernel; more would only queue there.
	maxThreads = 64
	// maxIdle bounds the threads kept for later.
	maxIdle = 4
)

// thread runs functions on one operating system thread that has file system
// state of its own and hops into a namespace for each visit and out again.
// Between visits it is in the namespace it began in, so it keeps no other
// namespace, and none of its mounts, alive.
//
// Both sides wait in read(2) on an eventfd and not on a channel: the runtime
// wakes a goroutine that is locked to a thread by way of another thread, which
// costs several times what the work of a short visit does. The channels, which
// nobody ever waits on, carry what is passed.
type thread struct {
	work chan task
	done chan outcome

	wake, woken int // eventfds: there is work, it is done
	self        int // O_PATH descriptor of the thread's own directory in /proc
	home        int // the mount namespace it began in
}

type task struct {
	fn    func(*thread) error
	enter int // descriptor of the namespace to enter first, -1 to stay
	leave bool
}

type outcome struct {
	err      error
	panicked any
	exited   bool // runtime.Goexit, as by testing.T.FailNow
	dead     bool // the thread is gone or must not be used again
}

// threads are those not in use. slots bounds how many exist outside idle.
var threads = struct {
	sync.Mutex
	idle []*thread
}{}

var slots = make(chan struct{}, maxThreads)

// borrow takes an idle thread or starts one, waiting while maxThreads are busy.
func borrow(ctx context.Context) (*thread, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	select {
	case slots <- struct{}{}:
	default:
		select {
		case slots <- struct{}{}:
		case <-ctx.Done():
			return nil, fmt.Errorf("mountns: all %d threads are inside namespaces: %w", maxThreads, ctx.Err())
		}
	}
	threads.Lock()
	if last := len(threads.idle) - 1; last >= 0 {
		t := threads.idle[last]
		threads.idle = threads.idle[:last]
		threads.Unlock()
		return t, nil
	}
	threads.Unlock()
	t, err := startThread()
	if err != nil {
		<-slots
	}
	return t, err
}

func (t *thread) giveBack(reusable bool) {
	if reusable {
		threads.Lock()
		if len(threads.idle) < maxIdle {
			threads.idle = append(threads.idle, t)
			threads.Unlock()
			<-slots
			return
		}
		threads.Unlock()
		close(t.work)
		post(t.wake)
	}
	_ = unix.Close(t.woken) // the thread has posted all it ever will
	<-slots
}

func startThread() (*thread, error) {
	t := &thread{
		work: make(chan task, 1), done: make(chan outcome, 1),
		wake: -1, woken: -1, self: -1, home: -1,
	}
	ready := make(chan error, 1)
	kernel.StartThread(func() {
		defer t.end() // also when a task ends the goroutine
		err := t.begin()
		ready <- err
		if err == nil {
			t.serve()
		}
	})
	if err := <-ready; err != nil {
		if t.woken >= 0 {
			_ = unix.Close(t.woken)
		}
		return nil, err
	}
	return t, nil
}

func (t *thread) begin() (err error) {
	if t.self, err = unix.Open("/proc/thread-self", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0); err != nil {
		return fmt.Errorf("mountns: /proc is needed to find a thread's namespace: %w", err)
	}
	if t.home, err = t.openNamespace(); err != nil {
		return err
	}
	for _, fd := range []*int{&t.wake, &t.woken} {
		if *fd, err = unix.Eventfd(0, unix.EFD_CLOEXEC); err != nil {
			return os.NewSyscallError("eventfd", err)
		}
	}
	// setns refuses a thread that shares root and working directory with others.
	return os.NewSyscallError("unshare", unix.Unshare(unix.CLONE_FS))
}

// end closes what only the thread uses; woken is the caller's.
func (t *thread) end() {
	for _, fd := range []int{t.wake, t.self, t.home} {
		if fd >= 0 {
			_ = unix.Close(fd)
		}
	}
}

// openNamespace opens the namespace the thread is in now, whatever /proc that
// namespace has.
func (t *thread) openNamespace() (int, error) {
	fd, err := unix.Openat(t.self, "ns/mnt", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, &os.PathError{Op: "open", Path: ownLink, Err: err}
	}
	return fd, nil
}

func (t *thread) serve() {
	for {
		await(t.wake)
		w, ok := <-t.work
		if !ok || t.perform(w) {
			return
		}
	}
}

// post and await pass one signal through an eventfd.
func post(fd int) {
	var one [8]byte
	binary.NativeEndian.PutUint64(one[:], 1)
	for {
		if _, err := unix.Write(fd, one[:]); err != unix.EINTR {
			return
		}
	}
}

func await(fd int) {
	var count [8]byte
	for {
		if _, err := unix.Read(fd, count[:]); err != unix.EINTR {
			return
		}
	}
}

// perform runs one task and reports it. The report is sent even when the task
// ends the goroutine, in which case serve never regains control.
func (t *thread) perform(w task) (dead bool) {
	o := outcome{exited: true, dead: true}
	defer func() {
		if o.exited {
			if p := recover(); p != nil {
				o.exited, o.panicked, dead = false, p, true
			}
		}
		t.done <- o
		post(t.woken)
	}()
	o.err, o.dead = t.run(w)
	o.exited = false
	return o.dead
}

func (t *thread) run(w task) (err error, dead bool) {
	if w.enter >= 0 {
		if err := unix.Setns(w.enter, unix.CLONE_NEWNS); err != nil {
			return os.NewSyscallError("setns", err), false
		}
	}
	if w.fn != nil {
		err = w.fn(t)
	}
	if w.leave {
		dead = unix.Setns(t.home, unix.CLONE_NEWNS) != nil
	}
	return err, dead
}

// call runs one task and passes on how it ended: a panic goes on in the
// caller's goroutine, and so does a runtime.Goexit.
func (t *thread) call(w task) (err error, alive bool) {
	t.work <- w
	post(t.wake)
	await(t.woken)
	o := <-t.done
	if o.panicked != nil || o.exited {
		t.giveBack(false)
		if o.exited {
			runtime.Goexit()
		}
		panic(o.panicked)
	}
	return o.err, !o.dead
}

// visit is the round trip that everything else is made of.
func (n *Namespace) visit(ctx context.Context, fn func(*thread) error) error {
	t, err := borrow(ctx)
	if err != nil {
		return err
	}
	err, alive := t.call(task{fn: fn, enter: n.fd, leave: true})
	runtime.KeepAlive(n)
	t.giveBack(alive)
	return err
}

// Do runs fn inside the namespace, on a thread that is in it while fn runs and
// has the namespace's root as root and working directory. fn is not interrupted:
// ctx bounds only the wait for a thread, of which a fixed number may be inside
// namespaces at one time. What can hang belongs in a process that can be killed.
//
// Only fn itself is inside. Goroutines it starts run elsewhere, and so does
// what a library runs on goroutines of its own, such as the function polled by
// Gomega's Eventually; a process started by fn begins inside. fn must not call
// runtime.UnlockOSThread nor leave the thread changed in anything but its mount
// namespace, root and working directory. A panic or runtime.Goexit in fn goes
// on in the caller.
func (n *Namespace) Do(ctx context.Context, fn func() error) error {
	return n.visit(ctx, func(*thread) error { return fn() })
}

// Visit is a stay in a namespace for several steps, at the price of one
// entering. It is for one goroutine, holds one of the threads that [Namespace.Do]
// uses, and must be ended with Leave.
type Visit struct {
	t     *thread
	alive bool
}

// Enter begins a visit; ctx bounds the wait for a thread.
func (n *Namespace) Enter(ctx context.Context) (*Visit, error) {
	t, err := borrow(ctx)
	if err != nil {
		return nil, err
	}
	err, alive := t.call(task{enter: n.fd})
	runtime.KeepAlive(n)
	if err != nil {
		t.giveBack(alive)
		return nil, err
	}
	return &Visit{t: t, alive: true}, nil
}

// Do runs one step, as [Namespace.Do] does. After a step that panicked the
// visit is over.
func (v *Visit) Do(fn func() error) error {
	if v.t == nil {
		return os.ErrClosed
	}
	t := v.t
	v.t = nil
	err, alive := t.call(task{fn: func(*thread) error { return fn() }, enter: -1})
	v.t, v.alive = t, alive
	return err
}

// Leave ends the visit. Calling it again does nothing.
func (v *Visit) Leave() {
	if v.t == nil {
		return
	}
	t := v.t
	v.t = nil
	_, alive := t.call(task{enter: -1, leave: true})
	t.giveBack(alive)
}
