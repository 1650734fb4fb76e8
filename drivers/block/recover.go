package block

import (
	"context"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/drivers/server"
)

// recover ends what an earlier process of this boot left in the middle of a
// call: its loop devices, which are on record. What cannot be ended now stays
// on record, for a call of the CO or the next start.
func (d *Driver) recover(ctx context.Context) {
	d.recoverStages(ctx)
	d.recoverUses(ctx)
	d.recoverStrays(ctx)
	d.recoverSizes()
}

// instance is the record of what tells this driver from another one.
type instance struct {
	Owner string `json:"owner"`
}

// identify reads, or chooses for ever, the owner of this driver's devices.
func (d *Driver) identify() error {
	r, err := server.OpenRecords[instance](d.state, "instance")
	if err != nil {
		return err
	}
	i, known, err := r.Get(server.Key{})
	if err == nil && !known {
		i.Owner = newID()[:16]
		err = r.Put(server.Key{}, i)
	}
	d.owner = i.Owner
	return err
}

// recoverStrays ends the loop devices of this driver that no record has: those
// of what was taken for another boot, or of records that were removed. One
// that is in use stays, and its volume is refused until it is not.
func (d *Driver) recoverStrays(ctx context.Context) {
	recorded, err := d.marks()
	if err != nil {
		return // that a record is damaged was logged
	}
	owned, err := d.nodes.Owned(d.owner)
	if err != nil {
		d.log.Error("loop devices cannot be looked through", "error", err)
		return
	}
	for _, l := range owned {
		if recorded[l.Mark] {
			continue
		}
		if err := d.nodes.Detach(ctx, l); err != nil {
			d.log.Error("a loop device that no record has cannot be ended", "error", err)
			continue
		}
		d.log.Info("ended a loop device that no record has", "was", l.Number)
	}
}

func (d *Driver) recoverStages(ctx context.Context) {
	stages, err := d.stages.All()
	if err != nil {
		d.log.Error("stages cannot be looked through", "error", err)
		return
	}
	for _, s := range stages {
		if s.Value.Done {
			if s.Value.Loop == nil {
				continue
			}
			if there, err := d.nodes.Attached(*s.Value.Loop); err != nil || !there {
				d.log.Warn("the loop device of a staged volume is gone; it is attached anew when the volume is prepared or staged", "volume_id", s.Key.Volume, "error", err)
			}
			continue
		}
		if err := d.endStage(ctx, s.Key, s.Value); err != nil {
			d.log.Error("a stage that was cut off cannot be ended", "volume_id", s.Key.Volume, "error", err)
			continue
		}
		d.log.Info("ended a stage that was cut off", "volume_id", s.Key.Volume)
	}
}

func (d *Driver) recoverUses(ctx context.Context) {
	uses, err := d.uses.All()
	if err != nil {
		d.log.Error("uses cannot be looked through", "error", err)
		return
	}
	for _, u := range uses {
		prepared, err := d.preparations.PreparedAs(u.Key.Volume, u.Key.Name)
		if err != nil || prepared {
			continue // the CO repeats its call, or calls Unprepare
		}
		if err := d.release(ctx, u.Key.Volume, u.Key.Name); err != nil {
			d.log.Error("a device that no preparation has cannot be ended", "volume_id", u.Key.Volume, "prepare_id", u.Key.Name, "error", err)
		}
	}
}

// recoverSizes records the size of files whose expansion was cut off after
// they had it.
func (d *Driver) recoverSizes() {
	volumes, err := d.volumes.All()
	if err != nil || d.files == nil {
		return
	}
	for _, e := range volumes {
		if e.Value.Phase != ready || e.Value.Inode == 0 {
			continue
		}
		f, err := d.files.open(volumeFiles, e.Key.Volume, e.Value.Inode, unix.O_RDONLY)
		if err != nil {
			d.log.Error("the file of a volume cannot be opened", "volume_id", e.Key.Volume, "error", err)
			continue
		}
		info, err := f.Stat()
		_ = f.Close()
		if err == nil && info.Size() > e.Value.Capacity {
			e.Value.Capacity = info.Size()
			err = d.volumes.Put(e.Key, e.Value)
		}
		if err != nil {
			d.log.Error("the size of a volume cannot be recorded", "volume_id", e.Key.Volume, "error", err)
		}
	}
}
