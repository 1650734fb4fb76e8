package perform

import (
	"errors"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
	"github.com/csi-prepare/csi-prepare/reference/master"
	"github.com/csi-prepare/csi-prepare/reference/mountns"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
)

// offered is a detached tmpfs with a file in it, as a plugin would send it.
func (r *rig) offered() *os.File {
	r.Helper()
	fs, err := kernel.OpenFS("tmpfs")
	if err != nil {
		r.Fatal(err)
	}
	defer fs.Close()
	if err := fs.Create(); err != nil {
		r.Fatal(err)
	}
	fd, err := fs.Mount(0)
	if err != nil {
		r.Fatal(err)
	}
	mount := os.NewFile(uintptr(fd), "offered")
	r.Cleanup(func() { mount.Close() })
	f, err := unix.Openat(fd, "f", unix.O_CREAT|unix.O_CLOEXEC, 0o644)
	if err != nil {
		r.Fatal(err)
	}
	unix.Close(f)
	if err := unix.Mkdirat(fd, "d", 0o755); err != nil {
		r.Fatal(err)
	}
	return mount
}

func TestAHandleIsClonedForEachConsumer(t *testing.T) {
	inside(t, func(r *rig) {
		before := r.table()
		received, err := master.Receive(r.ctx, r.offered(), master.Expected{FSType: "tmpfs"})
		if err != nil {
			r.Fatal(err)
		}
		defer received.Close()
		o := r.options(func(o *Options) {
			o.Masters = map[string]*master.Mount{"h": received, "m": master.Made(r.offered())}
		})
		specs := []mountspec.Spec{
			{Kind: &mountspec.Handle{ID: "h", FSType: "tmpfs"}, Attributes: mountspec.Attributes{Readonly: true}},
			{Kind: &mountspec.FUSE{ID: "m"}, Target: "d"},
		}
		var all []*Performed
		for _, place := range []string{"consumer/place", "consumer/other"} {
			if err := os.MkdirAll(r.path(place), 0o755); err != nil {
				r.Fatal(err)
			}
			p, err := Perform(r.ctx, r.target(place), specs, o)
			if err != nil {
				r.Fatal(err)
			}
			all = append(all, p)
			for _, f := range []string{"/f", "/d/f"} {
				if _, err := os.Stat(r.path(place) + f); err != nil {
					t.Error(err)
				}
			}
			if err := os.WriteFile(r.path(place)+"/new", nil, 0o600); !errors.Is(err, unix.EROFS) {
				t.Errorf("the clone is not narrowed: %v", err)
			}
			table := r.table()
			for _, receipt := range p.Receipts {
				m, ok := table.ByID(receipt.MountID)
				if !ok || m.Attr&(mountns.AttrNosuid|mountns.AttrNodev) != mountns.AttrNosuid|mountns.AttrNodev {
					t.Errorf("%+v: %+v", receipt, m)
				}
			}
		}
		for _, p := range all {
			if err := Undo(r.ctx, nil, p.Receipts); err != nil {
				t.Error(err)
			}
		}
		r.same(before)
		if fd, err := received.Clone(r.ctx, false); err != nil {
			t.Errorf("the master went with its clones: %v", err)
		} else {
			unix.Close(fd)
		}
	})
}

func TestAHandleTheCODoesNotHold(t *testing.T) {
	inside(t, func(r *rig) {
		before := r.table()
		specs := []mountspec.Spec{{Kind: &mountspec.FUSE{ID: "gone"}}}
		if _, err := Perform(r.ctx, r.target("consumer/place"), specs, r.options()); !errors.Is(err, ErrSource) {
			t.Errorf("got %v", err)
		}
		r.same(before)
	})
}
