package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/moby/swarmkit/v2/agent/csi/plugin"
	"github.com/moby/swarmkit/v2/api"
	nodeplugin "github.com/moby/swarmkit/v2/node/plugin"
	"golang.org/x/sys/unix"
)

// dockerPlugin is how Docker shows a plugin to swarm.
type dockerPlugin struct{ name, socket string }

func (p *dockerPlugin) Name() string                    { return p.name }
func (p *dockerPlugin) ScopedPath(s string) string      { return s }   // in one root directory with swarm
func (p *dockerPlugin) Client() nodeplugin.Client       { return nil } // swarm speaks gRPC with it
func (p *dockerPlugin) Addr() net.Addr                  { return &net.UnixAddr{Net: "unix", Name: p.socket} }
func (p *dockerPlugin) Get(string) (*api.Secret, error) { return nil, nil } //nolint:nilnil // as swarm's own for no secret

const callTime = 30 * time.Second

// step is one thing that swarm does, or that is seen of it.
type step struct {
	name string
	do   func(context.Context) error
}

// swarmkit has the node plugin of Docker Swarm use a volume from the beginning
// to the end, with a crash of the shim while the volume is in use.
func swarmkit(ctx context.Context, g *rig) (result Result, err error) {
	conn, err := g.dial("shim.sock")
	if err != nil {
		return result, err
	}
	defer conn.Close()
	controller, node := csi.NewControllerClient(conn), csi.NewNodeClient(conn)
	docker := &dockerPlugin{name: "shim", socket: g.path("shim.sock")}
	np := plugin.NewNodePlugin("shim", docker, docker)
	v := &api.VolumeAssignment{
		ID: "v1", AccessMode: &api.VolumeAccessMode{
			Scope: api.VolumeScopeSingleNode, Sharing: api.VolumeSharingNone,
			AccessType: &api.VolumeAccessMode_Mount{Mount: &api.VolumeAccessMode_MountVolume{}},
		},
	}
	capability := &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
	}
	if g.access == "block" {
		v.AccessMode.AccessType = &api.VolumeAccessMode_Block{Block: &api.VolumeAccessMode_BlockVolume{}}
		capability.AccessType = &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}
	}
	stages := g.driver == "block"
	staged := filepath.Join(plugin.TargetStagePath, v.ID)
	text := []byte("written by a consumer of swarm's\n")
	steps := []step{
		{"NodeGetInfo", func(ctx context.Context) error {
			info, err := np.NodeGetInfo(ctx)
			if err == nil && info.NodeID != "node1" {
				err = fmt.Errorf("node %q", info.NodeID)
			}
			return err
		}},
		{"CreateVolume", func(ctx context.Context) error {
			req := &csi.CreateVolumeRequest{Name: "swarm", VolumeCapabilities: []*csi.VolumeCapability{capability}}
			if g.driver == "block" {
				req.CapacityRange = &csi.CapacityRange{RequiredBytes: 32 * mib}
			}
			created, err := controller.CreateVolume(ctx, req)
			v.VolumeID = created.GetVolume().GetVolumeId()
			v.VolumeContext = created.GetVolume().GetVolumeContext()
			return err
		}},
		{"make the staging path", func(context.Context) error {
			if !stages {
				return nil
			}
			return os.Mkdir(docker.ScopedPath(staged), 0o755)
		}},
		{"NodeStageVolume", func(ctx context.Context) error { return np.NodeStageVolume(ctx, v) }},
		{"NodePublishVolume", func(ctx context.Context) error { return np.NodePublishVolume(ctx, v) }},
		{"the volume is at the published path", func(context.Context) error { return volumeAt(np.GetPublishedPath(v.ID), g.access) }},
		{"a consumer writes", func(context.Context) error { return put(np.GetPublishedPath(v.ID), g.access, text) }},
		{"NodePublishVolume again", func(ctx context.Context) error { return np.NodePublishVolume(ctx, v) }},
		{"the shim is killed and started again", func(ctx context.Context) error {
			g.peak()
			kill(g.shim)
			return g.startShim(ctx)
		}},
		{"NodePublishVolume after the crash", func(ctx context.Context) error {
			// The connection of before may end only with its first call.
			err := np.NodePublishVolume(ctx, v)
			for range 50 {
				if err == nil || ctx.Err() != nil {
					break
				}
				time.Sleep(100 * time.Millisecond)
				err = np.NodePublishVolume(ctx, v)
			}
			return err
		}},
		{"one mount at the published path", func(context.Context) error {
			if n, err := mountsAt(np.GetPublishedPath(v.ID)); n != 1 || err != nil {
				return fmt.Errorf("%d mounts, %w", n, err)
			}
			return nil
		}},
		{"the consumer reads", func(context.Context) error {
			found, err := get(np.GetPublishedPath(v.ID), g.access, len(text))
			if err == nil && !bytes.Equal(found, text) {
				err = fmt.Errorf("found %q", found)
			}
			return err
		}},
		{"NodeUnpublishVolume", func(ctx context.Context) error { return np.NodeUnpublishVolume(ctx, v) }},
		{"NodeUnpublishVolume again", func(ctx context.Context) error { return np.NodeUnpublishVolume(ctx, v) }},
		{"nothing is left of the target", func(context.Context) error {
			at := docker.ScopedPath(filepath.Join(plugin.TargetPublishPath, v.ID))
			if _, err := os.Lstat(at); !os.IsNotExist(err) {
				return fmt.Errorf("%s: %w", at, err)
			}
			return nil
		}},
		{"NodeUnstageVolume", func(ctx context.Context) error { return np.NodeUnstageVolume(ctx, v) }},
		{"what swarm does not unstage is unstaged", func(ctx context.Context) error {
			if !stages {
				return nil
			}
			_, err := node.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: v.VolumeID, StagingTargetPath: staged})
			return errors.Join(err, os.Remove(staged))
		}},
		{"DeleteVolume", func(ctx context.Context) error {
			_, err := controller.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: v.VolumeID})
			return err
		}},
	}
	if stages {
		result.Notes = append(result.Notes, "swarmkit 2.0.0 answers NodeUnstageVolume itself while it remembers the volume, and never makes the call; the test makes it")
	}
	for _, s := range steps {
		ctx, cancel := context.WithTimeout(ctx, callTime)
		err := s.do(ctx)
		cancel()
		if err != nil {
			result.Failed++
			return result, fmt.Errorf("%s: %w", s.name, err)
		}
		result.Passed++
	}
	return result, nil
}

// volumeAt sees that a path is what the access type asks for.
func volumeAt(path, access string) error {
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	want := uint32(unix.S_IFDIR)
	if access == "block" {
		want = unix.S_IFBLK
	}
	if st.Mode&unix.S_IFMT != want {
		return fmt.Errorf("%s has mode %#o", path, st.Mode)
	}
	if n, err := mountsAt(path); n != 1 || err != nil {
		return fmt.Errorf("%d mounts are at %s, %w", n, path, err)
	}
	return nil
}

func mountsAt(path string) (n int, err error) {
	table, err := os.ReadFile("/proc/self/mountinfo")
	for line := range bytes.SplitSeq(table, []byte("\n")) {
		if fields := bytes.Fields(line); len(fields) > 4 && string(fields[4]) == path {
			n++
		}
	}
	return n, err
}

func put(path, access string, text []byte) error {
	flags := os.O_WRONLY
	if access == "mount" {
		path, flags = filepath.Join(path, "data"), flags|os.O_CREATE
	}
	f, err := os.OpenFile(path, flags|unix.O_SYNC, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = f.Write(text)
	return err
}

func get(path, access string, size int) ([]byte, error) {
	if access == "mount" {
		path = filepath.Join(path, "data")
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	found := make([]byte, size)
	_, err = f.ReadAt(found, 0)
	return found, err
}
