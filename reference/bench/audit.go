package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	containerd "github.com/containerd/containerd/v2/core/mount"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/mountns"
)

// anyNumber says that a case's variants make mounts where the process's own
// table does not show them all.
const anyNumber = -1

// audited adds the product's own look for leaks: a watermark before and the
// increment after, in which nothing may be left.
func (p *performer) audited(v Variant) Variant {
	perform, undo := v.Perform, v.Undo
	var mark mountns.Watermark
	own, err := mountns.Own()
	if err != nil {
		v.Missing = err.Error()
		return v
	}
	v.Perform = func() (err error) {
		if mark, err = own.Mark(p.ctx); err != nil {
			return err
		}
		return perform()
	}
	v.Undo = func() error {
		if err := undo(); err != nil {
			return err
		}
		since, err := own.Since(p.ctx, mark)
		if err == nil && (len(since.New) > 0 || since.Unexplained != 0) {
			err = fmt.Errorf("audit: left behind: %v and %d more", since.New, since.Unexplained)
		}
		return err
	}
	return v
}

// incremental asks what is new since a moment ago, with one new mount, and
// all about it. Each peer reads the whole table, as it has to.
func (s *suite) incremental(n int) (Case, error) {
	own, err := mountns.Own()
	if err != nil {
		return Case{}, err
	}
	mark, err := own.Mark(s.ours.ctx)
	if err != nil {
		return Case{}, err
	}
	at := s.ground.Dir("leak")
	if err := bindMount(s.ground.source+"/data", at); err != nil {
		return Case{}, err
	}
	return Case{
		Name: caseIncremental, N: n, Rounds: s.roundsAt(n),
		Variants: []Variant{
			{Name: getMounts, Perform: func() error {
				_, err := mountinfo.GetMounts(nil)
				return err
			}},
			{Name: product, Perform: func() error {
				since, err := own.Since(s.ours.ctx, mark)
				if err == nil && (len(since.New) != 1 || since.New[0].Point != at) {
					err = fmt.Errorf("found %v, not the mount at %s", since.New, at)
				}
				return err
			}},
			incrementCalls(own.ID(), mark.ID, own.FD()),
		},
		Close: func() error {
			own.Close()
			return unix.Unmount(at, 0)
		},
	}, nil
}

// exact compares all ids: nothing can hide from it.
func (s *suite) exact(n int) (Case, error) {
	own, err := mountns.Own()
	if err != nil {
		return Case{}, err
	}
	before, err := own.IDs(s.ours.ctx, nil)
	if err != nil {
		return Case{}, err
	}
	var after []uint64
	return Case{
		Name: caseExact, N: n, Rounds: s.roundsAt(n),
		Variants: []Variant{
			{Name: getMounts, Perform: func() error {
				_, err := mountinfo.GetMounts(nil)
				return err
			}},
			{Name: product, Perform: func() error {
				var err error
				if after, err = own.IDs(s.ours.ctx, after[:0]); err != nil {
					return err
				}
				if added, removed := mountns.DiffIDs(before, after); len(added)+len(removed) > 0 {
					return fmt.Errorf("%d added, %d removed, though nothing changed", len(added), len(removed))
				}
				return nil
			}},
		},
		Close: own.Close,
	}, nil
}

// machine looks for new mounts in every namespace, 50 of which no process is
// in: they are held by a descriptor only.
func (s *suite) machine() (Case, error) {
	ctx := s.ours.ctx
	const held = 50
	namespaces := make([]*mountns.Namespace, 0, held)
	small, err := smallNamespace()
	if err != nil {
		return Case{}, err
	}
	namespaces = append(namespaces, small)
	for len(namespaces) < held {
		n, err := small.Copy(ctx)
		if err != nil {
			return Case{}, err
		}
		namespaces = append(namespaces, n)
	}
	mark, err := mountns.MarkMachine(ctx)
	if err != nil {
		return Case{}, err
	}
	if err := namespaces[held/2].Do(ctx, func() error { return bindMount("/", "/") }); err != nil {
		return Case{}, err
	}
	return Case{
		Name: caseMachine, N: held, Rounds: s.rounds,
		Variants: []Variant{
			{Name: procWalk, Perform: walkProc},
			{Name: product, Perform: func() error {
				since, err := mark.Since(ctx)
				if err != nil {
					return err
				}
				for _, n := range since.Namespaces {
					if n.ID == namespaces[held/2].ID() && len(n.New) == 1 {
						return nil
					}
				}
				return fmt.Errorf("the mount in a namespace without a process was not found: %+v", since)
			}},
		},
		Close: func() error {
			mountns.CloseAll(namespaces)
			return nil
		},
	}, nil
}

// smallNamespace is one with a handful of mounts, as a container has.
func smallNamespace() (*mountns.Namespace, error) {
	n, err := mountns.New(context.Background())
	if err != nil {
		return nil, err
	}
	return n, n.Do(context.Background(), func() error {
		mounts, err := mountinfo.GetMounts(mountinfo.PrefixFilter(os.TempDir()))
		if err != nil {
			return err
		}
		for i := len(mounts) - 1; i >= 0; i-- {
			// What cannot be unmounted is covered by something that can.
			_ = unix.Unmount(mounts[i].Mountpoint, unix.MNT_DETACH)
		}
		return nil
	})
}

// walkProc reads and parses the table of every thread, as one without the
// kernel's walk over namespaces has to, each namespace once.
func walkProc() error {
	tasks, err := filepath.Glob("/proc/[0-9]*/task/[0-9]*/ns/mnt")
	if err != nil {
		return err
	}
	seen := map[uint64]bool{}
	for _, path := range tasks {
		var st unix.Stat_t
		if unix.Stat(path, &st) != nil || seen[st.Ino] {
			continue // the thread has ended
		}
		seen[st.Ino] = true
		f, err := os.Open(filepath.Join(filepath.Dir(filepath.Dir(path)), "mountinfo"))
		if err != nil {
			continue
		}
		_, err = mountinfo.GetMountsFromReader(f, nil)
		f.Close()
		if err != nil {
			return err
		}
	}
	return nil
}

func containerdPlainBind(source, target string) Variant {
	return containerdList(target, []containerd.Mount{{Type: "bind", Source: source, Options: []string{"bind"}}})
}

func mountTmpfs(at string) error      { return unix.Mount("ground", at, "tmpfs", 0, "size=16m") }
func bindMount(from, at string) error { return unix.Mount(from, at, "", unix.MS_BIND, "") }
func detach(at string) error          { return unix.Unmount(at, unix.MNT_DETACH) }
