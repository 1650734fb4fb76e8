package nfsd

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// Addresses of the server and of the node, on the link between them.
const (
	Address4, Address6         = "10.77.0.1", "fd77::1"
	nodeAddress4, nodeAddress6 = "10.77.0.2", "fd77::2"
	serverLink, nodeLink       = "server0", "node0"
)

const processName = "csi-prepare-nfsd"

// MainIfServer has to be called first in main by a program that calls Start:
// the server is a process of its own, which is that program again. In that
// process it does not return.
func MainIfServer() {
	if os.Args[0] != processName {
		return
	}
	runtime.LockOSThread()
	if err := serverMain(os.Args[1]); err != nil {
		fmt.Println("error:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// serverMain obeys the commands on its standard input, and answers each by one
// line.
func serverMain(root string) error {
	ctx := context.Background()
	s, err := serveHere(ctx, root)
	if err != nil {
		return err
	}
	fmt.Println("ok")
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		verb, path, _ := strings.Cut(lines.Text(), " ")
		err := map[string]func() error{
			"start":    func() error { return s.start(ctx) },
			"stop":     s.stop,
			"export":   func() error { return s.add(path) },
			"unexport": func() error { return s.remove(path) },
			"flush":    s.flush,
		}[verb]()
		if err != nil {
			fmt.Println("error:", err)
		} else {
			fmt.Println("ok")
		}
	}
	return s.stop()
}

// Host is the server as another host on a link of this one's.
type Host struct {
	// Root is the directory that it has as its root.
	Root string

	cmd     *exec.Cmd
	orders  io.WriteCloser
	answers *bufio.Scanner
}

// Start makes the host, with a tmpfs at root to serve from. Its server does not
// run yet.
func Start(ctx context.Context, root string) (*Host, error) {
	h := &Host{Root: root}
	if err := unix.Mount("server", root, "tmpfs", 0, "mode=755"); err != nil {
		return nil, fmt.Errorf("mount the server's tmpfs: %w", err)
	}
	h.cmd = &exec.Cmd{Path: "/proc/self/exe", Args: []string{processName, root}, Env: os.Environ(), Stderr: os.Stderr}
	h.cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET, Unshareflags: unix.CLONE_NEWNS}
	var err error
	if h.orders, err = h.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := h.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	h.answers = bufio.NewScanner(out)
	if err := h.cmd.Start(); err != nil {
		return nil, errors.Join(err, unix.Unmount(root, 0))
	}
	err = h.answer()
	if err == nil {
		err = h.link(ctx)
	}
	if err != nil {
		return nil, errors.Join(err, h.Close())
	}
	return h, nil
}

// link joins the two network namespaces.
func (h *Host) link(ctx context.Context) error {
	pid := strconv.Itoa(h.cmd.Process.Pid)
	inside := []string{"nsenter", "-t", pid, "-n", "--"}
	for _, step := range [][]string{
		{"ip", "link", "add", nodeLink, "type", "veth", "peer", "name", serverLink, "netns", pid},
		{"ip", "address", "add", nodeAddress4 + "/24", "dev", nodeLink},
		{"ip", "address", "add", nodeAddress6 + "/64", "dev", nodeLink, "nodad"},
		{"ip", "link", "set", nodeLink, "up"},
		append(inside, "ip", "link", "set", "lo", "up"),
		append(inside, "ip", "address", "add", Address4+"/24", "dev", serverLink),
		append(inside, "ip", "address", "add", Address6+"/64", "dev", serverLink, "nodad"),
		append(inside, "ip", "link", "set", serverLink, "up"),
	} {
		if out, err := exec.CommandContext(ctx, step[0], step[1:]...).CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w: %s", strings.Join(step, " "), err, out)
		}
	}
	return nil
}

func (h *Host) order(words ...string) error {
	if _, err := fmt.Fprintln(h.orders, strings.Join(words, " ")); err != nil {
		return fmt.Errorf("the server's process: %w", err)
	}
	return h.answer()
}

func (h *Host) answer() error {
	if !h.answers.Scan() {
		return errors.New("the server's process has ended")
	}
	if text := h.answers.Text(); text != "ok" {
		return errors.New("server: " + strings.TrimPrefix(text, "error: "))
	}
	return nil
}

// Serve starts the server.
func (h *Host) Serve() error { return h.order("start") }

// Stop stops the server: its port is closed.
func (h *Host) Stop() error { return h.order("stop") }

// Export exports a directory of the server's, an absolute path in its root.
func (h *Host) Export(path string) error { return h.order("export", path) }

// Unexport takes an export back: what clients have of it is stale.
func (h *Host) Unexport(path string) error { return h.order("unexport", path) }

// Flush has the server look up exports and clients anew.
func (h *Host) Flush() error { return h.order("flush") }

// Silence cuts the link: what is sent to the server gets no answer at all.
func (h *Host) Silence(ctx context.Context, silent bool) error {
	// The server's end, so that the node still has a route to it.
	state := "up"
	if silent {
		state = "down"
	}
	step := []string{"nsenter", "-t", strconv.Itoa(h.cmd.Process.Pid), "-n", "--", "ip", "link", "set", serverLink, state}
	out, err := exec.CommandContext(ctx, step[0], step[1:]...).CombinedOutput()
	if err == nil && !silent {
		// The kernel drops IPv6 addresses of a link that goes down.
		step = append(step[:6], "address", "replace", Address6+"/64", "dev", serverLink, "nodad")
		out, err = exec.CommandContext(ctx, step[0], step[1:]...).CombinedOutput()
	}
	if err != nil {
		return fmt.Errorf("%s: %w: %s", strings.Join(step, " "), err, out)
	}
	return nil
}

// Close ends the host.
func (h *Host) Close() error {
	_ = h.orders.Close()
	return errors.Join(h.cmd.Wait(), unix.Unmount(h.Root, unix.MNT_DETACH))
}
