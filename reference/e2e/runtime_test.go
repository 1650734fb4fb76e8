package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go/features"
)

// engine is one way to start containers.
type engine struct {
	name    string
	program string
	// containerd says that ctr starts the program through containerd.
	containerd bool
	// late says that the runtime makes mounts when the device rules hold
	// already, so that a filesystem on a device is refused.
	late bool
	// locked says that root of a container's user namespace cannot clear
	// attributes of what was performed on the node.
	locked bool
}

var engines = []engine{
	{name: "runc", program: "runc", locked: true},
	{name: "crun", program: "crun", late: true},
	{name: "containerd", program: "runc", containerd: true, locked: true},
}

// limit is far beyond what any step takes.
const limit = time.Minute

// command runs a program to its end and returns what it wrote.
func command(t *testing.T, name string, args ...string) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.WaitDelay = time.Second
	var out, words bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &words
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("%s %s: %w: %s%s", name, strings.Join(args, " "), err, words.String(), out.String())
	}
	return out.String(), nil
}

// lacks says why the engine cannot run here, "" if it can.
func (e *engine) lacks() string {
	programs := []string{e.program, "busybox"}
	if e.containerd {
		programs = append(programs, "containerd", "ctr", "containerd-shim-runc-v2")
	}
	if os.Getuid() != 0 {
		return "needs root"
	}
	for _, p := range programs {
		if _, err := exec.LookPath(p); err != nil {
			return "no " + p + " (Debian: runc, crun, containerd, busybox-static)"
		}
	}
	if e.containerd {
		if _, err := daemon(); err != nil {
			return err.Error()
		}
	}
	return ""
}

// features are what the runtime answers, nil for one that does not answer.
func (e *engine) features() *features.Features {
	out, err := exec.Command(e.program, "features").Output()
	f := &features.Features{}
	if err != nil || json.Unmarshal(out, f) != nil {
		return nil
	}
	return f
}

// args are the arguments every call begins with.
func (e *engine) args(rest ...string) []string {
	if e.containerd {
		socket, _ := daemon()
		return append([]string{"-a", socket}, rest...)
	}
	args := []string{"--root", filepath.Join(base, "state-"+e.name)}
	if e.name == "crun" {
		args = append(args, "--cgroup-manager=cgroupfs")
	}
	return append(args, rest...)
}

func (e *engine) call(t *testing.T, args ...string) (string, error) {
	t.Helper()
	program := e.program
	if e.containerd {
		program = "ctr"
	}
	return command(t, program, e.args(args...)...)
}

// run runs a container to its end and returns what its script wrote.
func (e *engine) run(t *testing.T, b *bundle) (string, error) {
	t.Helper()
	b.write(t)
	if e.containerd {
		return e.call(t, "run", "--rm", "--config", filepath.Join(b.dir, "config.json"), b.id)
	}
	defer e.remove(b.id)
	return e.call(t, "run", "--bundle", b.dir, b.id)
}

// running is a container that runs until the test ends.
type running struct {
	*engine
	id    string
	pid   int
	execs int
}

// start starts a container whose script does nothing.
func (e *engine) start(t *testing.T, b *bundle) *running {
	t.Helper()
	b.spec.Process.Args = []string{"/bin/sleep", "600"}
	b.write(t)
	r := &running{engine: e, id: b.id}
	t.Cleanup(func() { e.remove(b.id) })
	if e.containerd {
		_, err := e.call(t, "run", "-d", "--null-io", "--config", filepath.Join(b.dir, "config.json"), b.id)
		must(t, err)
		list, err := e.call(t, "task", "ls")
		must(t, err)
		for line := range strings.Lines(list) {
			if f := strings.Fields(line); len(f) > 1 && f[0] == b.id {
				r.pid, _ = strconv.Atoi(f[1])
			}
		}
	} else {
		// Not captured: the container would inherit the pipe.
		pid := filepath.Join(b.dir, "pid")
		log, err := os.Create(filepath.Join(b.dir, "log"))
		must(t, err)
		defer log.Close()
		cmd := exec.Command(e.program, e.args("run", "--detach", "--pid-file", pid, "--bundle", b.dir, b.id)...)
		cmd.Stdout, cmd.Stderr = log, log
		if err := cmd.Run(); err != nil {
			words, _ := os.ReadFile(log.Name())
			t.Fatalf("%v: %s", err, words)
		}
		text, err := os.ReadFile(pid)
		must(t, err)
		r.pid, _ = strconv.Atoi(strings.TrimSpace(string(text)))
	}
	if r.pid == 0 {
		t.Fatalf("%s: no process", b.id)
	}
	return r
}

// exec runs a script in the container.
func (r *running) exec(t *testing.T, script string) (string, error) {
	t.Helper()
	r.execs++
	if r.containerd {
		return r.call(t, "task", "exec", "--exec-id", "x"+strconv.Itoa(r.execs), r.id, "/bin/sh", "-c", script)
	}
	return r.call(t, "exec", r.id, "/bin/sh", "-c", script)
}

// remove ends a container and lets the runtime forget it.
func (e *engine) remove(id string) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	if !e.containerd {
		_ = exec.CommandContext(ctx, e.program, e.args("delete", "-f", id)...).Run()
		return
	}
	_ = exec.CommandContext(ctx, "ctr", e.args("task", "rm", "-f", id)...).Run()
	_ = exec.CommandContext(ctx, "ctr", e.args("container", "rm", id)...).Run()
}

// daemon starts containerd, once, and returns its socket.
var daemon = sync.OnceValues(func() (string, error) {
	dir := filepath.Join(base, "cd")
	if err := os.MkdirAll(dir, 0o711); err != nil {
		return "", err
	}
	socket, config := filepath.Join(dir, "s"), filepath.Join(dir, "config.toml")
	text := fmt.Sprintf("version = 2\nroot = %q\nstate = %q\ndisabled_plugins = [\"io.containerd.grpc.v1.cri\"]\n"+
		"[grpc]\n  address = %q\n", dir+"/root", dir+"/state", socket)
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		return "", err
	}
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		return "", err
	}
	defer log.Close()
	cmd := exec.Command("containerd", "--config", config)
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		return "", err
	}
	atEnd = append(atEnd, func() {
		_ = cmd.Process.Signal(os.Interrupt)
		done := make(chan struct{})
		go func() { _ = cmd.Wait(); close(done) }()
		select {
		case <-done:
		case <-time.After(10 * time.Second):
			_ = cmd.Process.Kill()
			<-done
		}
	})
	for end := time.Now().Add(limit); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		if exec.Command("ctr", "-a", socket, "version").Run() == nil {
			return socket, nil
		}
	}
	words, _ := os.ReadFile(log.Name())
	return "", fmt.Errorf("containerd does not answer: %s", words[max(0, len(words)-500):])
})

// atEnd is what is left to stop when all tests have run.
var atEnd []func()
