package perform

import (
	"fmt"
	"os"
	"strings"
	"sync"

	"github.com/csi-prepare/csi-prepare/reference/mountspec"
)

// receiptVersion is the version of the JSON form of a Receipt.
const receiptVersion = 1

// Receipt records what performing one mount spec made, in one boot and one
// mount namespace. It is plain data: encoded as JSON, kept on disk and decoded
// in another process, it is all that Undo needs. It holds no secret.
//
// A receipt that Options.Journal gets describes a mount that is made but not
// attached yet. It is as good for Undo as the final one: if the mount never
// was attached, there is nothing of it.
type Receipt struct {
	// Version is 1.
	Version int `json:"version"`
	// BootID is /proc/sys/kernel/random/boot_id. In another boot the
	// receipt is void.
	BootID string `json:"boot_id"`
	// MntnsID is the id of the mount namespace.
	MntnsID uint64 `json:"mntns_id"`
	// MountID is the unique id of the mount. On a kernel without unique ids
	// it is the id of mountinfo, below 2^31, and 0 in a receipt that was
	// written before mount(2) made the mount.
	MountID uint64 `json:"mount_id"`
	// ParentID is the mount it was attached to.
	ParentID uint64 `json:"parent_id"`
	// Kind is the mount spec's kind.
	Kind mountspec.KindName `json:"kind"`
	// Target is where it was attached, a path in the namespace. Undo goes
	// by the id; the path is for the reader, and where ids are reused.
	Target string `json:"target"`
	// Created is what was made for the target to exist, outermost first.
	Created []Created `json:"created,omitempty"`
	// Node is the device that a BLOCK_DEVICE spec shows at Target.
	Node *Node `json:"node,omitempty"`
	// SpecDigest is mountspec.Spec.Digest of the spec.
	SpecDigest string `json:"spec_digest"`

	// Device is the superblock's device, "major:minor", where ids are
	// reused and it has to help to tell mounts apart.
	Device string `json:"device,omitempty"`
	// Remote says that the place it was attached at is on a filesystem that
	// asks a server, or the mount itself on a network: undo must not look it
	// up, or take leave of the server, where it cannot be killed.
	Remote bool `json:"remote,omitempty"`
	// Tree says that the mount came with the mounts below it. Those have
	// ids greater than MountID and less than TreeEnd; where ids are reused,
	// they are listed in Below, outermost first.
	Tree    bool     `json:"tree,omitempty"`
	TreeEnd uint64   `json:"tree_end,omitempty"`
	Below   []uint64 `json:"below,omitempty"`
}

// Created is a directory, or an empty file, that was made to attach to.
type Created struct {
	// Path is absolute in the namespace.
	Path string `json:"path"`
	// Inode is its inode number, 0 in a receipt written before it was made.
	Inode uint64 `json:"inode,omitempty"`
	// File is true for a regular file.
	File bool `json:"file,omitempty"`
}

// Node is a block device node.
type Node struct {
	Major uint32 `json:"major"`
	Minor uint32 `json:"minor"`
	Path  string `json:"path"`
}

// check refuses what cannot be a receipt.
func (r *Receipt) check() error {
	switch {
	case r.Version != receiptVersion:
		return fmt.Errorf("%w: version %d, want %d", ErrReceipt, r.Version, receiptVersion)
	case r.BootID == "":
		return fmt.Errorf("%w: boot_id is empty", ErrReceipt)
	case !strings.HasPrefix(r.Target, "/") || r.Target == "/":
		return fmt.Errorf("%w: target %q is not a path below the root", ErrReceipt, r.Target)
	}
	for _, c := range r.Created {
		if !strings.HasPrefix(c.Path, "/") || c.Path == "/" {
			return fmt.Errorf("%w: created path %q is not a path below the root", ErrReceipt, c.Path)
		}
	}
	return nil
}

// bootID is read once: it does not change while the process lives.
var bootID = sync.OnceValues(func() (string, error) {
	text, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(text)), err
})
