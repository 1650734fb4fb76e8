// Package block is a reference driver whose volumes are block devices: files
// in a directory, attached as loop devices, or real devices the operator
// lists. For a block volume it returns the device's number, and the CO makes
// the node; for a mount volume it returns the filesystem type and the device,
// and the CO mounts it. The driver mounts nothing that anybody sees.
//
// # Identity
//
// A volume's file is known by its inode, a loop device by a mark it carries,
// the inode behind it and its sequence number, a real device by what it says
// it is. Names and links in /dev are not used, nor is /dev. What lies at a
// path of the driver's and is something else is refused and left alone, and so
// is a loop device that somebody else attached.
//
// # Formatting
//
// A filesystem is made at NodeStageVolume and only on a device that is proven
// blank, see package filesystem. That it is being made is on disk before; so
// one that a crash cut off is begun again, and one that was finished never.
//
// # Devices left behind
//
// Each loop device is on record before it is attached and until it is gone.
// A driver that starts ends those whose calls a crash cut off.
//
// # Access
//
// The single-node access modes are supported. A read-only preparation of a
// block volume gets a loop device of its own, on which no write succeeds,
// whatever the consumer does with its node. What it has read already it may
// read again from its own cache after another consumer wrote: a reader that
// wants to see later writes opens with O_DIRECT.
// A read-only preparation of a mount volume is a read-only mount of the
// writable superblock, so that readers and writers share one.
package block

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sync/singleflight"
	"google.golang.org/grpc"

	"github.com/csi-prepare/csi-prepare/drivers/block/device"
	"github.com/csi-prepare/csi-prepare/drivers/block/filesystem"
	"github.com/csi-prepare/csi-prepare/drivers/server"
	prepare "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// Name is the plugin's name, TopologyKey the key under which a volume's
// topology names its node.
const (
	Name        = "block.csi-prepare.github.io"
	TopologyKey = Name + "/node"
)

// Config of a driver. Endpoint, StateDir, NodeID and either Dir or Disks are
// required.
type Config struct {
	// Endpoint to serve on, unix:///PATH.
	Endpoint string
	// StateDir holds the durable records, for this process alone.
	StateDir string
	// NodeID is also the topology's value: 1 to 63 bytes of [A-Za-z0-9._-],
	// beginning and ending with a letter or digit.
	NodeID string
	// Dir is the directory for the files of volumes, for this driver alone.
	// Its filesystem has O_TMPFILE; with reflinks (xfs, btrfs) snapshots
	// and clones share blocks and can be taken of volumes in use.
	Dir string
	// Disks are the devices that volumes are, instead.
	Disks []Disk
	// Log is optional.
	Log *slog.Logger
	// Grace for pending calls at the end; server.DefaultGrace if zero.
	Grace time.Duration
	// BootID stands for the kernel's, if set.
	BootID string
}

var nodeID = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$`)

// Check refuses a configuration the driver cannot serve with.
func (c Config) Check() error {
	_, err := server.SocketPath(c.Endpoint)
	if !nodeID.MatchString(c.NodeID) {
		err = errors.Join(err, fmt.Errorf("node id %q: needs 1 to 63 bytes of [A-Za-z0-9._-], beginning and ending with a letter or digit", c.NodeID))
	}
	if c.StateDir == "" {
		err = errors.Join(err, errors.New("state directory: required; for example /var/lib/prepare-block"))
	}
	switch {
	case (c.Dir == "") == (len(c.Disks) == 0):
		err = errors.Join(err, errors.New("volumes: give either a directory for their files or a list of disks"))
	case c.Dir != "" && !filepath.IsAbs(c.Dir):
		err = errors.Join(err, fmt.Errorf("directory %q: is not an absolute path", c.Dir))
	}
	return errors.Join(err, checkDisks(c.Disks))
}

// Driver is the plugin: the CSI Identity, Controller and Node services, and
// NodePrepare.
type Driver struct {
	csi.UnimplementedControllerServer
	csi.UnimplementedNodeServer

	config Config
	log    *slog.Logger
	state  *server.State
	files  *store // nil if the volumes are disks
	nodes  *device.Nodes
	// owner marks the loop devices of this driver, in this and any later
	// process.
	owner string
	// tools is an empty directory for programs that need a path.
	tools string
	types []filesystem.Type // with all programs installed

	volumes      records[volume]
	snapshots    records[snapshot]
	stages       records[stage]
	uses         records[use]
	preparations *server.NodePrepare
	// byVolume is keyed by the id of a volume or snapshot, byName by the
	// name of CreateVolume or CreateSnapshot.
	byVolume, byName server.Flights
	pages            *server.Pages
	// measuring joins calls that ask a filesystem the same at one time.
	measuring singleflight.Group
	// placing is held while a disk is chosen.
	placing sync.Mutex
}

// New opens the state, ends what an earlier process left in the middle, and
// makes a driver of it. Close gives the state up.
func New(c Config) (*Driver, error) {
	if err := c.Check(); err != nil {
		return nil, err
	}
	if c.BootID == "" {
		boot, err := server.BootID()
		if err != nil {
			return nil, err
		}
		c.BootID = boot
	}
	state, err := server.OpenState(c.StateDir, c.Log)
	if err != nil {
		return nil, err
	}
	d := &Driver{config: c, log: c.Log, state: state, pages: server.NewPages(), tools: filepath.Join(c.StateDir, "nodes")}
	if d.log == nil {
		d.log = slog.New(slog.DiscardHandler)
	}
	if err := d.load(); err != nil {
		return nil, errors.Join(err, d.Close())
	}
	return d, nil
}

func (d *Driver) load() (err error) {
	if d.nodes, err = device.NewNodes(); err != nil {
		return fmt.Errorf("make a place for device nodes: %w", err)
	}
	if err := os.Mkdir(d.tools, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	if d.config.Dir != "" {
		if d.files, err = openStore(d.config.Dir); err != nil {
			return err
		}
	}
	for _, t := range filesystem.Types {
		if missing := filesystem.Missing(t); missing != nil {
			d.log.Warn("filesystem type is not offered: programs are missing", "type", t, "missing", missing)
			continue
		}
		d.types = append(d.types, t)
	}
	if d.volumes.Records, err = server.OpenRecords[volume](d.state, "volumes"); err != nil {
		return err
	}
	if d.snapshots.Records, err = server.OpenRecords[snapshot](d.state, "snapshots"); err != nil {
		return err
	}
	if d.stages.Records, err = server.OpenBootRecords[stage](d.state, "stages", d.config.BootID); err != nil {
		return err
	}
	if d.uses.Records, err = server.OpenBootRecords[use](d.state, "uses", d.config.BootID); err != nil {
		return err
	}
	d.preparations, err = server.NewNodePrepare(server.Config{
		Driver:      d,
		State:       d.state,
		Flights:     &d.byVolume,
		Release:     d.release,
		BootID:      d.config.BootID,
		Kinds:       []prepare.MountKind{prepare.MountKind_MOUNT_KIND_BLOCK_DEVICE, prepare.MountKind_MOUNT_KIND_FILESYSTEM, prepare.MountKind_MOUNT_KIND_HANDLE},
		MultiWriter: true,
	})
	if err != nil {
		return err
	}
	if err := d.identify(); err != nil {
		return err
	}
	d.recover(context.Background())
	return nil
}

// Register adds the services of the driver to a server.
func (d *Driver) Register(s grpc.ServiceRegistrar) {
	identity := &server.Identity{Name: Name, Capabilities: []csi.PluginCapability_Service_Type{
		csi.PluginCapability_Service_CONTROLLER_SERVICE,
		csi.PluginCapability_Service_VOLUME_ACCESSIBILITY_CONSTRAINTS,
	}}
	if d.files != nil {
		identity.Expansion = csi.PluginCapability_VolumeExpansion_ONLINE
	}
	csi.RegisterIdentityServer(s, identity)
	csi.RegisterControllerServer(s, d)
	csi.RegisterNodeServer(s, d)
	prepare.RegisterNodePrepareServer(s, d.preparations)
}

// Close waits for what is still being done and gives up the state. Devices
// that volumes are staged or prepared with stay.
func (d *Driver) Close() error {
	d.byName.Wait()
	d.byVolume.Wait()
	var err error
	if d.files != nil {
		err = d.files.close()
	}
	if d.nodes != nil {
		err = errors.Join(err, d.nodes.Close())
	}
	return errors.Join(err, d.state.Close())
}

// Run serves until ctx is done.
func Run(ctx context.Context, c Config) error {
	d, err := New(c)
	if err != nil {
		return err
	}
	err = server.Serve(ctx, server.Options{Endpoint: c.Endpoint, Log: c.Log, Grace: c.Grace}, d.Register)
	return errors.Join(err, server.Finish(c.Grace, d.Close))
}
