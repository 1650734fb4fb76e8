package vm

import (
	"archive/tar"
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/vm/job"
)

// UnavailableError says that no guest can run here, and what to do about it.
type UnavailableError struct{ Reason string }

// Error implements error.
func (e *UnavailableError) Error() string { return "no guest can run here: " + e.Reason }

// CrashError is a guest that ended without its status.
type CrashError struct{ Err error }

// Error implements error.
func (e *CrashError) Error() string {
	return fmt.Sprintf("the guest ended without a status: it has crashed, or was killed: %v", e.Err)
}

// Unwrap returns how its process ended.
func (e *CrashError) Unwrap() error { return e.Err }

// Guest is a guest to run once.
type Guest struct {
	// Init is vm/init, statically linked.
	Init string
	// Modules are the names of the kernel modules to load; what they need
	// is loaded too.
	Modules []string
	// Payload are the files that the guest finds in job.Payload, by name.
	Payload map[string]string
	// Steps are what it runs.
	Steps []job.Step
	// Scratch is a directory that others may pass through: a guest that root
	// starts runs as another user. Nothing is left in it.
	Scratch string
	// Console gets what the guest prints, if set.
	Console io.Writer
	// Results gets the files that the steps have left, if set: a directory
	// that exists.
	Results string
}

const (
	// resultsSize bounds what a guest can leave. The file is sparse.
	resultsSize = 256 << 20
	// nobody is the user a guest of root runs as.
	nobody = 65534
)

// Run boots the guest and returns what became of its steps. The error is an
// *UnavailableError, a *CrashError, or of ctx; it is nil although steps failed.
func (g *Guest) Run(ctx context.Context) ([]job.Outcome, error) {
	moduleDir, err := Find()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp(g.Scratch, "vm")
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	if err := g.lay(dir, moduleDir); err != nil {
		return nil, err
	}
	if err := g.boot(ctx, dir); err != nil {
		return nil, err
	}
	return g.unpack(filepath.Join(dir, "results"))
}

// lay makes the files of a guest.
func (g *Guest) lay(dir, moduleDir string) error {
	j := job.Job{Payload: filepath.Join(dir, "payload"), Steps: g.Steps}
	if err := errors.Join(os.Mkdir(j.Payload, 0o755), os.Mkdir(filepath.Join(dir, "run"), 0o700)); err != nil {
		return err
	}
	for name, from := range g.Payload {
		if err := copyFile(filepath.Join(j.Payload, name), from); err != nil {
			return err
		}
	}
	modules, err := closure(moduleDir, g.Modules)
	if err != nil {
		return err
	}
	w, err := os.Create(filepath.Join(dir, "initramfs"))
	if err != nil {
		return err
	}
	err = writeInitramfs(w, g.Init, moduleDir, modules, &j)
	if err = errors.Join(err, w.Close()); err != nil {
		return err
	}
	results, err := os.Create(filepath.Join(dir, "results"))
	if err != nil {
		return err
	}
	if err := errors.Join(results.Truncate(resultsSize), results.Close()); err != nil {
		return err
	}
	if os.Geteuid() != 0 {
		return nil
	}
	// The guest's user gets what the guest writes, and nothing else.
	return errors.Join(
		os.Chmod(dir, 0o711),
		os.Chown(filepath.Join(dir, "run"), nobody, nobody),
		os.Chown(filepath.Join(dir, "results"), nobody, nobody))
}

// copyFile makes a file that every user can read and start.
func copyFile(to, from string) error {
	if os.Link(from, to) == nil {
		return os.Chmod(to, 0o755)
	}
	r, err := os.Open(from)
	if err != nil {
		return err
	}
	defer r.Close()
	w, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o755)
	if err != nil {
		return err
	}
	_, err = io.Copy(w, r)
	return errors.Join(err, w.Close(), os.Chmod(to, 0o755))
}

// boot runs the machine until it is switched off, and returns nil if it has
// printed a status.
func (g *Guest) boot(ctx context.Context, dir string) error {
	argv := command(filepath.Join(dir, "run"), filepath.Join(dir, "initramfs"), filepath.Join(dir, "results"))
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Dir = "/"
	cmd.Env = append(os.Environ(), "TMPDIR="+filepath.Join(dir, "run"), "HOME="+filepath.Join(dir, "run"))
	// User-Mode Linux starts processes of its own: they are one group.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if os.Geteuid() == 0 {
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: nobody, Gid: nobody}
	}
	cmd.Cancel = func() error { return unix.Kill(-cmd.Process.Pid, unix.SIGKILL) }
	cmd.WaitDelay = 10 * time.Second
	// A console that is at its end would stop the guest.
	input, hold, err := os.Pipe()
	if err != nil {
		return err
	}
	defer func() { _ = errors.Join(input.Close(), hold.Close()) }()
	cmd.Stdin = input
	output, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	cmd.Stderr = cmd.Stdout
	if err := cmd.Start(); err != nil {
		return &UnavailableError{err.Error()}
	}
	defer func() { _ = unix.Kill(-cmd.Process.Pid, unix.SIGKILL) }()
	last, tail := g.watch(output)
	err = cmd.Wait()
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("the guest: %w; it printed last:\n%s", ctx.Err(), tail)
	case strings.HasPrefix(last, job.StatusPrefix):
		return nil
	case err == nil:
		err = errors.New("exit status 0")
	}
	return &CrashError{fmt.Errorf("%w; it printed last:\n%s", err, tail)}
}

// watch copies the console, and returns the status line and the last lines.
func (g *Guest) watch(console io.Reader) (status, tail string) {
	var last []string
	lines := bufio.NewReader(console)
	for {
		line, err := lines.ReadString('\n')
		line = strings.TrimRight(line, "\r\n")
		switch {
		case strings.HasPrefix(line, job.StatusPrefix):
			status = line
		case line != "":
			if last = append(last, line); len(last) > 30 {
				last = last[1:]
			}
			if g.Console != nil {
				fmt.Fprintln(g.Console, line)
			}
		}
		if err != nil {
			return status, strings.Join(last, "\n")
		}
	}
}

// unpack reads the results.
func (g *Guest) unpack(path string) ([]job.Outcome, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var outcomes []job.Outcome
	archive := tar.NewReader(f)
	for {
		h, err := archive.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("read the guest's results: %w", err)
		}
		if h.Typeflag != tar.TypeReg || !fs.ValidPath(h.Name) {
			continue
		}
		text, err := io.ReadAll(archive)
		if err != nil {
			return nil, fmt.Errorf("read the guest's results: %w", err)
		}
		if h.Name == job.OutcomesFile {
			if err := json.Unmarshal(text, &outcomes); err != nil {
				return nil, fmt.Errorf("read the guest's results: %s: %w", h.Name, err)
			}
		}
		if g.Results == "" {
			continue
		}
		name := h.Name
		if dir, file, ok := strings.Cut(h.Name, "/"); ok {
			name = dir + filepath.Ext(file)
		}
		to := filepath.Join(g.Results, filepath.Base(name))
		if err := os.WriteFile(to, text, 0o644); err != nil {
			return nil, err
		}
	}
	if outcomes == nil {
		return nil, &CrashError{errors.New("it left no results")}
	}
	return outcomes, nil
}
