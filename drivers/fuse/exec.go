package fuse

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// programEnvironment is all that a program gets of an environment.
var programEnvironment = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}

// program serves by a program of somebody else's, and waits until that has
// read INIT. It keeps the device beside the program, to deposit it with a CO
// that has restarted, and lets go of it when the program ends: while it is
// held, whoever waits for an answer goes on waiting.
func (p *process) program(ctx context.Context, o order) (err error) {
	var files []*os.File
	defer func() {
		if err != nil {
			for _, f := range files {
				_ = f.Close()
			}
		}
	}()
	out := &masked{to: os.Stderr}
	keys := o.Program.secrets()
	for _, key := range keys {
		f, err := secretFile(o.Secrets[key])
		if err != nil {
			return fmt.Errorf("a file for a secret: %w", err)
		}
		files = append(files, f)
		out.hide(o.Secrets[key])
	}
	private := o.Program.mounts()
	words := o.Program.words(o, func(key string) string {
		n := slices.Index(keys, key)
		if private {
			return secretPath(n)
		}
		return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), files[n].Fd())
	})
	cmd := exec.Command(words[0], words[1:]...)
	cmd.ExtraFiles = []*os.File{p.device}
	cmd.Env = programEnvironment
	cmd.Dir = "/"
	cmd.Stdout, cmd.Stderr = out, out
	cmd.WaitDelay = time.Second // what it started may have the same output
	// It does not outlive this process, which the CO takes for the server.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: unix.SIGKILL}
	if private {
		self, err := os.Open("/proc/self/exe")
		if err != nil {
			return err
		}
		defer self.Close()
		inPrivate(cmd, self, files)
	}
	started, ended := make(chan error, 1), make(chan struct{})
	go func() {
		runtime.LockOSThread() // Pdeathsig is about the thread
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			err = cmd.Wait()
			p.log.Info("the program ended", "error", err)
			close(ended)
		}
	}()
	if err := <-started; err != nil {
		return fmt.Errorf("start the program: %w", err)
	}
	p.kill = sync.OnceFunc(func() { _ = cmd.Process.Kill() })
	if err := p.untilRead(ctx, ended); err != nil {
		p.kill()
		<-ended
		if words := out.last(); words != "" {
			err = fmt.Errorf("%w; the last it wrote: %s", err, words)
		}
		return err
	}
	go func() {
		<-ended
		for _, f := range files {
			_ = f.Close()
		}
		close(p.finished)
	}()
	return nil
}

// untilRead waits until the program has read INIT, which is in the device from
// the beginning. Nothing else can be: nobody has the mount yet.
func (p *process) untilRead(ctx context.Context, ended <-chan struct{}) error {
	for {
		pending, gone, err := p.poll()
		switch {
		case err != nil:
			return fmt.Errorf("poll the device: %w", err)
		case gone:
			return errors.New("the CO has let go of the mount before it was served")
		case !pending:
			return nil
		}
		select {
		case <-ended:
			return errors.New("the program ended before it served")
		case <-ctx.Done():
			return fmt.Errorf("the program does not serve: %w", context.Cause(ctx))
		case <-time.After(time.Millisecond):
		}
	}
}

// secretFile is a file in memory that this user can open by its path, and
// nobody can write to.
func secretFile(value []byte) (*os.File, error) {
	fd, err := unix.MemfdCreate("secret", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), "secret")
	_, err = f.WriteAt(value, 0) // who inherits it reads from the beginning
	if err == nil {
		err = f.Chmod(0o400)
	}
	if err == nil {
		_, err = unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_SEAL|unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_WRITE)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// masked passes on lines without the secrets in them, and keeps the last.
type masked struct {
	to io.Writer

	mu      sync.Mutex
	secrets [][]byte
	rest    []byte // of a line that has not ended
	line    []byte
}

// hide masks each line of a value, since output comes in lines.
func (m *masked) hide(value []byte) {
	for line := range bytes.Lines(value) {
		if line = bytes.TrimSpace(line); len(line) > 0 {
			m.secrets = append(m.secrets, line)
		}
	}
}

// maxLine bounds what is kept of a line without an end.
const maxLine = 4096

func (m *masked) Write(b []byte) (int, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.rest = append(m.rest, b...)
	for {
		end := bytes.IndexByte(m.rest, '\n')
		if end < 0 && len(m.rest) < maxLine {
			return len(b), nil
		}
		if end < 0 {
			end = len(m.rest) - 1
		}
		m.emit(m.rest[:end+1])
		m.rest = m.rest[end+1:]
	}
}

func (m *masked) emit(line []byte) {
	for _, s := range m.secrets {
		line = bytes.ReplaceAll(line, s, []byte("***"))
	}
	if text := bytes.TrimSpace(line); len(text) > 0 {
		m.line = bytes.Clone(text)
	}
	_, _ = m.to.Write(line)
}

// last is the last line that was written.
func (m *masked) last() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.rest) > 0 {
		m.emit(m.rest)
		m.rest = nil
	}
	return string(m.line)
}
