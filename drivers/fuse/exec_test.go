package fuse

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/reference/fusemount"
	"github.com/csi-prepare/csi-prepare/reference/handoff"
)

func TestParseProgram(t *testing.T) {
	for text, rule := range map[string]string{
		"/usr/bin/sshfs {source} {device} -f -o IdentityFile={secret:key},uid={uid}": "",
		"sshfs {source} {device}":      "absolute path",
		"":                             "absolute path",
		"/bin/x {source}":              "{device} stands in it 0 times",
		"/bin/x {device} {device}":     "{device} stands in it 2 times",
		"/bin/x {device} {secret}":     "{secret} is none of",
		"/bin/x {device} {secret:a,b}": "is none of",
	} {
		_, err := ParseProgram(text)
		if rule == "" && err != nil || rule != "" && (err == nil || !strings.Contains(err.Error(), rule)) {
			t.Errorf("%q: got %v, want %q", text, err, rule)
		}
	}
}

func TestCheckSource(t *testing.T) {
	for source, allowed := range map[string]bool{
		"": false, "-oProxyCommand=id": false, "a/../b": false, "h:..": false, "a\nb": false, "..": false,
		strings.Repeat("a", 1025): false, "user@host:/srv/data": true, "dir": true, "a..b": true,
	} {
		if rule, _ := checkSource(source); (rule == "") != allowed {
			t.Errorf("%q: %q", source, rule)
		}
	}
}

func TestMaskedOutput(t *testing.T) {
	var to bytes.Buffer
	m := &masked{to: &to}
	m.hide([]byte("one-secret\n\n  two-secret\n"))
	for _, part := range []string{"a one-", "secret b\n", "two-secret", "\n", "the end"} {
		if _, err := m.Write([]byte(part)); err != nil {
			t.Fatal(err)
		}
	}
	if got := m.last(); got != "the end" {
		t.Errorf("the last line is %q", got)
	}
	if got := to.String(); got != "a *** b\n***\nthe end" {
		t.Errorf("got %q", got)
	}
}

// programs are the processes that serving processes have started.
func (s *site) programs() (pids []int) {
	for _, pid := range s.processes() {
		threads, _ := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
		for _, thread := range threads {
			text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/children", pid, thread.Name()))
			for _, field := range strings.Fields(string(text)) {
				if child, err := strconv.Atoi(field); err == nil {
					pids = append(pids, child)
				}
			}
		}
	}
	return pids
}

// serverLogs are what serving processes and programs have written.
func (s *site) serverLogs() (text []byte) {
	files, err := filepath.Glob(s.config.StateDir + "/servers/*.log")
	s.must(err)
	for _, f := range files {
		b, err := os.ReadFile(f)
		s.must(err)
		text = append(text, b...)
	}
	return text
}

func findProgram(t *testing.T, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		t.Skipf("%v: `make setup` installs it", err)
	}
	return path
}

func nobody(t *testing.T) int {
	t.Helper()
	u, err := user.Lookup("nobody")
	if err != nil {
		t.Skipf("a user with an account: %v", err)
	}
	uid, err := strconv.Atoi(u.Uid)
	if err != nil {
		t.Fatal(err)
	}
	return uid
}

// bindfsSite has a driver with a program that shows a directory of the node's.
func bindfsSite(t *testing.T) (*site, string) {
	t.Helper()
	bindfs, files := findProgram(t, "bindfs"), t.TempDir()
	for _, dir := range []string{filepath.Dir(files), files} {
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(files+"/exports", 0o777); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(files+"/exports", 0o777); err != nil {
		t.Fatal(err)
	}
	return newSiteOf(t, plugin, func(c *Config) {
		c.Programs = map[string]Program{
			"bindfs": {bindfs, "-f", files + "/{source}", "{mountpoint}"},
			"sleep":  {findProgram(t, "sh"), "-c", "exec sleep 1000", "{device}"},
			"fails":  {findProgram(t, "sh"), "-c", "cat {secret:a} >&2; echo cannot >&2", "{device}"},
			"falls":  {findProgram(t, "sh"), "-c", "cat {secret:a} >&2; ls {mountpoint}; echo cannot >&2"},
		}
	}, nil), files + "/exports"
}

var ofExports = map[string]string{"program": "bindfs", "source": "exports"}

func TestAProgramServes(t *testing.T) {
	s, files := bindfsSite(t)
	key := handoff.Key{VolumeID: s.create("v", ofExports), PrepareID: "p"}
	h := s.up(key)
	if h.Resumable {
		t.Error("a program is not to be resumed")
	}
	s.inConsumer(func() error { return os.WriteFile(s.point("p")+"/f", []byte("x"), 0o644) })
	if b, err := os.ReadFile(files + "/f"); string(b) != "x" {
		t.Errorf("the file is %q, %v", b, err)
	}
	for _, pid := range s.programs() {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		s.must(err)
		if !strings.Contains(string(text), "CapEff:\t0000000000000000") || !strings.Contains(string(text), fmt.Sprintf("Uid:\t%d\t", plugin)) {
			t.Errorf("the program has privileges:\n%s", text)
		}
	}
	if err := s.unprepare(key); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("while it is mounted: %v", err)
	}
	s.down(key)
	if left := s.servers(); len(left) > 0 {
		t.Errorf("still serving: %v", left)
	}
}

func TestADeadProgramIsReplaced(t *testing.T) {
	s, _ := bindfsSite(t)
	key := handoff.Key{VolumeID: s.create("v", ofExports), PrepareID: "p"}
	s.up(key)
	for _, pid := range s.programs() {
		s.must(unix.Kill(pid, unix.SIGKILL))
	}
	if n := <-s.gone; !n.Until.IsZero() {
		t.Errorf("its end is not final: %+v", n)
	}
	s.waitFor(func() (ended bool) {
		s.inConsumer(func() error {
			_, err := os.ReadDir(s.point("p"))
			if ended = errors.Is(err, unix.ENOTCONN); ended || errors.Is(err, unix.ECONNABORTED) {
				return nil
			}
			return fmt.Errorf("got %w, want ENOTCONN", err)
		})
		return ended
	})
	h, err := s.call(key)
	s.must(err)
	s.inConsumer(func() error {
		if err := fusemount.Replace(t.Context(), h.Mount, s.point("p"), nil); err != nil {
			return err
		}
		return os.WriteFile(s.point("p")+"/g", nil, 0o644)
	})
	s.down(key)
}

// A CO that restarts keeps the mount of a program, but not the device: the
// death of the program is an error at once, not a wait.
func TestTheDepositOfAProgram(t *testing.T) {
	s, _ := bindfsSite(t)
	key := handoff.Key{VolumeID: s.create("v", ofExports), PrepareID: "p"}
	s.up(key)
	s.listener.Close()
	s.listen(nil)
	h, err := s.call(key)
	s.must(err)
	if h.Resumable || s.listener.Descriptors() != 2 {
		t.Errorf("%+v, %d descriptors", h, s.listener.Descriptors())
	}
	s.detach(key)
	s.must(s.consumer.Do(t.Context(), func() error { return os.Remove(s.point("p")) }))
	s.up(key) // from what was deposited
	s.inConsumer(func() error { return os.WriteFile(s.point("p")+"/h", nil, 0o644) })
	s.down(key)
}

func TestAProgramEndsWithItsSupervisor(t *testing.T) {
	s, _ := bindfsSite(t)
	key := handoff.Key{VolumeID: s.create("v", ofExports), PrepareID: "p"}
	s.up(key)
	pids := s.programs()
	if len(pids) != 1 {
		t.Fatalf("programs: %v", pids)
	}
	for _, pid := range s.servers() {
		if pid != pids[0] {
			s.must(unix.Kill(pid, unix.SIGKILL))
		}
	}
	<-s.gone
	s.waitFor(func() bool { return errors.Is(unix.Kill(pids[0], 0), unix.ESRCH) || stateOf(pids[0]) == 'Z' })
	s.down(key)
}

// stateOf a process, 'Z' for one that is only to be waited for.
func stateOf(pid int) byte {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if i := bytes.LastIndexByte(text, ')'); err == nil && i >= 0 && len(text) > i+2 {
		return text[i+2]
	}
	return 0
}

func TestAProgramThatDoesNotServe(t *testing.T) {
	s, _ := bindfsSite(t)
	s.secrets = map[string]string{"a": "the-secret-value\n"}
	for name, want := range map[string]string{"fails": "the last it wrote: cannot", "falls": "the last it wrote: cannot", "sleep": "deadline"} {
		key := handoff.Key{VolumeID: s.create(name, map[string]string{"program": name}), PrepareID: name}
		if name == "sleep" {
			s.patience = time.Second
		}
		_, err := s.call(key)
		if name != "sleep" && (err == nil || !strings.Contains(err.Error(), want)) || strings.Contains(fmt.Sprint(err), "secret-value") {
			t.Errorf("%s: got %v", name, err)
		}
		if err == nil {
			t.Errorf("%s serves", name)
		}
		s.patience = 0
		if name != "sleep" && !bytes.Contains(s.serverLogs(), []byte("***")) {
			t.Errorf("%s has not read its secret: %s", name, s.serverLogs())
		}
		s.must(s.unprepare(key))
		s.waitFor(func() bool { return len(s.programs()) == 0 })
	}
}

func TestTheParametersOfAProgram(t *testing.T) {
	s, _ := bindfsSite(t)
	for name, parameters := range map[string]map[string]string{
		"none of the driver's": {"program": "nfs"}, "no source": {"program": "bindfs"},
		"an option": {"program": "bindfs", "source": "-o"}, "outside": {"program": "bindfs", "source": "../etc"},
		"a medium": {"program": "bindfs", "source": "x", "medium": "disk"}, "a source alone": {"source": "x"},
		"shared": {"program": "bindfs", "source": "x", "share": "true"}, "an unused source": {"program": "sleep", "source": "x"},
	} {
		if err := s.tryCreate(name, parameters); status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), "parameters[") {
			t.Errorf("%s: got %v", name, err)
		}
	}
	key := handoff.Key{VolumeID: s.create("v", map[string]string{"program": "fails"}), PrepareID: "p"}
	if _, err := s.call(key); status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), "secrets") {
		t.Errorf("without its secret: %v", err)
	}
}

// sshd is a server on the loopback interface, for the user nobody alone.
func sshd(t *testing.T, uid int, dir string) (port int, key, hosts string) {
	t.Helper()
	sshd, keygen := findProgram(t, "/usr/sbin/sshd"), findProgram(t, "ssh-keygen")
	run := func(arguments ...string) {
		t.Helper()
		if out, err := exec.Command(keygen, arguments...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	at := func(name string) string { return filepath.Join(dir, name) }
	run("-q", "-t", "ed25519", "-N", "", "-f", at("host"))
	run("-q", "-t", "ed25519", "-N", "", "-f", at("user"))
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port = l.Addr().(*net.TCPAddr).Port
	l.Close()
	text := func(name string) string {
		b, err := os.ReadFile(at(name))
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	config := fmt.Sprintf("ListenAddress 127.0.0.1\nPort %d\nHostKey %s\nAuthorizedKeysFile %s\nPidFile none\nUsePAM yes\nStrictModes no\nPasswordAuthentication no\nForceCommand internal-sftp\nSubsystem sftp internal-sftp\n",
		port, at("host"), at("user.pub"))
	if err := os.WriteFile(at("config"), []byte(config), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"host", "user.pub", "config"} {
		if err := os.Chown(at(name), uid, uid); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.Command(sshd, "-D", "-e", "-f", at("config"))
	var log bytes.Buffer
	cmd.Stderr = &log
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(uid)}, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if t.Failed() {
			t.Logf("sshd: %s", log.String())
		}
	})
	for range 500 {
		if c, err := net.Dial("tcp4", fmt.Sprintf("127.0.0.1:%d", port)); err == nil {
			c.Close()
			return port, text("user"), fmt.Sprintf("[127.0.0.1]:%d %s", port, text("host.pub"))
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatal("sshd does not listen")
	return 0, "", ""
}

func TestSSHFS(t *testing.T) {
	uid, dir := nobody(t), t.TempDir()
	for _, d := range []string{filepath.Dir(dir), dir} {
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	port, key, hosts := sshd(t, uid, dir)
	remote := filepath.Join(dir, "remote")
	if err := errors.Join(os.Mkdir(remote, 0o755), os.Chown(remote, uid, uid)); err != nil {
		t.Fatal(err)
	}
	s := newSiteOf(t, uid, func(c *Config) {
		c.Programs = map[string]Program{"sshfs": {
			findProgram(t, "sshfs"), "{source}", "{device}", "-f", "-p", strconv.Itoa(port), "-o",
			"IdentityFile={secret:key},UserKnownHostsFile={secret:hosts},StrictHostKeyChecking=yes,BatchMode=yes,uid={uid},gid={gid}",
		}}
	}, nil)
	v := handoff.Key{VolumeID: s.create("v", map[string]string{"program": "sshfs", "source": "nobody@127.0.0.1:" + remote}), PrepareID: "p"}

	s.secrets = map[string]string{"key": key, "hosts": strings.Replace(hosts, "AAAA", "AAAB", 1)}
	if _, err := s.call(v); err == nil {
		t.Error("a host with another key was believed")
	}
	s.must(s.unprepare(v))

	s.secrets = map[string]string{"key": key, "hosts": hosts}
	s.up(v)
	data := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
	s.inConsumer(func() error {
		if err := os.WriteFile(s.point("p")+"/f", data, 0o644); err != nil {
			return err
		}
		back, err := os.ReadFile(s.point("p") + "/f")
		if err == nil && !bytes.Equal(back, data) {
			t.Error("other bytes come back")
		}
		var st unix.Stat_t
		if err := unix.Stat(s.point("p")+"/f", &st); err != nil || st.Uid != 0 {
			t.Errorf("the owner is %d, %v", st.Uid, err)
		}
		return err
	})
	if b, err := os.ReadFile(remote + "/f"); err != nil || !bytes.Equal(b, data) {
		t.Errorf("the server has %d bytes, %v", len(b), err)
	}
	// The key is in no argument, no environment and no file.
	secret := []byte(strings.Split(strings.TrimSpace(key), "\n")[1])
	pids := append(s.processes(), s.programs()...)
	for _, pid := range slices.Clone(pids) { // and the ssh below
		children, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid))
		for _, f := range strings.Fields(string(children)) {
			if child, err := strconv.Atoi(f); err == nil {
				pids = append(pids, child)
			}
		}
	}
	if len(pids) < 3 {
		t.Errorf("processes: %v", pids)
	}
	for _, pid := range pids {
		for _, name := range []string{"cmdline", "environ"} {
			if b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, name)); bytes.Contains(b, secret) {
				t.Errorf("the key is in /proc/%d/%s", pid, name)
			}
		}
	}
	s.must(filepath.WalkDir(s.base, func(path string, e os.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() || strings.HasPrefix(path, s.base+"/consumer") {
			return err
		}
		if b, err := os.ReadFile(path); err != nil || bytes.Contains(b, secret) {
			t.Errorf("the key is in %s, %v", path, err)
		}
		return nil
	}))
	s.down(v)
	if b, err := os.ReadFile(remote + "/f"); err != nil || !bytes.Equal(b, data) {
		t.Errorf("after Unprepare the server has %d bytes, %v", len(b), err)
	}
}
