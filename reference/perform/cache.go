package perform

import (
	"github.com/csi-prepare/csi-prepare/reference/kernel"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
)

type cache struct{}
type trash struct{}

func (e *Executor) clone(x *performance, from int, u *unit, s *mountspec.Step, flags uint) (int, error) {
	return kernel.OpenTree(from, "", flags)
}
