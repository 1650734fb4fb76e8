package perform

import (
	"os"
	"testing"

	"github.com/csi-prepare/csi-prepare/reference/mountspec"
)

func TestPerformAndUndo(t *testing.T) {
	for _, x := range executors {
		t.Run(x.name, func(t *testing.T) {
			inside(t, func(r *rig) {
				before := r.table()
				specs := []mountspec.Spec{tmpfs("")}
				p := r.perform(x.e, r.target("consumer/place"), specs, r.options())
				if _, err := os.Stat(r.path("consumer/place")); err != nil {
					t.Error(err)
				}
				r.undo(x.e, p.Receipts)
				r.undo(x.e, p.Receipts)
				r.same(before)

				specs = []mountspec.Spec{bind("", "data", readonly), tmpfs("sub")}
				p = r.perform(x.e, r.target("consumer/place"), specs, r.options())
				if _, err := os.Stat(r.path("consumer/place/file")); err != nil {
					t.Error(err)
				}
				if err := os.WriteFile(r.path("consumer/place/file"), nil, 0); err == nil {
					t.Error("a read-only bind was written to")
				}
				r.undo(x.e, p.Receipts)
				r.same(before)
			})
		})
	}
}
