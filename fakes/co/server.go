// Package co is a conformant executor of mount specs behind the suite's
// testing service, and the executors that are wrong in exactly one way.
package co

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"regexp"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/csi-prepare/csi-prepare/reference/mountspec"
	"github.com/csi-prepare/csi-prepare/reference/mountspec/wire"
	preparev1alpha1 "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
	testingv1alpha1 "github.com/csi-prepare/csi-prepare/spec/testingv1alpha1"
)

// Server serves csi.prepare.testing.v1alpha1.Performer over an Executor. It
// keeps what was performed under which id, so that a repeat performs nothing
// again and a successor can recover.
type Server struct {
	testingv1alpha1.UnimplementedPerformerServer

	// Orchestrator, if set, is served beside it: a whole CO.
	Orchestrator testingv1alpha1.OrchestratorServer

	executor Executor
	ledger   ledger
	faults   []grpc.UnaryServerInterceptor
	// once reports whether a record settles a repeat.
	once func(record) bool
	// unfinished ends a performance that was cut short.
	unfinished func(ctx context.Context, s *Server, id string, r record) error

	mu   sync.Mutex
	busy map[string]*sync.Mutex // by id: one call at a time
}

// New returns a Server over an Executor. Its records lie in directory, or in
// memory if that is "".
func New(e Executor, directory string) (*Server, error) {
	return newServer(e, directory, ofAnotherBoot)
}

func newServer(e Executor, directory string, void func(r record, boot string) bool) (*Server, error) {
	l, err := openLedger(directory, void)
	if err != nil {
		return nil, fmt.Errorf("opening the ledger in %s: %w", directory, err)
	}
	return &Server{
		executor: e, ledger: l, busy: make(map[string]*sync.Mutex),
		once:       func(r record) bool { return r.Performed },
		unfinished: func(ctx context.Context, s *Server, id string, r record) error { return s.undo(ctx, id, r) },
	}, nil
}

// Serve registers the service of s. The grpc.Server has to be made with
// s.Options().
func (s *Server) Serve(g *grpc.Server) {
	testingv1alpha1.RegisterPerformerServer(g, s)
	if s.Orchestrator != nil {
		testingv1alpha1.RegisterOrchestratorServer(g, s.Orchestrator)
	}
}

// Options are the options of the grpc.Server that s is served by.
func (s *Server) Options() []grpc.ServerOption {
	return []grpc.ServerOption{grpc.ChainUnaryInterceptor(s.faults...)}
}

var idAlphabet = regexp.MustCompile(`^[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}$`)

// lock waits until no other call for the id is running.
func (s *Server) lock(id string) (unlock func()) {
	s.mu.Lock()
	m := s.busy[id]
	if m == nil {
		m = new(sync.Mutex)
		s.busy[id] = m
	}
	s.mu.Unlock()
	m.Lock()
	return m.Unlock
}

// Perform implements testingv1alpha1.PerformerServer.
func (s *Server) Perform(ctx context.Context, r *testingv1alpha1.PerformRequest) (*testingv1alpha1.PerformResponse, error) {
	if !idAlphabet.MatchString(r.GetId()) {
		return nil, status.Error(codes.InvalidArgument, "id: has to be 1 to 128 bytes of [A-Za-z0-9._-], the first not '.'")
	}
	defer s.lock(r.GetId())()
	digest := digestOf(r)
	was, found := s.ledger.get(r.GetId())
	switch {
	case found && s.once(was) && was.Digest != digest:
		return nil, status.Error(codes.AlreadyExists, "id: is in use with other arguments; undo it first")
	case found && s.once(was):
		return &testingv1alpha1.PerformResponse{Receipts: was.Receipts}, nil
	case found && !was.Performed:
		// A predecessor was killed on the way.
		if err := s.unfinished(ctx, s, r.GetId(), was); err != nil {
			return nil, answer(err)
		}
	}
	p, err := performance(r)
	if err != nil {
		return nil, answer(err)
	}
	now := record{Target: p.Target, Digest: digest}
	receipts, err := s.executor.Perform(ctx, p, func(receipts []string) error {
		now.Receipts = receipts
		return s.ledger.put(r.GetId(), now)
	})
	if err != nil {
		return nil, answer(errors.Join(err, s.ledger.drop(r.GetId())))
	}
	now.Receipts, now.Performed = receipts, true
	if err := s.ledger.put(r.GetId(), now); err != nil {
		return nil, answer(errors.Join(err, s.executor.Undo(ctx, p.Target, receipts)))
	}
	return &testingv1alpha1.PerformResponse{Receipts: receipts}, nil
}

// Undo implements testingv1alpha1.PerformerServer.
func (s *Server) Undo(ctx context.Context, r *testingv1alpha1.UndoRequest) (*testingv1alpha1.UndoResponse, error) {
	defer s.lock(r.GetId())()
	if err := s.undo(ctx, r.GetId(), record{Target: target(r.GetTarget()), Receipts: r.GetReceipts()}); err != nil {
		return nil, answer(err)
	}
	return &testingv1alpha1.UndoResponse{}, nil
}

// Recover implements testingv1alpha1.PerformerServer.
func (s *Server) Recover(ctx context.Context, _ *testingv1alpha1.RecoverRequest) (*testingv1alpha1.RecoverResponse, error) {
	result := new(testingv1alpha1.RecoverResponse)
	for _, id := range s.ledger.ids() {
		performed, err := s.recover(ctx, id)
		switch {
		case err != nil:
			return nil, answer(fmt.Errorf("performance %s: %w", id, err))
		case performed:
			result.Performed = append(result.Performed, id)
		default:
			result.Undone = append(result.Undone, id)
		}
	}
	return result, nil
}

// recover brings one performance to whole or nothing.
func (s *Server) recover(ctx context.Context, id string) (performed bool, err error) {
	defer s.lock(id)()
	r, found := s.ledger.get(id)
	if !found {
		return false, nil
	}
	if r.Performed {
		whole, err := s.executor.Whole(ctx, r.Target, r.Receipts)
		if whole || err != nil {
			return whole, err
		}
	}
	return false, s.unfinished(ctx, s, id, r)
}

func (s *Server) undo(ctx context.Context, id string, r record) error {
	if err := s.executor.Undo(ctx, r.Target, r.Receipts); err != nil {
		return err
	}
	return s.ledger.drop(id)
}

// performance converts a request; violations that only the wire can have, a
// field of a later version for one, are a [RefusedError].
func performance(r *testingv1alpha1.PerformRequest) (Performance, error) {
	specs, violations := wire.FromProto(r.GetMountSpecs())
	if len(violations) > 0 {
		return Performance{}, &RefusedError{Violations: violations}
	}
	request := r.GetRequest()
	return Performance{
		Target: target(r.GetTarget()),
		Request: mountspec.Request{
			Performer: wire.PerformerFromProto(request.GetPerformer()),
			Readonly:  request.GetReadonly(),
			Block:     request.GetBlock(),
			Staging:   request.GetStagingTargetPath() != "",
		},
		Staging: request.GetStagingTargetPath(),
		Prepare: request.GetPreparePath(),
		Grants:  request.GetGrants(),
		Specs:   specs,
	}, nil
}

func target(t *testingv1alpha1.Target) Target {
	return Target{Namespace: t.GetNamespace(), Root: t.GetRoot(), Path: t.GetPath()}
}

// digestOf tells requests apart without keeping what is secret in them.
func digestOf(r *testingv1alpha1.PerformRequest) string {
	r = proto.CloneOf(r)
	for _, m := range r.GetMountSpecs() {
		for _, p := range m.GetFilesystem().GetParameters() {
			if p.GetSecret() != "" {
				p.Value = &preparev1alpha1.FsParameter_Secret{}
			}
		}
	}
	data, err := proto.MarshalOptions{Deterministic: true}.Marshal(r)
	if err != nil { // a request that came over the wire can go back to it
		data = []byte(err.Error())
	}
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:])
}

// answer gives an error the code the testing service has for it.
func answer(err error) error {
	var refused *RefusedError
	var state *StateError
	switch {
	case errors.As(err, &refused):
		return status.Error(codes.InvalidArgument, err.Error())
	case errors.As(err, &state):
		return status.Error(codes.FailedPrecondition, err.Error())
	case errors.Is(err, context.DeadlineExceeded):
		return status.Error(codes.DeadlineExceeded, err.Error())
	case errors.Is(err, context.Canceled):
		return status.Error(codes.Canceled, err.Error())
	default:
		return status.Error(codes.Internal, err.Error())
	}
}
