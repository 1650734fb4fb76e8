package co

import (
	"context"
	"errors"
	"os"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// The tests of this file are about one sentence: a read that failed has not
// said that nothing is wanted.

func TestFailedReadOfTheLedger(t *testing.T) {
	r := newRig(t)
	u := r.use(r.volume("v"))
	record := r.up(u)
	r.must(r.co.Close())
	ledger := r.path("co/ledger")
	for name, spoil := range map[string]func() (mend func()){
		"the directory is a file": func() func() {
			r.must(os.Rename(ledger, ledger+"-kept"))
			r.must(os.WriteFile(ledger, nil, 0o600))
			return func() {
				r.must(os.Remove(ledger))
				r.must(os.Rename(ledger+"-kept", ledger))
			}
		},
		"others may enter it": func() func() {
			r.must(os.Chmod(ledger, 0o755))
			return func() { r.must(os.Chmod(ledger, 0o700)) }
		},
	} {
		mend := spoil()
		if c, err := Open(Config{Dir: r.path("co")}); err == nil {
			t.Errorf("%s: opened", name)
			c.Close()
		}
		mend()
	}
	r.mountsAt(u.Target.Path, 1)
	r.co = nil
	r.open()
	done, err := r.co.Recover(r.ctx)
	r.must(err)
	if len(done.Kept) != 1 {
		t.Errorf("recovered %+v, want it kept", done)
	}
	r.down(record.Key())
	r.nothingLeft()
}

// TestFailedReadOfMounts has a table that cannot be read: no performance may
// be taken for gone.
func TestFailedReadOfMounts(t *testing.T) {
	r := newRig(t)
	u := r.use(r.volume("v"))
	record := r.up(u)
	r.called()
	ctx, cancel := context.WithCancel(r.ctx)
	cancel()
	if done, err := r.co.Recover(ctx); err == nil || done != nil {
		t.Errorf("recovered %+v, %v", done, err)
	}
	if _, err := r.co.whole(ctx, record); err == nil {
		t.Error("a performance was judged by a table that could not be read")
	}
	if _, err := r.co.Up(ctx, u); err == nil {
		t.Error("repeated all the same")
	}
	if calls := r.called(); len(calls) > 0 {
		t.Errorf("calls %v", calls)
	}
	if got := r.record(); got.Phase != Performed {
		t.Errorf("record %+v", got)
	}
	r.mountsAt(u.Target.Path, 1)
	r.down(record.Key())
	r.nothingLeft()
}

// TestFailedReadOfPreparations has a plugin whose list breaks off.
func TestFailedReadOfPreparations(t *testing.T) {
	r := newRig(t)
	u := r.use(r.volume("v"))
	record := r.up(u)
	pages := 0
	r.answering(func(ctx context.Context, method string, request any, next func(context.Context) (any, error)) (any, error) {
		if _, lists := request.(*preparev1alpha1.NodeListPreparedVolumesRequest); !lists {
			return next(ctx)
		}
		if pages++; pages == 1 {
			return &preparev1alpha1.NodeListPreparedVolumesResponse{NextToken: "more"}, nil
		}
		return nil, status.Error(codes.Internal, "disk")
	})
	r.called()
	done, err := r.co.Recover(r.ctx)
	if status.Code(err) != codes.Internal || len(done.Kept) != 1 {
		t.Errorf("recovered %+v, %v, want it kept, and the error", done, err)
	}
	if calls := r.called(); len(calls) > 0 {
		t.Errorf("calls %v", calls)
	}
	r.answering(nil)
	r.down(record.Key())
	r.nothingLeft()
}

// TestFailedWriteOfTheLedger has a disk that is full: what cannot be written
// down is not begun.
func TestFailedWriteOfTheLedger(t *testing.T) {
	r := newRig(t)
	u := r.use(r.volume("v"))
	full := r.path("co/ledger")
	r.must(unix.Mount("full", full, "tmpfs", 0, "size=4k,nr_inodes=2,mode=700"))
	_, err := r.co.Up(r.ctx, u)
	if !errors.Is(err, unix.ENOSPC) {
		t.Errorf("%v, want ENOSPC", err)
	}
	if calls := r.called(); len(calls) > 0 {
		t.Errorf("calls %v although nothing is written down", calls)
	}
	r.must(unix.Unmount(full, 0))
	r.nothingLeft()
}
