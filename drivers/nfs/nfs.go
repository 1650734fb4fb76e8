// Package nfs is a reference driver whose volumes are directories of an NFS
// export. It answers NodePrepareVolume with a FILESYSTEM of the kernel's own
// client, ready for one mount: the server's name is resolved at each call, the
// version of the protocol is always said, and no mount helper is needed. The
// driver mounts nothing, and needs no privilege on the node.
//
// # Controller and node
//
// The controller makes, copies and removes directories, for which the operator
// gives it one, the root, at which the export can be reached: the exported
// directory itself on the server, or a mount of it elsewhere. Without a root a
// driver serves the node alone, and takes the place of a volume from its
// volume_context.
//
// # Size
//
// NFS holds no directory to a size: a capacity_range is refused with
// OUT_OF_RANGE, and the capacity of a volume is unknown. A snapshot and a clone
// are real copies, of a volume that no consumer writes to.
//
// # By a helper
//
// With a mount helper the driver shows how a plugin that cannot do without one
// serves NodePrepare: the helper mounts in a mount namespace that lives as long
// as the call, and the CO gets a clone of that mount as a HANDLE. That takes
// CAP_SYS_ADMIN, but no propagation and no way to a consumer's directories.
package nfs

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"path/filepath"
	"regexp"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sync/singleflight"
	"google.golang.org/grpc"

	"github.com/csi-prepare/csi-prepare/drivers/directory"
	"github.com/csi-prepare/csi-prepare/drivers/server"
	prepare "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// Name is the plugin's name.
const Name = "nfs.csi-prepare.github.io"

// Config of a driver. Endpoint, StateDir, NodeID and Export are required.
type Config struct {
	// Endpoint to serve on, unix:///PATH.
	Endpoint string
	// StateDir holds the durable records, for this process alone.
	StateDir string
	// NodeID has 1 to 63 bytes of [A-Za-z0-9._-], beginning and ending with
	// a letter or digit.
	NodeID string
	// Export holds the volumes.
	Export Export
	// Root is the directory at which this process reaches the export; empty
	// for a driver without the Controller service.
	Root string
	// Helper is the mount helper to mount with, as mount.nfs is called:
	// PROGRAM SOURCE DIRECTORY -o OPTIONS. Empty for none.
	Helper string
	// Lookup resolves the server's name; net.DefaultResolver if nil.
	Lookup Lookup
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
		err = errors.Join(err, errors.New("state directory: required; for example /var/lib/prepare-nfs"))
	}
	if c.Export == (Export{}) {
		err = errors.Join(err, errors.New("export: required; for example --export nfs.example.org:/srv/volumes"))
	} else {
		err = errors.Join(err, c.Export.check())
	}
	if len(c.Export.source(maxBelow)) > maxSource {
		err = errors.Join(err, fmt.Errorf("export: host and path are too long, the source of a volume would exceed %d bytes", maxSource))
	}
	for name, path := range map[string]string{"root": c.Root, "helper": c.Helper} {
		if path != "" && (!filepath.IsAbs(path) || filepath.Clean(path) != path) {
			err = errors.Join(err, fmt.Errorf("%s %q: needs to be absolute, with no '.', '..', double or trailing slash", name, path))
		}
	}
	return err
}

// Driver is the plugin: the CSI Identity, Controller and Node services, and
// NodePrepare.
type Driver struct {
	directory.Node

	config       Config
	state        *server.State
	controller   *directory.Controller[traits] // nil without a root
	preparations *server.NodePrepare
	flights      server.Flights // keyed by volume_id
	// measuring joins calls that ask the export the same at one time, so
	// that a server which does not answer holds up one thread.
	measuring singleflight.Group
}

// New opens the state and makes a driver of it. Close gives the state up.
func New(c Config) (*Driver, error) {
	if err := c.Check(); err != nil {
		return nil, err
	}
	if c.Lookup == nil {
		c.Lookup = net.DefaultResolver.LookupNetIP
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
	d := &Driver{Node: directory.Node{ID: c.NodeID}, config: c, state: state}
	if err := d.load(); err != nil {
		return nil, errors.Join(err, state.Close())
	}
	return d, nil
}

func (d *Driver) load() (err error) {
	if d.config.Root != "" {
		d.controller, err = directory.New(directory.Config[traits]{
			Driver: d, Node: d.Node, State: d.state, Flights: &d.flights, Copies: true, Capacity: true,
			// A client of version 4 goes down to the volume as whoever its
			// root is at the server. The ids of volumes cannot be guessed.
			Mode:       0o711,
			Capability: d.checkCapability,
			Context:    volumeContext,
		})
		if err != nil {
			return err
		}
	}
	kind := prepare.MountKind_MOUNT_KIND_FILESYSTEM
	if d.config.Helper != "" {
		kind = prepare.MountKind_MOUNT_KIND_HANDLE
	}
	d.preparations, err = server.NewNodePrepare(server.Config{
		Driver:      d,
		State:       d.state,
		Flights:     &d.flights,
		BootID:      d.config.BootID,
		Kinds:       []prepare.MountKind{kind},
		MultiWriter: true,
	})
	if err == nil && d.controller != nil {
		d.controller.Guard(d.preparations)
	}
	return err
}

// Register adds the services of the driver to a server.
func (d *Driver) Register(s grpc.ServiceRegistrar) {
	identity := &server.Identity{Name: Name}
	if d.controller != nil {
		identity.Capabilities = append(identity.Capabilities, csi.PluginCapability_Service_CONTROLLER_SERVICE)
		csi.RegisterControllerServer(s, controller{d.controller, d})
	}
	csi.RegisterIdentityServer(s, identity)
	csi.RegisterNodeServer(s, d)
	prepare.RegisterNodePrepareServer(s, d.preparations)
}

// Close waits for what is still being done and gives up the state.
func (d *Driver) Close() error {
	if d.controller != nil {
		d.controller.Wait()
	}
	d.flights.Wait()
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
