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

	"github.com/csi-prepare/csi-prepare/reference/perform"
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

// step does a job in a child of its own, at most for the deadline. journal is
// called with receipts that have to be durable before the child goes on.
func (c *CO) step(ctx context.Context, k Key, lock *os.File, j job, namespace, root *os.File, journal func([]perform.Receipt) error) ([]perform.Receipt, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Duration(j.Settings.StepDeadline))
	defer cancel()

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
		return 2 + len(cmd.ExtraFiles)
	}
	j.Namespace, j.Root = inherit(namespace), inherit(root)
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	var words tail
	cmd.Stderr = &words
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start a child: %w", err)
	}
	type outcome struct {
		receipts []perform.Receipt
		err      error
	}
	talked := make(chan outcome, 1)
	// Once step has returned nothing is written for it any more.
	var writing sync.Mutex
	over := false
	go func() {
		receipts, err := converse(in, out, &j, func(r []perform.Receipt) error {
			writing.Lock()
			defer writing.Unlock()
			if over {
				return context.Cause(ctx)
			}
			return journal(r)
		})
		_ = in.Close()
		waited := cmd.Wait() // reaps, also after step has returned
		var fault *StepError
		if err != nil && !errors.As(err, &fault) {
			err = fmt.Errorf("child %v: %w%s", waited, err, words.text()) //nolint:errorlint // how the child ended is told; the cause is err
		}
		talked <- outcome{receipts, err}
	}()
	select {
	case o := <-talked:
		return o.receipts, o.err
	case <-ctx.Done():
	}
	_ = cmd.Process.Kill()
	select {
	case o := <-talked:
		if o.err == nil {
			return o.receipts, nil
		}
		return nil, fmt.Errorf("step: %w: %w", ctx.Err(), o.err)
	case <-time.After(reapTime):
		writing.Lock()
		defer writing.Unlock()
		over = true
		return nil, errors.Join(fmt.Errorf("step: %w", ctx.Err()), &PendingError{k, cmd.Process.Pid})
	}
}

// converse gives a child its job and hears it to the end.
func converse(in io.Writer, out io.Reader, j *job, journal func([]perform.Receipt) error) ([]perform.Receipt, error) {
	e, d := json.NewEncoder(in), json.NewDecoder(out)
	if err := e.Encode(j); err != nil {
		return nil, err
	}
	for {
		var a answer
		if err := d.Decode(&a); err != nil {
			return nil, err
		}
		switch {
		case a.Fault != nil:
			return nil, a.Fault.err()
		case a.Done:
			return a.Receipts, nil
		}
		if err := journal(a.Receipts); err != nil {
			return nil, err
		}
		if err := e.Encode(true); err != nil {
			return nil, err
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
