package crash

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"

	"github.com/csi-prepare/csi-prepare/reference/co"
	"github.com/csi-prepare/csi-prepare/reference/mountns"
	"github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

func ownTable(ctx context.Context) (*mountns.Table, error) {
	ns, err := mountns.Own()
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	return ns.Table(ctx)
}

// isPerformed says whether a mount is at the place of a use.
func (c *Campaign) isPerformed(volumeID, prepareID string) bool {
	t, err := ownTable(context.Background())
	if err != nil {
		return false
	}
	return slices.ContainsFunc(c.uses, func(u use) bool {
		return u.VolumeID == volumeID && u.PrepareID == prepareID && len(t.At(u.Target)) > 0
	})
}

// check compares what there is with what should be, while nobody acts.
func (c *Campaign) check(ctx context.Context, when string) error {
	c.result.Runs++
	records, err := co.ReadLedger(c.dir + "/co")
	if err != nil {
		c.found(&c.result.WrongState, "%s: %v", when, err)
	}
	table, err := ownTable(ctx)
	if err != nil {
		return err
	}
	ours := map[uint64]bool{}
	performed := map[co.Key]bool{}
	for _, r := range records {
		performed[r.Key()] = true
		if r.Phase != co.Performed || len(r.Receipts) != 1 {
			c.found(&c.result.WrongState, "%s: %s is %s, with %d receipts: %s", when, r.Key(), r.Phase, len(r.Receipts), r.Error)
			continue
		}
		ours[r.Receipts[0].MountID] = true
		if at := table.At(r.Target); len(at) != 1 || at[0].ID != r.Receipts[0].MountID {
			c.found(&c.result.WrongState, "%s: %s: %v at %s, the receipt is of mount %d", when, r.Key(), at, r.Target, r.Receipts[0].MountID)
		}
	}
	changes := mountns.Diff(c.before, table)
	for _, m := range changes.Added {
		if !ours[m.ID] {
			c.found(&c.result.LeakedMounts, "%s: leaked %s", when, m)
		}
	}
	for _, m := range changes.Removed {
		c.found(&c.result.WrongState, "%s: a bystander's mount is gone: %s", when, m)
	}
	c.checkDevices(when, records)
	c.checkDirectories(when, records)
	for _, p := range c.plugins {
		for _, b := range p.calls.take() {
			c.found(&c.result.WrongState, "%s: %s", when, b)
		}
		if err := c.checkPreparations(ctx, when, p, performed); err != nil {
			return err
		}
	}
	return c.checkData(ctx, when, performed)
}

// checkPreparations compares what a plugin has prepared with the ledger.
func (c *Campaign) checkPreparations(ctx context.Context, when string, p *plugin, performed map[co.Key]bool) error {
	conn, err := p.connect()
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	var list *preparev1alpha1.NodeListPreparedVolumesResponse
	// A connection of a plugin that was killed just now may be refused once.
	for range 100 {
		list, err = preparev1alpha1.NewNodePrepareClient(conn).NodeListPreparedVolumes(ctx, &preparev1alpha1.NodeListPreparedVolumesRequest{}, grpc.WaitForReady(true))
		if err == nil || ctx.Err() != nil {
			break
		}
		time.Sleep(5 * time.Millisecond)
	}
	if err != nil {
		c.found(&c.result.Stuck, "%s: %s does not list: %v", when, p.name, err)
		return nil
	}
	has := map[co.Key]bool{}
	for _, e := range list.GetEntries() {
		k := co.Key{Driver: p.driver, VolumeID: e.GetVolumeId(), PrepareID: e.GetPrepareId()}
		has[k] = true
		if !performed[k] {
			c.found(&c.result.WrongState, "%s: %s is prepared and in no record", when, k)
		}
	}
	for k := range performed {
		if k.Driver == p.driver && !has[k] {
			c.found(&c.result.WrongState, "%s: %s is performed and not prepared", when, k)
		}
	}
	return nil
}

// loops are the loop devices of this campaign.
func (c *Campaign) loops() (files []string) {
	all, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, f := range all {
		text, err := os.ReadFile(f)
		if err == nil && strings.HasPrefix(string(text), c.dir+"/") {
			files = append(files, strings.TrimSpace(string(text)))
		}
	}
	return files
}

func (c *Campaign) checkDevices(when string, records []co.Record) {
	staged := map[string]bool{}
	for _, r := range records {
		if r.StagingPath != "" && slices.ContainsFunc(c.plugins, func(p *plugin) bool { return p.name == "block" && p.driver == r.Driver }) {
			staged[r.VolumeID] = true
		}
	}
	loops := c.loops()
	for range len(loops) - len(staged) {
		c.found(&c.result.LeakedDevices, "%s: %d loop devices for %d volumes: %v", when, len(loops), len(staged), loops)
	}
}

func (c *Campaign) checkDirectories(when string, records []co.Record) {
	want := map[string]bool{}
	for _, r := range records {
		want[r.PreparePath] = true
		want[r.StagingPath] = true
		want[filepath.Dir(r.Target)] = true
	}
	for _, dir := range []string{"co/prepare", "co/staging", "consumer"} {
		entries, err := os.ReadDir(filepath.Join(c.dir, dir))
		if err != nil {
			c.found(&c.result.WrongState, "%s: %v", when, err)
		}
		for _, e := range entries {
			if path := filepath.Join(c.dir, dir, e.Name()); !want[path] {
				c.found(&c.result.WrongState, "%s: left directory %s", when, path)
			}
		}
	}
}

// checkData reads the nonce of every volume that a consumer has, as that
// consumer, and sees that those that stay could write all the time.
func (c *Campaign) checkData(ctx context.Context, when string, performed map[co.Key]bool) error {
	for i := range c.uses {
		u := &c.uses[i]
		switch {
		case !performed[u.key()]:
			if u.Steady && c.writing {
				c.found(&c.result.WrongState, "%s: the volume of a consumer that stays is gone: %s", when, u.key())
			}
			continue
		case !c.writing:
			continue // no nonce yet, or the end
		}
		o, err := c.consumers.ask(ctx, errand{Dir: u.Target, Nonce: c.nonces[u.VolumeID]})
		if err != nil {
			c.found(&c.result.Stuck, "%s: the consumer of %s: %v", when, u.key(), err)
			return fmt.Errorf("a consumer does not answer: %w", err)
		}
		if o.Error != "" {
			c.found(&c.result.WrongState, "%s: the consumer of %s: %s", when, u.key(), o.Error)
		}
	}
	if c.writing && c.result.Runs%20 == 0 {
		c.stopWriting(ctx)
		c.write(ctx)
	}
	return nil
}

// write has the consumers that stay write all the time.
func (c *Campaign) write(ctx context.Context) {
	for _, u := range c.uses {
		if u.Steady {
			if _, err := c.consumers.ask(ctx, errand{Dir: u.Target, Write: true, Next: c.next[u.Target]}); err != nil {
				c.found(&c.result.Stuck, "a consumer does not write: %v", err)
			}
		}
	}
	c.writing = true
}

// stopWriting ends that, and counts what is missing.
func (c *Campaign) stopWriting(ctx context.Context) {
	c.result.Written = 0
	for _, u := range c.uses {
		if !u.Steady {
			continue
		}
		o, err := c.consumers.ask(ctx, errand{Dir: u.Target, Stop: true})
		if err = errors.Join(err, textError(o.Error)); err != nil {
			c.found(&c.result.WrongState, "the consumer of %s noticed: %v", u.key(), err)
		}
		if o.Lost > 0 {
			var n int
			c.found(&n, "%d bytes are lost of %s", o.Lost, u.key())
			c.result.LostBytes += o.Lost
		}
		if o.Next > 0 {
			c.next[u.Target] = o.Next
		}
		c.result.Written += 8 * c.next[u.Target]
	}
	c.writing = false
}

func textError(text string) error {
	if text == "" {
		return nil
	}
	return errors.New(text)
}
