package kernel_test

import (
	"testing"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
)

func TestProbe(t *testing.T) {
	t.Log(kernel.Probe())
}
