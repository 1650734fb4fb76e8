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

// patience is how long a path may take to answer. What is on a dead server
// never does, and a thread that waits for it cannot be ended: so every look at
// a path is taken by a child process that can be given up.
const patience = time.Second

// askName is the name of that child process, which is this program.
const askName = "preparectl-ask"

// SilentError says that a path did not answer.
type SilentError struct {
	Path string
	// PID is the process that goes on waiting, although it has been killed,
	// until the server answers or its connection is aborted.
	PID int
}

// Error implements error.
func (e *SilentError) Error() string {
	return fmt.Sprintf("%s: did not answer within %s (process %d still waits for it)", e.Path, patience, e.PID)
}

// question is one system call about a path.
type question struct {
	// Act is "lstat", "answer", "statfs", "list", "read" or "rmdir".
	Act  string `json:"act"`
	Path string `json:"path"`
}

// answer is what the call said.
type answer struct {
	Errno  int      `json:"errno,omitempty"`
	Mode   uint32   `json:"mode,omitempty"`
	Major  uint32   `json:"major,omitempty"` // of a device node
	Minor  uint32   `json:"minor,omitempty"`
	FSType int64    `json:"fs_type,omitempty"` // statfs(2)
	Time   int64    `json:"time,omitempty"`    // of the last change, in seconds
	Names  []string `json:"names,omitempty"`
	Text   string   `json:"text,omitempty"`
}

// directory says that the answer is of a directory.
func (a *answer) directory() bool { return a.Mode&unix.S_IFMT == unix.S_IFDIR }

// askChild answers questions, in a child; in any other process it does nothing.
func askChild() {
	if len(os.Args) == 0 || os.Args[0] != askName {
		return
	}
	in, out := json.NewDecoder(os.Stdin), json.NewEncoder(os.Stdout)
	if out.Encode(answer{}) != nil { // it is ready
		os.Exit(1)
	}
	for {
		var q question
		if in.Decode(&q) != nil || out.Encode(q.look()) != nil {
			os.Exit(0)
		}
	}
}

func (q question) look() answer {
	var a answer
	var err error
	switch q.Act {
	case "lstat":
		var st unix.Stat_t
		err = unix.Lstat(q.Path, &st)
		a.Mode, a.Major, a.Minor, a.Time = st.Mode, unix.Major(st.Rdev), unix.Minor(st.Rdev), st.Mtim.Sec
	case "answer": // past every cache
		var st unix.Statx_t
		err = unix.Statx(unix.AT_FDCWD, q.Path, unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT|unix.AT_STATX_FORCE_SYNC, unix.STATX_BASIC_STATS, &st)
	case "statfs":
		var st unix.Statfs_t
		err = unix.Statfs(q.Path, &st)
		a.FSType = st.Type
	case "list":
		a.Names, err = list(q.Path)
	case "read":
		a.Text, err = read(q.Path)
	case "rmdir":
		err = unix.Rmdir(q.Path)
	default:
		err = unix.ENOSYS
	}
	var errno unix.Errno
	if err != nil && !errors.As(err, &errno) {
		errno = unix.EIO
	}
	a.Errno = int(errno)
	return a
}

// list names what is in a directory that is no link.
func list(path string) ([]string, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	d := os.NewFile(uintptr(fd), path)
	defer d.Close()
	names, err := d.Readdirnames(-1)
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return names, err
}

// read returns what is in a file.
func read(path string) (string, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", err
	}
	f := os.NewFile(uintptr(fd), path)
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, mostRead+1))
	if len(text) > mostRead {
		return "", unix.EFBIG
	}
	return string(text), err
}

// mostRead is far more than any file has that the tool reads.
const mostRead = 4 << 20

// asker asks children. It may be used by several goroutines at once.
type asker struct {
	mu   sync.Mutex
	idle []*asked
}

// asked is a child that answers.
type asked struct {
	cmd   *exec.Cmd
	in    io.WriteCloser
	out   *os.File
	lines *bufio.Reader // of out
}

// ask looks at a path. Errors are a *SilentError, or an *os.PathError.
func (k *asker) ask(act, path string) (answer, error) {
	if strings.IndexByte(path, 0) >= 0 {
		return answer{}, &os.PathError{Op: act, Path: path, Err: unix.EINVAL}
	}
	c, err := k.child()
	if err != nil {
		return answer{}, err
	}
	var a answer
	err = json.NewEncoder(c.in).Encode(question{act, path})
	if err == nil {
		a, err = c.hear()
	}
	if err != nil {
		c.giveUp()
		if errors.Is(err, os.ErrDeadlineExceeded) {
			err = &SilentError{path, c.cmd.Process.Pid}
		}
		return answer{}, err
	}
	k.mu.Lock()
	k.idle = append(k.idle, c)
	k.mu.Unlock()
	if a.Errno != 0 {
		return answer{}, &os.PathError{Op: act, Path: path, Err: unix.Errno(a.Errno)}
	}
	return a, nil
}

func (k *asker) child() (*asked, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if n := len(k.idle); n > 0 {
		c := k.idle[n-1]
		k.idle = k.idle[:n-1]
		return c, nil
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Args, cmd.Env, cmd.Dir = []string{askName}, []string{}, "/"
	// Nothing of it keeps a terminal or a pipe of the user's waiting.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	cmd.Stdout = w
	err = cmd.Start()
	_ = w.Close()
	if err != nil {
		_ = r.Close()
		return nil, fmt.Errorf("start a child: %w", err)
	}
	go func() { _ = cmd.Wait() }()
	c := &asked{cmd, in, r, bufio.NewReader(r)}
	if _, err := c.hear(); err != nil {
		c.giveUp()
		return nil, fmt.Errorf("start a child: %w", err)
	}
	return c, nil
}

// hear waits for the next answer. Where processors are short a child may not
// have come to ask in time: then it is no path that keeps it.
func (c *asked) hear() (answer, error) {
	const often = 30
	var line []byte
	for n := 1; ; n++ {
		_ = c.out.SetReadDeadline(time.Now().Add(patience))
		more, err := c.lines.ReadBytes('\n')
		line = append(line, more...)
		switch {
		case err == nil:
			var a answer
			return a, json.Unmarshal(line, &a)
		case !errors.Is(err, os.ErrDeadlineExceeded) || n == often || !c.runs():
			return answer{}, err
		}
	}
}

// runs says that a thread of the child has something to do, rather than to
// wait for.
func (c *asked) runs() bool {
	files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", c.cmd.Process.Pid))
	for _, f := range files {
		text, _ := os.ReadFile(f)
		// The name, in brackets, may hold anything.
		if at := bytes.LastIndexByte(text, ')'); at >= 0 && bytes.HasPrefix(text[at+1:], []byte(" R")) {
			return true
		}
	}
	return false
}

func (c *asked) giveUp() {
	_ = c.cmd.Process.Kill()
	_ = c.in.Close()
	_ = c.out.Close()
}

// close lets the children go.
func (k *asker) close() {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, c := range k.idle {
		_ = c.in.Close()
		_ = c.out.Close()
	}
	k.idle = nil
}

// readFile is os.ReadFile that gives up.
func readFile(path string) ([]byte, error) {
	// The child is in another directory, and the own one need not answer.
	if !strings.HasPrefix(path, "/") {
		buf := make([]byte, unix.PathMax)
		n, err := unix.Getcwd(buf)
		if err != nil {
			return nil, os.NewSyscallError("getcwd", err)
		}
		path = string(buf[:n-1]) + "/" + path
	}
	k := &asker{}
	defer k.close()
	a, err := k.ask("read", path)
	return []byte(a.Text), err
}

// What the root of a mount may answer, besides an error of the kernel's.
const (
	answersYes  = "yes"
	answersNot  = "did not answer"
	answersGone = "its server is gone"
)

// health is how the root of a mount answers, in a word or two.
func (k *asker) health(point string) string {
	_, err := k.ask("answer", point)
	var silent *SilentError
	switch {
	case err == nil:
		return answersYes
	case errors.As(err, &silent):
		return answersNot
	case errors.Is(err, unix.ENOTCONN):
		return answersGone
	}
	var errno unix.Errno
	if errors.As(err, &errno) {
		return errno.Error()
	}
	return err.Error()
}
