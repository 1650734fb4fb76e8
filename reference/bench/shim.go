package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/csi-prepare/csi-prepare/drivers/hostpath"
	"github.com/csi-prepare/csi-prepare/drivers/server"
	"github.com/csi-prepare/csi-prepare/reference/co"
	"github.com/csi-prepare/csi-prepare/reference/shim/pass"
	"github.com/csi-prepare/csi-prepare/reference/shim/prepare"
	"github.com/csi-prepare/csi-prepare/reference/shim/publish"
	pb "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// The processes around the shims are this program again, in a role.
const roleVariable = "CSI_PREPARE_BENCH_ROLE"

func init() {
	co.Child()
	role := os.Getenv(roleVariable)
	if role == "" {
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	err := serveRole(ctx, role, os.Args[1])
	if err != nil {
		fmt.Fprintf(os.Stderr, "bench, %s: %v\n", role, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// The roles. Each socket is dir/ROLE.sock, each state is in dir/ROLE.
const (
	roleDriver   = "driver"  // a reference driver, which answers with mount specs
	rolePublish  = "publish" // prepare-shim co before it
	roleNaive    = "naive"   // the calls and the mount alone, before it
	roleLegacy   = "legacy"  // a plugin that mounts
	rolePrepare  = "prepare" // prepare-shim driver before that
	settleRounds = 1
)

func serveRole(ctx context.Context, role, dir string) error {
	path := func(name string) string { return filepath.Join(dir, name) }
	socket := func(role string) string { return "unix://" + path(role+".sock") }
	switch role {
	case roleDriver:
		return hostpath.Run(ctx, hostpath.Config{
			Endpoint: socket(role), StateDir: path(role), NodeID: "node1",
			Grants: []hostpath.Grant{{Name: "data", Dir: path("data")}},
		})
	case rolePublish:
		policy, err := co.ParsePolicy([]byte("apiVersion: csi-prepare/v1alpha1\nkind: Policy\ndefaults: {followLinks: false, grants: {data: " + path("data") + "}}\n"))
		if err != nil {
			return err
		}
		return publish.Run(ctx, publish.Config{Endpoint: socket(role), Plugin: socket(roleDriver), StateDir: path(role), Policy: policy})
	case rolePrepare:
		return prepare.Run(ctx, prepare.Config{Endpoint: socket(role), Plugin: socket(roleLegacy), StateDir: path(role)})
	}
	conn, err := pass.Dial(socket(roleDriver))
	if err != nil {
		return err
	}
	defer conn.Close()
	plugin := &mounting{data: path("data")}
	if role == roleNaive {
		plugin.next = pb.NewNodePrepareClient(conn)
		plugin.request = &pb.NodePrepareVolumeRequest{
			PrepareId: "naive", PreparePath: path("naive-prepare"),
			Performer: &pb.Performer{Kernel: pb.Performer_NODE, Kinds: []pb.MountKind{pb.MountKind_MOUNT_KIND_BIND}, Grants: []string{"data"}},
		}
	}
	return server.Serve(ctx, server.Options{Endpoint: socket(role)}, func(r grpc.ServiceRegistrar) { csi.RegisterNodeServer(r, plugin) })
}

// mounting is a plugin that mounts with mount(2), keeps no record and checks
// nothing: the least that can be done. With next it asks another plugin first,
// as whoever stands before one has to.
type mounting struct {
	csi.UnimplementedNodeServer
	data    string
	next    pb.NodePrepareClient
	request *pb.NodePrepareVolumeRequest
}

func (m *mounting) NodeGetCapabilities(context.Context, *csi.NodeGetCapabilitiesRequest) (*csi.NodeGetCapabilitiesResponse, error) {
	return &csi.NodeGetCapabilitiesResponse{}, nil
}

func (m *mounting) NodePublishVolume(ctx context.Context, req *csi.NodePublishVolumeRequest) (*csi.NodePublishVolumeResponse, error) {
	source := m.data
	if m.next != nil {
		r := &pb.NodePrepareVolumeRequest{
			VolumeId: req.GetVolumeId(), PrepareId: m.request.GetPrepareId(), PreparePath: m.request.GetPreparePath(),
			VolumeCapability: req.GetVolumeCapability(), Performer: m.request.GetPerformer(),
		}
		answer, err := m.next.NodePrepareVolume(ctx, r)
		if err != nil {
			return nil, err
		}
		source = filepath.Join(m.data, answer.GetMountSpecs()[0].GetBind().GetSource().GetRelative())
	}
	if err := os.Mkdir(req.GetTargetPath(), 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		return nil, err
	}
	return &csi.NodePublishVolumeResponse{}, unix.Mount(source, req.GetTargetPath(), "", unix.MS_BIND, "")
}

func (m *mounting) NodeUnpublishVolume(ctx context.Context, req *csi.NodeUnpublishVolumeRequest) (*csi.NodeUnpublishVolumeResponse, error) {
	if err := unix.Unmount(req.GetTargetPath(), 0); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
		return nil, err
	}
	if err := unix.Rmdir(req.GetTargetPath()); err != nil && !errors.Is(err, unix.ENOENT) {
		return nil, err
	}
	if m.next == nil {
		return &csi.NodeUnpublishVolumeResponse{}, nil
	}
	_, err := m.next.NodeUnprepareVolume(ctx, &pb.NodeUnprepareVolumeRequest{
		VolumeId: req.GetVolumeId(), PrepareId: m.request.GetPrepareId(), PreparePath: m.request.GetPreparePath(),
	})
	return &csi.NodeUnpublishVolumeResponse{}, err
}

// shimBench is the processes and the connections to them.
type shimBench struct {
	dir string
	// handle is the directory, opened where it can be seen: the threads that
	// gRPC dials from are in another mount namespace than main's.
	handle    *os.File
	processes map[string]*exec.Cmd
	conns     map[string]*grpc.ClientConn
	volume    string
}

const (
	goalPublish = "NodePublishVolume through prepare-shim co"
	goalPrepare = "NodePrepareVolume through prepare-shim driver"
	goalMemory  = "MiB resident, "
)

// shims judges what the shims cost. Only the call that makes is timed, not the
// one that takes back.
func shims(s *suite, focus *regexp.Regexp) []Verdict {
	if !focus.MatchString("shims") {
		return nil
	}
	b := &shimBench{dir: s.ground.Dir("shims"), processes: map[string]*exec.Cmd{}, conns: map[string]*grpc.ClientConn{}}
	defer b.close()
	var err error
	if b.handle, err = os.Open(b.dir); err != nil {
		return []Verdict{{Goal: Goal{Name: goalPublish, Limit: 1.3, AtMost: true}, Missing: err.Error()}}
	}
	verdicts, err := b.measure(s.rounds)
	if err != nil {
		return []Verdict{{Goal: Goal{Name: goalPublish, Limit: 1.3, AtMost: true}, Missing: err.Error()}}
	}
	return verdicts
}

func (b *shimBench) measure(rounds int) ([]Verdict, error) {
	ctx := context.Background()
	for _, dir := range []string{"data", "naive-prepare", "prepare-path"} {
		if err := os.Mkdir(filepath.Join(b.dir, dir), 0o700); err != nil {
			return nil, err
		}
	}
	for _, role := range []string{roleDriver, roleLegacy, rolePublish, roleNaive, rolePrepare} {
		if err := b.start(role); err != nil {
			return nil, err
		}
	}
	capability := &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER},
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
	}
	wait := grpc.WaitForReady(true)
	created, err := csi.NewControllerClient(b.conns[roleDriver]).CreateVolume(ctx,
		&csi.CreateVolumeRequest{Name: "bench", VolumeCapabilities: []*csi.VolumeCapability{capability}}, wait)
	if err != nil {
		return nil, err
	}
	b.volume = created.GetVolume().GetVolumeId()

	publishes := func(role string) Variant {
		node, target := csi.NewNodeClient(b.conns[role]), filepath.Join(b.dir, "target-"+role)
		return Variant{
			Name: role,
			Perform: func() error {
				_, err := node.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{VolumeId: b.volume, TargetPath: target, VolumeCapability: capability}, wait)
				return err
			},
			Undo: func() error {
				_, err := node.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: b.volume, TargetPath: target}, wait)
				return err
			},
		}
	}
	node, at := pb.NewNodePrepareClient(b.conns[rolePrepare]), filepath.Join(b.dir, "prepare-path")
	prepares := Variant{
		Name: rolePrepare,
		Perform: func() error {
			_, err := node.NodePrepareVolume(ctx, &pb.NodePrepareVolumeRequest{
				VolumeId: b.volume, PrepareId: "bench", PreparePath: at, VolumeCapability: capability,
				Performer: &pb.Performer{Kernel: pb.Performer_NODE, Kinds: []pb.MountKind{pb.MountKind_MOUNT_KIND_BIND}},
			}, wait)
			return err
		},
		Undo: func() error {
			_, err := node.NodeUnprepareVolume(ctx, &pb.NodeUnprepareVolumeRequest{VolumeId: b.volume, PrepareId: "bench", PreparePath: at}, wait)
			return err
		},
	}
	bare := Variant{
		Name: "a bare RPC",
		Perform: func() error {
			_, err := csi.NewNodeClient(b.conns[roleLegacy]).NodeGetCapabilities(ctx, &csi.NodeGetCapabilitiesRequest{}, wait)
			return err
		},
		Undo: func() error { return nil },
	}
	series, err := timePerforms(rounds, publishes(rolePublish), publishes(roleNaive), publishes(roleLegacy), prepares, bare)
	if err != nil {
		return nil, err
	}
	ours, naive, legacy, prepared, rpc := series[0], series[1], series[2], series[3], series[4]
	verdicts := []Verdict{
		verdictOf(Goal{Name: goalPublish + ", to its two RPCs and a raw mount", Of: rolePublish, Against: roleNaive, Limit: 1.3, AtMost: true}, ours, naive),
		verdictOf(Goal{Name: goalPrepare + ", to the plugin's own call and one RPC", Of: rolePrepare, Against: "plugin + RPC", Limit: 1, AtMost: true}, prepared, sum(legacy, rpc)),
	}
	for _, role := range []string{rolePublish, rolePrepare} {
		mib := b.resident(role)
		verdicts = append(verdicts, Verdict{
			Goal:  Goal{Name: goalMemory + "prepare-shim " + map[string]string{rolePublish: "co", rolePrepare: "driver"}[role], Of: role, Against: "MiB", Limit: 32, AtMost: true, Minima: true},
			Ratio: Ratio{OfMinima: mib},
		})
	}
	return verdicts, nil
}

// timePerforms times the making half of each variant, in rounds that rotate.
func timePerforms(rounds int, variants ...Variant) ([]Series, error) {
	series := make([]Series, len(variants))
	const cycles = 6 // taking back looks at every mount namespace of the machine
	for round := range rounds {
		for k := range variants {
			i := (round + k) % len(variants)
			v, times := variants[i], make([]float64, 0, cycles)
			for n := range cycles + settleRounds {
				start := time.Now()
				err := v.Perform()
				took := float64(time.Since(start))
				if err == nil {
					err = v.Undo()
				}
				if err != nil {
					return nil, fmt.Errorf("%s: %w", v.Name, err)
				}
				if n >= settleRounds {
					times = append(times, took)
				}
			}
			s := &series[i]
			s.Variant = v
			s.Rounds = append(s.Rounds, quantile(times, 0.5))
			if least := slices.Min(times); s.Min == 0 || least < s.Min {
				s.Min = least
			}
		}
	}
	return series, nil
}

// sum is what two things take one after the other, round by round.
func sum(a, b Series) Series {
	s := Series{Min: a.Min + b.Min}
	for i := range a.Rounds {
		s.Rounds = append(s.Rounds, a.Rounds[i]+b.Rounds[i])
	}
	return s
}

func verdictOf(g Goal, of, against Series) Verdict {
	return Verdict{
		Goal: g, Ratio: ratio(of, against),
		OursNS: of.Median(), OursMin: of.Min, PeerNS: against.Median(), PeerMin: against.Min,
	}
}

func (b *shimBench) start(role string) (err error) {
	cmd := exec.Command("/proc/self/exe", b.dir)
	cmd.Env = append(os.Environ(), roleVariable+"="+role)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} // main is locked to its thread
	if err := cmd.Start(); err != nil {
		return err
	}
	b.processes[role] = cmd
	b.conns[role], err = grpc.NewClient(fmt.Sprintf("unix:///proc/self/fd/%d/%s.sock", b.handle.Fd(), role), grpc.WithTransportCredentials(insecure.NewCredentials()))
	return err
}

func (b *shimBench) close() {
	for _, c := range b.conns {
		_ = c.Close()
	}
	_ = b.handle.Close()
	for _, role := range []string{rolePublish, rolePrepare, roleNaive, roleDriver, roleLegacy} {
		if p := b.processes[role]; p != nil {
			_ = p.Process.Signal(syscall.SIGTERM)
			_ = p.Wait() // it was told to end
		}
	}
}

// resident is the most memory a process had resident, in MiB.
func (b *shimBench) resident(role string) float64 {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", b.processes[role].Process.Pid))
	for line := range strings.SplitSeq(string(text), "\n") {
		if rest, found := strings.CutPrefix(line, "VmHWM:"); found {
			kib, _ := strconv.ParseFloat(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 64)
			return kib / 1024
		}
	}
	return 0
}
