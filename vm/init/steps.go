package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/vm/job"
)

// maxTail is how much of a failed step's output goes to the console.
const maxTail = 8 << 10

func runSteps(steps []job.Step) []job.Outcome {
	var outcomes []job.Outcome
	for _, s := range steps {
		begin := time.Now()
		o := job.Outcome{Name: s.Name, Outcome: job.Passed}
		if err := runStep(s); err != nil {
			o.Outcome, o.Message = job.Failed, err.Error()
			var exit *exec.ExitError
			if errors.As(err, &exit) && exit.ExitCode() == job.ExitCouldNotRun {
				o.Outcome = job.CouldNotRun
			}
		}
		o.Seconds = time.Since(begin).Seconds()
		fmt.Printf("%-13s %6.1f s  %s\n", o.Outcome, o.Seconds, o.Name)
		if o.Outcome != job.Passed {
			fmt.Println(o.Message)
			printTail(logOf(s.Name))
		}
		outcomes = append(outcomes, o)
	}
	return outcomes
}

func logOf(name string) string { return filepath.Join(job.Results, name+".log") }

// runStep runs a step until it ends, or is killed with all it has started.
func runStep(s job.Step) error {
	out, err := os.Create(logOf(s.Name))
	if err != nil {
		return err
	}
	defer out.Close()
	cmd := exec.Command(s.Argv[0], s.Argv[1:]...) //nolint:noctx // the timer below kills its whole group
	cmd.Dir = "/tmp"
	cmd.Env = append([]string{
		"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/tmp", "TMPDIR=/tmp",
	}, s.Env...)
	cmd.Stdout, cmd.Stderr = out, out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	var ready io.ReadCloser
	if s.Background {
		cmd.Stdout = nil
		if ready, err = cmd.StdoutPipe(); err != nil {
			return err
		}
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	if s.Background {
		return awaitLine(ready, out, time.Duration(s.Seconds)*time.Second)
	}
	kill := time.AfterFunc(time.Duration(s.Seconds)*time.Second, func() {
		_ = unix.Kill(-cmd.Process.Pid, unix.SIGQUIT) // a Go program says where it is
		time.Sleep(5 * time.Second)
		_ = unix.Kill(-cmd.Process.Pid, unix.SIGKILL)
	})
	err = cmd.Wait()
	if !kill.Stop() {
		return fmt.Errorf("killed after %d seconds", s.Seconds)
	}
	return err
}

func awaitLine(ready io.Reader, out io.Writer, limit time.Duration) error {
	first := make(chan error, 1)
	go func() {
		var line [1]byte
		_, err := io.ReadFull(ready, line[:])
		_, _ = out.Write(line[:])
		first <- err
		_, _ = io.Copy(out, ready)
	}()
	select {
	case err := <-first:
		return err
	case <-time.After(limit):
		return fmt.Errorf("not ready after %v", limit)
	}
}

func printTail(path string) {
	text, err := os.ReadFile(path)
	if err != nil {
		return
	}
	if len(text) > maxTail {
		text = text[len(text)-maxTail:]
	}
	for line := range strings.Lines(string(text)) {
		fmt.Print("  ", strings.TrimRight(line, "\n"), "\n")
	}
}
