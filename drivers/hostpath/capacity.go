package hostpath

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/csi-prepare/csi-prepare/drivers/directory"
	"github.com/csi-prepare/csi-prepare/drivers/server"
)

func hasRange(r *csi.CapacityRange) bool { return r.GetRequiredBytes() > 0 || r.GetLimitBytes() > 0 }

// keeps tells whether a volume of such a size keeps to a range.
func (v size) keeps(r *csi.CapacityRange) bool {
	if !hasRange(r) {
		return true
	}
	return v.Ceiling > 0 && v.Capacity >= r.GetRequiredBytes() && (r.GetLimitBytes() == 0 || v.Ceiling <= r.GetLimitBytes())
}

// Place implements directory.Driver: it takes the grant of a new volume if that
// is a sized one. Without a range, grants without a size come first, that of
// the source of a copy before the others, since files of one filesystem may
// share their blocks; among sized ones that fit, the smallest.
func (d *Driver) Place(id string, req *csi.CreateVolumeRequest, from string) (string, size, error) {
	name, r := req.GetParameters()[parameterGrant], req.GetCapacityRange()
	if g, ok := d.grant(from); ok && !g.Sized && name == "" && !hasRange(r) {
		return from, size{}, nil
	}
	type fit struct {
		grant string
		size
	}
	var sized []fit
	var unknown error // of a sized grant whose filesystem cannot be asked
	for _, g := range d.config.Grants {
		switch {
		case name != "" && g.Name != name:
		case g.Sized:
			v, err := d.whole(g)
			if err != nil {
				unknown = err
			} else if v.keeps(r) {
				sized = append(sized, fit{g.Name, v})
			}
		case !hasRange(r):
			return g.Name, size{}, nil
		}
	}
	slices.SortStableFunc(sized, func(a, b fit) int { return cmp.Compare(a.Ceiling, b.Ceiling) })
	for _, v := range sized {
		if d.takeSized(v.grant, id) {
			return v.grant, v.size, nil
		}
	}
	switch {
	case unknown != nil:
		return "", size{}, unknown
	case len(sized) > 0:
		return "", size{}, status.Error(codes.ResourceExhausted, "every sized grant that fits holds a volume; delete one, or have the operator add a sized grant")
	}
	return "", size{}, status.Error(codes.OutOfRange,
		"capacity_range: no sized grant is of such a size, and a directory cannot be held to one; leave capacity_range out, or have the operator add a sized grant (GetCapacity tells the largest free one)")
}

// whole is the size of a volume that has a sized grant to itself.
func (d *Driver) whole(g Grant) (size, error) {
	s, err := g.size()
	if err != nil {
		return size{}, err
	}
	v := size{Capacity: s.available, Ceiling: s.total}
	if d.holder(g.Name) != "" {
		v.Capacity = s.total - (s.free - s.available) // as it will be when free
	}
	return v, nil
}

func (d *Driver) takeSized(grant, id string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.taken[grant] != "" {
		return false
	}
	d.taken[grant] = id
	return true
}

// Free implements directory.Driver.
func (d *Driver) Free(id string, v volume) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.taken[v.Home] == id {
		delete(d.taken, v.Home)
	}
}

func (d *Driver) holder(grant string) string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.taken[grant]
}

// sizedInUse reads from the records which sized grants hold a volume. While
// one record cannot be read, which was logged, all do: it may be that volume's.
func (d *Driver) sizedInUse() (map[string]string, error) {
	taken := map[string]string{}
	all, err := d.All()
	var damaged *server.DamagedError
	switch {
	case errors.As(err, &damaged):
		for _, g := range d.config.Grants {
			if g.Sized {
				taken[g.Name] = "unknown"
			}
		}
		return taken, nil
	case err != nil:
		return nil, err
	}
	for _, e := range all {
		if g, ok := d.grant(e.Value.Home); ok && g.Sized {
			if other := taken[g.Name]; other != "" {
				return nil, fmt.Errorf("sized grant %s: holds volumes %s and %s; grant it without a size", g.Name, other, e.Key.Volume)
			}
			taken[g.Name] = e.Key.Volume
		}
	}
	return taken, nil
}

// GetCapacity implements csi.ControllerServer. The available capacity counts
// each filesystem once; the largest volume of a required size is the largest
// free sized grant, or 0.
func (d *Driver) GetCapacity(ctx context.Context, req *csi.GetCapacityRequest) (*csi.GetCapacityResponse, error) {
	if err := d.CheckParameters(req.GetParameters()); err != nil {
		return nil, err
	}
	grant := req.GetParameters()[parameterGrant]
	none := &csi.GetCapacityResponse{MaximumVolumeSize: wrapperspb.Int64(0)}
	for i, c := range req.GetVolumeCapabilities() {
		name := fmt.Sprintf("volume_capabilities[%d]", i)
		if err := server.CheckCapability(name, c); err != nil {
			return nil, err
		}
		if directory.Supported(c) != "" {
			return none, nil
		}
	}
	if t := req.GetAccessibleTopology(); t != nil && !d.IsHere(t) {
		return none, nil
	}
	return shared(ctx, &d.measuring, "capacity of "+grant, func() (*csi.GetCapacityResponse, error) {
		return d.capacity(grant)
	})
}

// capacity of one grant, or of all if the name is empty.
func (d *Driver) capacity(name string) (*csi.GetCapacityResponse, error) {
	var available, largest int64
	seen := map[unix.Fsid]bool{}
	for _, g := range d.config.Grants {
		if name != "" && g.Name != name || g.Sized && d.holder(g.Name) != "" {
			continue
		}
		s, err := g.size()
		if err != nil {
			return nil, err
		}
		if g.Sized {
			largest = max(largest, s.available)
		}
		if !seen[s.id] {
			available += s.available
			seen[s.id] = true
		}
	}
	return &csi.GetCapacityResponse{AvailableCapacity: available, MaximumVolumeSize: wrapperspb.Int64(largest)}, nil
}
