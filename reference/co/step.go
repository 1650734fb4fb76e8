package co

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
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

// hold takes a preparation for one operation. Children have the lock too while
// they do a step, so that a successor of this process also finds it taken until
// they have ended, which they do when this process does.
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

// step does a task in a child, at most for the deadline.
func (c *CO) step(ctx context.Context, k Key, lock *os.File, t task) (message, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Duration(t.Settings.StepDeadline))
	defer cancel()
	with := []*os.File{lock}
	along := func(f *os.File) int {
		if f == nil {
			return 0
		}
		with = append(with, f)
		return len(with) - 1
	}
	t.Namespace, t.Root = along(t.namespace), along(t.root)
	for _, g := range t.handles {
		mount, ns := g.master.Files()
		t.Handles = append(t.Handles, handleFD{g.handle.ID, g.handle.FUSE, along(mount), along(ns)})
	}
	h, err := c.children.take()
	if err != nil {
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
		last, err := h.converse(&t.job, with, func(m message) error {
			writing.Lock()
			defer writing.Unlock()
			if over {
				return context.Cause(ctx)
			}
			return t.journal(m)
		})
		var fault *StepError
		if err == nil || errors.As(err, &fault) {
			c.children.giveBack(h)
		} else {
			h.kill()
			<-h.ended
			err = fmt.Errorf("child %v: %w%s", h.cmd.ProcessState, err, h.words.text())
		}
		talked <- outcome{last, err}
	}()
	select {
	case o := <-talked:
		return o.last, o.err
	case <-ctx.Done():
	}
	h.kill()
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
		return message{}, errors.Join(fmt.Errorf("step: %w", ctx.Err()), &PendingError{k, h.cmd.Process.Pid})
	}
}

// converse gives a child its job, with files, and hears it to the end.
func (h *child) converse(j *job, with []*os.File, journal func(message) error) (message, error) {
	if err := send(h.conn, j, with...); err != nil {
		return message{}, err
	}
	for {
		text, files, err := receive(h.conn)
		closeAll(files)
		if err != nil {
			return message{}, err
		}
		var m message
		if err := json.Unmarshal(text, &m); err != nil {
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
		if err := send(h.conn, true); err != nil {
			return message{}, err
		}
	}
}

// maxMessage bounds what one of the two sends the other. A plugin's answer, the
// largest part of it, has 4 MiB at most (gRPC).
const maxMessage = 16 << 20

// maxFiles are a lock, a namespace, a root and two for each of 16 handles.
const maxFiles = 64

// send sends a value, after its length, with files.
func send(conn *net.UnixConn, value any, files ...*os.File) error {
	text, err := json.Marshal(value)
	if err != nil {
		return err
	}
	if len(text) > maxMessage {
		return fmt.Errorf("a message of %d bytes: at most %d", len(text), maxMessage)
	}
	var rights []byte
	if len(files) > 0 {
		fds := make([]int, len(files))
		for i, f := range files {
			fds[i] = int(f.Fd())
		}
		rights = unix.UnixRights(fds...)
	}
	head := binary.NativeEndian.AppendUint32(nil, uint32(len(text)))
	if _, _, err := conn.WriteMsgUnix(head, rights, nil); err != nil {
		return err
	}
	_, err = conn.Write(text)
	return err
}

func receive(conn *net.UnixConn) (text []byte, files []*os.File, err error) {
	head, rights := make([]byte, 4), make([]byte, unix.CmsgSpace(4*maxFiles))
	n, rn, _, _, err := conn.ReadMsgUnix(head, rights)
	if err == nil && n == 0 {
		err = io.EOF
	}
	if err != nil {
		return nil, nil, err
	}
	messages, err := unix.ParseSocketControlMessage(rights[:rn])
	for i := range messages {
		fds, _ := unix.ParseUnixRights(&messages[i])
		for _, fd := range fds {
			files = append(files, os.NewFile(uintptr(fd), "received"))
		}
	}
	if err == nil {
		_, err = io.ReadFull(conn, head[n:])
	}
	if size := binary.NativeEndian.Uint32(head); err == nil && size <= maxMessage {
		text = make([]byte, size)
		_, err = io.ReadFull(conn, text)
	} else if err == nil {
		err = fmt.Errorf("a message of %d bytes: at most %d", size, maxMessage)
	}
	if err != nil {
		closeAll(files)
		return nil, nil, err
	}
	return text, files, nil
}

func closeAll(files []*os.File) {
	for _, f := range files {
		if f != nil {
			_ = f.Close()
		}
	}
}
