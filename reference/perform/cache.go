package perform

import (
	"sync"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
)

// maxSources bounds the clones that are kept, each of which is a descriptor.
const maxSources = 64

// cache keeps a detached clone of each base directory. A clone has no mounts
// below it, so it must not stand in for a source that is on one of those.
type cache struct {
	// mu is held for reading while a kept clone is used.
	mu      sync.RWMutex
	kept    map[sourceKey]keptSource
	counter uint64
}

// sourceKey names a directory as seen through one mount of one namespace.
type sourceKey struct {
	mount        uint64
	major, minor uint32
	inode        uint64
}

type keptSource struct {
	fd   int
	attr uint64 // of the mount when it was cloned
	age  uint64
}

// clone makes the detached mount of a bind's source.
func (e *Executor) clone(x *performance, s *mountspec.Step, from int) (int, error) {
	if s.Recursive {
		return kernel.OpenTree(from, "", unix.OPEN_TREE_CLONE|unix.AT_RECURSIVE)
	}
	if e.cache != nil && x.f.UniqueIDs && x.f.DetachedTrees {
		fd, ok, err := e.cache.clone(x.units[s.Base].base, from, s.Text)
		if ok || err != nil {
			return fd, err
		}
	}
	return kernel.OpenTree(from, "", unix.OPEN_TREE_CLONE)
}

// clone clones the source, relative to base, out of the kept clone of base. It
// reports false where that would not be the same.
func (c *cache) clone(base, source int, relative string) (int, bool, error) {
	at, err := kernel.FactsOf(base, "", true)
	if err != nil {
		return -1, false, err
	}
	want := at
	if relative != "" {
		if want, err = kernel.FactsOf(source, "", true); err != nil {
			return -1, false, err
		}
	}
	if want.MountID != at.MountID {
		return -1, false, nil // below the base there is a mount, and it is on that
	}
	m, err := kernel.StatMount(0, at.MountID, kernel.StatBasic)
	if err != nil {
		return -1, false, err
	}
	key := sourceKey{at.MountID, at.DevMajor, at.DevMinor, at.Inode}
	fd, ok, err := c.use(key, m.Attr, want, relative)
	if ok || err != nil {
		return fd, ok, err
	}
	if err := c.keep(key, m.Attr, base); err != nil {
		return -1, false, err
	}
	return c.use(key, m.Attr, want, relative)
}

// use clones from what is kept, if it is there and leads to the wanted file.
func (c *cache) use(key sourceKey, attr uint64, want kernel.Facts, relative string) (int, bool, error) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	k, ok := c.kept[key]
	if !ok || k.attr != attr {
		return -1, false, nil
	}
	from := k.fd
	if relative != "" {
		inner, err := kernel.OpenBeneath(k.fd, relative, unix.O_PATH|unix.O_NOFOLLOW)
		if err != nil {
			return -1, false, nil
		}
		defer unix.Close(inner)
		got, err := kernel.FactsOf(inner, "", true)
		if err != nil || got.Inode != want.Inode || got.DevMajor != want.DevMajor || got.DevMinor != want.DevMinor {
			return -1, false, nil
		}
		from = inner
	}
	fd, err := kernel.OpenTree(from, "", unix.OPEN_TREE_CLONE)
	return fd, err == nil, err
}

func (c *cache) keep(key sourceKey, attr uint64, base int) error {
	fd, err := kernel.OpenTree(base, "", unix.OPEN_TREE_CLONE)
	if err != nil {
		return err
	}
	// A clone of a shared mount would be told of what is mounted there.
	if err := kernel.MountSetattr(fd, &unix.MountAttr{Propagation: unix.MS_PRIVATE}, false); err != nil {
		_ = unix.Close(fd)
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if old, ok := c.kept[key]; ok {
		_ = unix.Close(old.fd)
	} else if len(c.kept) == maxSources {
		c.evict()
	}
	if c.kept == nil {
		c.kept = map[sourceKey]keptSource{}
	}
	c.counter++
	c.kept[key] = keptSource{fd: fd, attr: attr, age: c.counter}
	return nil
}

// evict closes the oldest.
func (c *cache) evict() {
	var oldest sourceKey
	age := c.counter + 1
	for key, k := range c.kept {
		if k.age < age {
			oldest, age = key, k.age
		}
	}
	_ = unix.Close(c.kept[oldest].fd)
	delete(c.kept, oldest)
}

func (c *cache) drop() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, k := range c.kept {
		_ = unix.Close(k.fd)
	}
	clear(c.kept)
}
