package co

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// PendingError says that a step of a preparation is still running: it has been
// killed and has not ended, because it waits in the kernel for a device or a
// server. Nothing else is done for the preparation until it has.
type PendingError struct {
	Key Key
	PID int // of the process, 0 if not known
}

// Error names the process.
func (e *PendingError) Error() string {
	if e.PID == 0 {
		return fmt.Sprintf("%s: an earlier step of it still runs", e.Key)
	}
	return fmt.Sprintf("%s: an earlier step of it still runs, as process %d, and does not end although killed: see what it waits for in /proc/%d/stack", e.Key, e.PID, e.PID)
}

// reapTime is how long a killed child is waited for.
const reapTime = time.Second

// hold takes a preparation for one operation. Children inherit the lock, so
// that a successor of this process too finds it taken until they have ended,
// which they do when this process does.
func (c *CO) hold(ctx context.Context, k Key) (*os.File, error) {
	end := time.Now().Add(reapTime)
	for {
		lock, err := lockFile(c.ledger.lockPath(k.position()))
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return lock, err
		}
		if time.Now().After(end) || ctx.Err() != nil {
			return nil, &PendingError{Key: k}
		}
		time.Sleep(reapTime / 100)
	}
}

// task is a job with what goes along to the child.
type task struct {
	job
	namespace, root *os.File
	handles         []given
	// journal is called with what has to be durable before the child goes
	// on.
	journal func(message) error
	// unblock, if set, ends what a killed child may wait for.
	unblock func()
}

// step does a task in a child of its own, at most for the deadline.
func (c *CO) step(ctx context.Context, k Key, lock *os.File, t task) (message, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Duration(t.Settings.StepDeadline))
	defer cancel()
	if c.inProcess && t.namespace == nil && t.root == nil && len(t.handles) == 0 {
		return t.do(ctx, t.journal)
	}

	cmd := exec.Command("/proc/self/exe")
	cmd.Args, cmd.Env = []string{childName}, []string{}
	// An interrupt at the terminal is for this process to decide about.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.ExtraFiles = []*os.File{lock}
	inherit := func(f *os.File) int {
		if f == nil {
			return 0
		}
		cmd.ExtraFiles = append(cmd.ExtraFiles, f)
		return firstInherited - 1 + len(cmd.ExtraFiles)
	}
	t.Namespace, t.Root = inherit(t.namespace), inherit(t.root)
	for _, g := range t.handles {
		mount, ns := g.master.Files()
		t.Handles = append(t.Handles, handleFD{g.handle.ID, g.handle.FUSE, inherit(mount), inherit(ns)})
	}
	t.Inherited = len(cmd.ExtraFiles)
	in, err := cmd.StdinPipe()
	if err != nil {
		return message{}, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return message{}, err
	}
	var words tail
	cmd.Stderr = &words
	if err := cmd.Start(); err != nil {
		return message{}, fmt.Errorf("start a child: %w", err)
	}
	type outcome struct {
		last message
		err  error
	}
	talked := make(chan outcome, 1)
	// Once step has returned nothing is written for it any more.
	var writing sync.Mutex
	over := false
	go func() {
		last, err := converse(in, out, &t.job, func(m message) error {
			writing.Lock()
			defer writing.Unlock()
			if over {
				return context.Cause(ctx)
			}
			return t.journal(m)
		})
		_ = in.Close()
		waited := cmd.Wait() // reaps, also after step has returned
		var fault *StepError
		if err != nil && !errors.As(err, &fault) {
			err = fmt.Errorf("child %v: %w%s", waited, err, words.text()) //nolint:errorlint // how the child ended is told; the cause is err
		}
		talked <- outcome{last, err}
	}()
	select {
	case o := <-talked:
		return o.last, o.err
	case <-ctx.Done():
	}
	_ = cmd.Process.Kill()
	if t.unblock != nil {
		t.unblock()
	}
	select {
	case o := <-talked:
		if o.err == nil {
			return o.last, nil
		}
		return message{}, fmt.Errorf("step: %w: %w", ctx.Err(), o.err)
	case <-time.After(reapTime):
		writing.Lock()
		defer writing.Unlock()
		over = true
		return message{}, errors.Join(fmt.Errorf("step: %w", ctx.Err()), &PendingError{k, cmd.Process.Pid})
	}
}

// converse gives a child its job and hears it to the end.
func converse(in io.Writer, out io.Reader, j *job, journal func(message) error) (message, error) {
	e, d := json.NewEncoder(in), json.NewDecoder(out)
	if err := e.Encode(j); err != nil {
		return message{}, err
	}
	for {
		var m message
		if err := d.Decode(&m); err != nil {
			return message{}, err
		}
		switch {
		case m.Fault != nil:
			return message{}, m.Fault.err()
		case m.Done:
			return m, nil
		}
		if err := journal(m); err != nil {
			return message{}, err
		}
		if err := e.Encode(true); err != nil {
			return message{}, err
		}
	}
}

// tail keeps the last words of a child that died of a fault of its own.
type tail struct{ buf bytes.Buffer }

// Write implements io.Writer.
func (t *tail) Write(p []byte) (int, error) {
	if room := 4096 - t.buf.Len(); room > 0 {
		t.buf.Write(p[:min(room, len(p))])
	}
	return len(p), nil
}

func (t *tail) text() string {
	if t.buf.Len() == 0 {
		return ""
	}
	return ": " + t.buf.String()
}
