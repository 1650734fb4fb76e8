package co

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/mountns"
)

// Config is what a CO is made of.
type Config struct {
	// Dir is a directory for this CO alone, made with mode 0711 if missing,
	// by its absolute path. Below it are the ledger, every staging path and
	// every prepare_path; so it has to be at the same path for the plugins.
	// The socket of the side channel is below it too, so that its path must
	// not have more than 58 bytes if FUSE or HANDLE is to be offered.
	Dir string
	// Policy is the operator's; nil is the defaults.
	Policy *Policy
	// Log gets a line for each act; nil discards. No secret is in it.
	Log *slog.Logger
	// Before, if set, is called before each step, with a name of it, and may
	// end the process: so tests kill a CO at every boundary.
	Before func(step string)
}

// CO acts for consumers of volumes on this node. Its methods may be called by
// several goroutines at once: acts for one volume wait for each other, those
// for different volumes do not. It acts in the mount namespace of the process.
type CO struct {
	dir    string
	policy *Policy
	log    *slog.Logger
	ledger *ledger
	boot   string

	volumes  flights
	children children

	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	tasks  sync.WaitGroup

	mu       sync.Mutex
	closed   bool
	plugins  map[string]*plugin  // by endpoint
	channels map[string]*channel // by plugin name
	uses     map[Key]Use         // those with a server

	before func(step string)
}

// Open takes a directory for this process. Recover should follow it, before
// anything else. Close gives the directory up.
func Open(c Config) (*CO, error) {
	if !childReady {
		return nil, errors.New("co.Child was not called: call it first thing in main")
	}
	if !cleanPath(c.Dir) {
		return nil, fmt.Errorf("directory %q: has to be an absolute path in its shortest form", c.Dir)
	}
	boot, err := bootID()
	if err != nil {
		return nil, fmt.Errorf("read the boot id: %w", err)
	}
	// A plugin may be an ordinary user, who has to get to what is its own.
	for _, sub := range []string{"", "staging", "prepare", "handoff"} {
		if err := makeDir(filepath.Join(c.Dir, sub), 0o711); err != nil {
			return nil, err
		}
	}
	l, err := openLedger(c.Dir)
	if err != nil {
		return nil, err
	}
	if c.Policy == nil {
		c.Policy = &Policy{}
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	co := &CO{
		dir: c.Dir, policy: c.Policy, log: c.Log, ledger: l, boot: boot, before: c.Before,
		plugins: map[string]*plugin{}, channels: map[string]*channel{}, uses: map[Key]Use{},
	}
	if co.before == nil {
		co.before = func(string) {}
	}
	co.ctx, co.cancel = context.WithCancel(context.Background())
	return co, nil
}

// Close ends the connections to plugins and gives the directory up, once no act
// is under way. What is performed stays: FUSE servers go on, and deposit their
// devices with the next CO.
func (c *CO) Close() error {
	c.mu.Lock()
	c.closed = true
	c.cancel()
	channels := c.channels
	c.mu.Unlock()
	var errs []error
	for _, ch := range channels {
		errs = append(errs, ch.Close())
	}
	c.tasks.Wait()
	c.children.close()
	for _, p := range c.plugins {
		errs = append(errs, p.conn.Close())
	}
	return errors.Join(append(errs, c.ledger.close())...)
}

// Records returns what the ledger says, with a *DamagedError for each record
// that cannot be read.
func (c *CO) Records() ([]Record, error) {
	records, damaged := c.ledger.all()
	var errs []error
	for _, d := range damaged {
		errs = append(errs, d)
	}
	return records, errors.Join(errs...)
}

func (c *CO) plugin(endpoint string) (*plugin, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if p := c.plugins[endpoint]; p != nil {
		return p, nil
	}
	p, err := dial(endpoint)
	if err == nil {
		c.plugins[endpoint] = p
	}
	return p, err
}

// pluginOf returns the plugin of a record, if it still is that plugin: another
// would answer OK to taking back what it never knew.
func (c *CO) pluginOf(ctx context.Context, r *Record, s *Settings) (*plugin, error) {
	p, err := c.plugin(r.Endpoint)
	if err != nil {
		return nil, err
	}
	var f *facts
	err = s.call(ctx, "discovery", func(ctx context.Context) error {
		var err error
		f, err = p.discover(ctx)
		return err
	})
	if err != nil {
		return nil, err
	}
	if f.name != r.Driver {
		return nil, fmt.Errorf("%s: plugin %q serves there now, the preparation is of %q", r.Endpoint, f.name, r.Driver)
	}
	return p, nil
}

func (c *CO) preparePath(k Key) string { return filepath.Join(c.dir, "prepare", k.position()) }
func (c *CO) stagingPath(k Key) string { return filepath.Join(c.dir, "staging", k.volume()) }

// namespaceOf opens the mount namespace with an id, nil if it is this
// process's own. One that is gone is errGone, and its mounts are gone with it.
func namespaceOf(ctx context.Context, id uint64) (*mountns.Namespace, error) {
	own, err := mountns.Own()
	if err != nil {
		return nil, err
	}
	defer own.Close()
	if own.ID() == id {
		return nil, nil
	}
	all, err := mountns.All(ctx)
	if err != nil {
		return nil, fmt.Errorf("look for mount namespace %d: %w", id, err)
	}
	var found *mountns.Namespace
	for _, ns := range all {
		if ns.ID() == id && found == nil {
			found = ns
			continue
		}
		_ = ns.Close()
	}
	if found == nil {
		return nil, errGone
	}
	return found, nil
}

var errGone = errors.New("the mount namespace is gone")

func bootID() (string, error) {
	text, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(text)), err
}

// flights lets one act at a time go on for a volume. The zero value is ready.
type flights struct {
	mu      sync.Mutex
	waiting map[string]*flight
}

type flight struct {
	turn  chan struct{}
	users int
}

// enter waits for the volume's turn, until ctx ends.
func (f *flights) enter(ctx context.Context, volume string) (leave func(), err error) {
	f.mu.Lock()
	if f.waiting == nil {
		f.waiting = map[string]*flight{}
	}
	v := f.waiting[volume]
	if v == nil {
		v = &flight{turn: make(chan struct{}, 1)}
		f.waiting[volume] = v
	}
	v.users++
	f.mu.Unlock()
	done := func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		if v.users--; v.users == 0 {
			delete(f.waiting, volume)
		}
	}
	select {
	case v.turn <- struct{}{}:
		return func() { <-v.turn; done() }, nil
	case <-ctx.Done():
		done()
		return nil, fmt.Errorf("wait for another act on the volume: %w", ctx.Err())
	}
}

// LeftoverError is a directory that was not removed: something is in it that
// nobody admits to.
type LeftoverError struct {
	Dir string
	// Mounts are below it, with the namespaces they are in.
	Mounts []FoundMount
	Err    error
}

// FoundMount is a mount and the namespace it was found in.
type FoundMount struct {
	Namespace uint64        `json:"mntns_id"`
	Mount     mountns.Mount `json:"mount"`
}

// Error says what is in the way.
func (e *LeftoverError) Error() string {
	if len(e.Mounts) == 0 {
		return fmt.Sprintf("%s is not removed: %v; see what is in it, and remove it with rmdir", e.Dir, e.Err)
	}
	texts := make([]string, len(e.Mounts))
	for i, m := range e.Mounts {
		texts[i] = fmt.Sprintf("%s in mount namespace %d", m.Mount, m.Namespace)
	}
	return fmt.Sprintf("%s is not removed: mounts are left below it: %s", e.Dir, strings.Join(texts, "; "))
}

// Unwrap returns the reason.
func (e *LeftoverError) Unwrap() error { return e.Err }

// removeDir removes one empty directory. First it looks for mounts there in
// every namespace, since rmdir(2) silently detaches those of others.
func removeDir(ctx context.Context, dir string) error {
	left, err := mountsBelow(ctx, dir)
	if err != nil {
		return fmt.Errorf("look for mounts below %s: %w", dir, err)
	}
	if len(left) > 0 {
		return &LeftoverError{Dir: dir, Mounts: left, Err: unix.EBUSY}
	}
	if err := unix.Rmdir(dir); err != nil && !errors.Is(err, unix.ENOENT) {
		return &LeftoverError{Dir: dir, Err: err}
	}
	return nil
}

// mountsBelow finds what is mounted at a path or below it, in every mount
// namespace.
func mountsBelow(ctx context.Context, path string) ([]FoundMount, error) {
	return mountsWhere(ctx, func(t *mountns.Table) []mountns.Mount { return t.Below(path) })
}

// mountsWhere finds mounts in every mount namespace.
func mountsWhere(ctx context.Context, which func(*mountns.Table) []mountns.Mount) ([]FoundMount, error) {
	all, err := mountns.All(ctx)
	if err != nil {
		return nil, err
	}
	defer mountns.CloseAll(all)
	var found []FoundMount
	for _, ns := range all {
		t, err := ns.Table(ctx)
		if err != nil {
			return nil, err
		}
		for _, m := range which(t) {
			found = append(found, FoundMount{ns.ID(), m})
		}
	}
	return found, nil
}
