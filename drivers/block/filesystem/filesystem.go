// Package filesystem proves that a block device is blank, makes, checks, grows
// and measures ext4, xfs and btrfs on it. It mounts a filesystem for a moment
// where that is the only way, and then where nobody sees it: the mount is
// attached nowhere.
//
// Programs of e2fsprogs, xfsprogs, btrfs-progs and util-linux do what the
// kernel does not. They get the device as a descriptor, run without the
// caller's environment, and end with it.
package filesystem

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"
)

// Type is the kernel's name of a filesystem type.
type Type string

// The types of this package.
const (
	Ext4  Type = "ext4"
	XFS   Type = "xfs"
	Btrfs Type = "btrfs"
)

// Types in order of preference.
var Types = []Type{Ext4, XFS, Btrfs}

// onDescriptor is the path at which a program finds the device it is given.
const onDescriptor = "/proc/self/fd/3"

// toolLimit bounds a program that makes or checks a filesystem. It runs on
// when the call that started it is cancelled: a caller that repeats the call
// would never see the end of it otherwise.
const toolLimit = 10 * time.Minute

// mustEnd are the programs that cannot be begun again where they were cut off.
// They claim the device until they have ended.
var mustEnd = map[string]bool{"resize2fs": true}

// ToolError tells of a program that failed.
type ToolError struct {
	Name   string
	Code   int // its exit code, -1 if it was killed or did not start
	Output string
	Err    error
}

// Error is the program's own reason, on one line.
func (e *ToolError) Error() string {
	if e.Output == "" {
		return fmt.Sprintf("%s: %v", e.Name, e.Err)
	}
	return fmt.Sprintf("%s: %v: %s", e.Name, e.Err, e.Output)
}

// Unwrap returns why it ended.
func (e *ToolError) Unwrap() error { return e.Err }

// sbin is where the programs are, in whatever environment the driver runs.
var sbin = []string{"/usr/sbin", "/sbin", "/usr/bin", "/bin", "/usr/local/sbin", "/usr/local/bin"}

func lookUp(name string) (string, error) {
	for _, dir := range sbin {
		if path, err := exec.LookPath(filepath.Join(dir, name)); err == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("%s: %w in %s; install it", name, exec.ErrNotFound, strings.Join(sbin, ":"))
}

// Missing names the programs that are needed for a type and not installed.
func Missing(t Type) []string {
	need := map[Type][]string{Ext4: {"blkid", "mkfs.ext4", "e2fsck", "resize2fs"}, XFS: {"blkid", "mkfs.xfs"}, Btrfs: {"blkid", "mkfs.btrfs"}}
	var missing []string
	for _, name := range need[t] {
		if _, err := lookUp(name); err != nil {
			missing = append(missing, name)
		}
	}
	return missing
}

// run runs a program with a device as its descriptor 3 and returns what it
// wrote to its standard output.
func run(ctx context.Context, dev *os.File, name string, args ...string) (string, error) {
	path, err := lookUp(name)
	if err != nil {
		return "", &ToolError{Name: name, Code: -1, Err: err}
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), toolLimit)
	defer cancel()
	var out, reasons bytes.Buffer
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Env = []string{"LC_ALL=C", "PATH=" + strings.Join(sbin, ":")}
	cmd.Dir = "/"
	// Pipes alone: /dev/null may be missing.
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(""), &out, &reasons
	cmd.ExtraFiles = []*os.File{dev}
	if !mustEnd[name] {
		// One that outlives this process would still be writing when the next
		// process looks at the device. The signal comes when the thread ends.
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
	}
	err = cmd.Run()
	if err == nil && name == "blkid" && reasons.Len() > 0 {
		err = errors.New("exit status 0, with a warning")
	}
	if err != nil {
		return out.String(), &ToolError{name, cmd.ProcessState.ExitCode(), oneLine(reasons.String()), err}
	}
	return out.String(), nil
}

// maxOutput bounds what an error quotes of a program.
const maxOutput = 500

func oneLine(text string) string {
	text = strings.Join(strings.Fields(text), " ")
	if len(text) > maxOutput {
		text = text[:maxOutput] + "…"
	}
	return text
}
