package co

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/csi-prepare/csi-prepare/fakes/sp"
	"github.com/csi-prepare/csi-prepare/reference/mountns"
	"github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// ground is a plugin in a process of its own, which can be killed, and a
// directory for COs that are.
type ground struct {
	*testing.T
	ctx      context.Context
	dir      string
	plugin   *exec.Cmd
	conn     *grpc.ClientConn
	volume   string
	before   *mountns.Table
	stateful bool
	serves   bool // what it answers is FUSE
}

func newGround(t *testing.T) *ground {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	t.Cleanup(cancel)
	g := &ground{T: t, ctx: ctx, dir: tempDir(t), stateful: true}
	for _, d := range []string{"data", "consumer", "state"} {
		g.must(os.Mkdir(filepath.Join(g.dir, d), 0o755))
	}
	conn, err := grpc.NewClient("unix://"+g.dir+"/csi.sock", grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithConnectParams(reconnect))
	g.must(err)
	g.conn = conn
	t.Cleanup(func() { conn.Close(); g.kill() })
	g.start()
	v, err := csi.NewControllerClient(conn).CreateVolume(ctx, &csi.CreateVolumeRequest{
		Name: "v", VolumeCapabilities: []*csi.VolumeCapability{capability()},
	}, grpc.WaitForReady(true))
	g.must(err)
	g.volume = v.GetVolume().GetVolumeId()
	g.must(os.WriteFile(filepath.Join(g.dir, "data", g.volume, "file"), []byte("nonce"), 0o644))
	g.before = g.table()
	return g
}

func (g *ground) must(err error) {
	g.Helper()
	if err != nil {
		g.Fatal(err)
	}
}

func (g *ground) start() {
	g.Helper()
	state := ""
	if g.stateful {
		state = "kept"
	}
	g.plugin = program(rolePlugin, "CO_TEST_DIR="+g.dir, "CO_TEST_STATE="+state)
	if g.serves {
		g.plugin.Env = append(g.plugin.Env, "CO_TEST_FUSE=1")
		// Not in a copy of the mount namespace, which would have copies of
		// the mounts it serves.
		g.plugin.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	}
	g.plugin.Stderr = os.Stderr
	g.must(g.plugin.Start())
	// The connection to its predecessor may end only with the first call.
	for {
		_, err := csi.NewIdentityClient(g.conn).Probe(g.ctx, &csi.ProbeRequest{}, grpc.WaitForReady(true))
		if err == nil {
			return
		}
		g.must(g.ctx.Err())
	}
}

func (g *ground) kill() {
	if g.plugin != nil {
		_ = g.plugin.Process.Kill()
		_ = g.plugin.Wait()
		g.plugin = nil
	}
}

// act runs a CO that kills itself at a step; it returns the step's name, ""
// if the act was over before.
func (g *ground) act(act string, step int) string {
	g.Helper()
	cmd := exec.Command("/proc/self/exe")
	// In the mount namespace of the test, so that the test sees its mounts.
	cmd.Env = append(os.Environ(), roleVariable+"="+roleCO, "CO_TEST_DIR="+g.dir, "CO_TEST_VOLUME="+g.volume,
		"CO_TEST_ACT="+act, fmt.Sprint("CO_TEST_STEPS=", step))
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	if err != nil && cmd.ProcessState.ExitCode() != -1 {
		g.Fatalf("%s: %v: %s", act, err, errs.String())
	}
	return strings.TrimSpace(out.String())
}

func (g *ground) table() *mountns.Table {
	g.Helper()
	ns, err := mountns.Own()
	g.must(err)
	defer ns.Close()
	t, err := ns.Table(g.ctx)
	g.must(err)
	return t
}

// open makes a successor of the CO that was killed.
func (g *ground) open() *CO {
	g.Helper()
	c, err := Open(Config{Dir: g.dir + "/co", Policy: testPolicy(g.dir)})
	g.must(err)
	return c
}

// state says what there is of the volume's use, and fails the test if that is
// neither wholly performed nor nothing.
func (g *ground) state(when string) (performed bool) {
	g.Helper()
	list, err := preparev1alpha1.NewNodePrepareClient(g.conn).NodeListPreparedVolumes(g.ctx, &preparev1alpha1.NodeListPreparedVolumesRequest{}, grpc.WaitForReady(true))
	g.must(err)
	records, err := ReadLedger(g.dir + "/co")
	g.must(err)
	mounts := g.table().At(useOf(g.dir, g.volume).Target.Path)
	left := []string{}
	for _, dir := range []string{"co/ledger", "co/prepare", "co/staging", "consumer"} {
		entries, err := os.ReadDir(filepath.Join(g.dir, dir))
		g.must(err)
		for _, e := range entries {
			left = append(left, dir+"/"+e.Name())
		}
	}
	switch {
	case len(records) == 1 && records[0].Phase == Performed && len(mounts) == 1 && mounts[0].ID == records[0].Receipts[0].MountID &&
		(len(list.GetEntries()) == 1 || !g.stateful):
		return true
	case len(records) == 0 && len(mounts) == 0 && len(list.GetEntries()) == 0 && len(left) == 0:
		if c := mountns.Diff(g.before, g.table()); !c.Empty() {
			g.Errorf("%s: the mount table has changed:\n%s", when, c)
		}
		return false
	}
	g.Errorf("%s: neither performed nor nothing left: records %+v, mounts %v, the plugin has %v, left %v", when, records, mounts, list.GetEntries(), left)
	return false
}

// finish sees that what is there is whole, and takes it down.
func (g *ground) finish(c *CO, when string) {
	g.Helper()
	if !g.state(when) {
		return
	}
	if text, err := os.ReadFile(useOf(g.dir, g.volume).Target.Path + "/file"); string(text) != "nonce" {
		g.Errorf("%s: the consumer reads %q, %v", when, text, err)
	}
	g.must(c.Down(g.ctx, Key{sp.Name, g.volume, "c1"}))
	if g.state(when + ", and taken down") {
		g.Errorf("%s: performed after Down", when)
	}
}

// stride is from one step that is tried to the next: with -short not each is.
func stride() int {
	if testing.Short() {
		return 6
	}
	return 1
}

// TestKilledAtEveryStep kills the CO at each of its steps. What the successor
// recovers has to be performed exactly once, or gone.
func TestKilledAtEveryStep(t *testing.T) {
	for _, act := range []string{"up", "down"} {
		t.Run(act, func(t *testing.T) {
			g := newGround(t)
			for step := 1; ; step += stride() {
				if act == "down" {
					g.act("up", 0)
				}
				at := g.act(act, step)
				when := fmt.Sprintf("killed at step %d (%s) of %s", step, at, act)
				c := g.open()
				if _, err := c.Recover(g.ctx); err != nil {
					t.Errorf("%s: recover: %v", when, err)
				}
				g.finish(c, when)
				g.must(c.Close())
				if at == "" {
					t.Logf("up to step %d", step-1)
					return
				}
			}
		})
	}
}

// TestPluginKilledAtEveryStep kills the plugin, and not the CO, with and
// without a state that outlives it.
func TestPluginKilledAtEveryStep(t *testing.T) {
	for _, stateful := range []bool{true, false} {
		t.Run(fmt.Sprintf("state kept %v", stateful), func(t *testing.T) {
			g := newGround(t)
			// The volume itself is always remembered.
			for step := 1; ; step += stride() {
				c := g.open()
				n, at := step, ""
				c.before = func(name string) {
					// To the plugin, before a record is written is as
					// after the step before.
					if strings.HasPrefix(name, "write ") {
						return
					}
					if n--; n == 0 {
						at = name
						g.kill()
						if !stateful {
							g.forgetPreparations()
						}
						g.start()
					}
				}
				u := useOf(g.dir, g.volume)
				record, err := c.Up(g.ctx, u)
				if err == nil {
					err = c.Down(g.ctx, record.Key())
				}
				c.before = func(string) {}
				when := fmt.Sprintf("plugin killed at step %d (%s)", step, at)
				if err != nil {
					t.Logf("%s: %v", when, err)
				}
				if _, err := c.Recover(g.ctx); err != nil {
					t.Errorf("%s: recover: %v", when, err)
				}
				g.finish(c, when)
				g.must(c.Close())
				if at == "" {
					t.Logf("up to step %d", step-1)
					return
				}
			}
		})
	}
}

// forgetPreparations has the plugin's successor know volumes alone, as after a
// reboot.
func (g *ground) forgetPreparations() {
	g.Helper()
	file := filepath.Join(g.dir, "state", "state.json")
	text, err := os.ReadFile(file)
	g.must(err)
	boot, err := bootID()
	g.must(err)
	g.must(os.WriteFile(file, bytes.Replace(text, []byte(boot), []byte("another-boot"), 1), 0o600))
}

// TestPluginDown has no plugin to take anything back.
func TestPluginDown(t *testing.T) {
	g := newGround(t)
	g.act("up", 0)
	g.kill()
	c := g.open()
	defer c.Close()
	if _, err := c.Recover(g.ctx); err == nil {
		t.Error("the plugin that could not be asked was not reported")
	}
	k := Key{sp.Name, g.volume, "c1"}
	if err := c.Down(g.ctx, k); err == nil {
		t.Error("Down succeeded without the plugin")
	}
	if records, _ := c.Records(); len(records) != 1 || records[0].Phase != Unpreparing || !records[0].Uncertain {
		t.Errorf("records %+v, want one unpreparing, uncertain", records)
	}
	g.start()
	if _, err := c.Recover(g.ctx); err != nil {
		t.Error(err)
	}
	if g.state("after the plugin came back") {
		t.Error("still performed")
	}
}

// TestReboot has everything of another boot, as it is after one: the mounts
// and the plugin's preparations are gone, the ledger and the directories not.
func TestReboot(t *testing.T) {
	g := newGround(t)
	g.act("up", 0)
	g.must(unix.Unmount(useOf(g.dir, g.volume).Target.Path, 0))
	g.kill()
	g.forgetPreparations()
	g.must(os.RemoveAll(g.dir + "/consumer/c1")) // consumers begin anew
	g.must(os.Remove(g.dir + "/calls"))
	g.start()
	c := g.open()
	defer c.Close()
	c.boot = "the-next-boot"
	done, err := c.Recover(g.ctx)
	g.must(err)
	if want := []Key{{sp.Name, g.volume, "c1"}}; !slices.Equal(done.Taken, want) {
		t.Errorf("taken %v, want %v", done.Taken, want)
	}
	if g.state("after the reboot") {
		t.Error("a performance of another boot counts")
	}
	calls, err := os.ReadFile(g.dir + "/calls")
	g.must(err)
	if strings.Contains(string(calls), "NodeUn") {
		t.Errorf("what is void was taken back:\n%s", calls)
	}
}

// TestLostRecord has a preparation that the ledger does not know any more.
func TestLostRecord(t *testing.T) {
	g := newGround(t)
	g.act("up", 0)
	u := useOf(g.dir, g.volume)
	g.must(unix.Unmount(u.Target.Path, 0))
	g.must(os.RemoveAll(g.dir + "/consumer/c1"))
	k := Key{sp.Name, g.volume, "c1"}
	for _, dir := range []string{"ledger", "performed"} {
		g.must(os.Remove(g.dir + "/co/" + dir + "/" + k.position() + ".json"))
	}
	foreign := filepath.Join(g.dir, "foreign")
	g.must(os.Mkdir(foreign, 0o700))
	_, err := preparev1alpha1.NewNodePrepareClient(g.conn).NodePrepareVolume(g.ctx, &preparev1alpha1.NodePrepareVolumeRequest{
		VolumeId: g.volume, PrepareId: "anothers", PreparePath: foreign, VolumeCapability: capability(),
		StagingTargetPath: g.dir + "/co/staging/" + k.volume(),
		Performer:         &preparev1alpha1.Performer{Kernel: preparev1alpha1.Performer_NODE, Kinds: []preparev1alpha1.MountKind{preparev1alpha1.MountKind_MOUNT_KIND_BIND}, Grants: []string{"data"}},
	})
	g.must(err)
	c := g.open()
	defer c.Close()
	done, err := c.Recover(g.ctx, u.Endpoint)
	if !slices.Equal(done.Orphans, nil) || err == nil {
		// The other CO's preparation keeps the volume from being unstaged.
		t.Logf("orphans %v, %v", done.Orphans, err)
	}
	list, err := preparev1alpha1.NewNodePrepareClient(g.conn).NodeListPreparedVolumes(g.ctx, &preparev1alpha1.NodeListPreparedVolumesRequest{})
	g.must(err)
	if len(list.GetEntries()) != 1 || list.GetEntries()[0].GetPrepareId() != "anothers" {
		t.Errorf("the plugin has %v, want the other CO's preparation alone", list.GetEntries())
	}
	_, err = preparev1alpha1.NewNodePrepareClient(g.conn).NodeUnprepareVolume(g.ctx, &preparev1alpha1.NodeUnprepareVolumeRequest{
		VolumeId: g.volume, PrepareId: "anothers", PreparePath: foreign,
	})
	g.must(err)
	_, err = c.Recover(g.ctx, u.Endpoint)
	g.must(err)
	g.state("after the record was lost")
}

// TestLostRecordOfALivingMount has a record removed while the consumer runs.
func TestLostRecordOfALivingMount(t *testing.T) {
	g := newGround(t)
	g.act("up", 0)
	u := useOf(g.dir, g.volume)
	k := Key{sp.Name, g.volume, "c1"}
	g.must(os.Remove(g.dir + "/co/ledger/" + k.position() + ".json"))
	before := g.table()
	c := g.open()
	done, err := c.Recover(g.ctx, u.Endpoint)
	g.must(err)
	if !slices.Equal(done.Kept, []Key{k}) {
		t.Errorf("recovered %+v, want it kept", done)
	}
	if c := mountns.Diff(before, g.table()); !c.Empty() {
		t.Errorf("the table has changed:\n%s", c)
	}
	g.finish(c, "restored from a copy")
	g.must(c.Close())

	// The copy can be damaged as well: then nothing is known, and nothing
	// taken for unused.
	g.act("up", 0)
	g.must(os.Remove(g.dir + "/co/ledger/" + k.position() + ".json"))
	file := g.dir + "/co/performed/" + k.position() + ".json"
	good, err := os.ReadFile(file)
	g.must(err)
	g.must(os.WriteFile(file, nil, 0o600))
	c = g.open()
	var damaged *DamagedError
	if _, err := c.Recover(g.ctx, u.Endpoint); !errors.As(err, &damaged) || damaged.File != file {
		t.Errorf("%v, want a DamagedError for the copy", err)
	}
	if len(g.table().At(u.Target.Path)) != 1 {
		t.Error("the consumer lost its volume")
	}
	g.must(c.Close())
	g.must(os.WriteFile(file, good, 0o600))
	c = g.open()
	defer c.Close()
	_, err = c.Recover(g.ctx, u.Endpoint)
	g.must(err)
	g.finish(c, "restored after all")
}

// TestLostLedgerOfALivingMount has no record left of a volume whose filesystem
// the plugin has mounted, and a consumer too.
func TestLostLedgerOfALivingMount(t *testing.T) {
	g := newGround(t)
	g.act("up", 0)
	u := useOf(g.dir, g.volume)
	k := Key{sp.Name, g.volume, "c1"}
	g.must(unix.Unmount(u.Target.Path, 0))
	staged := g.dir + "/co/staging/" + k.volume()
	g.must(unix.Mount("volume", staged, "tmpfs", 0, ""))
	g.must(unix.Mount(staged, u.Target.Path, "", unix.MS_BIND, ""))
	for _, dir := range []string{"ledger", "performed"} {
		g.must(os.Remove(g.dir + "/co/" + dir + "/" + k.position() + ".json"))
	}
	c := g.open()
	defer c.Close()
	var living *LivingError
	if _, err := c.Recover(g.ctx, u.Endpoint); !errors.As(err, &living) || len(living.Mounts) != 1 || living.Mounts[0].Mount.Point != u.Target.Path {
		t.Errorf("%v, want a LivingError for the consumer's mount", err)
	}
	if calls, err := os.ReadFile(g.dir + "/calls"); err != nil || strings.Contains(string(calls), "NodeUn") {
		t.Errorf("it was taken back: %s, %v", calls, err)
	}
	g.must(unix.Unmount(u.Target.Path, 0))
	g.must(unix.Unmount(staged, 0))
	g.must(os.RemoveAll(g.dir + "/consumer/c1"))
	done, err := c.Recover(g.ctx, u.Endpoint)
	g.must(err)
	if !slices.Equal(done.Orphans, []Key{k}) {
		t.Errorf("recovered %+v, want an orphan", done)
	}
	g.state("taken back")
}

// TestDamagedRecord has a record that cannot be read: nothing of its volume
// may be taken for unused.
func TestDamagedRecord(t *testing.T) {
	g := newGround(t)
	g.act("up", 0)
	k := Key{sp.Name, g.volume, "c1"}
	file := g.dir + "/co/ledger/" + k.position() + ".json"
	good, err := os.ReadFile(file)
	g.must(err)
	g.must(os.WriteFile(file, good[:len(good)/2], 0o600))
	c := g.open()
	var damaged *DamagedError
	u := useOf(g.dir, g.volume)
	if _, err := c.Recover(g.ctx, u.Endpoint); !errors.As(err, &damaged) || damaged.File != file {
		t.Errorf("recover: %v, want a DamagedError for %s", err, file)
	}
	if _, err := c.Up(g.ctx, u); !errors.As(err, &damaged) {
		t.Errorf("up: %v, want a DamagedError", err)
	}
	if err := c.Down(g.ctx, k); !errors.As(err, &damaged) {
		t.Errorf("down: %v, want a DamagedError", err)
	}
	// Another consumer comes and goes: the volume stays staged for the one
	// that the record may be of.
	other := u
	other.PrepareID, other.Target.Path = "c2", g.dir+"/consumer/c2"
	record, err := c.Up(g.ctx, other)
	g.must(err)
	if err := c.Down(g.ctx, record.Key()); !errors.As(err, &damaged) {
		t.Errorf("down of another: %v, want a DamagedError", err)
	}
	calls, err := os.ReadFile(g.dir + "/calls")
	g.must(err)
	if strings.Contains(string(calls), "NodeUnstageVolume") {
		t.Error("the volume was unstaged")
	}
	if text, err := os.ReadFile(u.Target.Path + "/file"); string(text) != "nonce" {
		t.Errorf("the consumer reads %q, %v", text, err)
	}
	g.must(c.Close())
	g.must(os.WriteFile(file, good, 0o600))
	c = g.open()
	defer c.Close()
	_, err = c.Recover(g.ctx)
	g.must(err)
	if !g.state("after the record was restored") {
		t.Error("not performed")
	}
	g.must(c.Down(g.ctx, k))
	g.state("at the end")
}
