package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/csi-prepare/csi-prepare/vm"
	"github.com/csi-prepare/csi-prepare/vm/job"
)

type options struct {
	out, only string
	short     bool
	timeout   time.Duration
	console   io.Writer
}

// run builds, boots and reports.
func (o *options) run(ctx context.Context) error {
	if _, err := vm.Find(); err != nil {
		return err
	}
	only, err := regexp.Compile(o.only)
	if err != nil {
		return fmt.Errorf("--only: %w", err)
	}
	wanted := selected(only, o.short)
	if len(wanted) == 0 {
		return fmt.Errorf("--only %s: names no step", o.only)
	}
	if err := os.MkdirAll(o.out, 0o755); err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "prepare-vm-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	if err := os.Chmod(dir, 0o711); err != nil {
		return err
	}
	built := time.Now()
	programs, err := build(ctx, filepath.Join(dir, "bin"), wanted)
	if err != nil {
		return err
	}
	fmt.Fprintf(o.console, "built in %.1f s\n", time.Since(built).Seconds())

	begun := time.Now()
	var mu sync.Mutex
	failed := false
	var running errgroup.Group
	for _, g := range wanted {
		running.Go(func() error {
			outcomes, err := o.boot(ctx, g, dir, programs)
			mu.Lock()
			defer mu.Unlock()
			for _, oc := range outcomes {
				failed = failed || oc.Outcome == job.Failed
			}
			return err
		})
	}
	err = running.Wait()
	fmt.Fprintf(o.console, "guests ran for %.1f s; reports are in %s\n", time.Since(begun).Seconds(), o.out)
	if err == nil && failed {
		err = errFailed
	}
	var crash *vm.CrashError
	if errors.As(err, &crash) || errors.Is(err, context.DeadlineExceeded) {
		err = fmt.Errorf("%w: %w", errFailed, err)
	}
	return err
}

// boot runs one guest and writes what it left: vm-GUEST.json with the outcome of
// each step, vm-STEP.json for a report of the suite, vm-STEP.log.
func (o *options) boot(ctx context.Context, g guest, dir string, programs map[string]string) ([]job.Outcome, error) {
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	results := filepath.Join(dir, "results-"+g.name)
	if err := os.Mkdir(results, 0o755); err != nil {
		return nil, err
	}
	console := &prefixed{to: o.console, prefix: g.name + ": "}
	boot := vm.Guest{
		Init: programs[initName], Modules: g.modules, Payload: map[string]string{},
		Scratch: dir, Console: console, Results: results,
	}
	for _, s := range g.steps {
		boot.Steps = append(boot.Steps, s.job(o.short))
		boot.Payload[s.program()] = programs[s.program()]
		if s.beside {
			boot.Payload[path.Base(nfsServer)] = programs[path.Base(nfsServer)]
		}
	}
	for name, text := range files {
		file := filepath.Join(results, "."+name)
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			return nil, err
		}
		boot.Payload[name] = file
	}
	outcomes, err := boot.Run(ctx)
	if err != nil {
		return nil, fmt.Errorf("guest %s: %w", g.name, err)
	}
	return outcomes, o.keep(results, g.name, outcomes)
}

// keep copies the results to the reports.
func (o *options) keep(results, guest string, outcomes []job.Outcome) error {
	text, err := json.MarshalIndent(map[string]any{
		"apiVersion": "csi-prepare/v1alpha1", "kind": "GuestReport", "guest": guest, "steps": outcomes,
	}, "", "  ")
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(o.out, "vm-"+guest+".json"), text, 0o644); err != nil {
		return err
	}
	found, err := os.ReadDir(results)
	if err != nil {
		return err
	}
	for _, f := range found {
		name := f.Name()
		switch {
		case strings.HasPrefix(name, "."), name == job.OutcomesFile:
			continue
		case name == job.KernelLog:
			name = guest + "-kernel.log"
		}
		text, err := os.ReadFile(filepath.Join(results, f.Name()))
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(o.out, "vm-"+name), text, 0o644); err != nil { //nolint:gosec // the name of a file in a directory of our own
			return err
		}
	}
	return nil
}

const initName = "init"

// build builds what the guests need, and returns where each program is. The
// init has no C library to find, the others have the host's.
func build(ctx context.Context, dir string, wanted []guest) (map[string]string, error) {
	programs := map[string]string{}
	add := func(name string, args ...string) error {
		if programs[name] != "" {
			return nil
		}
		programs[name] = filepath.Join(dir, name)
		args = append(args[:1:1], append([]string{"-ldflags=-s -w", "-o", programs[name]}, args[1:]...)...)
		cmd := exec.CommandContext(ctx, "go", args...)
		if name == initName {
			cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		}
		if text, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("go %s: %w\n%s", strings.Join(args, " "), err, text)
		}
		return nil
	}
	if err := add(initName, "build", "./vm/init"); err != nil {
		return nil, err
	}
	for _, g := range wanted {
		for _, s := range g.steps {
			args := []string{"build", "./" + s.command}
			if s.test != "" {
				args = []string{"test", "-c", "./" + s.test}
			}
			if err := add(s.program(), args...); err != nil {
				return nil, err
			}
			if s.beside {
				if err := add(path.Base(nfsServer), "build", "./"+nfsServer); err != nil {
					return nil, err
				}
			}
		}
	}
	return programs, nil
}

// prefixed tells the consoles of guests apart.
type prefixed struct {
	mu     sync.Mutex
	to     io.Writer
	prefix string
}

func (p *prefixed) Write(line []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, err := io.WriteString(p.to, p.prefix); err != nil {
		return 0, err
	}
	return p.to.Write(line)
}
