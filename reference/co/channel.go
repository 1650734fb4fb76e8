package co

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/fusemount"
	"github.com/csi-prepare/csi-prepare/reference/handoff"
	"github.com/csi-prepare/csi-prepare/reference/kernel"
	"github.com/csi-prepare/csi-prepare/reference/mountns"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
	"github.com/csi-prepare/csi-prepare/reference/perform"
)

// handed are the kinds whose mounts cross the side channel.
var handed = []mountspec.KindName{mountspec.KindHandle, mountspec.KindFUSE}

// handsOver says that a plugin may be offered one of those kinds, here: a
// mount that is in no namespace can be cloned since Linux 6.15 only.
func (s *Settings) handsOver() bool {
	f := kernel.Probe()
	return f.DetachedClone && f.Statmount && slices.ContainsFunc(s.Kinds, func(k mountspec.KindName) bool { return slices.Contains(handed, k) })
}

// channel is the side channel to one plugin.
type channel struct {
	*handoff.Listener
	owner owner
}

// owner is the user a plugin runs as, to whom its directories belong.
type owner struct{ uid, gid int }

// ownerOf is what the operator says, or else who answers the endpoint.
func (s *Settings) ownerOf(p *plugin) owner {
	o := p.listener()
	if s.PluginUID != nil {
		o.uid = int(*s.PluginUID)
	}
	if s.PluginGID != nil {
		o.gid = int(*s.PluginGID)
	}
	return o
}

// channelTo opens the side channel to a plugin, or returns nil if it is offered
// no kind that needs one. One that cannot be opened is no reason to refuse the
// plugin the other kinds.
func (c *CO) channelTo(p *plugin, driver string, s *Settings) *channel {
	if !s.handsOver() {
		return nil
	}
	o := s.ownerOf(p)
	c.mu.Lock()
	defer c.mu.Unlock()
	old := c.channels[driver]
	if old != nil && old.owner == o || c.closed {
		return old
	}
	if old != nil { // another process listens at the endpoint now
		_ = old.Close()
	}
	l, err := handoff.Listen(handoff.Config{
		Directory: filepath.Join(c.dir, "handoff", digest(driver)[:16]), UID: o.uid, GID: o.gid,
		Mount: fusemount.Policy{MaxRead: s.FUSEMaxRead, ServerPermissions: s.FUSEServerPermissions}.Mount,
		Adopt: func(ctx context.Context, k handoff.Key, _ string, device *os.File) (*os.File, error) {
			return c.adopt(ctx, Key{driver, k.VolumeID, k.PrepareID}, device)
		},
		Abort: fusemount.Abort,
		Gone:  func(n handoff.Notice) { c.serverGone(driver, n) },
		Step:  time.Duration(s.StepDeadline), Failover: time.Duration(s.Failover), Log: c.log,
	})
	if err != nil {
		c.log.Warn("no side channel: HANDLE and FUSE are not offered", "plugin", driver, "error", err)
		delete(c.channels, driver)
		return nil
	}
	c.channels[driver] = &channel{l, o}
	return c.channels[driver]
}

// release lets go of what is held for a preparation, so that its server sees
// the end of the last mount.
func (c *CO) release(k Key) {
	c.mu.Lock()
	ch := c.channels[k.Driver]
	delete(c.uses, k)
	c.mu.Unlock()
	if ch != nil {
		ch.Release(k.handoff())
	}
}

func (k Key) handoff() handoff.Key { return handoff.Key{VolumeID: k.VolumeID, PrepareID: k.PrepareID} }

// adopt finds the mount of a device that a server deposits, where this CO's
// predecessor attached it for the consumer.
func (c *CO) adopt(ctx context.Context, k Key, device *os.File) (*os.File, error) {
	r, err := c.ledger.get(k)
	if err != nil {
		return nil, err
	}
	if r == nil || r.BootID != c.boot {
		return nil, errors.New("no preparation of this boot")
	}
	for _, receipt := range r.Receipts {
		// A path that asks a server is not walked here: it could not be left.
		if receipt.Kind != mountspec.KindFUSE || receipt.Remote {
			continue
		}
		ns, err := namespaceOf(ctx, receipt.MntnsID)
		if err != nil {
			return nil, err
		}
		mount, err := cloneAttached(ctx, ns, &receipt)
		if ns != nil {
			_ = ns.Close()
		}
		if err != nil {
			return nil, err
		}
		if same, err := fusemount.Same(device, mount); err == nil && same {
			return mount, nil
		}
		_ = mount.Close()
	}
	return nil, errors.New("the device is of no mount that is attached for the preparation")
}

// cloneAttached clones the very mount that a receipt is of.
func cloneAttached(ctx context.Context, ns *mountns.Namespace, receipt *perform.Receipt) (*os.File, error) {
	clone := -1
	do := func() error {
		fd, err := kernel.OpenTree(unix.AT_FDCWD, receipt.Target, unix.AT_SYMLINK_NOFOLLOW)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		if id, err := kernel.UniqueID(fd, ""); err != nil || id != receipt.MountID {
			return errors.Join(err, fmt.Errorf("mount %d is on %s, not mount %d", id, receipt.Target, receipt.MountID))
		}
		clone, err = kernel.OpenTree(fd, "", unix.OPEN_TREE_CLONE)
		return err
	}
	var err error
	if ns == nil {
		err = do()
	} else {
		err = ns.Do(ctx, do)
	}
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(clone), "adopted"), nil
}

// remember keeps a use with a server in memory, secrets included, since its
// preparation has to be repeated when that server dies.
func (c *CO) remember(k Key, u *Use) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.closed {
		c.uses[k] = *u
	}
}

// serverGone repeats the preparation of a FUSE mount whose server is gone: a
// successor resumes the connection before its deadline, or serves a new mount,
// which is attached in the place of the dead one.
func (c *CO) serverGone(driver string, n handoff.Notice) {
	k := Key{driver, n.Key.VolumeID, n.Key.PrepareID}
	c.mu.Lock()
	u, known := c.uses[k]
	if !known || c.closed {
		c.mu.Unlock()
		return
	}
	c.tasks.Add(1)
	c.mu.Unlock()
	defer c.tasks.Done()
	ctx := c.ctx
	if n.Until.IsZero() {
		c.log.Warn("the server of a volume is gone", "preparation", k.String(), "error", n.Err)
	} else {
		c.log.Warn("the server of a volume is away", "preparation", k.String(), "until", n.Until)
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadline(ctx, n.Until)
		defer cancel()
	}
	s := c.policy.For(driver)
	err := s.repeat(ctx, func(error) bool { return true }, func(ctx context.Context) error { return c.again(ctx, k, &u) })
	if err != nil {
		c.log.Warn("no server yet", "preparation", k.String(), "error", masked(err, u.hidden(nil)))
	}
}

// again repeats the preparation of a consumer that has the volume, if it still
// does.
func (c *CO) again(ctx context.Context, k Key, u *Use) error {
	leave, err := c.volumes.enter(ctx, k.volume())
	if err != nil {
		return err
	}
	defer leave()
	r, err := c.ledger.get(k)
	if r == nil || err != nil {
		return err
	}
	lock, err := c.hold(ctx, k)
	if err != nil {
		return err
	}
	defer lock.Close()
	a := &act{CO: c, lock: lock, r: r, s: c.policy.For(k.Driver), hidden: u.hidden(nil)}
	if whole, err := c.whole(ctx, r); !whole || err != nil {
		return err
	}
	p, err := c.pluginOf(ctx, r, &a.s)
	if err != nil {
		return err
	}
	_, err = a.refresh(ctx, u, p)
	return err
}
