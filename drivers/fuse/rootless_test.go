package fuse

import (
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// rootlessVariable is set in a process that is root of a user namespace alone:
// it is the path of a device of FUSE that every user may open, as most nodes
// have it at /dev/fuse.
const rootlessVariable = "FUSE_TEST_ROOTLESS"

// enterRootless makes that device the one of this process's namespace, and
// gives it temporary files of its own: those of the run are another user's.
func enterRootless() error {
	node := os.Getenv(rootlessVariable)
	if node == "" {
		return nil
	}
	if err := unix.Mount(node, "/dev/fuse", "", unix.MS_BIND, ""); err != nil {
		return err
	}
	if err := unix.Mount("tmpfs", "/tmp", "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=1777"); err != nil {
		return err
	}
	return os.Setenv("TMPDIR", "/tmp")
}

// A CO without privilege on the node, in a user namespace of its own, with a
// driver of another user of that namespace: all of it goes as it does for root.
func TestRootless(t *testing.T) {
	if os.Geteuid() != 0 || os.Getenv(rootlessVariable) != "" {
		t.Skip("making the device of the test needs root")
	}
	dir, err := os.MkdirTemp("", "rootless") // the other user has to get there
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	node := filepath.Join(dir, "fuse")
	if err := unix.Mknod(node, unix.S_IFCHR|0o666, int(unix.Mkdev(10, 229))); err != nil {
		t.Skipf("a device of FUSE: %v", err)
	}
	const root = 100000
	for path, mode := range map[string]os.FileMode{dir: 0o755, node: 0o666} {
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
	}
	tests := "^(TestADepositAfterTheCORestarted|TestUnprepareWhileTheConnectionLives"
	if !testing.Short() {
		tests += "|TestAVolumeIsUsedAndGone|TestPreparationsShareAServer"
	}
	cmd := exec.Command("/proc/self/exe", "-test.v", "-test.run", tests+")$")
	cmd.Env = append(os.Environ(), rootlessVariable+"="+node)
	mapping := []syscall.SysProcIDMap{{ContainerID: 0, HostID: root, Size: 65536}}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWUSER | unix.CLONE_NEWNS, UidMappings: mapping, GidMappings: mapping,
		GidMappingsEnableSetgroups: true,
		Credential:                 &syscall.Credential{}, // root of the namespace
	}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("%v: %s", err, out)
	}
	t.Logf("%s", out)
}
