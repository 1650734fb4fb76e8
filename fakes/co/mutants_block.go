package co

import (
	"errors"
	"os"
	"path"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/fakes/mutant"
	"github.com/csi-prepare/csi-prepare/reference/kernel"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// Devices that are not what the plugin named, or stay.
var blockMutants = []Mutant{
	seat("trusts-device-number", mutant.Data, requirement.BlockDiskseqChecked,
		"the number alone counts: after a device was detached the consumer writes to whichever has got its number",
		plain(func(p *Plain) {
			p.open = func(d *mountspec.BlockDevice, readonly bool) (*os.File, error) {
				return openDevice(&mountspec.BlockDevice{Major: d.Major, Minor: d.Minor}, readonly)
			}
		})),
	seat("node-of-another-device", mutant.Data, requirement.PerformVerified,
		"the node is made with the next minor number: two databases share a disk",
		plain(func(p *Plain) {
			p.node = func(d *mountspec.BlockDevice) (int, error) {
				return node(&mountspec.BlockDevice{Major: d.Major, Minor: d.Minor ^ 1})
			}
		})),
	seat("file-instead-of-node", mutant.Data, requirement.PerformVerified,
		"where the node cannot be made a regular file takes its place: the consumer writes to memory",
		plain(func(p *Plain) {
			p.node = func(d *mountspec.BlockDevice) (int, error) { return nodeOf(unix.S_IFREG|0o600, d) }
		})),
	seat("character-node", mutant.Data, requirement.PerformVerified,
		"the node is of a character device: the same number, another world",
		plain(func(p *Plain) {
			p.node = func(d *mountspec.BlockDevice) (int, error) { return nodeOf(unix.S_IFCHR|0o600, d) }
		})),
	seat("adopts-plugins-node", mutant.Escape, requirement.BlockOwnerMode,
		"the node at device_path is bound as it is, with the owner and mode the plugin gave it",
		plain(func(p *Plain) {
			p.node = func(d *mountspec.BlockDevice) (int, error) {
				if d.DevicePath == "" {
					return node(d)
				}
				return kernel.OpenTree(unix.AT_FDCWD, d.DevicePath, unix.OPEN_TREE_CLONE)
			}
		})),
	seat("readonly-by-mount", mutant.Attributes, requirement.BlockReadonlyDevice,
		"a device is made read-only by a read-only mount over its node, through which it takes every write",
		plain(func(p *Plain) { p.refusesWrites = func(*os.File) error { return nil } })),
	seat("leaves-node", mutant.Leaks, requirement.UndoCreatedRemoved,
		"the node is made in the consumer's directory, and undo forgets it: it reaches whatever gets the number next",
		plain(func(p *Plain) {
			p.attach = func(p *Plain, at *place, all []made, undo func() error) error {
				d, block := all[0].spec.Kind.(*mountspec.BlockDevice)
				if !block || !at.missing {
					return attach(p, at, all, undo)
				}
				return unix.Mknodat(at.parent, at.name, unix.S_IFBLK|0o600, int(unix.Mkdev(d.Major, d.Minor)))
			}
		})),
	seat("removes-foreign-node", mutant.Undoing, requirement.UndoBystanderKept,
		"undo removes whatever is at the path of the node it made, somebody else's node too",
		plain(func(p *Plain) {
			p.remove = func(at *place, r receipt) error {
				for _, created := range r.Created {
					err := unix.Unlinkat(at.parent, path.Base(created), 0)
					if errors.Is(err, unix.EISDIR) {
						err = remove(at, r)
					}
					if err != nil && !errors.Is(err, unix.ENOENT) {
						return err
					}
				}
				return nil
			}
		})),
}
