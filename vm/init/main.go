// Command init is process 1 of a guest: it makes a root, loads the modules of
// the kernel, runs the steps of the job, leaves the results on a device, prints
// the status as its last line, and switches the guest off.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/vm/job"
)

const (
	initPath = "/init"
	workName = "init-work"
)

func main() {
	switch {
	case os.Args[0] == workName:
		os.Exit(work())
	case os.Getpid() != 1:
		fmt.Fprintln(os.Stderr, "init: is process 1 of a guest only; vm/cmd/prepare-vm starts one")
		os.Exit(2)
	}
	status, err := reap()
	if err != nil {
		fmt.Println("init:", err)
	}
	unix.Sync()
	fmt.Printf("%s%d\n", job.StatusPrefix, status)
	_ = unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
}

// reap does the work in a child, so that process 1 can wait for whatever other
// processes leave to it.
func reap() (status int, err error) {
	p, err := os.StartProcess(initPath, []string{workName}, &os.ProcAttr{
		Files: []*os.File{os.Stdin, os.Stdout, os.Stderr},
	})
	if err != nil {
		return 1, err
	}
	for {
		var ws unix.WaitStatus
		pid, err := unix.Wait4(-1, &ws, 0, nil)
		switch {
		case err == unix.EINTR:
		case err != nil:
			return 1, fmt.Errorf("wait: %w", err)
		case pid == p.Pid && ws.Exited():
			return ws.ExitStatus(), nil
		case pid == p.Pid:
			return 1, fmt.Errorf("the work ended by %v", ws.Signal())
		}
	}
}

// work returns the exit code.
func work() int {
	passed, err := run()
	switch {
	case err != nil:
		fmt.Println("init:", err)
		return 1
	case !passed:
		return 1
	}
	return 0
}

func run() (passed bool, err error) {
	text, err := os.ReadFile(job.File)
	if err != nil {
		return false, err
	}
	var j job.Job
	if err := json.Unmarshal(text, &j); err != nil {
		return false, fmt.Errorf("%s: %w", job.File, err)
	}
	if err := mountAll(kernelFilesystems); err != nil {
		return false, err
	}
	for _, m := range j.Modules {
		if err := load(m); err != nil {
			return false, err
		}
	}
	if err := makeRoot(&j); err != nil {
		return false, err
	}
	if err := loopbackUp(); err != nil {
		return false, err
	}
	outcomes := runSteps(j.Steps)
	passed = len(outcomes) > 0
	for _, o := range outcomes {
		passed = passed && o.Outcome != job.Failed
	}
	text, err = json.MarshalIndent(outcomes, "", "  ")
	if err != nil {
		return false, err
	}
	if err := os.WriteFile(filepath.Join(job.Results, job.OutcomesFile), text, 0o644); err != nil {
		return false, err
	}
	return passed, errors.Join(saveKernelLog(), writeResults(job.Device))
}

// load loads a module. One that is there already is no error.
func load(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := unix.FinitModule(int(f.Fd()), "", 0); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("load %s: %w", path, err)
	}
	return nil
}
