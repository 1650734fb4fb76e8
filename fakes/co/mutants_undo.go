package co

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/fakes/mutant"
	"github.com/csi-prepare/csi-prepare/reference/kernel"
	"github.com/csi-prepare/csi-prepare/reference/mountns"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// Undoing too much, too little, or too quietly.
var undoMutants = []Mutant{
	seat("undo-in-list-order", mutant.Undoing, requirement.UndoReverseOrder,
		"the first mount is undone first: it is busy with the later ones inside, for ever",
		plain(func(p *Plain) {
			p.order = func(n int) []int { order := reverse(n); slices.Reverse(order); return order }
		})),
	seat("single-umount", mutant.Undoing, requirement.UndoRechecked,
		"undo is one umount of the path, and success: if somebody mounted over it, that one is gone and ours is not",
		plain(func(p *Plain) { p.unmount = func(at *place, _ receipt) error { return ignoreGone(at.umount(0)) } })),
	seat("ignores-umount-error", mutant.Undoing, requirement.UndoRechecked,
		"what umount says is not listened to: a busy mount is reported undone",
		plain(func(p *Plain) { p.unmount = func(at *place, r receipt) error { _ = unmount(at, r); return nil } })),
	seat("lazy-undo", mutant.Undoing, requirement.UndoBusyReported,
		"a busy mount is detached lazily: the table is clean while files in it are still written",
		plain(func(p *Plain) {
			p.unmount = func(at *place, r receipt) error {
				err := unmount(at, r)
				if errors.Is(err, unix.EBUSY) {
					return at.umount(unix.MNT_DETACH)
				}
				return err
			}
		})),
	seat("undo-pops-bystander", mutant.Undoing, requirement.UndoBystanderKept,
		"undo unmounts the path until its own mount is gone: what somebody else had mounted over it goes too",
		plain(func(p *Plain) {
			p.unmount = func(at *place, r receipt) error {
				for {
					if gone, err := isGone(r.MountID); gone || err != nil {
						return err
					}
					if err := at.umount(0); err != nil {
						return &StateError{r.Target, err}
					}
				}
			}
		})),
	seat("undo-by-path", mutant.Undoing, requirement.UndoByID,
		"undo unmounts what lies at the path now, whoever made it, when its own mount is long gone",
		plain(func(p *Plain) {
			p.unmount = func(at *place, r receipt) error {
				if gone, err := isGone(r.MountID); err != nil || !gone {
					return unmount(at, r)
				}
				return ignoreGone(at.umount(0))
			}
		})),
	seat("undo-once", mutant.Repeats, requirement.UndoIdempotent,
		"undoing again what is undone is an error: a CO that lost the answer never gets past it",
		around(func(r *undoRequest, next func() (*undoResponse, error)) (*undoResponse, error) {
			if len(r.GetReceipts()) > 0 && allGone(r.GetReceipts(), r.GetTarget().GetNamespace()) {
				return nil, status.Error(codes.Internal, "umount: invalid argument")
			}
			return next()
		})),
	seat("keeps-created-target", mutant.Leaks, requirement.UndoCreatedRemoved,
		"the target it created stays when the mount is gone: scripts take the empty directory for a volume",
		plain(func(p *Plain) { p.remove = func(*place, receipt) error { return nil } })),
	seat("removes-found-target", mutant.Leaks, requirement.UndoCreatedRemoved,
		"the target is removed although it was there before",
		plain(func(p *Plain) {
			p.remove = func(at *place, r receipt) error {
				_ = at.rmdir(at.name, false)
				return remove(at, r)
			}
		})),
	seat("removes-recursively", mutant.Data, requirement.UndoNoRecursiveRemove,
		"what lies at the target after undo is removed, with all that is in it",
		plain(func(p *Plain) {
			p.remove = func(at *place, _ receipt) error {
				return os.RemoveAll(fmt.Sprintf("/proc/self/fd/%d/%s", at.parent, at.name))
			}
		})),
	seat("looks-below-target", mutant.Undoing, requirement.UndoNoPathAccess,
		"undo reads the directory it is about to unmount: with a dead server it hangs, and the mount stays",
		plain(func(p *Plain) {
			p.unmount = func(at *place, r receipt) error {
				if fd, err := unix.Openat(at.parent, at.name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0); err == nil {
					_, _ = unix.ReadDirent(fd, make([]byte, 4096))
					_ = unix.Close(fd)
				}
				return unmount(at, r)
			}
		})),
	seat("leaks-intermediate", mutant.Leaks, requirement.AuditTableRestored,
		"a mount made on the way, in the executor's own namespace, is not taken away: the device is never free again",
		func(p *Plain, s *Server) {
			p.remove = func(at *place, r receipt) error {
				if directory := s.ledger.directory; directory != "" && mutant.Contained() {
					intermediate(filepath.Join(directory, "intermediate"))
				}
				return remove(at, r)
			}
		}),
}

// A crash in the middle, and what may not be shown.
var lifeMutants = []Mutant{
	seat("forgets-the-unfinished", mutant.Restart, requirement.CrashRecovered,
		"mounts are attached one by one, and recovery drops the record of a list that was cut short: half of it stays for ever",
		both(
			plain(func(p *Plain) {
				p.assemble = func(*Plain, []made) error { return nil }
				p.attach = oneByOne(func() { time.Sleep(20 * time.Millisecond) })
			}),
			func(_ *Plain, s *Server) {
				s.unfinished = func(_ context.Context, s *Server, id string, _ record) error { return s.ledger.drop(id) }
			},
		)),
	seat("receipts-in-memory", mutant.Restart, requirement.CrashReceiptDurable,
		"receipts are kept in memory alone: after a crash nobody knows what was performed",
		func(_ *Plain, s *Server) { s.ledger.directory = "" }),
	seat("secret-in-perform-error", mutant.Secrets, requirement.SecuritySecretsCO,
		"an error repeats the superblock parameters, the password among them",
		around(func(r *performRequest, next func() (*performResponse, error)) (*performResponse, error) {
			answer, err := next()
			if err != nil {
				var secrets []string
				for _, m := range r.GetMountSpecs() {
					for _, q := range m.GetFilesystem().GetParameters() {
						secrets = append(secrets, q.GetSecret())
					}
				}
				return nil, status.Errorf(status.Code(err), "%s: %q", status.Convert(err).Message(), secrets)
			}
			return answer, nil
		})),
}

// intermediate mounts something in the namespace of the process, from a
// thread that may be in another.
func intermediate(directory string) {
	own, err := mountns.OpenPath("/proc/self/ns/mnt")
	if err != nil {
		return
	}
	defer own.Close()
	_ = own.Do(context.Background(), func() error {
		if err := os.Mkdir(directory, 0o700); err != nil && !os.IsExist(err) {
			return err
		}
		return unix.Mount("intermediate", directory, "tmpfs", 0, "size=64k")
	})
}

// ignoreGone is nil for the errors that say that nothing is mounted.
func ignoreGone(err error) error {
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}

// allGone reports whether no mount of the receipts is there any more.
func allGone(texts []string, namespace string) bool {
	receipts, err := decode(texts)
	if err != nil {
		return false
	}
	ns, err := mountns.OpenPath(namespace)
	if err != nil {
		return false
	}
	defer ns.Close()
	for _, r := range receipts {
		if _, err := kernel.StatMount(ns.ID(), r.MountID, kernel.StatBasic); err == nil {
			return false
		}
	}
	return true
}
