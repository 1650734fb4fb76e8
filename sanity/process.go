package sanity

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/mountns"
)

// process is a plugin, or a performer, that the suite starts itself, in a
// mount namespace that is not the suite's. It ends with the suite, whatever
// ends that.
type process struct {
	argv []string
	env  []string
	ns   *mountns.Namespace
	log  *capture
	// dir is the working directory of the first start. Later ones come from
	// the thread of a spec, which entered a namespace and so stands at /.
	dir string

	cmd   *exec.Cmd
	ended chan struct{} // closed when the process is gone
	state error         // of the ended process
}

// start starts the command. The thread that does so has to live as long as
// the child, whose parent-death signal is tied to it, so it stays in the
// namespace till the child is gone.
func (p *process) start() error {
	if p.dir == "" {
		here, err := os.Getwd()
		if err != nil {
			return fmt.Errorf("starting %s: %w", p.argv[0], err)
		}
		p.dir = here
	}
	cmd := exec.Command(p.argv[0], p.argv[1:]...)
	cmd.Dir = p.dir
	cmd.Env = append(os.Environ(), p.env...)
	cmd.Stdout, cmd.Stderr = p.log, p.log
	cmd.WaitDelay = time.Second
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: unix.SIGKILL}
	ended, started := make(chan struct{}), make(chan error, 1)
	go func() {
		err := p.ns.Do(context.Background(), func() error {
			if err := cmd.Start(); err != nil {
				return err
			}
			started <- nil
			p.state = cmd.Wait()
			close(ended)
			return nil
		})
		if err != nil {
			started <- err
		}
	}()
	if err := <-started; err != nil {
		return fmt.Errorf("starting %s: %w", p.argv[0], err)
	}
	p.cmd, p.ended = cmd, ended
	return nil
}

// pid of the process that was started last.
func (p *process) pid() int { return p.cmd.Process.Pid }

// gone says how the process ended, or nil if it lives.
func (p *process) gone() error {
	select {
	case <-p.ended:
		how := "exit status 0"
		if p.state != nil {
			how = p.state.Error()
		}
		if last := p.log.last(); last != "" {
			return fmt.Errorf("the process ended (%s); its last words: %s", how, last)
		}
		return fmt.Errorf("the process ended (%s)", how)
	default:
		return nil
	}
}

// kill ends the process as a crash would, and nothing it started.
func (p *process) kill() error {
	if err := p.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("killing process %d: %w", p.pid(), err)
	}
	<-p.ended
	return nil
}

// stop asks the process to end, and then ends it and what it started.
func (p *process) stop() {
	if p.cmd == nil {
		return
	}
	group := -p.pid()
	_ = p.cmd.Process.Signal(unix.SIGTERM)
	select {
	case <-p.ended:
	case <-time.After(5 * time.Second):
	}
	_ = unix.Kill(group, unix.SIGKILL)
	<-p.ended
}

// capture keeps the output of a process, for its last words and for a search
// for secrets.
type capture struct {
	mu   sync.Mutex
	text bytes.Buffer
	also io.Writer
}

// captureLimit bounds what is kept, in bytes. What comes after is passed on
// and not searched.
const captureLimit = 8 << 20

func (c *capture) Write(b []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if room := captureLimit - c.text.Len(); room > 0 {
		c.text.Write(b[:min(room, len(b))])
	}
	if c.also != nil {
		_, _ = c.also.Write(b)
	}
	return len(b), nil
}

// contains reports whether the process has written a text.
func (c *capture) contains(text string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return bytes.Contains(c.text.Bytes(), []byte(text))
}

// last returns the last line that is not empty, of a panic the line that says
// why.
func (c *capture) last() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	lines := strings.Split(strings.TrimSpace(c.text.String()), "\n")
	for _, line := range lines {
		if strings.HasPrefix(line, "panic: ") || strings.HasPrefix(line, "fatal error: ") {
			return line
		}
	}
	return lines[len(lines)-1]
}
