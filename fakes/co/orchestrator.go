package co

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/renameio/v2"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/reference/mountspec"
	"github.com/csi-prepare/csi-prepare/reference/mountspec/wire"
	preparev1alpha1 "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
	testingv1alpha1 "github.com/csi-prepare/csi-prepare/spec/testingv1alpha1"
)

// Orchestrator is a CO in straight lines: stage, prepare, perform by an
// Executor, and back. It offers BIND and tmpfs.
//
// Its rules are fields, so that a mutant is an Orchestrator with one of them
// replaced.
type Orchestrator struct {
	testingv1alpha1.UnimplementedOrchestratorServer
	rules

	executor  Executor
	directory string

	mu      sync.Mutex
	plugins map[string]*plugin
	volumes map[string]*sync.Mutex
	answers map[string][]*preparev1alpha1.MountSpec // the last, by volume
}

// rules are what the CO owes the plugin.
type rules struct {
	// prepareID names a preparation.
	prepareID func(u *use) string
	// preparePath makes the directory of a preparation.
	preparePath func(o *Orchestrator, u *use) error
	// absent is the error for a plugin without NodePrepare.
	absent func() error
	// extensions are offered to every plugin.
	extensions []string
	// asksOnce keeps the answer that there is no NodePrepare.
	asksOnce bool
	// prepare makes the call, or does without.
	prepare func(ctx context.Context, o *Orchestrator, p *plugin, u *use) ([]*preparev1alpha1.MountSpec, error)
	// afterUncertain and afterRefusal end a preparation that is not performed.
	afterUncertain, afterRefusal func(ctx context.Context, o *Orchestrator, p *plugin, u *use) error
	// takeDown undoes and unprepares, in that order.
	takeDown func(ctx context.Context, o *Orchestrator, p *plugin, u *use) error
	// unprepare ends a preparation, however often it takes.
	unprepare func(ctx context.Context, o *Orchestrator, p *plugin, u *use) error
	// removePath removes prepare_path.
	removePath func(path string) error
	// unstages reports whether a volume is to be unstaged now.
	unstages func(o *Orchestrator, u *use) (bool, error)
	// enter waits for other acts on the volume.
	enter func(o *Orchestrator, u *use) (leave func())
	// intend makes the intent durable.
	intend func(o *Orchestrator, u *use) error
}

// use is one use of a volume by one consumer, as the record has it.
type use struct {
	Endpoint    string   `json:"endpoint"`
	Volume      string   `json:"volume_id"`
	Consumer    string   `json:"consumer"`
	Readonly    bool     `json:"readonly"`
	PrepareID   string   `json:"prepare_id"`
	PreparePath string   `json:"prepare_path"`
	Staging     string   `json:"staging,omitempty"`
	Target      Target   `json:"target"`
	Receipts    []string `json:"receipts"`
	Up          bool     `json:"up"`

	capability *csi.VolumeCapability
	pending    bool // what became of the preparation is not known
}

func (u *use) key() string { return digestText(u.Endpoint, u.Volume, u.Consumer) }

func (u *use) volumeKey() string { return digestText(u.Endpoint, u.Volume) }

func digestText(texts ...string) string {
	h := sha256.New()
	for _, t := range texts {
		fmt.Fprintf(h, "%d:%s", len(t), t)
	}
	return hex.EncodeToString(h.Sum(nil)[:12])
}

// NewOrchestrator returns the conformant Orchestrator. Its records, staging
// and prepare paths are below directory.
func NewOrchestrator(e Executor, directory string) (*Orchestrator, error) {
	o := &Orchestrator{
		executor: e, directory: directory, plugins: map[string]*plugin{}, volumes: map[string]*sync.Mutex{},
		answers: map[string][]*preparev1alpha1.MountSpec{},
		rules: rules{
			prepareID:      func(u *use) string { return u.Consumer },
			preparePath:    makePreparePath,
			absent:         func() error { return status.Error(codes.Unimplemented, "the plugin does not serve NodePrepare") },
			asksOnce:       true,
			prepare:        callPrepare,
			afterUncertain: callUnprepare,
			afterRefusal:   callUnprepare,
			takeDown:       undoThenUnprepare,
			unprepare:      callUnprepare,
			removePath:     func(path string) error { return ignoreAbsent(os.Remove(path)) },
			unstages:       lastOfVolume,
			enter:          enterVolume,
			intend:         func(o *Orchestrator, u *use) error { return o.put(u) },
		},
	}
	for _, sub := range []string{"", "uses", "prepare", "staging"} {
		if err := os.MkdirAll(filepath.Join(directory, sub), 0o700); err != nil {
			return nil, err
		}
	}
	return o, nil
}

// NewPlainCO returns a Server over a Plain, with an Orchestrator that has the
// same perform.
func NewPlainCO(p *Plain, directory string) (*Server, error) {
	s, err := New(p, directory)
	if err != nil {
		return nil, err
	}
	s.Orchestrator, err = NewOrchestrator(p, filepath.Join(directory, "co"))
	return s, err
}

func enterVolume(o *Orchestrator, u *use) (leave func()) {
	o.mu.Lock()
	m := o.volumes[u.volumeKey()]
	if m == nil {
		m = new(sync.Mutex)
		o.volumes[u.volumeKey()] = m
	}
	o.mu.Unlock()
	m.Lock()
	return m.Unlock
}

// Up implements testingv1alpha1.OrchestratorServer.
func (o *Orchestrator) Up(ctx context.Context, r *testingv1alpha1.UpRequest) (*testingv1alpha1.UpResponse, error) {
	if r.GetVolumeId() == "" || !idAlphabet.MatchString(r.GetConsumer()) {
		return nil, status.Error(codes.InvalidArgument, "volume_id or consumer: is empty or malformed")
	}
	u := &use{
		Endpoint: r.GetEndpoint(), Volume: r.GetVolumeId(), Consumer: r.GetConsumer(), Readonly: r.GetReadonly(),
		Target: target(r.GetTarget()), capability: r.GetVolumeCapability(),
	}
	defer o.enter(o, u)()
	p, err := o.plugin(ctx, u.Endpoint)
	if err != nil {
		return nil, err // with the code of the call
	}
	if was, err := o.get(u.key()); err != nil || was != nil && was.Up {
		return &testingv1alpha1.UpResponse{}, answerIf(err)
	}
	u.PrepareID = o.prepareID(u)
	u.PreparePath = filepath.Join(o.directory, "prepare", u.key())
	if p.stages {
		u.Staging = filepath.Join(o.directory, "staging", u.volumeKey())
	}
	if err := o.intend(o, u); err != nil {
		return nil, answer(err)
	}
	if err := o.bringUp(ctx, p, u); err != nil {
		if u.pending {
			return nil, answer(err) // the record stays for Down and Resume
		}
		return nil, answer(errors.Join(err, o.clear(context.WithoutCancel(ctx), p, u)))
	}
	u.Up = true
	return &testingv1alpha1.UpResponse{}, answerIf(o.put(u))
}

// answerIf is answer for an error, and nil for none.
func answerIf(err error) error {
	if err == nil {
		return nil
	}
	return answer(err)
}

func (o *Orchestrator) bringUp(ctx context.Context, p *plugin, u *use) error {
	if u.Staging != "" {
		if err := os.Mkdir(u.Staging, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
		if _, err := p.node.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{
			VolumeId: u.Volume, StagingTargetPath: u.Staging, VolumeCapability: u.capability,
		}); err != nil {
			return err
		}
	}
	if err := o.preparePath(o, u); err != nil {
		return err
	}
	specs, err := o.prepare(ctx, o, p, u)
	after := o.afterUncertain
	if err == nil {
		if err = o.perform(ctx, u, specs); err == nil {
			return nil
		}
		after = callUnprepare
		var refused *RefusedError
		if errors.As(err, &refused) {
			after = o.afterRefusal
		}
	}
	ended := after(context.WithoutCancel(ctx), o, p, u)
	u.pending = ended != nil
	return errors.Join(err, ended)
}

func makePreparePath(_ *Orchestrator, u *use) error { return os.Mkdir(u.PreparePath, 0o700) }

// offer is what the Orchestrator performs.
func (o *Orchestrator) offer() *preparev1alpha1.Performer {
	return &preparev1alpha1.Performer{
		Extensions: o.extensions,
		Kernel:     preparev1alpha1.Performer_NODE,
		Kinds:      []preparev1alpha1.MountKind{preparev1alpha1.MountKind_MOUNT_KIND_BIND, preparev1alpha1.MountKind_MOUNT_KIND_FILESYSTEM},
		FsTypes:    []string{"tmpfs"},
	}
}

func callPrepare(ctx context.Context, o *Orchestrator, p *plugin, u *use) ([]*preparev1alpha1.MountSpec, error) {
	reply, err := p.prepare.NodePrepareVolume(ctx, &preparev1alpha1.NodePrepareVolumeRequest{
		VolumeId: u.Volume, PrepareId: u.PrepareID, StagingTargetPath: u.Staging, PreparePath: u.PreparePath,
		VolumeCapability: u.capability, Readonly: u.Readonly, Performer: o.offer(),
	})
	return reply.GetMountSpecs(), err
}

func (o *Orchestrator) perform(ctx context.Context, u *use, messages []*preparev1alpha1.MountSpec) error {
	specs, violations := wire.FromProto(messages)
	if len(violations) > 0 {
		return &RefusedError{Violations: violations}
	}
	receipts, err := o.executor.Perform(ctx, Performance{
		Target: u.Target, Staging: u.Staging, Prepare: u.PreparePath, Specs: specs,
		Request: mountspec.Request{Performer: wire.PerformerFromProto(o.offer()), Readonly: u.Readonly, Block: u.capability.GetBlock() != nil, Staging: u.Staging != ""},
	}, func(receipts []string) error {
		u.Receipts = receipts
		return o.put(u)
	})
	if err != nil {
		u.Receipts = nil
		return err
	}
	u.Receipts = receipts
	return o.put(u)
}

// Down implements testingv1alpha1.OrchestratorServer.
func (o *Orchestrator) Down(ctx context.Context, r *testingv1alpha1.DownRequest) (*testingv1alpha1.DownResponse, error) {
	u := &use{Endpoint: r.GetEndpoint(), Volume: r.GetVolumeId(), Consumer: r.GetConsumer()}
	defer o.enter(o, u)()
	return &testingv1alpha1.DownResponse{}, answerIf(o.down(ctx, u.key()))
}

func (o *Orchestrator) down(ctx context.Context, key string) error {
	u, err := o.get(key)
	if u == nil || err != nil {
		return err
	}
	p, err := o.plugin(ctx, u.Endpoint)
	if err != nil {
		return err
	}
	if err := o.takeDown(ctx, o, p, u); err != nil {
		return err
	}
	return o.clear(ctx, p, u)
}

// clear removes what is left of a use that is no longer prepared.
func (o *Orchestrator) clear(ctx context.Context, p *plugin, u *use) error {
	if err := o.removePath(u.PreparePath); err != nil {
		return err
	}
	if err := o.drop(u); err != nil || u.Staging == "" {
		return err
	}
	if last, err := o.unstages(o, u); err != nil || !last {
		return err
	}
	if _, err := p.node.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: u.Volume, StagingTargetPath: u.Staging}); err != nil {
		return err
	}
	return ignoreAbsent(os.Remove(u.Staging))
}

func undoThenUnprepare(ctx context.Context, o *Orchestrator, p *plugin, u *use) error {
	if err := o.executor.Undo(ctx, u.Target, u.Receipts); err != nil {
		return err
	}
	return o.unprepare(ctx, o, p, u)
}

// callUnprepare repeats the call after FAILED_PRECONDITION, later each time.
func callUnprepare(ctx context.Context, _ *Orchestrator, p *plugin, u *use) error {
	pause := 10 * time.Millisecond
	for range 5 {
		_, err := p.prepare.NodeUnprepareVolume(ctx, unprepareOf(u))
		if status.Code(err) != codes.FailedPrecondition && status.Code(err) != codes.Unavailable {
			return err
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return ctx.Err()
		}
		pause *= 2
	}
	return status.Error(codes.FailedPrecondition, "the plugin does not end the preparation")
}

func unprepareOf(u *use) *preparev1alpha1.NodeUnprepareVolumeRequest {
	return &preparev1alpha1.NodeUnprepareVolumeRequest{
		VolumeId: u.Volume, PrepareId: u.PrepareID, PreparePath: u.PreparePath, StagingTargetPath: u.Staging,
	}
}

// lastOfVolume reports whether no other use of the volume is left.
func lastOfVolume(o *Orchestrator, u *use) (bool, error) {
	all, err := o.all()
	for _, other := range all {
		if other.volumeKey() == u.volumeKey() && other.key() != u.key() {
			return false, err
		}
	}
	return true, err
}

// Resume implements testingv1alpha1.OrchestratorServer.
func (o *Orchestrator) Resume(ctx context.Context, _ *testingv1alpha1.ResumeRequest) (*testingv1alpha1.ResumeResponse, error) {
	all, err := o.all()
	for _, u := range all {
		if u.Up {
			continue
		}
		leave := o.enter(o, u)
		err = errors.Join(err, o.down(ctx, u.key()))
		leave()
	}
	return &testingv1alpha1.ResumeResponse{}, answerIf(err)
}

func (o *Orchestrator) file(key string) string {
	return filepath.Join(o.directory, "uses", key+".json")
}

func (o *Orchestrator) put(u *use) error {
	data, err := json.Marshal(u)
	if err != nil {
		return err
	}
	return renameio.WriteFile(o.file(u.key()), data, 0o600, renameio.WithTempDir(o.directory))
}

func (o *Orchestrator) drop(u *use) error { return ignoreAbsent(os.Remove(o.file(u.key()))) }

func (o *Orchestrator) get(key string) (*use, error) {
	data, err := os.ReadFile(o.file(key))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	u := new(use)
	return u, json.Unmarshal(data, u)
}

func (o *Orchestrator) all() ([]*use, error) {
	entries, err := os.ReadDir(filepath.Join(o.directory, "uses"))
	var all []*use
	for _, e := range entries {
		u, failed := o.get(trimJSON(e.Name()))
		if u != nil {
			all = append(all, u)
		}
		err = errors.Join(err, failed)
	}
	return all, err
}

func trimJSON(name string) string { return name[:max(0, len(name)-len(".json"))] }

func ignoreAbsent(err error) error {
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}
