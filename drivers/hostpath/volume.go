package hostpath

import (
	"fmt"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/drivers/directory"
	"github.com/csi-prepare/csi-prepare/drivers/server"
)

// size of a volume in bytes: what anybody can store, and what nobody can
// exceed. Both are 0 for a volume that shares its filesystem.
type size struct {
	Capacity int64 `json:"capacity_bytes,omitempty"`
	Ceiling  int64 `json:"ceiling_bytes,omitempty"`
}

// The home of a volume is its grant, by name.
type (
	volume = directory.Volume[size]
	entry  = directory.Entry[size]
)

// parameterGrant is the one parameter of CreateVolume: the grant a volume is
// to lie in.
const parameterGrant = "grant"

// CheckParameters implements directory.Driver.
func (d *Driver) CheckParameters(parameters map[string]string) error {
	for key := range parameters {
		if key != parameterGrant {
			return server.Invalid(fmt.Sprintf("parameters[%q]", key), "is unknown", fmt.Sprintf("leave it out; this plugin knows %q", parameterGrant))
		}
	}
	name, given := parameters[parameterGrant]
	if _, ok := d.grant(name); given && !ok {
		return server.Invalid(fmt.Sprintf("parameters[%q]", parameterGrant), "names no grant of this plugin", "use a name the operator gave to the plugin with --grant or --sized-grant")
	}
	return nil
}

// Differs implements directory.Driver.
func (d *Driver) Differs(v volume, req *csi.CreateVolumeRequest) (field, how string) {
	switch grant := req.GetParameters()[parameterGrant]; {
	case !v.Traits.keeps(req.GetCapacityRange()):
		return "capacity_range", "is of another size"
	case grant != "" && grant != v.Home:
		return "parameters", "lies in another grant"
	}
	return "", ""
}

// Capacity implements directory.Driver.
func (d *Driver) Capacity(v volume) int64 { return v.Traits.Capacity }

// SnapshotHome implements directory.Driver: the volume's own grant, unless that
// is the volume's alone.
func (d *Driver) SnapshotHome(v volume) (string, error) {
	g, err := d.grantOf(v.Home)
	if err == nil && !g.Sized {
		return g.Name, nil
	}
	for _, g := range d.config.Grants {
		if !g.Sized {
			return g.Name, nil
		}
	}
	return "", status.Error(codes.FailedPrecondition, "source_volume_id: a snapshot lies in a grant without a size, and this plugin has none; have the operator add one with --grant")
}

// Open implements directory.Driver.
func (d *Driver) Open(home string) (int, error) {
	g, err := d.grantOf(home)
	if err != nil {
		return -1, err
	}
	return g.open()
}

func (d *Driver) grant(name string) (Grant, bool) {
	for _, g := range d.config.Grants {
		if g.Name == name {
			return g, true
		}
	}
	return Grant{}, false
}

// grantOf returns the grant a volume was created in.
func (d *Driver) grantOf(name string) (Grant, error) {
	g, ok := d.grant(name)
	if !ok {
		return g, fmt.Errorf("the volume lies in grant %s, which this driver was not given; start it with --grant %s=DIR", name, name)
	}
	return g, nil
}
