package vm

import (
	"strings"
	"testing"

	"github.com/csi-prepare/csi-prepare/vm/job"
)

// A guest is known to have ended well by its status alone, wherever the kernel
// puts words of its own.
func TestWatchFindsTheStatus(t *testing.T) {
	for name, tt := range map[string]struct{ console, status string }{
		"at the end":     {"booting\n" + job.StatusPrefix + "0\n", job.StatusPrefix + "0"},
		"before a word":  {job.StatusPrefix + "1\r\nreboot: System halted\r\n", job.StatusPrefix + "1"},
		"without a line": {"Kernel panic - not syncing\n", ""},
		"cut off":        {"boot", ""},
	} {
		t.Run(name, func(t *testing.T) {
			var console strings.Builder
			g := &Guest{Console: &console}
			status, tail := g.watch(strings.NewReader(tt.console))
			if status != tt.status {
				t.Errorf("the status is %q, want %q", status, tt.status)
			}
			if strings.Contains(tail, job.StatusPrefix) || tail == "" && tt.status == "" {
				t.Errorf("the tail is %q", tail)
			}
		})
	}
}
