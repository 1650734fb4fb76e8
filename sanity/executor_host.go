package sanity

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// hostSpecs are about what a performance needs of the machine besides the
// kernel, and what it leaves in the process that performs.
func hostSpecs(s *section) {
	s.spec("no mount helper is started", Covers(requirement.FilesystemNoHelper), func(t *trial) {
		g := t.rig()
		g.elsewhere()
		started := g.trap("mount")
		r := g.performance(tmpfsOf("", nil), bind("", "", nil))
		r.MountSpecs = r.MountSpecs[:1]
		_, err := g.perform(r)
		g.alive(err)
		g.want(requirement.FilesystemNoHelper, !exists(started), "a filesystem made by system calls", "mount(8) was started")
		g.want(requirement.FilesystemNoHelper, err == nil, "OK without mount(8)", "%s", answered(err))
	})
	s.spec("no descriptor of a performance can be inherited", Covers(requirement.PerformNoDescriptor), func(t *trial) {
		g := t.rig()
		pid := g.pid()
		if pid == 0 {
			end(couldNotRun("the process of the performer is not known, so its descriptors cannot be looked at"))
		}
		before := inheritable(pid)
		for range 3 {
			g.performed(g.performance(bind("", "", nil), tmpfsOf("dir", nil)))
			for fd, what := range inheritable(pid) {
				_, known := before[fd]
				g.want(requirement.PerformNoDescriptor, known, "every descriptor of a performance closed on exec", "descriptor %s, %s, is inherited by whatever is started", fd, what)
			}
			t.sysfail("unmounting", unix.Unmount(filepath.Join(g.target, "dir"), 0))
			t.sysfail("unmounting", unix.Unmount(g.target, 0))
		}
	})
}

// trap puts a program in the place of another, for the performer and in the
// consumer's namespace, and returns the file that is there once it was
// started.
func (g *rig) trap(program string) (started string) {
	path, err := exec.LookPath(program)
	if err == nil {
		path, err = filepath.EvalSymlinks(path)
	}
	if err != nil {
		end(couldNotRun("there is no %s here that could be started: %v", program, err))
	}
	dir := g.mkdir("trap")
	started = filepath.Join(dir, "started")
	script := filepath.Join(dir, "script")
	g.write(script, fmt.Sprintf("#!/bin/sh\necho yes > %s\nexit 1\n", started))
	g.cleanup(func() error { return ignoreMissing(os.Remove(started)) })
	g.cleanup(func() error { return os.Remove(script) })
	g.sysfail("making a script", os.Chmod(script, 0o755))
	set := func() error { return unix.Mount(script, path, "", unix.MS_BIND, "") }
	unset := func() error { return unix.Unmount(path, 0) }
	g.sysfail("putting a trap onto "+path, set())
	g.cleanup(unset)
	g.sysfail("putting a trap onto "+path+" for the performer", g.beyond.Do(g.ctx, set))
	g.cleanup(func() error { return g.beyond.Do(g.ctx, unset) })
	return started
}

// inheritable are the descriptors of a process, but the standard ones, that
// stay open across an exec.
func inheritable(pid int) map[string]string {
	found := map[string]string{}
	dir := fmt.Sprintf("/proc/%d/fdinfo", pid)
	for _, fd := range names(dir) {
		text, err := os.ReadFile(filepath.Join(dir, fd))
		if n, convErr := strconv.Atoi(fd); err != nil || convErr != nil || n <= 2 {
			continue
		}
		for line := range strings.Lines(string(text)) {
			value, is := strings.CutPrefix(line, "flags:")
			if !is {
				continue
			}
			flags, err := strconv.ParseUint(strings.TrimSpace(value), 8, 64)
			if err == nil && flags&unix.O_CLOEXEC == 0 {
				to, _ := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", pid, fd)) // "" if it was closed meanwhile
				found[fd] = orElse(to, "closed by now")
			}
		}
	}
	return found
}
