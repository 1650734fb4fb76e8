package co

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sync/errgroup"

	"github.com/csi-prepare/csi-prepare/reference/mountns"
	"github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// Recovered is what Recover found and did.
type Recovered struct {
	// Kept are preparations that are wholly performed.
	Kept []Key
	// Taken are those of which nothing is left now: they were interrupted,
	// or of another boot, or their consumer's mounts were gone.
	Taken []Key
	// Orphans are preparations that the plugin had and the ledger did not,
	// and that the plugin has taken back.
	Orphans []Key
}

// Recover follows Open after a crash or a reboot. It brings every preparation
// of the ledger to wholly performed or to nothing left, and has the plugins
// take back the preparations of this CO that the ledger does not know. It
// takes nothing for granted but the ledger, the mount tables and the plugins'
// answers, and touches nothing that is not in them.
//
// The error joins one for each preparation that could not be taken back yet,
// each record that cannot be read, and each plugin that could not be asked; all
// others are recovered all the same, and Recover may be called again.
// Endpoints are those of plugins to ask besides the ones in the ledger.
func (c *CO) Recover(ctx context.Context, endpoints ...string) (*Recovered, error) {
	records, damaged := c.ledger.all()
	attachedNow, err := mountsOfAll(ctx)
	if err != nil {
		return nil, fmt.Errorf("recover: %w", err)
	}
	var (
		mu   sync.Mutex
		done Recovered
		errs []error
	)
	for _, d := range damaged {
		errs = append(errs, d)
	}
	note := func(keys *[]Key, k Key, err error) {
		mu.Lock()
		defer mu.Unlock()
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", k, err))
			return
		}
		*keys = append(*keys, k)
	}
	var g errgroup.Group
	g.SetLimit(16)
	for _, r := range records {
		k := r.Key()
		if !slices.Contains(endpoints, r.Endpoint) {
			endpoints = append(endpoints, r.Endpoint)
		}
		if r.BootID == c.boot && r.Phase == Performed && attached(&r, attachedNow[r.Receipts[0].MntnsID]) {
			note(&done.Kept, k, nil)
			continue
		}
		g.Go(func() error {
			note(&done.Taken, k, c.Down(ctx, k))
			return nil
		})
	}
	_ = g.Wait()
	for _, endpoint := range endpoints {
		orphans, err := c.takeOrphans(ctx, endpoint)
		done.Orphans = append(done.Orphans, orphans...)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", endpoint, err))
		}
	}
	return &done, errors.Join(errs...)
}

// mountsOfAll lists the mounts of every namespace by its id.
func mountsOfAll(ctx context.Context) (map[uint64][]uint64, error) {
	s, err := mountns.TakeSnapshot(ctx)
	if err != nil {
		return nil, err
	}
	all := make(map[uint64][]uint64, len(s.Namespaces))
	for _, ns := range s.Namespaces {
		all[ns.ID] = ns.Mounts
	}
	return all, nil
}

// takeOrphans has a plugin take back the preparations below this CO's own
// directory that no record is of, a damaged one included.
func (c *CO) takeOrphans(ctx context.Context, endpoint string) (taken []Key, err error) {
	p, err := c.plugin(endpoint)
	if err != nil {
		return nil, err
	}
	s := c.policy.For("")
	var f *facts
	err = s.call(ctx, "discovery", func(ctx context.Context) (err error) {
		f, err = p.discover(ctx)
		return err
	})
	if err != nil {
		return nil, err
	}
	s = c.policy.For(f.name)
	entries, err := s.list(ctx, p)
	if err != nil {
		return nil, err
	}
	var errs []error
	for _, e := range entries {
		k := Key{f.name, e.GetVolumeId(), e.GetPrepareId()}
		if filepath.Clean(e.GetPreparePath()) != c.preparePath(k) {
			continue // another CO's
		}
		switch took, err := c.takeOrphan(ctx, k, p, &s, e); {
		case err != nil:
			errs = append(errs, fmt.Errorf("%s: %w", k, err))
		case took:
			taken = append(taken, k)
		}
	}
	return taken, errors.Join(errs...)
}

func (c *CO) takeOrphan(ctx context.Context, k Key, p *plugin, s *Settings, e *preparev1alpha1.NodeListPreparedVolumesResponse_Entry) (bool, error) {
	leave, err := c.volumes.enter(ctx, k.volume())
	if err != nil {
		return false, err
	}
	defer leave()
	// A damaged record is reported as such; what it was of is not known.
	if r, err := c.ledger.get(k); r != nil || err != nil {
		return false, nil
	}
	lock, err := c.hold(ctx, k)
	if err != nil {
		return false, err
	}
	defer lock.Close()
	a := &act{CO: c, lock: lock, s: *s, r: &Record{
		BootID: c.boot, Driver: k.Driver, Endpoint: p.endpoint, VolumeID: k.VolumeID, PrepareID: k.PrepareID,
		PreparePath: c.preparePath(k), Phase: Unpreparing, Error: "the plugin had it and the ledger did not",
	}}
	if e.GetStagingTargetPath() == c.stagingPath(k) {
		a.r.StagingPath = c.stagingPath(k)
	}
	living, err := c.living(ctx, a.r)
	if err != nil || len(living) > 0 {
		return false, errors.Join(err, &LivingError{k, living})
	}
	return true, a.takeBack(ctx)
}

// LivingError is a preparation that the plugin has and the ledger does not, and
// whose volume some consumer may have: it is left alone.
type LivingError struct {
	Key    Key
	Mounts []FoundMount
}

// Error says what to do.
func (e *LivingError) Error() string {
	where := make([]string, len(e.Mounts))
	for i, m := range e.Mounts {
		where[i] = fmt.Sprintf("%s in mount namespace %d", m.Mount, m.Namespace)
	}
	return fmt.Sprintf("%s: its record is lost, and mounts of its filesystem are left: %s; unmount them, and recover again", e.Key, strings.Join(where, "; "))
}

// living finds mounts of the filesystems that the plugin has mounted for a
// preparation, elsewhere than in this CO's directory, and of no record.
func (c *CO) living(ctx context.Context, r *Record) ([]FoundMount, error) {
	type device struct{ major, minor uint32 }
	own := map[device]bool{}
	recorded := map[uint64]bool{}
	records, _ := c.ledger.all()
	for _, o := range records {
		for _, receipt := range o.Receipts {
			recorded[receipt.MountID] = true
		}
	}
	for _, dir := range []string{r.StagingPath, r.PreparePath} {
		if dir == "" {
			continue
		}
		below, err := mountsBelow(ctx, dir)
		if err != nil {
			return nil, err
		}
		for _, m := range below {
			own[device{m.Mount.Major, m.Mount.Minor}] = true
		}
	}
	if len(own) == 0 {
		return nil, nil
	}
	return mountsWhere(ctx, func(t *mountns.Table) (found []mountns.Mount) {
		for _, m := range t.Mounts {
			if own[device{m.Major, m.Minor}] && !recorded[m.ID] && !strings.HasPrefix(m.Point, c.dir+"/") {
				found = append(found, m)
			}
		}
		return found
	})
}

// list asks for all preparations of a plugin.
func (s *Settings) list(ctx context.Context, p *plugin) ([]*preparev1alpha1.NodeListPreparedVolumesResponse_Entry, error) {
	var all []*preparev1alpha1.NodeListPreparedVolumesResponse_Entry
	for token, seen := "", map[string]bool{}; ; {
		var page *preparev1alpha1.NodeListPreparedVolumesResponse
		err := s.call(ctx, "NodeListPreparedVolumes", func(ctx context.Context) (err error) {
			page, err = p.prepare.NodeListPreparedVolumes(ctx, &preparev1alpha1.NodeListPreparedVolumesRequest{StartingToken: token})
			return err
		})
		if err != nil {
			return nil, err
		}
		all = append(all, page.GetEntries()...)
		token = page.GetNextToken()
		if token == "" || seen[token] {
			return all, nil
		}
		seen[token] = true
	}
}
