package block

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	prepare "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// mortal is a site whose driver is killed, and whose CO repeats every call
// until it has been answered.
type mortal struct {
	*site

	mu     sync.Mutex
	driver *exec.Cmd
	kills  int
	// during counts the kills by the call that was not answered.
	during map[string]int
}

// run starts the driver, with SIGKILL before its act number at, if not 0.
func (m *mortal) run(at int) {
	m.t.Helper()
	var env []string
	if at > 0 {
		env = append(env, fmt.Sprintf("%s=%d", killVariable, at))
	}
	cmd := m.command(env...)
	if err := cmd.Start(); err != nil {
		m.t.Fatal(err)
	}
	m.mu.Lock()
	m.driver = cmd
	m.mu.Unlock()
}

// kill ends the driver wherever it is.
func (m *mortal) kill() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.driver.Process.Kill()
}

// again waits for the end of a driver that was killed and starts another.
func (m *mortal) again() {
	m.t.Helper()
	m.driver.Wait()
	m.kills++
	m.run(0)
}

// call repeats a call while the driver dies in it.
func (m *mortal) call(what string, call func() error) {
	m.t.Helper()
	var err error
	for end := time.Now().Add(2 * time.Minute); time.Now().Before(end); {
		err = call()
		switch status.Code(err) {
		case codes.OK:
			return
		case codes.Unavailable:
			before := m.kills
			if m.revive(); m.kills > before && m.during != nil {
				m.during[strings.Fields(what)[0]]++
			}
		case codes.Aborted:
			time.Sleep(5 * time.Millisecond)
		default:
			log, _ := os.ReadFile(filepath.Join(m.dir, "log"))
			m.t.Fatalf("%s after %d kills: %v\n%s", what, m.kills, err, log)
		}
	}
	log, _ := os.ReadFile(filepath.Join(m.dir, "log"))
	m.t.Fatalf("%s: no answer after %d kills, but %v\n%s", what, m.kills, err, log[max(0, len(log)-10000):])
}

// revive starts a driver if the last one is dead.
func (m *mortal) revive() {
	m.t.Helper()
	var info unix.Siginfo
	err := unix.Waitid(unix.P_PID, m.driver.Process.Pid, &info, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, nil)
	if err != nil || info.Signo == int32(syscall.SIGCHLD) {
		m.again()
		return
	}
	time.Sleep(2 * time.Millisecond)
}

// life of a volume: what a CO does from its creation to its deletion, with the
// content checked on the way and nothing left at the end.
func (m *mortal) life(c *csi.VolumeCapability, name string) {
	t, ctx := m.t, m.t.Context()
	t.Helper()
	isRaw := c.GetBlock() != nil
	var id, snapshotID, cloneID string
	m.call("CreateVolume", func() error {
		resp, err := m.controller.CreateVolume(ctx, m.createRequest(name, 16*mib, c))
		id = resp.GetVolume().GetVolumeId()
		return err
	})
	m.call("NodeStageVolume", func() error { return m.tryStage(id, c) })
	first, second := pattern("first "+name, mib), pattern("second "+name, mib)
	m.used(id, "writer", c, false, func(path string) { m.put(path, isRaw, first) })
	m.used(id, "reader", c, true, func(path string) { m.has(path, isRaw, first) })
	size := &csi.CapacityRange{RequiredBytes: 24 * mib}
	m.used(id, "grower", c, false, func(path string) {
		m.call("ControllerExpandVolume", func() error {
			return errorOf(m.controller.ControllerExpandVolume(ctx, &csi.ControllerExpandVolumeRequest{VolumeId: id, CapacityRange: size}))
		})
		if isRaw || maySetResources(t) {
			m.call("NodeExpandVolume", func() error {
				return errorOf(m.node.NodeExpandVolume(ctx, &csi.NodeExpandVolumeRequest{VolumeId: id, VolumePath: m.staging(id), CapacityRange: size}))
			})
		}
		m.has(path, isRaw, first)
	})
	m.call("NodeUnstageVolume", func() error { return m.tryUnstage(id) })
	m.call("CreateSnapshot", func() error {
		resp, err := m.controller.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{Name: name, SourceVolumeId: id})
		snapshotID = resp.GetSnapshot().GetSnapshotId()
		return err
	})
	m.call("NodeStageVolume again", func() error { return m.tryStage(id, c) })
	m.used(id, "writer", c, false, func(path string) { m.has(path, isRaw, first); m.put(path, isRaw, second) })
	m.call("CreateVolume from a snapshot", func() error {
		req := m.createRequest(name+" copy", 0, c)
		req.VolumeContentSource = (&source{Snapshot: snapshotID}).message()
		resp, err := m.controller.CreateVolume(ctx, req)
		cloneID = resp.GetVolume().GetVolumeId()
		return err
	})
	m.call("NodeStageVolume of the copy", func() error { return m.tryStage(cloneID, c) })
	m.used(cloneID, "reader", c, true, func(path string) { m.has(path, isRaw, first) })
	m.used(id, "reader", c, true, func(path string) { m.has(path, isRaw, second) })
	for _, volume := range []string{id, cloneID} {
		m.call("NodeUnstageVolume at the end", func() error { return m.tryUnstage(volume) })
		m.call("DeleteVolume", func() error {
			return errorOf(m.controller.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: volume}))
		})
	}
	m.call("DeleteSnapshot", func() error {
		return errorOf(m.controller.DeleteSnapshot(ctx, &csi.DeleteSnapshotRequest{SnapshotId: snapshotID}))
	})
	m.nothingLeft()
}

// used prepares and performs a volume for a while.
func (m *mortal) used(id, prepareID string, c *csi.VolumeCapability, readonly bool, do func(path string)) {
	m.t.Helper()
	req := m.request(id, prepareID, c, readonly)
	var spec *prepare.MountSpec
	m.call("NodePrepareVolume", func() (err error) {
		spec, err = m.tryPrepare(req)
		return err
	})
	var (
		path string
		undo func()
	)
	if c.GetBlock() != nil {
		path, undo = m.makeNode(req, spec)
	} else {
		path, undo = m.perform(req, spec)
	}
	do(path)
	undo()
	m.call("NodeUnprepareVolume", func() error { return m.tryUnprepare(req) })
	if err := os.Remove(req.GetPreparePath()); err != nil {
		m.t.Errorf("prepare_path after Unprepare: %v", err)
	}
}

func (m *mortal) put(path string, isRaw bool, data []byte) {
	m.t.Helper()
	flags := os.O_WRONLY
	if !isRaw {
		path, flags = filepath.Join(path, "file"), flags|os.O_CREATE
	}
	f, err := os.OpenFile(path, flags, 0o600)
	if err == nil {
		_, err = f.WriteAt(data, 0)
		err = errors.Join(err, f.Sync(), f.Close())
	}
	if err != nil {
		m.t.Errorf("write: %v", err)
	}
}

func (m *mortal) has(path string, isRaw bool, want []byte) {
	m.t.Helper()
	if !isRaw {
		path = filepath.Join(path, "file")
	}
	if got := readDirect(m.t, path, 0, len(want)); !bytes.Equal(got, want) {
		m.t.Errorf("%s holds %.20q…, want %.20q…", path, got, want)
	}
}

// nothingLeft wants no loop device, no file and no record.
func (m *mortal) nothingLeft() {
	m.t.Helper()
	if left := loopsBelow(m.dir); left != nil {
		m.t.Errorf("leaked: %q", left)
	}
	for _, pattern := range []string{"store/*/*", "state/volumes/*", "state/snapshots/*", "state/stages/*/*", "state/uses/*/*", "state/preparations/*/*"} {
		if left, _ := filepath.Glob(filepath.Join(m.dir, pattern)); left != nil {
			m.t.Errorf("left: %q", left)
		}
	}
}

// The driver is killed before each of its acts in turn, of every seventh in
// the short form: nothing is lost and nothing is left, whichever it was.
func TestKilledAtEachStep(t *testing.T) {
	for name, c := range map[string]*csi.VolumeCapability{"raw": raw(), "ext4": mountOf("ext4")} {
		t.Run(name, func(t *testing.T) {
			m := &mortal{site: newSite(t)}
			t.Cleanup(func() { m.kill(); m.driver.Wait() })
			at, stride := 1, 1
			if testing.Short() {
				stride = 7
			}
			for ; ; at += stride {
				m.run(at)
				m.ready()
				m.life(c, fmt.Sprint("v", at))
				killed := m.kills
				m.kills = 0
				m.kill()
				m.driver.Wait()
				if t.Failed() {
					t.Fatalf("killed before act %d", at)
				}
				if killed == 0 {
					break
				}
			}
			t.Logf("killed before every act of %d, in strides of %d", at-1, stride)
		})
	}
}

var (
	wantedKills = flag.Int("kills", 30, "how often TestKilledAtRandom kills the driver, for each access type")
	crashReport = flag.String("report", "", "file for what TestKilledAtRandom comes to, as JSON")
)

// campaign is what kills at random came to. The test fails, and nothing is
// written, if anything was lost or left.
type campaign struct {
	Runs          int            `json:"runs"`
	Kills         int            `json:"kills"`
	During        map[string]int `json:"kills_during"`
	LeakedMounts  int            `json:"leaked_mounts"`
	LeakedDevices int            `json:"leaked_devices"`
	LostBytes     int            `json:"lost_bytes"`
	WrongState    int            `json:"wrong_state"`
	Stuck         int            `json:"stuck"`
}

func (c campaign) write(t *testing.T) {
	if *crashReport == "" || t.Failed() {
		return
	}
	text, err := json.MarshalIndent(c, "", "  ")
	if err == nil {
		err = os.WriteFile(*crashReport, append(text, '\n'), 0o600)
	}
	if err != nil {
		t.Error(err)
	}
}

// The driver is killed at random moments of its work.
func TestKilledAtRandom(t *testing.T) {
	all := campaign{During: map[string]int{}}
	defer func() { all.write(t) }()
	for name, c := range map[string]*csi.VolumeCapability{"raw": raw(), "ext4": mountOf("ext4")} {
		t.Run(name, func(t *testing.T) {
			m := &mortal{site: newSite(t), during: all.During}
			began := time.Now()
			m.run(0)
			m.ready()
			// Seldom before it serves, often while it does.
			most := 2*time.Since(began) + 50*time.Millisecond
			done, ended := make(chan struct{}), make(chan struct{})
			go func() {
				defer close(ended)
				for i := range time.Duration(1 << 20) {
					// Now and then it has the time to come to an end.
					select {
					case <-done:
						return
					case <-time.After(rand.N(most * (1 + i%4))):
						m.kill()
					}
				}
			}()
			lives := 0
			wanted := *wantedKills
			if testing.Short() {
				wanted = min(wanted, 8)
			}
			for ; m.kills < wanted && !t.Failed(); lives++ {
				m.life(c, fmt.Sprint("v", lives))
			}
			close(done)
			<-ended
			m.kill()
			m.driver.Wait()
			all.Runs, all.Kills = all.Runs+lives, all.Kills+m.kills
			t.Logf("%d kills in the lives of %d volumes, so far in %v", m.kills, lives, all.During)
		})
	}
}
