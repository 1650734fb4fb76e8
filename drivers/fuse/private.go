package fuse

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// A program that does not know /dev/fd/N mounts on a directory. As an ordinary
// user it cannot, and asks fusermount, a program with the right to do so, which
// sends it the device over a socket: so do libfuse 2 and 3 and the libraries of
// other languages. In a mount and a user namespace of its own the program gets
// a fusermount that sends it the device the CO has given.

const (
	// What is in the private /dev, besides a few devices.
	privateMountpoint = "/dev/mountpoint"
	privateBin        = "/dev/bin"
	privateSecrets    = "/dev/secrets"

	// Descriptors of the program: the device, the file of this program, which
	// may have been replaced since it was started, and the secrets.
	deviceFD      = 3
	selfFD        = 4
	firstSecretFD = 5

	// becomeProgram and askFusermount are arguments that have this program do
	// something else than serve.
	becomeProgram = "become-program"
	askFusermount = "fusermount"
	// commFD is the variable that names the socket.
	commFD = "_FUSE_COMMFD"
)

// inPrivate has a command run in namespaces of its own, by way of this program,
// which has to lead to ServeInherited with the arguments it was started with.
// Its secrets become files there.
func inPrivate(cmd *exec.Cmd, self *os.File, secrets []*os.File) {
	arguments := []string{becomeProgram, strconv.Itoa(len(secrets))}
	cmd.Args = slices.Concat(os.Args, arguments, cmd.Args)
	cmd.Path = "/proc/self/exe"
	cmd.ExtraFiles = append(append(cmd.ExtraFiles, self), secrets...)
	uid, gid := os.Getuid(), os.Getgid()
	cmd.SysProcAttr.Cloneflags = unix.CLONE_NEWUSER | unix.CLONE_NEWNS
	cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: uid, HostID: uid, Size: 1}}
	cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: gid, HostID: gid, Size: 1}}
	cmd.SysProcAttr.AmbientCaps = []uintptr{unix.CAP_SYS_ADMIN} // until execPrivate has mounted
}

// secretPath is that of the nth secret of a program in namespaces of its own.
func secretPath(n int) string { return privateSecrets + "/" + strconv.Itoa(n) }

// execPrivate becomes the program that words are of, the first being how many
// secrets it has. Its mounts are copies that follow the node's; what it adds is
// seen by nobody else.
func execPrivate(words []string) error {
	if len(words) < 2 {
		return errors.New("there is no program to become")
	}
	secrets, err := strconv.Atoi(words[0])
	if err != nil {
		return fmt.Errorf("how many secrets there are: %w", err)
	}
	words = words[1:]
	runtime.LockOSThread()
	if err := coverDev(); err != nil {
		return fmt.Errorf("a /dev for the program: %w", err)
	}
	for n := range secrets {
		value, err := io.ReadAll(os.NewFile(uintptr(firstSecretFD+n), "secret"))
		if err == nil {
			err = os.WriteFile(secretPath(n), value, 0o400)
		}
		if err != nil {
			return fmt.Errorf("a file for a secret: %w", err)
		}
	}
	if _, err := unix.FcntlInt(selfFD, unix.F_SETFD, 0); err != nil {
		return fmt.Errorf("this program's file: %w", err)
	}
	if err := unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0); err != nil {
		return fmt.Errorf("drop capabilities: %w", err)
	}
	// The namespace made it forget: a change of capabilities does.
	if err := unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0); err != nil {
		return fmt.Errorf("end with the supervisor: %w", err)
	}
	env := []string{strings.Replace(programEnvironment[0], "PATH=", "PATH="+privateBin+":", 1)}
	return &os.PathError{Op: "exec", Path: words[0], Err: unix.Exec(words[0], words, env)}
}

// coverDev mounts a /dev in which the program finds no device of FUSE, a
// directory to mount on, and its fusermount; that is put in the place of the
// node's, too.
func coverDev() error {
	names := []string{"null", "zero", "full", "random", "urandom"}
	fds := make([]int, len(names))
	for i, name := range names {
		fd, err := unix.Open("/dev/"+name, unix.O_PATH|unix.O_CLOEXEC, 0)
		if err != nil {
			return &os.PathError{Op: "open", Path: "/dev/" + name, Err: err}
		}
		defer unix.Close(fd)
		fds[i] = fd
	}
	if err := unix.Mount("dev", "/dev", "tmpfs", unix.MS_NOSUID, "size=1m,mode=755"); err != nil {
		return os.NewSyscallError("mount", err)
	}
	for _, dir := range []string{privateMountpoint, privateBin, privateSecrets} {
		if err := os.Mkdir(dir, 0o700); err != nil {
			return err
		}
	}
	for i, name := range names {
		if err := bindFile(fmt.Sprintf("/proc/self/fd/%d", fds[i]), "/dev/"+name); err != nil {
			return err
		}
	}
	// libfuse 2 opens the device before it finds that it cannot mount it.
	if err := os.WriteFile("/dev/fuse", nil, 0o600); err != nil {
		return err
	}
	script := fmt.Sprintf("#!/bin/sh\nexec /proc/self/fd/%d", selfFD)
	for _, a := range os.Args[1:] {
		if a == becomeProgram {
			break
		}
		script += " '" + strings.ReplaceAll(a, "'", `'\''`) + "'"
	}
	script += " " + askFusermount + "\n"
	for _, name := range []string{"fusermount", "fusermount3"} {
		own := privateBin + "/" + name
		if err := os.WriteFile(own, []byte(script), 0o755); err != nil { //nolint:gosec // in the private /dev, by a name of ours
			return err
		}
		// libfuse tries its own first, where it was installed.
		for _, dir := range []string{"/bin/", "/usr/bin/", "/usr/local/bin/"} {
			err := unix.Mount(own, dir+name, "", unix.MS_BIND, "")
			if err != nil && !errors.Is(err, unix.ENOENT) {
				return &os.PathError{Op: "bind", Path: dir + name, Err: err}
			}
		}
	}
	return nil
}

func bindFile(from, to string) error {
	err := os.WriteFile(to, nil, 0o600)
	if err == nil {
		err = unix.Mount(from, to, "", unix.MS_BIND, "")
	}
	if err != nil {
		return fmt.Errorf("bind %s: %w", to, err)
	}
	return nil
}

// fusermount sends the device, which is descriptor 3 here as it is in the
// program, to who has asked for a mount. That is there already: what else is
// asked for, unmounting in the first place, is the CO's to do.
func fusermount() error {
	text := os.Getenv(commFD)
	if text == "" {
		return nil
	}
	socket, err := strconv.Atoi(text)
	if err != nil {
		return fmt.Errorf("%s: %w", commFD, err)
	}
	if err := unix.Sendmsg(socket, []byte{0}, unix.UnixRights(deviceFD), nil, 0); err != nil {
		return fmt.Errorf("send the device: %w", err)
	}
	_ = unix.Close(deviceFD)
	// With auto_unmount the end of this process would be taken for a failure.
	_, _ = io.Copy(io.Discard, os.NewFile(uintptr(socket), "program"))
	return nil
}
