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

// withPlugin serves while the plugin runs that a command starts, none if there
// is no command. Either ends with the other: a plugin that lived on would keep
// its socket from its successor.
func withPlugin(parent context.Context, argv []string, serve func(context.Context) error) error {
	if len(argv) == 0 {
		return serve(parent)
	}
	// The plugin outlives the last call that may need it.
	plugin := exec.Command(argv[0], argv[1:]...)
	plugin.Stdout, plugin.Stderr = os.Stderr, os.Stderr
	plugin.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := plugin.Start(); err != nil {
		return fmt.Errorf("start the plugin: %w", err)
	}
	ctx, cancel := context.WithCancelCause(parent)
	defer cancel(nil)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		cancel(fmt.Errorf("the plugin ended: %v", describe(plugin.Wait()))) //nolint:errorlint // how it ended is told
	}()
	err := serve(ctx)
	gone := context.Cause(ctx)
	if parent.Err() == nil && gone != nil {
		return errors.Join(err, gone)
	}
	_ = plugin.Process.Signal(syscall.SIGTERM)
	select {
	case <-ended:
	case <-time.After(server.DefaultGrace): // it ends with this process
	}
	return err
}

func describe(err error) string {
	if err == nil {
		return "exit status 0"
	}
	return err.Error()
}
