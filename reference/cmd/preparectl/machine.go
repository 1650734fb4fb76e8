package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/mountns"
)

// machine is the mount tables of all namespaces, read once.
type machine struct {
	spaces []space // the own one first
	// partial says why only the own namespace was read, "" if all were.
	partial string
}

// space is one mount namespace.
type space struct {
	ID, Inode uint64
	Table     *mountns.Table
}

// placed is a mount and the namespace it is in.
type placed struct {
	Namespace uint64        `json:"mntns_id"`
	Mount     mountns.Mount `json:"mount"`
}

// readMachine needs root; others see their own namespace.
func readMachine(ctx context.Context) (*machine, error) {
	own, err := mountns.Own()
	if err != nil {
		return nil, err
	}
	defer own.Close()
	settle(own)
	all, err := mountns.All(ctx)
	m := &machine{}
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES) {
		m.partial = "other mount namespaces cannot be seen without root"
		all, err = nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer mountns.CloseAll(all)
	if err := m.add(ctx, own); err != nil {
		return nil, err
	}
	for _, ns := range all {
		if ns.ID() == own.ID() {
			continue
		}
		if err := m.add(ctx, ns); err != nil {
			return nil, err
		}
	}
	return m, nil
}

// settle waits until no thread of this process is in another namespace: the
// probe of the kernel has tried things in one, with copies of all mounts.
func settle(own *mountns.Namespace) {
	for range 200 {
		links, _ := filepath.Glob("/proc/self/task/*/ns/mnt")
		elsewhere := slices.ContainsFunc(links, func(link string) bool {
			name, err := os.Readlink(link)
			return err == nil && name != own.String()
		})
		if !elsewhere {
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func (m *machine) add(ctx context.Context, ns *mountns.Namespace) error {
	t, err := ns.Table(ctx)
	if err == nil {
		m.spaces = append(m.spaces, space{ns.ID(), ns.Inode(), t})
	}
	return err
}

func (m *machine) own() *space { return &m.spaces[0] }

// space returns the namespace with an id, nil if it is gone.
func (m *machine) space(id uint64) *space {
	for i := range m.spaces {
		if m.spaces[i].ID == id {
			return &m.spaces[i]
		}
	}
	return nil
}

// where finds mounts in all namespaces.
func (m *machine) where(which func(*mountns.Table) []mountns.Mount) (found []placed) {
	for i := range m.spaces {
		for _, mount := range which(m.spaces[i].Table) {
			found = append(found, placed{m.spaces[i].ID, mount})
		}
	}
	return found
}

// on finds what is mounted on a directory of the own namespace or below it, in
// all namespaces, wherever the directory is in those: a directory is one of a
// filesystem, and rmdir(2) detaches what others have mounted on it.
func (m *machine) on(dir string) []placed {
	found := map[uint64]bool{}
	all := m.where(func(t *mountns.Table) []mountns.Mount { return t.Below(dir) })
	for _, p := range all {
		found[p.Mount.ID] = true
	}
	in, known := covering(m.own().Table, dir)
	if !known {
		return all
	}
	inFS := path.Join(in.Root, strings.TrimPrefix(dir, in.Point))
	return append(all, m.where(func(t *mountns.Table) (more []mountns.Mount) {
		for _, mount := range t.Mounts {
			parent, known := t.ByID(mount.ParentID)
			if found[mount.ID] || !known || parent.ID == mount.ID || parent.Major != in.Major || parent.Minor != in.Minor {
				continue
			}
			if below(path.Join(parent.Root, strings.TrimPrefix(mount.Point, parent.Point)), inFS) {
				more = append(more, mount)
			}
		}
		return more
	})...)
}

// covering returns the mount that a path leads into, as the table tells it.
func covering(t *mountns.Table, path string) (mountns.Mount, bool) {
	for at := path; ; {
		if m, found := t.Top(at); found {
			return m, true
		}
		if at == "/" {
			return mountns.Mount{}, false
		}
		cut := strings.LastIndexByte(at, '/')
		at = at[:max(cut, 1)]
	}
}

// namespaceOf opens the mount namespace of a process, the own one for 0.
func namespaceOf(pid int) (*mountns.Namespace, error) {
	if pid == 0 {
		return mountns.Own()
	}
	return mountns.OfPID(pid)
}

// uses looks at all processes, and leaves out one that does not answer once
// the others have: silent says how many and which.
func uses(ctx context.Context, match func(*mountns.Use) bool) (found []mountns.Use, silent string, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var last atomic.Int64
	last.Store(time.Now().UnixNano())
	go func() {
		for tick := time.NewTicker(patience / 4); ; {
			select {
			case <-ctx.Done():
				tick.Stop()
				return
			case <-tick.C:
				if time.Since(time.Unix(0, last.Load())) > patience {
					cancel()
				}
			}
		}
	}()
	found, err = mountns.Uses(ctx, func(u *mountns.Use) bool {
		last.Store(time.Now().UnixNano())
		return match(u)
	})
	if errors.Is(err, context.Canceled) {
		return found, err.Error(), nil
	}
	return found, "", err
}

var (
	containerID = regexp.MustCompile(`[0-9a-f]{64}`)
	podUID      = regexp.MustCompile(`pod([0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12})`)
)

// containerOf tells from a process's cgroup which container it is in, as far
// as runtimes name cgroups so that it can be told.
func containerOf(pid int) string {
	text, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/cgroup")
	if err != nil {
		return ""
	}
	return containerIn(string(text))
}

func containerIn(cgroup string) string {
	var parts []string
	if m := podUID.FindStringSubmatch(cgroup); m != nil {
		parts = append(parts, "pod "+strings.ReplaceAll(m[1], "_", "-"))
	}
	if id := containerID.FindString(cgroup); id != "" {
		parts = append(parts, "container "+id[:12])
	}
	return strings.Join(parts, ", ")
}

// device is a block device number.
type device struct{ Major, Minor uint32 }

// String is "7:0".
func (d device) String() string { return fmt.Sprintf("%d:%d", d.Major, d.Minor) }

// parseDevice reads "7:0".
func parseDevice(text string) (device, bool) {
	major, minor, found := strings.Cut(text, ":")
	ma, err1 := strconv.ParseUint(major, 10, 32)
	mi, err2 := strconv.ParseUint(minor, 10, 32)
	return device{uint32(ma), uint32(mi)}, found && err1 == nil && err2 == nil
}
