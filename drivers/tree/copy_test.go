package tree

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// pair is a tree to copy and an empty directory.
func pair(t *testing.T, dir string) (from, to string) {
	t.Helper()
	from, to = filepath.Join(dir, "from"), filepath.Join(dir, "to")
	for _, d := range []string{from, to} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return from, to
}

func copyTree(ctx context.Context, to, from string) error {
	fds := map[string]int{}
	for _, d := range []string{to, from} {
		fd, err := unix.Open(d, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		fds[d] = fd
	}
	return Copy(ctx, fds[to], fds[from])
}

// look describes everything in a tree: a line for each name.
func look(t *testing.T, root string) []string {
	t.Helper()
	var lines []string
	links := map[uint64]string{}
	err := filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			return err
		}
		name, _ := filepath.Rel(root, path)
		line := fmt.Sprintf("%s mode=%o owner=%d:%d rdev=%d mtime=%d.%d", name, st.Mode, st.Uid, st.Gid, st.Rdev, st.Mtim.Sec, st.Mtim.Nsec)
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFREG:
			text, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			line += fmt.Sprintf(" size=%d text=%q", st.Size, strings.Trim(string(text), "\x00"))
			if first := links[st.Ino]; first != "" {
				line += " is " + first
			}
			links[st.Ino] = name
		case unix.S_IFLNK:
			to, err := os.Readlink(path)
			if err != nil {
				return err
			}
			line += " to=" + to
		}
		if st.Mode&unix.S_IFMT != unix.S_IFLNK {
			value := make([]byte, 64)
			if n, err := unix.Lgetxattr(path, "user.note", value); err == nil {
				line += " note=" + string(value[:n])
			}
		}
		lines = append(lines, line)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return lines
}

func must(t *testing.T, errs ...error) {
	t.Helper()
	for _, err := range errs {
		if err != nil {
			t.Fatal(err)
		}
	}
}

func TestCopyHasEverything(t *testing.T) {
	from, to := pair(t, t.TempDir())
	in := func(name string) string { return filepath.Join(from, name) }
	must(t,
		os.MkdirAll(in("a/b/c"), 0o750),
		os.WriteFile(in("a/file"), []byte("text"), 0o640),
		os.WriteFile(in("empty"), nil, 0o600),
		os.Link(in("a/file"), in("a/b/same")),
		os.Link(in("a/file"), in("also")),
		os.Symlink("../../outside", in("a/climbs")),
		os.Symlink("nowhere", in("dangling")),
		os.WriteFile(in("odd\nname\x01"), []byte{0, 1, 2}, 0o644),
		unix.Mkfifo(in("fifo"), 0o622),
	)
	sparse, err := os.Create(in("sparse"))
	must(t, err)
	_, err = sparse.WriteAt([]byte("middle"), 4<<20)
	must(t, err, sparse.Truncate(8<<20), sparse.Close())
	if os.Geteuid() == 0 {
		must(t, os.Lchown(in("a/file"), 1234, 4321), os.Chmod(in("a/file"), 0o4755|os.ModeSetuid), os.Lchown(in("dangling"), 77, 78))
		must(t, unix.Mknod(in("null"), unix.S_IFCHR|0o600, int(unix.Mkdev(1, 3))))
	}
	if err := unix.Setxattr(in("empty"), "user.note", []byte("kept"), 0); err != nil && !errors.Is(err, unix.EOPNOTSUPP) {
		t.Fatal(err)
	}
	long := time.Date(2001, 2, 3, 4, 5, 6, 789, time.UTC)
	must(t, os.Chtimes(in("a/file"), long, long), os.Chtimes(in("a/b"), long, long), os.Chmod(from, 0o777))

	must(t, copyTree(t.Context(), to, from))
	if diff := cmp.Diff(look(t, from), look(t, to)); diff != "" {
		t.Errorf("the copy differs (-from +to):\n%s", diff)
	}
	var st unix.Stat_t
	must(t, unix.Stat(filepath.Join(to, "sparse"), &st))
	if st.Blocks*512 > 1<<20 {
		t.Errorf("the copy of a sparse file takes %d bytes", st.Blocks*512)
	}
	must(t, os.WriteFile(filepath.Join(to, "a/file"), []byte("other"), 0o600))
	if text, _ := os.ReadFile(in("a/file")); string(text) != "text" {
		t.Errorf("writing to the copy changed the original: %q", text)
	}
}

func TestCopyRefusesWhatIsTooDeep(t *testing.T) {
	dir := t.TempDir()
	from, to := pair(t, dir)
	must(t, os.MkdirAll(filepath.Join(from, strings.Repeat("d/", MaxDepth+1)), 0o755))
	if err := copyTree(t.Context(), to, from); err == nil || !strings.Contains(err.Error(), "below each other") {
		t.Errorf("copying a tree that is too deep: %v", err)
	}
}

func TestCopyEndsWithItsContext(t *testing.T) {
	from, to := pair(t, t.TempDir())
	must(t, os.WriteFile(filepath.Join(from, "file"), nil, 0o600))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := copyTree(ctx, to, from); !errors.Is(err, context.Canceled) {
		t.Errorf("copying after the context ended: %v", err)
	}
}

// inNamespace runs the rest of a test in a process with a mount namespace of
// its own.
func inNamespace(t *testing.T) bool {
	t.Helper()
	const own = "TREE_TEST_OWN_NAMESPACE"
	if os.Getenv(own) == t.Name() {
		must(t, unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""))
		return true
	}
	if os.Geteuid() != 0 {
		t.Skip("a mount namespace needs root")
	}
	self, err := os.Executable()
	must(t, err)
	cmd := exec.CommandContext(t.Context(), self, "-test.run=^"+t.Name()+"$", "-test.v")
	cmd.Env = append(os.Environ(), own+"="+t.Name())
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("in a mount namespace of its own: %v\n%s", err, out)
	} else if strings.Contains(string(out), "--- SKIP") {
		t.Skip(string(out))
	}
	return false
}

func TestCopyEntersNoMount(t *testing.T) {
	if !inNamespace(t) {
		return
	}
	from, to := pair(t, t.TempDir())
	must(t, os.Mkdir(filepath.Join(from, "mounted"), 0o755), unix.Mount("mounted", filepath.Join(from, "mounted"), "tmpfs", 0, "size=64k"))
	var mounted *MountError
	if err := copyTree(t.Context(), to, from); !errors.As(err, &mounted) {
		t.Errorf("copying a tree with a mount in it: %v", err)
	}
	must(t, unix.Unmount(filepath.Join(from, "mounted"), 0))
}

// Where the filesystem can share blocks, a copy needs none of its own: the
// filesystem has not the room for both.
func TestCopySharesBlocks(t *testing.T) {
	if !inNamespace(t) {
		return
	}
	for _, name := range []string{"mkfs.xfs", "losetup"} {
		if _, err := exec.LookPath(name); err != nil {
			t.Skipf("needs %s: %v", name, err)
		}
	}
	dir := t.TempDir()
	image, mnt := filepath.Join(dir, "image"), filepath.Join(dir, "mnt")
	must(t, os.WriteFile(image, nil, 0o600), os.Truncate(image, 320<<20), os.Mkdir(mnt, 0o755))
	if out, err := exec.Command("mkfs.xfs", "-q", "-m", "reflink=1", image).CombinedOutput(); err != nil {
		t.Fatalf("mkfs.xfs: %v: %s", err, out)
	}
	out, err := exec.Command("losetup", "--find", "--show", image).CombinedOutput()
	if err != nil {
		t.Skipf("no loop device: %s", out)
	}
	device := strings.TrimSpace(string(out))
	defer exec.Command("losetup", "-d", device).Run()
	if err := unix.Mount(device, mnt, "xfs", 0, ""); err != nil {
		t.Skipf("this kernel mounts no xfs: %v", err)
	}
	defer unix.Unmount(mnt, 0)
	from, to := pair(t, mnt)
	block := make([]byte, 1<<20)
	for i := range block {
		block[i] = byte(i)
	}
	f, err := os.Create(filepath.Join(from, "big"))
	must(t, err)
	for range 150 {
		_, err = f.Write(block)
		must(t, err)
	}
	must(t, f.Close(), copyTree(t.Context(), to, from))
	var st unix.Statfs_t
	must(t, unix.Statfs(mnt, &st))
	if used := int64(st.Blocks-st.Bfree) * st.Bsize; used > 250<<20 {
		t.Errorf("a file of 150 MiB and its copy take %d MiB", used>>20)
	}
}
