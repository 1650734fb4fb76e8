package block

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/drivers/server"
)

// The test binary is four things: the driver, as killing it is real only in a
// process of its own; the tests, in a mount namespace of their own; what
// starts them; and a process that detaches the loop devices they leave if they
// are killed.
const (
	roleDriver = "block"
	roleSweep  = "sweep"

	rootVariable = "BLOCK_TEST_ROOT"
	killVariable = "BLOCK_TEST_KILL_AT"
)

func TestMain(m *testing.M) {
	switch {
	case len(os.Args) > 1 && os.Args[1] == roleDriver:
		os.Exit(driverMain(os.Args[2:]))
	case len(os.Args) > 2 && os.Args[1] == roleSweep:
		io.Copy(io.Discard, os.Stdin)
		os.Exit(sweep(os.Args[2]))
	case os.Getenv(rootVariable) != "":
		os.Exit(m.Run())
	case os.Geteuid() != 0:
		fmt.Fprintln(os.Stderr, "skipped: needs root for loop devices and a mount namespace")
	default:
		os.Exit(testsMain())
	}
}

func driverMain(args []string) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	if at, err := strconv.Atoi(os.Getenv(killVariable)); err == nil {
		n := 0
		before = func(string) {
			if n++; n == at {
				syscall.Kill(os.Getpid(), syscall.SIGKILL)
				select {}
			}
		}
	}
	cmd := NewCommand()
	cmd.SetArgs(args)
	err := cmd.ExecuteContext(ctx)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	return server.ExitCode(err)
}

// testsMain runs the tests in a mount namespace of their own, with a directory
// for all their files, and looks what loop devices they leave.
func testsMain() int {
	root, err := os.MkdirTemp("", "block") // short, for the sockets
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	self, err := os.Executable()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	// It ends when its standard input does, however this process ends.
	sweeper := exec.Command(self, roleSweep, root)
	sweeper.Stderr = os.Stderr
	sweeper.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	hold, err := sweeper.StdinPipe()
	if err == nil {
		err = sweeper.Start()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	tests := exec.Command(self, os.Args[1:]...)
	tests.Env = append(os.Environ(), rootVariable+"="+root, "TMPDIR="+root)
	tests.Stdin, tests.Stdout, tests.Stderr = os.Stdin, os.Stdout, os.Stderr
	// Unshareflags makes the mounts private, too.
	tests.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	runtime.LockOSThread() // Pdeathsig is sent when the thread ends
	defer runtime.UnlockOSThread()
	failed := tests.Run()
	hold.Close()
	if err := errors.Join(failed, sweeper.Wait()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// sweep detaches every loop device on a file below root, removes root, and
// fails if there was any.
func sweep(root string) int {
	left := 0
	for range 5 { // a device may be on a filesystem that is on another one
		for _, l := range attachedLoops() {
			if !l.below(root) {
				continue
			}
			left++
			fmt.Fprintf(os.Stderr, "leaked: %s on %s\n", l.node, l.file)
			if f, err := os.OpenFile(l.node, os.O_RDONLY, 0); err == nil {
				unix.IoctlRetInt(int(f.Fd()), unix.LOOP_CLR_FD)
				f.Close()
			}
		}
	}
	if err := os.RemoveAll(root); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return min(left, 1)
}

type attachedLoop struct {
	node, file string
	backing    unix.LoopInfo64
}

// attachedLoops are all loop devices of the machine.
func attachedLoops() []attachedLoop {
	dirs, _ := filepath.Glob("/sys/block/loop*/loop")
	var all []attachedLoop
	for _, dir := range dirs {
		text, err := os.ReadFile(filepath.Join(dir, "backing_file"))
		if err != nil {
			continue
		}
		l := attachedLoop{node: "/dev/" + filepath.Base(filepath.Dir(dir)), file: strings.TrimSpace(string(text))}
		if f, err := os.OpenFile(l.node, os.O_RDONLY, 0); err == nil {
			if info, err := unix.IoctlLoopGetStatus64(int(f.Fd())); err == nil {
				l.backing = *info
			}
			f.Close()
		}
		all = append(all, l)
	}
	return all
}

// below tells whether the file is in root, or on a filesystem on such a loop
// device: in another mount namespace its path says nothing.
func (l attachedLoop) below(root string) bool {
	if strings.HasPrefix(l.file, root+"/") {
		return true
	}
	for _, other := range attachedLoops() {
		var st unix.Stat_t
		if unix.Stat(other.node, &st) == nil && st.Rdev == l.backing.Device && strings.HasPrefix(other.file, root+"/") {
			return true
		}
	}
	return false
}

// loopsBelow counts the loop devices on files in a directory.
func loopsBelow(dir string) []string {
	var found []string
	for _, l := range attachedLoops() {
		if strings.HasPrefix(l.file, dir+"/") {
			found = append(found, l.node+" on "+l.file)
		}
	}
	return found
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return !errors.Is(err, fs.ErrNotExist)
}

// eventually waits for something that happens by itself.
func eventually(t *testing.T, what string, done func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !done(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: not so after 20 s", what)
		}
	}
}
