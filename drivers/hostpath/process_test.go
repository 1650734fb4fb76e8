package hostpath

import (
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	prepare "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

func (s *site) log() *os.File {
	s.t.Helper()
	f, err := os.Create(filepath.Join(s.dir, "log"))
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { f.Close() })
	return f
}

func (s *site) read(f *os.File) string {
	s.t.Helper()
	text, err := os.ReadFile(f.Name())
	if err != nil {
		s.t.Fatal(err)
	}
	return string(text)
}

func (s *site) term(cmd *exec.Cmd) {
	s.t.Helper()
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		s.t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		s.t.Errorf("after SIGTERM: %v", err)
	}
}

// Killed at any moment, the driver comes back with every preparation and
// volume it answered OK for, and every call that was cut off can be repeated.
func TestKilledInTheMiddle(t *testing.T) {
	s := newSite(t)
	log := s.log()
	cmd := s.spawn(nil, log)
	id := s.create("shared").GetVolumeId()
	requests := map[string]*prepare.NodePrepareVolumeRequest{}
	prepared := map[string]bool{}  // answered OK
	volumes := map[string]string{} // name to id, "" if not answered

	for round := range 8 {
		var (
			all sync.WaitGroup
			mu  sync.Mutex
		)
		for i := range 4 {
			name := fmt.Sprintf("r%d-%d", round, i)
			req := s.request(s.create("of-"+name).GetVolumeId(), name)
			if i == 0 {
				req.VolumeId = id
			}
			requests[name], volumes[name] = req, ""
		}
		for i := range 4 {
			name := fmt.Sprintf("r%d-%d", round, i)
			req := requests[name]
			all.Go(func() {
				if _, err := s.prepares.NodePrepareVolume(t.Context(), req); err == nil {
					mu.Lock()
					prepared[name] = true
					mu.Unlock()
				}
			})
			all.Go(func() {
				if resp, err := s.controller.CreateVolume(t.Context(), createRequest(name)); err == nil {
					mu.Lock()
					volumes[name] = resp.GetVolume().GetVolumeId()
					mu.Unlock()
				}
			})
		}
		time.Sleep(rand.N(8 * time.Millisecond)) // any moment is a good one
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		cmd.Wait()
		all.Wait()
		cmd = s.spawn(nil, log)

		list, err := s.prepares.NodeListPreparedVolumes(t.Context(), &prepare.NodeListPreparedVolumesRequest{})
		if err != nil {
			t.Fatal(err)
		}
		listed := map[string]bool{}
		for _, e := range list.GetEntries() {
			listed[e.GetPrepareId()] = true
			if requests[e.GetPrepareId()] == nil {
				t.Errorf("listed but never asked for: %v", e)
			}
			if e.GetUncertain() && prepared[e.GetPrepareId()] {
				t.Errorf("answered OK, and uncertain: %v", e)
			}
		}
		for name := range prepared {
			if !listed[name] {
				t.Errorf("round %d: %s was answered OK and is lost", round, name)
			}
		}
		for name, before := range volumes {
			if got := s.create(name).GetVolumeId(); before != "" && got != before {
				t.Errorf("round %d: volume %s is %s, was %s", round, name, got, before)
			} else {
				volumes[name] = got
			}
		}
		for name, req := range requests {
			s.prepare(req)
			prepared[name] = true
		}
	}
	for _, req := range requests {
		s.code("unprepare", s.unprepare(req), codes.OK)
	}
	list, err := s.controller.ListVolumes(t.Context(), &csi.ListVolumesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range list.GetEntries() {
		s.code("delete", s.delete(e.GetVolume().GetVolumeId()), codes.OK)
	}
	if left, err := filepath.Glob(s.path("*")); err != nil || len(left) > 0 {
		t.Errorf("left in the grant: %q, %v", left, err)
	}
	s.term(cmd)
	if strings.Contains(s.read(log), "level=ERROR") {
		t.Errorf("log:\n%s", s.read(log))
	}
	err = filepath.WalkDir(s.config.StateDir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() && d.Name() != "lock" {
			t.Errorf("left in the state: %s", path)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}

// The whole life of a volume with no capability at all, as a user of its own,
// and no change to any mount table.
func TestUnprivilegedDriverMountsNothing(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to become another user")
	}
	const nobody = 65534
	s := newSite(t)
	log := s.log()
	for _, path := range []string{s.dir, s.config.Grants[0].Dir, s.mkdir("p-p1")} {
		if err := os.Chown(path, nobody, nobody); err != nil {
			t.Fatal(err)
		}
	}
	before := mountTable(t, os.Getpid())
	cmd := s.spawn(&syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}, log)
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", cmd.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, set := range []string{"CapEff", "CapPrm", "CapInh", "CapAmb"} {
		if !regexp.MustCompile(`(?m)^` + set + `:\t0+$`).Match(text) {
			t.Errorf("%s is not empty:\n%s", set, text)
		}
	}

	id := s.create("v").GetVolumeId()
	req := s.request(id, "p1")
	s.prepare(req)
	plant(t, s.path(id), "a/b")
	if err := os.Lchown(filepath.Join(s.path(id), "a"), nobody, nobody); err != nil {
		t.Fatal(err)
	}
	if _, err := s.node.NodeGetVolumeStats(t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: id, VolumePath: req.PreparePath}); err != nil {
		t.Errorf("NodeGetVolumeStats: %v", err)
	}
	if during := mountTable(t, cmd.Process.Pid); during != before {
		t.Errorf("the driver's mount table changed:\n%s\nwas:\n%s", during, before)
	}
	s.code("unprepare", s.unprepare(req), codes.OK)
	s.code("delete", s.delete(id), codes.OK)
	s.term(cmd)
	if after := mountTable(t, os.Getpid()); after != before {
		t.Errorf("the mount table changed:\n%s\nwas:\n%s", after, before)
	}
	if exists(filepath.Join(s.dir, "csi.sock")) {
		t.Error("the socket is left")
	}
}

// mountTable is the mount points of a process: what is unmounted or mounted
// in the rest of the machine meanwhile does not count.
func mountTable(t *testing.T, pid int) string {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", pid))
	if err != nil {
		t.Fatal(err)
	}
	var below []string
	for line := range strings.Lines(string(text)) {
		if strings.Contains(line, os.TempDir()+"/hostpath") {
			below = append(below, line)
		}
	}
	return strings.Join(below, "")
}

// A canary in every field that may be sensitive shows up in no log, at its
// most talkative, in no error, in no file and on no command line.
func TestNoSecretLeaks(t *testing.T) {
	const canary = "canary-93d1e77b"
	s := newSite(t)
	log := s.log()
	cmd := s.spawn(nil, log)
	look := func(what string, err error) {
		t.Helper()
		if err != nil && strings.Contains(err.Error(), canary) {
			t.Errorf("%s: in the error: %v", what, err)
		}
	}
	secrets := map[string]string{"password": canary}
	create := createRequest("v")
	create.Secrets = secrets
	resp, err := s.controller.CreateVolume(t.Context(), create)
	if err != nil {
		t.Fatal(err)
	}
	id := resp.GetVolume().GetVolumeId()
	create.VolumeCapabilities[0] = capability(multiWriter, "password="+canary)
	_, err = s.controller.CreateVolume(t.Context(), create)
	look("create", err)

	req := s.request(id, "p1")
	req.Secrets, req.HandleSocket, req.HandoffToken = secrets, "/run/co/s", []byte(canary+"0")
	s.prepare(req)
	bad := s.request(id, "p2")
	bad.Secrets, bad.VolumeCapability = secrets, capability(multiWriter, "nosuid", "password="+canary)
	_, err = s.prepares.NodePrepareVolume(t.Context(), bad)
	s.code("flag", err, codes.InvalidArgument)
	look("flag", err)
	bad.VolumeId = "unknown"
	_, err = s.prepares.NodePrepareVolume(t.Context(), bad)
	look("unknown volume", err)
	_, err = s.controller.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: id, Secrets: secrets})
	s.code("delete", err, codes.FailedPrecondition)
	look("delete", err)

	for _, file := range []string{"cmdline", "environ"} {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", cmd.Process.Pid, file))
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(text), canary) {
			t.Errorf("in %s", file)
		}
	}
	s.term(cmd)
	err = filepath.WalkDir(s.dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		text, err := os.ReadFile(path)
		// The base64 of the token's first bytes, as JSON would show it.
		if strings.Contains(string(text), canary) || strings.Contains(string(text), "Y2FuYXJ5LTkz") {
			t.Errorf("in %s:\n%s", path, text)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
	if text := s.read(log); !strings.Contains(text, "stripped") || !strings.Contains(text, "msg=request") {
		t.Errorf("the log shows no requests:\n%s", text)
	}
}

// A second driver process gets neither the state nor the socket of a running
// one, says whose they are, and harms nothing.
func TestSecondProcess(t *testing.T) {
	s := newSite(t)
	cmd := s.spawn(nil, s.log())
	s.create("v")
	for _, tt := range []struct {
		name, socket, state string
		want                []string
	}{
		{"state", "other.sock", "state", []string{"state", fmt.Sprintf("pid %d", cmd.Process.Pid)}},
		{"socket", "csi.sock", "other", []string{"csi.sock", "running process"}},
	} {
		self, err := os.Executable()
		if err != nil {
			t.Fatal(err)
		}
		second := exec.CommandContext(t.Context(), self, "hostpath", "--endpoint", filepath.Join(s.dir, tt.socket),
			"--state-dir", filepath.Join(s.dir, tt.state), "--node-id", "node1", "--grant", "data="+s.mkdir("data2"))
		out, err := second.CombinedOutput()
		if second.ProcessState.ExitCode() != 1 {
			t.Errorf("%s: %v\n%s", tt.name, err, out)
		}
		for _, word := range tt.want {
			if !strings.Contains(string(out), word) {
				t.Errorf("%s: %q lacks %q", tt.name, out, word)
			}
		}
	}
	s.create("v2")
	s.term(cmd)
	if err := unix.Access(filepath.Join(s.dir, "other.sock"), unix.F_OK); err == nil {
		t.Error("a socket is left")
	}
}
