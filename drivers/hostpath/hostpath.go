// Package hostpath is a reference driver whose volumes are directories of the
// node. The operator grants a directory to it and, by the same name, to the
// CO; a volume is a directory below the grant, and the only mount spec it
// ever returns is a bind of that. It mounts nothing, stages nothing and writes
// nothing into prepare_path, so it needs neither CAP_SYS_ADMIN nor mount
// propagation nor a way to any consumer's directory. It needs Linux 5.8.
//
// # Size
//
// A directory cannot be held to a size. A capacity_range is therefore kept by
// a filesystem or refused: a grant that is marked as sized is a filesystem of
// its own and holds one volume at a time, which has the size of that
// filesystem. Without a free one of fitting size, CreateVolume answers
// OUT_OF_RANGE, or RESOURCE_EXHAUSTED where one that fits is in use. A volume
// created without capacity_range shares the space of its grant with all the
// others, and its capacity is answered as 0, which means unknown.
//
// # Access
//
// The volumes are on one node's disks: the single-node access modes are
// supported, the multi-node ones are not, and a volume's topology names the
// node. A filesystem type cannot be asked for, as it is that of the grant.
// volume_mount_group is refused: files in the volume keep the owners they
// have, and to change them is the CO's. The root of a volume has mode 0777
// and lies in a directory of mode 0700, so that consumers may run as any user
// and other users of the node do not get there.
//
// # Snapshots and copies
//
// A snapshot is a copy of the volume's directory, as is a volume made from a
// snapshot or from another volume. Files share their blocks where the
// filesystem can do that, and are read back and compared where it cannot. A
// tree is not copied in one moment, so a volume that is prepared for writing
// is not copied: FAILED_PRECONDITION. Snapshots lie in a grant without a size,
// beside the volumes.
//
// To delete and copy what consumers wrote, a driver that does not run as root
// needs CAP_DAC_OVERRIDE and CAP_FOWNER, for copies CAP_CHOWN and CAP_MKNOD
// too.
package hostpath

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"regexp"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sync/singleflight"
	"google.golang.org/grpc"

	"github.com/csi-prepare/csi-prepare/drivers/directory"
	"github.com/csi-prepare/csi-prepare/drivers/server"
	prepare "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// Name is the plugin's name, TopologyKey the key under which a volume's
// topology names its node.
const (
	Name        = "hostpath.csi-prepare.github.io"
	TopologyKey = Name + "/node"
)

// Config of a driver. Endpoint, StateDir, NodeID and Grants are required.
type Config struct {
	// Endpoint to serve on, unix:///PATH.
	Endpoint string
	// StateDir holds the durable records, for this process alone.
	StateDir string
	// NodeID is also the topology's value: 1 to 63 bytes of [A-Za-z0-9._-],
	// beginning and ending with a letter or digit.
	NodeID string
	// Grants in order of preference.
	Grants []Grant
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
		err = errors.Join(err, errors.New("state directory: required; for example /var/lib/prepare-hostpath"))
	}
	return errors.Join(err, checkGrants(c.Grants))
}

// Driver is the plugin: the CSI Identity, Controller and Node services, and
// NodePrepare.
type Driver struct {
	*directory.Controller[size]
	directory.Node

	config       Config
	state        *server.State
	preparations *server.NodePrepare
	flights      server.Flights // keyed by volume_id
	// measuring joins calls that ask a filesystem the same at one time, so
	// that one which does not answer holds up one thread.
	measuring singleflight.Group

	mu    sync.Mutex
	taken map[string]string // sized grant -> the volume_id that has it
}

// New opens the state and makes a driver of it. Close gives the state up.
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
	d := &Driver{
		Node:   directory.Node{ID: c.NodeID, TopologyKey: TopologyKey},
		config: c, state: state, taken: map[string]string{},
	}
	if err := d.load(); err != nil {
		return nil, errors.Join(err, state.Close())
	}
	return d, nil
}

func (d *Driver) load() (err error) {
	d.Controller, err = directory.New(directory.Config[size]{
		Driver: d, Node: d.Node, State: d.state, Flights: &d.flights, Copies: true, Capacity: true,
	})
	if err != nil {
		return err
	}
	d.preparations, err = server.NewNodePrepare(server.Config{
		Driver:      d,
		State:       d.state,
		Flights:     &d.flights,
		BootID:      d.config.BootID,
		Kinds:       []prepare.MountKind{prepare.MountKind_MOUNT_KIND_BIND},
		MultiWriter: true,
	})
	if err != nil {
		return err
	}
	d.Guard(d.preparations)
	d.taken, err = d.sizedInUse()
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

// Close waits for what is still being done and gives up the state.
func (d *Driver) Close() error {
	d.Wait()
	return d.state.Close()
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
