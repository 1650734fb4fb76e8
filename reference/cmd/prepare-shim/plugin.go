package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"time"

	"github.com/csi-prepare/csi-prepare/drivers/server"
)

// settleTime is how long a plugin that ends at once is started again: one that
// was killed may take a moment to let go of its socket and its state.
const (
	settleTime  = 5 * time.Second
	settlePause = 100 * time.Millisecond
)

// withPlugin serves while the plugin runs that a command starts, none if there
// is no command. Either ends with the other: a plugin that lived on would keep
// its socket from its successor.
func withPlugin(parent context.Context, argv []string, serve func(context.Context) error) error {
	if len(argv) == 0 {
		return serve(parent)
	}
	p := &plugin{argv: argv, settled: time.Now().Add(settleTime)}
	ctx, cancel := context.WithCancelCause(parent)
	defer cancel(nil)
	if err := p.start(); err != nil {
		return err
	}
	served := make(chan error, 1)
	go func() { served <- serve(ctx) }()
	// Here is the thread that the plugin's life depends on.
	for {
		select {
		case err := <-served:
			p.stop()
			return err
		case how := <-p.ended:
			err := fmt.Errorf("the plugin ended: %s", how)
			if time.Now().Before(p.settled) && parent.Err() == nil {
				time.Sleep(settlePause)
				if err = p.start(); err == nil {
					continue
				}
			}
			cancel(err)
			if parent.Err() != nil {
				err = nil // both were told to stop
			}
			return errors.Join(<-served, err)
		}
	}
}

// plugin is a process that ends with this one.
type plugin struct {
	argv    []string
	settled time.Time
	cmd     *exec.Cmd
	ended   chan string
}

func (p *plugin) start() error {
	// Not with the context: the plugin outlives the last call that needs it.
	p.cmd, p.ended = exec.Command(p.argv[0], p.argv[1:]...), make(chan string, 1)
	p.cmd.Stdout, p.cmd.Stderr = os.Stderr, os.Stderr
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := p.cmd.Start(); err != nil {
		return fmt.Errorf("start the plugin: %w", err)
	}
	go func(cmd *exec.Cmd, ended chan<- string) {
		_ = cmd.Wait() // its state says all
		ended <- cmd.ProcessState.String()
	}(p.cmd, p.ended)
	return nil
}

// stop tells the plugin to end, and leaves one that does not to the kernel.
func (p *plugin) stop() {
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-p.ended:
	case <-time.After(server.DefaultGrace):
	}
}
