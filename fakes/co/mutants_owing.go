package co

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/fakes/mutant"
	"github.com/csi-prepare/csi-prepare/reference/kernel"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
	preparev1alpha1 "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// What a performance leaves in the process, and asks of the machine.
var hostMutants = []Mutant{
	seat("keeps-inheritable-descriptors", mutant.Escape, requirement.PerformNoDescriptor,
		"the descriptor of what was mounted stays open across exec: whatever is started next reaches the volume by it",
		plain(func(p *Plain) {
			attach := p.attach
			p.attach = func(p *Plain, at *place, all []made, undo func() error) error {
				if err := attach(p, at, all, undo); err != nil {
					return err
				}
				_, err := unix.Dup(all[0].fd) // not closed on exec
				return err
			}
		})),
	seat("starts-mount-helper", mutant.Escape, requirement.FilesystemNoHelper,
		"a program is started to mount: it takes words for options, and whatever it finds in its environment",
		plain(func(p *Plain) {
			create := p.create
			p.create = func(p *Plain, c *kernel.FSContext, f *mountspec.Filesystem) error {
				_ = exec.Command("mount", "--version").Run()
				return create(p, c, f)
			}
		})),
}

// What a CO owes the plugin, and does not keep.
var owingMutants = []Mutant{
	owing("takes-absence-for-failure", mutant.Discovery, requirement.DiscoveryUnimplemented,
		"a plugin without NodePrepare is reported as broken: its volumes stop working with the CO's update",
		func(o *Orchestrator) {
			o.absent = func() error { return status.Error(codes.Internal, "the plugin is broken") }
		}),
	owing("asks-again-and-again", mutant.Discovery, requirement.DiscoveryNotAgain,
		"every use asks a plugin without NodePrepare for it once more",
		func(o *Orchestrator) { o.asksOnce = false }),
	owing("publishes-as-a-fallback", mutant.Discovery, requirement.DiscoveryOneWay,
		"what cannot be prepared is published instead: the plugin then mounts where the CO is about to",
		func(o *Orchestrator) {
			next := o.prepare
			o.prepare = func(ctx context.Context, o *Orchestrator, p *plugin, u *use) ([]*preparev1alpha1.MountSpec, error) {
				specs, err := next(ctx, o, p, u)
				if err != nil {
					_, _ = p.node.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{
						VolumeId: u.Volume, StagingTargetPath: u.Staging, TargetPath: u.Target.Path, VolumeCapability: u.capability,
					})
				}
				return specs, err
			}
		}),
	owing("one-path-for-a-volume", mutant.Data, requirement.PreparePathPrivate,
		"all preparations of a volume share one prepare_path: the end of one empties that of the others",
		func(o *Orchestrator) {
			o.preparePath = func(o *Orchestrator, u *use) error {
				u.PreparePath = filepath.Join(o.directory, "prepare", u.volumeKey())
				if err := os.Mkdir(u.PreparePath, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
					return err
				}
				return nil
			}
			o.removePath = func(path string) error { _ = os.Remove(path); return nil }
		}),
	owing("keeps-its-notes-in-the-path", mutant.Leaks, requirement.PreparePathPrivate,
		"the CO keeps a lock file in prepare_path: a plugin that wants it empty refuses every call",
		func(o *Orchestrator) {
			o.preparePath = func(o *Orchestrator, u *use) error {
				if err := makePreparePath(o, u); err != nil {
					return err
				}
				return os.WriteFile(filepath.Join(u.PreparePath, "lock"), nil, 0o600)
			}
			o.removePath = func(path string) error {
				return errors.Join(ignoreAbsent(os.Remove(filepath.Join(path, "lock"))), ignoreAbsent(os.Remove(path)))
			}
		}),
	owing("one-id-for-all-consumers", mutant.Data, requirement.PrepareIDOwn,
		"the prepare_id is made from the volume: to the plugin two consumers are one, and the first to go ends both",
		func(o *Orchestrator) { o.prepareID = func(u *use) string { return "of-" + u.volumeKey() } }),
	owing("performs-what-it-remembers", mutant.Data, requirement.PrepareEachPerformance,
		"mount specs of a volume are kept and performed again without a call: at an address the server has left",
		func(o *Orchestrator) {
			o.prepare = func(ctx context.Context, o *Orchestrator, p *plugin, u *use) ([]*preparev1alpha1.MountSpec, error) {
				o.mu.Lock()
				specs := o.answers[u.volumeKey()]
				o.mu.Unlock()
				if specs != nil {
					return specs, nil
				}
				specs, err := callPrepare(ctx, o, p, u)
				o.mu.Lock()
				o.answers[u.volumeKey()] = specs
				o.mu.Unlock()
				return specs, err
			}
		}),
	owing("forgets-what-may-be-prepared", mutant.Leaks, requirement.PrepareEndUncertain,
		"a call that ended with UNAVAILABLE is taken for one that did nothing: the preparation stays for ever",
		func(o *Orchestrator) { o.afterUncertain = nothingMore }),
	owing("forgets-what-it-refused", mutant.Leaks, requirement.ValidateEndsPreparation,
		"a response that breaks a rule is thrown away, and the plugin not told",
		func(o *Orchestrator) { o.afterRefusal = nothingMore }),
	owing("unprepares-what-is-performed", mutant.Undoing, requirement.UnprepareUndoneFirst,
		"the preparation is ended while the consumer still has the volume, and undone afterwards",
		func(o *Orchestrator) {
			o.takeDown = func(ctx context.Context, o *Orchestrator, p *plugin, u *use) error {
				if err := o.unprepare(ctx, o, p, u); err != nil {
					return err
				}
				return o.executor.Undo(ctx, u.Target, u.Receipts)
			}
		}),
	owing("removes-the-path-recursively", mutant.Data, requirement.UnprepareRmdir,
		"prepare_path is removed with all that is below it: what a plugin has still mounted there is deleted",
		func(o *Orchestrator) { o.removePath = os.RemoveAll }),
	owing("unstages-under-a-consumer", mutant.Data, requirement.UnprepareBeforeUnstage,
		"the first consumer to go takes the staged volume with it",
		func(o *Orchestrator) { o.unstages = func(*Orchestrator, *use) (bool, error) { return true, nil } }),
	owing("unstages-after-a-refusal", mutant.Data, requirement.UnprepareBeforeUnstage,
		"FAILED_PRECONDITION to NodeUnprepareVolume is taken for good enough: the volume is unstaged while it is in use",
		func(o *Orchestrator) { o.unprepare = onceAndNoMatterWhat }),
	owing("many-calls-for-one-volume", mutant.Concurrency, requirement.ConcurrencySingleFlight,
		"consumers of one volume do not wait for each other: the plugin is called for it twice at a time",
		func(o *Orchestrator) { o.enter = func(*Orchestrator, *use) func() { return func() {} } }),
	owing("records-what-is-done", mutant.Restart, requirement.CrashIntentDurable,
		"the record is written when the call has come back: a CO that is killed before does not know what it asked for",
		func(o *Orchestrator) { o.intend = func(*Orchestrator, *use) error { return nil } }),
	owing("path-open-to-all", mutant.Escape, requirement.SecurityLedgerPrivate,
		"prepare_path can be entered by every user of the node, and so can what a plugin keeps there",
		func(o *Orchestrator) {
			o.preparePath = func(o *Orchestrator, u *use) error {
				for _, dir := range []string{filepath.Dir(o.directory), o.directory, filepath.Dir(u.PreparePath)} {
					if err := os.Chmod(dir, 0o755); err != nil {
						return err
					}
				}
				return errors.Join(os.Mkdir(u.PreparePath, 0o755), os.Chmod(u.PreparePath, 0o755))
			}
		}),
	owing("asks-to-unprepare-once", mutant.Leaks, requirement.UnprepareBackOff,
		"a plugin that cannot unprepare yet is never asked again, and keeps the volume",
		func(o *Orchestrator) {
			o.unprepare = onceAndNoMatterWhat
			o.unstages = func(*Orchestrator, *use) (bool, error) { return false, nil }
		}),
}

func nothingMore(context.Context, *Orchestrator, *plugin, *use) error { return nil }

func onceAndNoMatterWhat(ctx context.Context, _ *Orchestrator, p *plugin, u *use) error {
	_, err := p.prepare.NodeUnprepareVolume(ctx, unprepareOf(u))
	if status.Code(err) == codes.FailedPrecondition {
		return nil
	}
	return err
}
