package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	gofuse "github.com/hanwen/go-fuse/v2/fuse"
	"github.com/rogpeppe/go-internal/testscript"
	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/drivers/fuse/attach"
	"github.com/csi-prepare/csi-prepare/drivers/fuse/loopback"
	"github.com/csi-prepare/csi-prepare/drivers/hostpath"
	"github.com/csi-prepare/csi-prepare/reference/mountns"
)

// commands are the programs of the scripts. Those that serve are processes of
// their own, so that nothing of the tool is stopped when they are.
var commands = map[string]func(){
	"preparectl": func() { os.Exit(run()) },
	"hostpath-driver": func() {
		cmd := hostpath.NewCommand()
		end(cmd.Execute())
	},
	"hung":  func() { end(hung(os.Args[1])) },
	"serve": func() { end(serve(os.Args[1], os.Args[2])) },
	"keep":  func() { end(keep(os.Args[1])) },
}

func end(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

const insideVariable = "PREPARECTL_TEST_INSIDE"

// TestMain runs the tests in a mount namespace of their own.
func TestMain(m *testing.M) {
	children()
	_, command := commands[filepath.Base(os.Args[0])]
	if command || os.Getuid() != 0 || os.Getenv(insideVariable) != "" {
		testscript.Main(m, commands)
		return
	}
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), insideVariable+"=1")
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: unix.CLONE_NEWNS, Pdeathsig: unix.SIGKILL}
	if err := cmd.Run(); err != nil && cmd.ProcessState == nil {
		end(err)
	}
	os.Exit(cmd.ProcessState.ExitCode())
}

func TestScripts(t *testing.T) {
	testscript.RunT(serial{t}, testscript.Params{
		Dir: "testdata",
		Condition: func(name string) (bool, error) {
			switch name {
			case "root":
				return os.Getuid() == 0, nil
			case "fuse":
				_, err := os.Stat("/dev/fuse")
				return err == nil && os.Getuid() == 0, nil
			case "loop":
				_, err := os.Stat("/dev/loop-control")
				return err == nil && os.Getuid() == 0, nil
			}
			return false, fmt.Errorf("condition %q: there is none", name)
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"await":   await,
			"signal":  signalTo,
			"pid-of":  pidOf,
			"private": private,
			"unmount": unmount,
		},
		Setup: func(e *testscript.Env) error {
			// What a script has mounted goes before its directory does.
			e.Defer(func() { unmountBelow(e.WorkDir) })
			return nil
		},
	})
}

// serial runs one script after another: a namespace that one makes has copies of
// the mounts of all.
type serial struct{ *testing.T }

func (serial) Parallel() {}

// Verbose implements testscript.T.
func (serial) Verbose() bool { return testing.Verbose() }

// Run implements testscript.T.
func (s serial) Run(name string, f func(testscript.T)) {
	s.T.Run(name, func(t *testing.T) { f(serial{t}) })
}

// unmountBelow takes away what is mounted in a script's directory, in the
// mount namespace of the tests.
func unmountBelow(dir string) {
	own, err := mountns.Own()
	if err != nil {
		return
	}
	defer own.Close()
	for range 3 {
		t, err := own.Table(context.Background())
		if err != nil {
			return
		}
		for _, m := range t.Below(dir) {
			_ = unix.Unmount(m.Point, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		}
	}
}

// await waits until a file is there or, with the word mount, until something is
// mounted at a path, which need not answer.
func await(ts *testscript.TestScript, neg bool, args []string) {
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		path, there := ts.MkAbs(args[0]), false
		if len(args) > 1 {
			table, err := os.ReadFile("/proc/self/mountinfo")
			ts.Check(err)
			there = strings.Contains(string(table), " "+path+" ")
		} else {
			_, err := os.Lstat(path)
			there = err == nil
		}
		if there != neg {
			return
		}
	}
	ts.Fatalf("await %v: in vain", args)
}

// signalTo sends a signal to the process whose number is in a file.
func signalTo(ts *testscript.TestScript, _ bool, args []string) {
	pid, err := strconv.Atoi(strings.TrimSpace(ts.ReadFile(args[1])))
	ts.Check(err)
	signals := map[string]unix.Signal{"STOP": unix.SIGSTOP, "CONT": unix.SIGCONT, "KILL": unix.SIGKILL}
	ts.Check(unix.Kill(pid, signals[args[0]]))
}

// pidOf sets a variable to the number in a file.
func pidOf(ts *testscript.TestScript, _ bool, args []string) {
	ts.Setenv(args[0], strings.TrimSpace(ts.ReadFile(args[1])))
}

// private mounts a tmpfs, for a script to mount in.
func private(ts *testscript.TestScript, _ bool, args []string) {
	dir := ts.MkAbs(args[0])
	ts.Check(os.MkdirAll(dir, 0o755))
	ts.Check(unix.Mount("tmpfs", dir, "tmpfs", 0, "mode=755"))
}

// unmount unmounts. umount(8) would look at the path first, and hang.
func unmount(ts *testscript.TestScript, _ bool, args []string) {
	ts.Check(unix.Unmount(ts.MkAbs(args[0]), unix.UMOUNT_NOFOLLOW))
}

// hung mounts a FUSE filesystem that nobody serves, and waits to be killed.
func hung(dir string) error {
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	options := fmt.Sprintf("fd=%d,rootmode=40755,user_id=0,group_id=0,allow_other", fd)
	if err := unix.Mount("hung", dir, "fuse.hung", unix.MS_NOSUID|unix.MS_NODEV, options); err != nil {
		return err
	}
	select {}
}

// serve serves a directory by FUSE at another. Its number is in DIR.pid.
func serve(dir, at string) error {
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	options := fmt.Sprintf("fd=%d,rootmode=40755,user_id=0,group_id=0,allow_other,default_permissions", fd)
	if err := unix.Mount("served", at, "fuse.served", unix.MS_NOSUID|unix.MS_NODEV, options); err != nil {
		return err
	}
	orphans := dir + ".orphans"
	if err := os.Mkdir(orphans, 0o700); err != nil {
		return err
	}
	fs, err := loopback.New(dir, orphans, loopback.Options{})
	if err != nil {
		return err
	}
	device := os.NewFile(uintptr(fd), "device")
	s, _, err := attach.Start(context.Background(), device, fs, gofuse.MountOptions{})
	if err != nil {
		return err
	}
	device.Close()
	if err := os.WriteFile(dir+".pid", []byte(strconv.Itoa(os.Getpid())), 0o644); err != nil {
		return err
	}
	return errors.Join(s.Serve())
}

// keep holds a mount namespace that nobody is in, by a descriptor, until it is
// killed. A file says that it does.
func keep(file string) error {
	ns, err := mountns.New(context.Background())
	if err != nil {
		return err
	}
	defer ns.Close()
	if err := os.WriteFile(file, []byte(strconv.Itoa(os.Getpid())), 0o644); err != nil {
		return err
	}
	select {}
}
