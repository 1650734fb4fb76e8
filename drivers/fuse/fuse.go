// Package fuse is a reference driver whose volumes are served over FUSE by
// processes of its own. It mounts nothing, opens no /dev/fuse, and runs as an
// ordinary user without any capability: while NodePrepareVolume is pending a
// serving process asks the CO for a mount over the handoff socket, gets the
// device of it, and serves.
//
// # Processes
//
// Each preparation has a serving process of its own, which outlives the one
// behind the CSI socket: when that is killed, nothing notices. What the two
// have between them is a socket in the state directory; a token goes over it
// and is in no argument and no environment. When a serving process is killed,
// operations wait; the CO, which kept the device, repeats NodePrepareVolume,
// and a new process takes over. When the CO has restarted and lost the device,
// the serving process deposits it.
//
// Whoever supervises the driver must not end the serving processes with it:
// KillMode=process for systemd.
//
// # Volumes
//
// A volume is a directory below one the operator names, or, with the parameter
// medium=memory, below one on a tmpfs. Either way its files belong to the user
// the driver runs as; consumers see them as the owner given by the parameter
// owner=UID:GID, 0:0 if there is none. See package loopback for what differs
// from a directory of the node's. A directory cannot be held to a size, so a
// capacity_range is answered with OUT_OF_RANGE.
package fuse

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"regexp"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	"github.com/csi-prepare/csi-prepare/drivers/directory"
	"github.com/csi-prepare/csi-prepare/drivers/server"
	prepare "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// Name is the plugin's name, TopologyKey the key under which a volume's
// topology names its node.
const (
	Name        = "fuse.csi-prepare.github.io"
	TopologyKey = Name + "/node"
)

// Config of a driver. Endpoint, StateDir, NodeID and Dir are required.
type Config struct {
	// Endpoint to serve on, unix:///PATH.
	Endpoint string
	// StateDir holds the durable records and the sockets of the serving
	// processes, for this user alone.
	StateDir string
	// NodeID is also the topology's value: 1 to 63 bytes of [A-Za-z0-9._-],
	// beginning and ending with a letter or digit.
	NodeID string
	// Dir is the directory of the volumes, the driver's alone.
	Dir string
	// MemoryDir is a directory on a tmpfs, the driver's alone. Without it
	// there are no volumes in memory.
	MemoryDir string
	// Programs serve volumes that have the parameter program, by its value.
	Programs map[string]Program
	// Classic has serving processes mount by themselves, below prepare_path,
	// for a CO that is able to bind and nothing else. They have the right to
	// do so then, and mounts there propagate to the CO.
	Classic bool
	// Server starts a serving process: a file and the arguments that lead
	// to ServeInherited. Empty is this program with the command NewCommand
	// has for it.
	Server []string
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
		err = errors.Join(err, errors.New("state directory: required; for example /var/lib/prepare-fuse"))
	}
	if !filepath.IsAbs(c.Dir) {
		err = errors.Join(err, fmt.Errorf("directory %q: required, and absolute; for example /srv/prepare-fuse", c.Dir))
	}
	if c.Classic && len(c.Programs) > 0 {
		err = errors.Join(err, errors.New("programs: are given a device by the CO, and a CO for which this driver has to mount gives none; leave out one of the two"))
	}
	return errors.Join(err, c.checkMemory(), checkPrograms(c.Programs))
}

// checkMemory sees that what is to be memory is memory.
func (c Config) checkMemory() error {
	if c.MemoryDir == "" {
		return nil
	}
	var st unix.Statfs_t
	if err := unix.Statfs(c.MemoryDir, &st); err != nil {
		return fmt.Errorf("memory directory %s: %w", c.MemoryDir, err)
	}
	if st.Type != unix.TMPFS_MAGIC {
		return fmt.Errorf("memory directory %s: is on no tmpfs; make one below /dev/shm or mount one there", c.MemoryDir)
	}
	return nil
}

// Driver is the plugin: the CSI Identity, Controller and Node services, and
// NodePrepare.
type Driver struct {
	*directory.Controller[traits]
	directory.Node

	config       Config
	state        *server.State
	preparations *server.NodePrepare
	servers      *servers
	flights      server.Flights // keyed by volume_id
}

// New opens the state and makes a driver of it. Close gives the state up.
func New(c Config) (*Driver, error) {
	if err := c.Check(); err != nil {
		return nil, err
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
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
	d := &Driver{Node: directory.Node{ID: c.NodeID, TopologyKey: TopologyKey}, config: c, state: state}
	if err := d.load(); err != nil {
		if d.servers != nil {
			err = errors.Join(err, d.servers.close())
		}
		return nil, errors.Join(err, state.Close())
	}
	return d, nil
}

func (d *Driver) load() (err error) {
	if d.servers, err = openServers(d.config); err != nil {
		return err
	}
	d.Controller, err = directory.New(directory.Config[traits]{
		Driver: d, Node: d.Node, State: d.state, Flights: &d.flights,
		Layout: directory.Layout{Data: dataDir, Beside: []string{orphansDir}},
	})
	if err != nil {
		return err
	}
	kind := prepare.MountKind_MOUNT_KIND_FUSE
	if d.config.Classic {
		kind = prepare.MountKind_MOUNT_KIND_BIND
	}
	d.preparations, err = server.NewNodePrepare(server.Config{
		Driver:      d,
		State:       d.state,
		Flights:     &d.flights,
		Release:     d.release,
		BootID:      d.config.BootID,
		Kinds:       []prepare.MountKind{kind},
		Propagates:  d.config.Classic,
		MultiWriter: true,
	})
	d.Guard(d.preparations)
	return err
}

// Register adds the services of the driver to a server.
func (d *Driver) Register(s grpc.ServiceRegistrar) {
	csi.RegisterIdentityServer(s, &server.Identity{Name: Name, Capabilities: []csi.PluginCapability_Service_Type{
		csi.PluginCapability_Service_CONTROLLER_SERVICE,
		csi.PluginCapability_Service_VOLUME_ACCESSIBILITY_CONSTRAINTS,
	}})
	csi.RegisterControllerServer(s, d)
	csi.RegisterNodeServer(s, d)
	prepare.RegisterNodePrepareServer(s, d.preparations)
}

// Close waits for what is still being done and gives up the state. Serving
// processes go on.
func (d *Driver) Close() error {
	d.Wait()
	return errors.Join(d.servers.close(), d.state.Close())
}

// Run serves until ctx is done.
func Run(ctx context.Context, c Config) error {
	d, err := New(c)
	if err != nil {
		return err
	}
	err = server.Serve(ctx, server.Options{Endpoint: c.Endpoint, Log: c.Log, Grace: c.Grace}, d.Register)
	return errors.Join(err, d.Close())
}
