package perform

import (
	"fmt"

	"github.com/csi-prepare/csi-prepare/reference/mountspec"
)

// cloneMaster clones the mount the CO holds for a HANDLE or a FUSE: the
// consumer gets a mount of its own, with attributes of its own, and the master
// is attached for nobody.
func (x *performance) cloneMaster(u *unit, s *mountspec.Step) (err error) {
	m := x.o.Masters[s.Text]
	if m == nil {
		return fmt.Errorf("%w: the CO holds no mount for handle %q", ErrSource, s.Text)
	}
	if u.mount, err = m.Clone(x.ctx, s.Recursive); err != nil || !s.Recursive {
		return err
	}
	return x.markTree(u, u.mount)
}
