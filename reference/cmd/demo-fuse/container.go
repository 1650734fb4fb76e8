package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// outcome is what a consumer saw since it was asked last.
type outcome struct {
	Operations, Failed, Corrupt int64
	Longest                     time.Duration
	First                       string // the first failure
}

// container is a process in namespaces of its own. It takes orders line by line
// and answers each with one, until there are no more.
type container struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
	dir string
}

// startContainer starts this program as a container's.
func startContainer(dir string) (*container, error) {
	if err := os.MkdirAll(filepath.Join(dir, "volume"), 0o755); err != nil {
		return nil, err
	}
	c := &container{cmd: exec.Command("/proc/self/exe"), dir: dir}
	c.cmd.Env = append(os.Environ(), consumerRole+"="+filepath.Join(dir, "volume"))
	c.cmd.Stderr = os.Stderr
	c.cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWIPC | unix.CLONE_NEWNET,
		// With it goes a recursive private: nothing propagates, either way.
		Unshareflags: unix.CLONE_NEWNS,
	}
	in, err := c.cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	c.in, c.out = in, bufio.NewReader(out)
	if err := c.cmd.Start(); err != nil {
		return nil, fmt.Errorf("%w: %w", errCannotRun, err)
	}
	_, err = c.order("hello")
	return c, err
}

func (c *container) pid() int { return c.cmd.Process.Pid }

func (c *container) order(text string) (o outcome, err error) {
	if _, err := io.WriteString(c.in, text+"\n"); err != nil {
		return o, err
	}
	line, err := c.out.ReadString('\n')
	if err != nil {
		return o, fmt.Errorf("the container: %w", err)
	}
	if err := json.Unmarshal([]byte(line), &o); err != nil {
		return o, err
	}
	if o.First != "" {
		err = errors.New("the consumer: " + o.First)
	}
	return o, err
}

func (c *container) begin() error             { _, err := c.order("begin"); return err }
func (c *container) report() (outcome, error) { return c.order("report") }
func (c *container) rest() error              { _, err := c.order("rest"); return err }

// moves tells whether the load has done something since just now.
func (c *container) moves() bool {
	o, err := c.order("look")
	return err == nil && o.Operations > 0
}

func (c *container) stop() error {
	err := c.in.Close()
	_ = c.cmd.Wait() // whatever it had to say it has said
	return err
}

// consume takes the orders, in the container.
func consume(dir string) error {
	var (
		mu      sync.Mutex
		seen    outcome
		recent  int64
		resting = make(chan struct{})
		rested  = make(chan struct{})
	)
	note := func(took time.Duration, corrupt bool, err error) {
		mu.Lock()
		defer mu.Unlock()
		seen.Operations++
		recent++
		seen.Longest = max(seen.Longest, took)
		if corrupt {
			seen.Corrupt++
		}
		if err != nil {
			seen.Failed++
			if seen.First == "" {
				seen.First = err.Error()
			}
		}
	}
	orders := bufio.NewScanner(os.Stdin)
	for orders.Scan() {
		var answer outcome
		switch order := strings.TrimSpace(orders.Text()); order {
		case "begin":
			go func() {
				defer close(rested)
				load(dir, resting, note)
			}()
		case "rest":
			close(resting)
			<-rested
		case "report":
			mu.Lock()
			answer, seen = seen, outcome{}
			mu.Unlock()
		case "look":
			mu.Lock()
			recent = 0
			mu.Unlock()
			time.Sleep(50 * time.Millisecond)
			mu.Lock()
			answer.Operations = recent
			mu.Unlock()
		}
		if err := json.NewEncoder(os.Stdout).Encode(answer); err != nil {
			return err
		}
	}
	return orders.Err()
}

// load writes, reads past the page cache, compares, and looks at the directory,
// with one file open all the while.
func load(dir string, resting <-chan struct{}, note func(time.Duration, bool, error)) {
	f, err := os.OpenFile(filepath.Join(dir, "file"), os.O_RDWR|os.O_CREATE, 0o644) //nolint:gosec // the volume, as the demonstration was told
	if err != nil {
		note(0, false, err)
		return
	}
	defer f.Close()
	for n := byte(1); ; n++ {
		select {
		case <-resting:
			return
		default:
		}
		block, back := bytes.Repeat([]byte{n}, 4096), make([]byte, 4096)
		at := int64(n%16) * 4096
		timed := func(what func() (bool, error)) {
			began := time.Now()
			corrupt, err := what()
			note(time.Since(began), corrupt, err)
		}
		timed(func() (bool, error) { _, err := f.WriteAt(block, at); return false, err })
		timed(func() (bool, error) {
			_ = unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED) // advice
			_, err := f.ReadAt(back, at)
			return err == nil && !bytes.Equal(block, back), err
		})
		timed(func() (bool, error) { _, err := os.ReadDir(dir); return false, err })
		time.Sleep(time.Millisecond)
	}
}
