package co

import (
	"bytes"
	"net"
	"os"
	"os/exec"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Starting a process costs far more than most steps. So one that has done its
// step is kept for the next one, for a while; one that was killed, or that
// misbehaved, is not.
const (
	maxIdle  = 8
	idleTime = 10 * time.Second
)

// children are the processes of a CO that do steps. The zero value is ready.
type children struct {
	mu     sync.Mutex
	idle   []*child
	closed bool
}

// child is one process, which does one step at a time.
type child struct {
	cmd   *exec.Cmd
	conn  *net.UnixConn
	words tail
	ended chan struct{}
	rest  *time.Timer
}

func (c *children) take() (*child, error) {
	c.mu.Lock()
	if n := len(c.idle); n > 0 {
		h := c.idle[n-1]
		c.idle = c.idle[:n-1]
		c.mu.Unlock()
		h.rest.Stop()
		return h, nil
	}
	c.mu.Unlock()
	return startChild()
}

// giveBack keeps a child, or ends it if there are enough.
func (c *children) giveBack(h *child) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed || len(c.idle) >= maxIdle {
		_ = h.conn.Close()
		return
	}
	h.rest = time.AfterFunc(idleTime, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if i := slices.Index(c.idle, h); i >= 0 {
			c.idle = slices.Delete(c.idle, i, i+1)
			_ = h.conn.Close()
		}
	})
	c.idle = append(c.idle, h)
}

// close ends those that do nothing, and waits for them.
func (c *children) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	for _, h := range c.idle {
		h.rest.Stop()
		_ = h.conn.Close()
		<-h.ended
	}
	c.idle = nil
}

// childSocket is the descriptor a child finds its socket at.
const childSocket = 3

func startChild() (*child, error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socketpair", err)
	}
	theirs := os.NewFile(uintptr(pair[1]), "child")
	defer theirs.Close()
	conn, err := socketOf(pair[0])
	if err != nil {
		return nil, err
	}
	h := &child{cmd: exec.Command("/proc/self/exe"), conn: conn, ended: make(chan struct{})}
	h.cmd.Args, h.cmd.Env = []string{childName}, []string{}
	// An interrupt at the terminal is for this process to decide about.
	h.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	h.cmd.ExtraFiles = []*os.File{theirs}
	h.cmd.Stderr = &h.words
	if err := h.cmd.Start(); err != nil {
		_ = conn.Close()
		return nil, err
	}
	go func() {
		_ = h.cmd.Wait()
		close(h.ended)
	}()
	return h, nil
}

// socketOf makes a connection of a descriptor, which it takes.
func socketOf(fd int) (*net.UnixConn, error) {
	f := os.NewFile(uintptr(fd), "socket")
	defer f.Close()
	conn, err := net.FileConn(f)
	if err != nil {
		return nil, err
	}
	return conn.(*net.UnixConn), nil
}

// kill ends the child, now or when the kernel lets it.
func (h *child) kill() {
	_ = h.cmd.Process.Kill()
	_ = h.conn.Close()
}

// tail keeps the last words of a child that died of a fault of its own.
type tail struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

// Write implements io.Writer.
func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if room := 4096 - t.buf.Len(); room > 0 {
		t.buf.Write(p[:min(room, len(p))])
	}
	return len(p), nil
}

func (t *tail) text() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.buf.Len() == 0 {
		return ""
	}
	return ": " + t.buf.String()
}
