package block

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/csi-prepare/csi-prepare/drivers/block/device"
	"github.com/csi-prepare/csi-prepare/drivers/block/filesystem"
	"github.com/csi-prepare/csi-prepare/drivers/server"
)

// Disk is a real device that may become a volume.
type Disk struct {
	// Name of 1 to 63 bytes of [a-z0-9-]; what records know it by.
	Name string
	// Path at which the device is looked for, which may be a link. What is
	// found there is compared with what the volume was created on.
	Path string
}

// disk is the record of the disk that is a volume.
type disk struct {
	Name     string          `json:"name"`
	Identity device.Identity `json:"identity"`
	// Boot in which it was identified.
	Boot string `json:"boot"`
}

var diskName = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)

func checkDisks(disks []Disk) error {
	var err error
	seen := map[string]bool{}
	for _, k := range disks {
		switch {
		case !diskName.MatchString(k.Name):
			err = errors.Join(err, fmt.Errorf("disk %q: its name needs 1 to 63 bytes of [a-z0-9-]", k.Name))
		case seen[k.Name]:
			err = errors.Join(err, fmt.Errorf("disk %s: is named twice", k.Name))
		case !filepath.IsAbs(k.Path):
			err = errors.Join(err, fmt.Errorf("disk %s: %q is not an absolute path", k.Name, k.Path))
		}
		seen[k.Name] = true
	}
	return err
}

// locate finds the disk of a volume, wherever it is by now.
func (d *Driver) locate(k disk) (device.Identity, error) {
	i := slices.IndexFunc(d.config.Disks, func(c Disk) bool { return c.Name == k.Name })
	if i < 0 {
		return device.Identity{}, status.Errorf(codes.FailedPrecondition, "volume_id: the volume is disk %s, which this driver was not given; start it with --disk %s=PATH", k.Name, k.Name)
	}
	path := d.config.Disks[i].Path
	now, err := d.nodes.Identify(path)
	if err != nil {
		return now, status.Errorf(codes.FailedPrecondition, "volume_id: disk %s cannot be found: %v", k.Name, err)
	}
	if !k.Identity.Same(now, k.Boot == d.config.BootID) {
		return now, status.Errorf(codes.FailedPrecondition, "volume_id: what is at %s is not, or cannot be known to be, the disk %s the volume was created on; let the path lead to that one", path, k.Name)
	}
	return now, nil
}

// takenDisks are the names of the disks that are volumes.
func (d *Driver) takenDisks() (map[string]bool, error) {
	all, err := d.volumes.All()
	taken := map[string]bool{}
	for _, e := range all {
		if e.Value.Disk != nil {
			taken[e.Value.Disk.Name] = true
		}
	}
	return taken, err
}

// freeDisks are the disks that are no volume, smallest first, and why others
// that could be are not there.
func (d *Driver) freeDisks() (free []disk, missing []error, err error) {
	taken, err := d.takenDisks()
	if err != nil {
		return nil, nil, err
	}
	for _, c := range d.config.Disks {
		if taken[c.Name] {
			continue
		}
		id, err := d.nodes.Identify(c.Path)
		if err != nil {
			missing = append(missing, fmt.Errorf("disk %s: %w", c.Name, err))
			continue
		}
		free = append(free, disk{Name: c.Name, Identity: id, Boot: d.config.BootID})
	}
	slices.SortStableFunc(free, func(a, b disk) int { return cmp.Compare(a.Identity.Size, b.Identity.Size) })
	return free, missing, nil
}

// createDisk takes the smallest disk that fits, is blank and used by nobody.
func (d *Driver) createDisk(ctx context.Context, e volumeEntry, r *csi.CapacityRange) (volumeEntry, error) {
	d.placing.Lock()
	defer d.placing.Unlock()
	free, reasons, err := d.freeDisks()
	if err != nil {
		return e, err
	}
	for _, k := range free {
		if !within(r, k.Identity.Size) {
			continue
		}
		if err := d.proveFree(ctx, k); err != nil {
			reasons = append(reasons, fmt.Errorf("disk %s: %w", k.Name, err))
			continue
		}
		e.Value.Disk, e.Value.Capacity = &k, k.Identity.Size
		if err := d.volumes.Put(e.Key, e.Value); err != nil {
			return e, also(err, d.volumes.Delete(e.Key))
		}
		return e, d.ready(&e)
	}
	if len(reasons) > 0 {
		return e, status.Errorf(codes.ResourceExhausted, "no disk is free: %s", strings.ReplaceAll(errors.Join(reasons...).Error(), "\n", "; "))
	}
	return e, status.Error(codes.OutOfRange, "capacity_range: no free disk is of such a size; GetCapacity tells the largest")
}

func (d *Driver) proveFree(ctx context.Context, k disk) error {
	dev, err := d.nodes.Claim(k.Identity.Number, unix.O_RDONLY)
	if err != nil {
		return err
	}
	defer dev.Close()
	return filesystem.ProveBlank(ctx, dev, nil)
}

// releaseDisk sees that nobody uses the disk of a volume, and that what was
// written is on it.
func (d *Driver) releaseDisk(e volumeEntry) error {
	id, err := d.locate(*e.Value.Disk)
	if err != nil {
		return err
	}
	dev, err := d.nodes.Claim(id.Number, unix.O_RDWR)
	if err != nil {
		return err
	}
	defer dev.Close()
	return dev.Sync()
}

// eraseDisk makes a disk blank for the volume after this one.
func (d *Driver) eraseDisk(ctx context.Context, k disk) error {
	id, err := d.locate(k)
	if err != nil {
		return err
	}
	dev, err := d.nodes.Claim(id.Number, unix.O_RDWR)
	if err != nil {
		return err
	}
	defer dev.Close()
	before("erase")
	return filesystem.Erase(ctx, dev)
}

func (d *Driver) diskCapacity() (*csi.GetCapacityResponse, error) {
	free, _, err := d.freeDisks()
	if err != nil {
		return nil, server.Status(err)
	}
	resp := &csi.GetCapacityResponse{MaximumVolumeSize: wrapperspb.Int64(0)}
	for _, k := range free {
		resp.AvailableCapacity += k.Identity.Size
		resp.MaximumVolumeSize.Value = max(resp.MaximumVolumeSize.Value, k.Identity.Size)
	}
	return resp, nil
}
