package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/csi-prepare/csi-prepare/reference/co"
	"github.com/csi-prepare/csi-prepare/reference/mountns"
	"github.com/csi-prepare/csi-prepare/reference/perform"
)

// nobody is the user the plugin runs as.
const nobody = 65534

// stage is all there is: a plugin, a CO, a container.
type stage struct {
	driver  string
	dir     string
	number  int
	plugin  *exec.Cmd
	volume  string
	co      *co.CO
	record  *co.Record
	use     co.Use
	inside  *mountns.Namespace
	content *container
}

func (s *stage) chapter(title string) {
	s.number++
	fmt.Printf("\n%d. %s\n", s.number, title)
}

func say(format string, args ...any) { fmt.Printf("   "+format+"\n", args...) }

// claim says what is so, or fails.
func claim(ok bool, format string, args ...any) error {
	text := fmt.Sprintf(format, args...)
	if !ok {
		return fmt.Errorf("this is not so: %s", text)
	}
	say("✓ %s", text)
	return nil
}

func (s *stage) in(name string) string { return filepath.Join(s.dir, name) }

func (s *stage) endpoint() string { return "unix://" + s.in("plugin/csi.sock") }

func (s *stage) startPlugin(ctx context.Context) error {
	var err error
	if s.dir, err = os.MkdirTemp("", "demo-fuse-"); err != nil {
		return err
	}
	if err := os.Chmod(s.dir, 0o711); err != nil {
		return err
	}
	for _, d := range []string{"plugin", "volumes"} {
		if err := errors.Join(os.Mkdir(s.in(d), 0o700), os.Chown(s.in(d), nobody, nobody)); err != nil {
			return err
		}
	}
	if err := s.launch(ctx); err != nil {
		return err
	}
	say("prepare-driver fuse, pid %d, started by setpriv as nobody without a capability", s.plugin.Process.Pid)
	if err := s.unprivileged(s.plugin.Process.Pid); err != nil {
		return err
	}
	probe := exec.CommandContext(ctx, "setpriv", "--reuid", strconv.Itoa(nobody), "--clear-groups", "test", "-r", "/dev/fuse")
	if probe.Run() == nil {
		say("(on this node any user may open /dev/fuse; the plugin does not)")
	} else {
		say("✓ it may not even open /dev/fuse")
	}
	conn, err := s.dial()
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	v, err := csi.NewControllerClient(conn).CreateVolume(ctx, &csi.CreateVolumeRequest{
		Name: "demo", VolumeCapabilities: []*csi.VolumeCapability{capability()},
	})
	if err != nil {
		return err
	}
	s.volume = v.GetVolume().GetVolumeId()
	say("CreateVolume: %s, a directory that only nobody may enter", s.volume)
	return nil
}

func capability() *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
	}
}

func (s *stage) dial() (*grpc.ClientConn, error) {
	return grpc.NewClient(s.endpoint(), grpc.WithTransportCredentials(insecure.NewCredentials()))
}

func (s *stage) launch(ctx context.Context) error {
	driver, err := filepath.Abs(s.driver)
	if err != nil {
		return err
	}
	log, err := os.OpenFile(s.in("plugin.log"), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	s.plugin = exec.Command("setpriv", "--reuid", strconv.Itoa(nobody), "--regid", strconv.Itoa(nobody), "--clear-groups",
		"--bounding-set=-all", "--no-new-privs", driver, "fuse", "--endpoint", s.endpoint(), "--state-dir", s.in("plugin/state"),
		"--node-id", "demo", "--dir", s.in("volumes"))
	s.plugin.Stderr = log
	if err := s.plugin.Start(); err != nil {
		return fmt.Errorf("%w: %w", errCannotRun, err)
	}
	conn, err := s.dial()
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	if _, err = csi.NewIdentityClient(conn).Probe(ctx, &csi.ProbeRequest{}, grpc.WaitForReady(true)); err != nil {
		text, _ := os.ReadFile(s.in("plugin.log")) // it says more, if it says anything
		return fmt.Errorf("the plugin does not answer: %w: %s", err, bytes.TrimSpace(text))
	}
	return nil
}

// unprivileged checks a process by what /proc tells of it.
func (s *stage) unprivileged(pid int) error {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(text)) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), ":\t")
		switch {
		case name == "Uid" && !strings.HasPrefix(value, strconv.Itoa(nobody)+"\t"),
			strings.HasPrefix(name, "Cap") && strings.Trim(value, "0") != "":
			return fmt.Errorf("this is not so: process %d has no privilege: %s", pid, strings.TrimSpace(line))
		}
	}
	say("✓ /proc/%d/status: uid %d; CapInh, CapPrm, CapEff, CapBnd, CapAmb: none", pid, nobody)
	return nil
}

func (s *stage) startContainer(ctx context.Context) error {
	var err error
	if s.content, err = startContainer(s.in("container")); err != nil {
		return err
	}
	if s.inside, err = mountns.OfPID(s.content.pid()); err != nil {
		return err
	}
	say("a process in mount, pid, ipc and network namespaces of its own, pid %d here", s.content.pid())
	table, err := s.inside.Table(ctx)
	if err != nil {
		return err
	}
	for _, m := range table.Mounts {
		if m.PeerGroup != 0 || m.Master != 0 {
			return fmt.Errorf("this is not so: nothing propagates: %s", m)
		}
	}
	return claim(true, "all its %d mounts are private: what is mounted outside never gets in", len(table.Mounts))
}

func (s *stage) up(ctx context.Context) error {
	if err := s.openCO(); err != nil {
		return err
	}
	s.use = co.Use{
		Endpoint: s.endpoint(), VolumeID: s.volume, PrepareID: "demo", Capability: capability(),
		Target: perform.Target{Namespace: s.inside, Path: s.in("container/volume")},
	}
	say("NodePrepareVolume: the plugin connects to the CO's socket and asks for a mount;")
	say("the CO opens /dev/fuse, makes a detached mount and sends the device back;")
	say("a process of the plugin answers INIT and says `serving`; the call is answered;")
	say("the CO sees that the mount answers, and attaches a clone of it in the container")
	began := time.Now()
	var err error
	if s.record, err = s.co.Up(ctx, s.use); err != nil {
		return err
	}
	say("it took %v, the ledger and what waits in a child process of its own included", time.Since(began).Round(time.Millisecond))
	return s.content.begin()
}

func (s *stage) openCO() error {
	log, err := os.OpenFile(s.in("co.log"), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	s.co, err = co.Open(co.Config{Dir: s.in("co"), Log: slog.New(slog.NewTextHandler(log, nil))})
	return err
}

func (s *stage) look(ctx context.Context) error {
	inside, err := fuseMounts(ctx, s.inside)
	if err != nil {
		return err
	}
	own, err := mountns.Own()
	if err != nil {
		return err
	}
	defer own.Close()
	node, err := fuseMounts(ctx, own)
	if err != nil {
		return err
	}
	pids := s.servers()
	return errors.Join(
		claim(len(inside) == 1, "the container has %d FUSE mount: %s", len(inside), strings.Join(inside, ", ")),
		claim(len(node) == 0, "the node, and with it the plugin, has %d of it in its mount table", len(node)),
		claim(len(pids) == 1 && pids[0] != s.plugin.Process.Pid, "the server is a process of its own: %v", pids),
		s.unprivileged(pids[0]),
	)
}

// fuseMounts are those of this demonstration's type.
func fuseMounts(ctx context.Context, ns *mountns.Namespace) ([]string, error) {
	table, err := ns.Table(ctx)
	if err != nil {
		return nil, err
	}
	var found []string
	for _, m := range table.Mounts {
		if m.Type() == "fuse.csi-prepare" {
			found = append(found, m.Point)
		}
	}
	return found, nil
}

// servers are the processes with a FUSE device whose log lies in the plugin's
// state directory, where it puts that of each process it starts.
func (s *stage) servers() (pids []int) {
	names, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return nil
	}
	for _, dir := range names {
		log, err := os.Readlink(dir + "/fd/2")
		if err != nil || !strings.HasPrefix(log, s.in("plugin/state/")) {
			continue
		}
		fds, err := os.ReadDir(dir + "/fd")
		if err != nil {
			continue
		}
		device := slices.ContainsFunc(fds, func(fd os.DirEntry) bool {
			to, err := os.Readlink(dir + "/fd/" + fd.Name())
			return err == nil && to == "/dev/fuse"
		})
		if pid, err := strconv.Atoi(filepath.Base(dir)); err == nil && device {
			pids = append(pids, pid)
		}
	}
	return pids
}

func (s *stage) killPlugin(ctx context.Context) error {
	before := s.servers()
	if err := s.plugin.Process.Kill(); err != nil {
		return err
	}
	_ = s.plugin.Wait() // killed it is
	time.Sleep(300 * time.Millisecond)
	if err := s.launch(ctx); err != nil {
		return err
	}
	o, err := s.content.report()
	return errors.Join(err,
		claim(slices.Equal(before, s.servers()), "the server goes on: %v", before),
		claim(o.Failed == 0, "the consumer did %d operations meanwhile, the longest in %v, none failed", o.Operations, o.Longest.Round(time.Microsecond)))
}

func (s *stage) killServers(ctx context.Context) error {
	const kills = 10
	for range kills {
		if err := s.killServer(ctx); err != nil {
			return err
		}
		time.Sleep(100 * time.Millisecond)
	}
	o, err := s.content.report()
	return errors.Join(err,
		claim(o.Failed == 0 && o.Corrupt == 0 && o.Operations > 0,
			"%d deaths: %d operations, %d failed, %d wrong bytes; the longest took %v", kills, o.Operations, o.Failed, o.Corrupt, o.Longest.Round(time.Millisecond)),
		claim(true, "the mount, the open files and the connection are the same: the CO kept the device, and each successor took it over"))
}

// killServer kills the server and waits for its successor.
func (s *stage) killServer(ctx context.Context) error {
	pids := s.servers()
	if len(pids) != 1 {
		return fmt.Errorf("servers: %v", pids)
	}
	if err := unix.Kill(pids[0], unix.SIGKILL); err != nil {
		return err
	}
	for range 1000 {
		if now := s.servers(); len(now) == 1 && now[0] != pids[0] && s.content.moves() {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(10 * time.Millisecond):
		}
	}
	return errors.New("no successor")
}

func (s *stage) restartCO(ctx context.Context) error {
	if err := s.co.Close(); err != nil {
		return err
	}
	say("the CO is gone, and with it the device and the mount it kept")
	if err := s.openCO(); err != nil {
		return err
	}
	if _, err := s.co.Recover(ctx); err != nil {
		return err
	}
	if _, err := s.co.Up(ctx, s.use); err != nil {
		return err
	}
	say("its successor prepares again with the same id, and the server deposits the device")
	if err := s.killServer(ctx); err != nil {
		return err
	}
	o, err := s.content.report()
	return errors.Join(err, claim(o.Failed == 0 && o.Corrupt == 0, "%d operations, %d failed, %d wrong bytes", o.Operations, o.Failed, o.Corrupt))
}

func (s *stage) down(ctx context.Context) error {
	if err := s.content.rest(); err != nil {
		return err
	}
	if err := s.co.Down(ctx, s.record.Key()); err != nil {
		return err
	}
	inside, err := fuseMounts(ctx, s.inside)
	if err != nil {
		return err
	}
	left, err := os.ReadDir(s.in("co/prepare"))
	if errors.Is(err, os.ErrNotExist) {
		err = nil
	}
	return errors.Join(err,
		claim(len(inside) == 0, "no mount is left in the container"),
		claim(len(left) == 0, "no directory is left of the preparation"),
		claim(len(s.servers()) == 0, "no process serves"))
}

// clear takes away what there is.
func (s *stage) clear() error {
	var errs []error
	if s.content != nil {
		errs = append(errs, s.content.stop())
	}
	if s.inside != nil {
		errs = append(errs, s.inside.Close())
	}
	if s.co != nil {
		errs = append(errs, s.co.Close())
	}
	if s.plugin != nil {
		_ = s.plugin.Process.Signal(syscall.SIGTERM)
		_ = s.plugin.Wait()
	}
	for range 500 { // a server ends with the last mount
		if len(s.servers()) == 0 {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	if s.dir != "" {
		errs = append(errs, os.RemoveAll(s.dir))
	}
	return errors.Join(errs...)
}
