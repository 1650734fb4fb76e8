package e2e

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	gofuse "github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/drivers/fuse/attach"
	"github.com/csi-prepare/csi-prepare/drivers/fuse/loopback"
	"github.com/csi-prepare/csi-prepare/reference/perform"
)

// The test binary is also the process that has the mount namespace of the
// tests, and the one that serves a FUSE filesystem.
const (
	roleVariable = "CSI_PREPARE_E2E_ROLE"
	baseVariable = "CSI_PREPARE_E2E_BASE"
)

// base is a tmpfs that holds everything the tests make.
var base string

func TestMain(m *testing.M) {
	perform.MainIfChild()
	role, argument, _ := strings.Cut(os.Getenv(roleVariable), " ")
	switch {
	case role == "serve":
		if err := serve(argument); err != nil {
			fmt.Fprintln(os.Stderr, "serve:", err)
			os.Exit(1)
		}
	case role == "inside":
		os.Exit(inside(m))
	case os.Getuid() != 0:
		os.Exit(m.Run()) // each says that it needs root
	default:
		os.Exit(enter())
	}
}

// enter runs the tests in a mount namespace of their own, and in a PID namespace:
// with its first process, however that ends, all of its others end.
func enter() int {
	dir, err := os.MkdirTemp("", "e2e")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.Remove(dir) // a directory once the namespace is gone
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), roleVariable+"=inside", baseVariable+"="+dir)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWPID, Unshareflags: unix.CLONE_NEWNS, Pdeathsig: unix.SIGKILL,
	}
	err = cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	removeCgroups()
	return cmd.ProcessState.ExitCode()
}

func inside(m *testing.M) int {
	os.Unsetenv(roleVariable)
	base = os.Getenv(baseVariable)
	if err := unix.Mount("tmpfs", base, "tmpfs", 0, "mode=755"); err != nil {
		fmt.Fprintln(os.Stderr, "tmpfs:", err)
		return 1
	}
	if err := unix.Mount("proc", "/proc", "proc", 0, ""); err != nil {
		fmt.Fprintln(os.Stderr, "proc:", err)
		return 1
	}
	// containerd and ctr have sockets and pipes in /run whatever they are told.
	if err := unix.Mount("tmpfs", "/run", "tmpfs", 0, "mode=755"); err != nil {
		fmt.Fprintln(os.Stderr, "tmpfs on /run:", err)
		return 1
	}
	// crun 1.8 refuses to run where both versions of cgroups are mounted.
	const unified = "/sys/fs/cgroup/unified"
	var st unix.Statfs_t
	if unix.Statfs(unified, &st) == nil && st.Type == unix.CGROUP2_SUPER_MAGIC {
		_ = unix.Unmount(unified, 0)
	}
	code := m.Run()
	for _, end := range atEnd {
		end()
	}
	if err := report(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	return code
}

// serve serves the FUSE device at descriptor 3 with what is in a directory. A
// line on stdout says that it does.
func serve(dir string) error {
	orphans, err := os.MkdirTemp(filepath.Dir(dir), "orphans")
	if err != nil {
		return err
	}
	fs, err := loopback.New(dir, orphans, loopback.Options{})
	if err != nil {
		return err
	}
	device := os.NewFile(3, "device")
	s, _, err := attach.Start(context.Background(), device, fs, gofuse.MountOptions{IDMappedMount: true})
	if err != nil {
		return err
	}
	device.Close()
	fmt.Println("serving")
	return s.Serve()
}

// waitLine waits for a child's first line.
func waitLine(f *os.File) error {
	_, err := bufio.NewReader(f).ReadString('\n')
	return err
}

const cgroupParent = "csi-prepare-e2e"

// removeCgroups removes the directory the containers' cgroups were in, which
// the runtimes leave, and what is in it if the tests were killed.
func removeCgroups() {
	for _, dir := range []string{"/sys/fs/cgroup/*/", "/sys/fs/cgroup/"} {
		for _, name := range []string{cgroupParent + "/*", cgroupParent} {
			found, _ := filepath.Glob(dir + name)
			for _, d := range found {
				_ = unix.Rmdir(d)
			}
		}
	}
}
