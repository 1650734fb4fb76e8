package mountns

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
)

// All opens every mount namespace of the machine, in order of ID: also those
// without a process, held by nothing but an open file or a file they are bound
// to. The caller closes each, soon, because as long as it is open a namespace
// and its mounts cannot go away; [CloseAll] does it.
//
// It needs CAP_SYS_ADMIN in the initial user namespace. Where the kernel cannot
// list its namespaces (before 6.12, or without that privilege) they are looked
// for in /proc: the namespaces of all threads, those that a process has open,
// and those bound to a path that can be walked to. That costs a thousand times
// more, ends at the PID namespace of /proc, and misses a namespace held by a
// message in a socket or by a bind that something is mounted over. There a
// process that hangs while it executes a program makes the search wait until
// ctx ends, with an error that names it.
func All(ctx context.Context) ([]*Namespace, error) { return all(ctx, kernel.Probe()) }

func all(ctx context.Context, f kernel.Features) ([]*Namespace, error) {
	if !f.NSWalk || !f.ListmountByNS {
		return allFromProc(ctx, f)
	}
	var found []*Namespace
	err := walk(ctx, func(fd int, _ kernel.NSInfo) error {
		dup, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			return os.NewSyscallError("fcntl", err)
		}
		n, err := adopt(dup, "namespace", f)
		if err != nil {
			return err
		}
		found = append(found, n)
		return nil
	})
	if err != nil {
		CloseAll(found)
		return nil, fmt.Errorf("mountns: namespaces of the machine: %w", err)
	}
	slices.SortFunc(found, func(a, b *Namespace) int { return compareIDs(a.id, b.id) })
	return found, nil
}

// CloseAll closes namespaces.
func CloseAll(namespaces []*Namespace) {
	for _, n := range namespaces {
		_ = n.Close()
	}
}

// walk visits every mount namespace, its own first, then downwards, then
// upwards. fd is closed when visit returns.
func walk(ctx context.Context, visit func(fd int, info kernel.NSInfo) error) error {
	own, err := unix.Open(ownLink, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: ownLink, Err: err}
	}
	defer unix.Close(own)
	info, err := kernel.NSStat(own)
	if err != nil {
		return err
	}
	if err := visit(own, info); err != nil {
		return err
	}
	if err := walkFrom(ctx, own, kernel.PrevNS, visit); err != nil {
		return err
	}
	return walkFrom(ctx, own, kernel.NextNS, visit)
}

func walkFrom(ctx context.Context, own int, step func(int) (int, kernel.NSInfo, error), visit func(int, kernel.NSInfo) error) error {
	at := own
	defer func() {
		if at != own {
			_ = unix.Close(at)
		}
	}()
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		next, info, err := step(at)
		if errors.Is(err, unix.ENOENT) {
			return nil
		}
		if err != nil {
			return err
		}
		if at != own {
			_ = unix.Close(at)
		}
		at = next
		if err := visit(next, info); err != nil {
			return err
		}
	}
}

// search is the walk through /proc, keyed by inode.
type search struct {
	features kernel.Features
	mu       sync.Mutex
	found    map[uint64]*Namespace
}

func allFromProc(ctx context.Context, f kernel.Features) ([]*Namespace, error) {
	s := search{features: f, found: map[uint64]*Namespace{}}
	_, err := eachProcess(ctx, s.process)
	if err == nil {
		err = s.binds(ctx)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	namespaces := slices.SortedFunc(seqOf(s.found), func(a, b *Namespace) int { return compareIDs(a.id, b.id) })
	if err != nil {
		CloseAll(namespaces)
		s.found = nil // what is still under way has nowhere to go
		return nil, fmt.Errorf("mountns: namespaces of the machine: %w", err)
	}
	return namespaces, nil
}

func seqOf(found map[uint64]*Namespace) iter.Seq[*Namespace] {
	return func(yield func(*Namespace) bool) {
		for _, n := range found {
			if !yield(n) {
				return
			}
		}
	}
}

// process looks at what the threads of a process are in and what it has open.
// What ends meanwhile is passed over.
func (s *search) process(pid string) struct{} {
	dir := filepath.Join("/proc", pid)
	tids, _ := entries(filepath.Join(dir, "task"))
	for _, tid := range tids {
		s.link(filepath.Join(dir, "task", tid, "ns/mnt"))
	}
	fds, _ := entries(filepath.Join(dir, "fd"))
	for _, fd := range fds {
		s.link(filepath.Join(dir, "fd", fd))
	}
	return struct{}{}
}

// link adds the namespace a link of /proc leads to, if it is one and is new.
func (s *search) link(path string) {
	text, err := os.Readlink(path)
	if err != nil {
		return
	}
	if inode, ok := namespaceName(text); ok && !s.has(inode) {
		if n, err := openPath(path, s.features); err == nil {
			s.add(n)
		}
	}
}

func (s *search) has(inode uint64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.found[inode] != nil
}

// add keeps a namespace that is new and closes any other.
func (s *search) add(n *Namespace) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.found == nil || s.found[n.inode] != nil {
		_ = n.Close()
		return false
	}
	s.found[n.inode] = n
	return true
}

// namespaceName reads "mnt:[4026531832]".
func namespaceName(text string) (inode uint64, ok bool) {
	number, ok := strings.CutPrefix(text, "mnt:[")
	if !ok {
		return 0, false
	}
	inode, err := strconv.ParseUint(strings.TrimSuffix(number, "]"), 10, 64)
	return inode, err == nil
}

// binds looks for namespaces bound to files, in every namespace found, and then
// in those found so.
func (s *search) binds(ctx context.Context) error {
	next := slices.Collect(seqOf(s.found))
	for len(next) > 0 {
		n := next[0]
		next = next[1:]
		table, err := n.Table(ctx)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			continue // one that cannot be read hides nothing else
		}
		for i := range table.Mounts {
			m := &table.Mounts[i]
			inode, ok := namespaceName(m.Root)
			if m.FSType != "nsfs" || !ok || s.has(inode) {
				continue
			}
			_ = n.Do(ctx, func() error {
				bound, err := openPath(m.Point, s.features)
				if err == nil && s.add(bound) {
					next = append(next, bound)
				}
				return err
			})
		}
	}
	return nil
}
