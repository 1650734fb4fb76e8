package perform

import (
	"fmt"
	"os"
	"path"
	"strconv"

	"github.com/csi-prepare/csi-prepare/reference/mountns"
)

// journal tells the caller what is about to be attached. Every mount exists
// by now and has the id it will keep, so that the record is exact although
// nothing is visible yet.
func (x *performance) journal() error {
	if x.o.Journal == nil {
		return nil
	}
	place, err := x.place()
	if err == nil {
		err = x.fillAll(place)
	}
	if err == nil {
		err = x.o.Journal(x.done.Receipts)
	}
	if err != nil {
		return &Error{-1, "journal", err}
	}
	return nil
}

// place returns the target's path in its namespace. The descriptor knows it,
// also where links or a root of the consumer's own led to it.
func (x *performance) place() (string, error) {
	if x.target.Root == nil && !x.o.Policy.FollowLinks {
		return path.Clean(x.target.Path), nil
	}
	place, err := os.Readlink("/proc/self/fd/" + strconv.Itoa(x.units[0].target))
	for _, name := range x.missing {
		place = path.Join(place, name)
	}
	return place, err
}

// fillAll fills the receipts with what is known before the specs are attached
// and verified.
func (x *performance) fillAll(place string) error {
	ns := x.parent.NS
	if !x.f.UniqueIDs {
		id, err := nsID(x.target.Namespace)
		if err != nil {
			return err
		}
		ns = id
	}
	for i := range x.units {
		r, u := &x.done.Receipts[i], &x.units[i]
		r.MntnsID, r.MountID, r.ParentID = ns, u.id, u.parentID
		r.Target = path.Join(place, x.specs[i].Target)
		r.Remote = remoteTypes[x.parent.FSType] || x.onNetwork(i) || i > 0 && x.firstIsRemote()
		x.fillKind(i)
	}
	x.fillCreated(place)
	return nil
}

// nsID returns the id of ns, or of the calling thread's namespace for nil.
func nsID(ns *mountns.Namespace) (uint64, error) {
	if ns != nil {
		return ns.ID(), nil
	}
	own, err := mountns.Own()
	if err != nil {
		return 0, fmt.Errorf("find the own mount namespace: %w", err)
	}
	defer func() { _ = own.Close() }()
	return own.ID(), nil
}

// fillCreated records what is made for the target to exist: before it is, all
// that is missing; after, what was found to be made by this performance.
func (x *performance) fillCreated(place string) {
	r := &x.done.Receipts[0]
	r.Created = nil
	if len(x.missing) == 0 {
		return
	}
	paths := make([]string, len(x.missing))
	for i := len(paths) - 1; i >= 0; i-- {
		paths[i] = place
		place, _ = splitPath(place)
	}
	if !x.creating {
		for i, p := range paths {
			r.Created = append(r.Created, Created{Path: p, File: i == len(paths)-1 && isFile(&x.specs[0])})
		}
		return
	}
	for _, m := range x.made {
		r.Created = append(r.Created, Created{Path: paths[m.at], Inode: m.inode, File: m.file})
	}
}
