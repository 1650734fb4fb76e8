// Package activate lets containerd's mount manager (2.2 and later) activate
// what is a descriptor and not text: the mounts of HANDLE and FUSE specs. For
// the manager it is a mount.Handler of a type of its own; what the manager
// keeps and passes on is an id that the CO has chosen, never text of a plugin.
//
// Activation performs the spec at the place the manager names, with package
// perform, and leaves to the runtime a bind of that place. Receipts are written down
// before anything is attached, so that a daemon that has crashed in between
// takes exactly that away.
//
// It is a module of its own because containerd/v2 is nothing that users of
// package containerd should have to build.
package activate

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/google/renameio/v2"
	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/master"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
	"github.com/csi-prepare/csi-prepare/reference/mountspec/containerd"
	"github.com/csi-prepare/csi-prepare/reference/perform"
)

// Type is the type of the mounts in containerd's lists. Source is the id of an
// Offer; there are no options.
const Type = "csi-prepare"

// Offer is a mount spec that can be activated, and the mount it speaks of.
type Offer struct {
	// Spec is of kind HANDLE or FUSE, with an empty target.
	Spec mountspec.Spec
	// Master is the mount to clone. It stays the CO's and has to stay open
	// for as long as the offer stands.
	Master *master.Mount
	Policy mountspec.Policy
}

// Mounter is a mount.Handler. Its methods may be called by several goroutines
// at once.
type Mounter struct {
	dir string

	mu      sync.Mutex
	offered map[string]Offer
}

var _ mount.Handler = (*Mounter)(nil)

// New returns a Mounter that keeps its receipts in a directory of its own,
// which is made with mode 0700 if it is missing. Place it where a reboot does
// not matter: receipts of another boot are void.
func New(dir string) (*Mounter, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	return &Mounter{dir: dir, offered: map[string]Offer{}}, nil
}

// Offer makes a mount spec known under an id: what NodePrepareVolume answered
// is offered before the list that names it is activated.
func (m *Mounter) Offer(id string, o Offer) error {
	if handleOf(o.Spec) == "" || o.Spec.Target != "" {
		return fmt.Errorf("offer %q: only a HANDLE or a FUSE spec with an empty target can be activated; "+
			"convert others with package containerd", id)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.offered[id] = o
	return nil
}

// Withdraw takes an offer back. What is active stays.
func (m *Mounter) Withdraw(id string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.offered, id)
}

func handleOf(s mountspec.Spec) string {
	switch k := s.Kind.(type) {
	case *mountspec.Handle:
		return k.ID
	case *mountspec.FUSE:
		return k.ID
	default:
		return ""
	}
}

// List is what to activate for an offer: the mount itself, and a bind of it for
// whoever starts the container. The manager puts the place where the first is
// mounted into the second; without it there would be nothing for the runtime.
func (m *Mounter) List(id string) ([]mount.Mount, error) {
	o, found := m.offer(id)
	if !found {
		return nil, fmt.Errorf("list %q: not offered", id)
	}
	set, _ := o.Policy.Effective(o.Spec)
	const performed = "/performed" // stands for what the manager puts in
	bound, err := containerd.Convert([]mountspec.Spec{o.Spec},
		[]mountspec.Place{{Performed: performed, Attributes: set, Private: true}},
		containerd.Options{Policy: o.Policy, PrivateParent: true})
	if err != nil {
		return nil, err
	}
	return []mount.Mount{
		{Type: Type, Source: id},
		{Type: "format/" + bound[0].GetType(), Source: "{{ mount 0 }}", Options: bound[0].GetOptions()},
	}, nil
}

func (m *Mounter) offer(id string) (Offer, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	o, found := m.offered[id]
	return o, found
}

// Mount implements mount.Handler. An id that is not offered is an error, as
// when the daemon has restarted since: the CO prepares and offers again.
func (m *Mounter) Mount(ctx context.Context, entry mount.Mount, place string, _ []mount.ActiveMount) (mount.ActiveMount, error) {
	o, found := m.offer(entry.Source)
	if entry.Type != Type || len(entry.Options) > 0 || entry.Target != "" {
		return mount.ActiveMount{}, fmt.Errorf("mount %q: want type %s, an id as source, and nothing else", entry.Source, Type)
	}
	if !found {
		return mount.ActiveMount{}, fmt.Errorf("mount %q: not offered: prepare the volume again", entry.Source)
	}
	if err := os.Mkdir(place, 0o700); err != nil {
		return mount.ActiveMount{}, err
	}
	_, err := perform.Perform(ctx, perform.Target{Path: place}, []mountspec.Spec{o.Spec}, perform.Options{
		Request: mountspec.Request{Performer: mountspec.Performer{Kinds: []mountspec.KindName{o.Spec.Kind.Name()}}},
		Masters: map[string]*master.Mount{handleOf(o.Spec): o.Master},
		Policy:  o.Policy,
		Journal: func(receipts []perform.Receipt) error { return m.write(place, receipts) },
	})
	if err != nil {
		return mount.ActiveMount{}, errors.Join(err, m.Unmount(context.WithoutCancel(ctx), place))
	}
	now := time.Now()
	return mount.ActiveMount{Mount: entry, MountPoint: place, MountedAt: &now}, nil
}

// Unmount implements mount.Handler: it undoes what Mount did at a place, in
// this process or in one before it, and removes the place. What is in use
// stays, and the error says who uses it. A place nothing is known of is done.
func (m *Mounter) Unmount(ctx context.Context, place string) error {
	receipts, err := m.read(place)
	if err != nil {
		return err
	}
	if err := perform.Undo(ctx, nil, receipts); err != nil {
		return err
	}
	if err := unix.Rmdir(place); err != nil && !errors.Is(err, unix.ENOENT) {
		return &os.PathError{Op: "rmdir", Path: place, Err: err}
	}
	err = os.Remove(m.file(place))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

func (m *Mounter) file(place string) string {
	sum := sha256.Sum256([]byte(place))
	return filepath.Join(m.dir, hex.EncodeToString(sum[:])+".json")
}

func (m *Mounter) write(place string, receipts []perform.Receipt) error {
	text, err := json.Marshal(receipts)
	if err != nil {
		return err
	}
	return renameio.WriteFile(m.file(place), text, 0o600)
}

func (m *Mounter) read(place string) (receipts []perform.Receipt, err error) {
	text, err := os.ReadFile(m.file(place))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err == nil {
		err = json.Unmarshal(text, &receipts)
	}
	if err != nil {
		return nil, fmt.Errorf("receipts of %s: %w", place, err)
	}
	return receipts, nil
}
