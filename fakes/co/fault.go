package co

import (
	"context"
	"path/filepath"

	"google.golang.org/grpc"

	"github.com/csi-prepare/csi-prepare/fakes/mutant"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
	testingv1alpha1 "github.com/csi-prepare/csi-prepare/spec/testingv1alpha1"
)

// A Mutant is a Server over a Plain with one fault.
type Mutant struct {
	mutant.Mutant
	fault fault
	rule  func(*Orchestrator) // of the CO around it, if that has the fault
	// void says which records of a predecessor do not count.
	void func(r record, boot string) bool
}

// New returns the Server that has the fault; its records are as those of the
// conformant New.
func (m Mutant) New(directory string) (*Server, error) {
	p := NewPlain()
	void := m.void
	if void == nil {
		void = ofAnotherBoot
	}
	s, err := newServer(p, directory, void)
	if err != nil {
		return nil, err
	}
	m.fault(p, s)
	if directory == "" {
		return s, nil
	}
	o, err := NewOrchestrator(p, filepath.Join(directory, "co"))
	if err != nil {
		return nil, err
	}
	if m.rule != nil {
		m.rule(o)
	}
	s.Orchestrator = o
	return s, nil
}

// fault makes a Plain, or the Server over it, wrong in one way.
type fault func(*Plain, *Server)

// seat makes the entry of the tables of mutants.
func seat(name string, c mutant.Category, breaks requirement.ID, story string, f fault) Mutant {
	return Mutant{
		Mutant: mutant.Mutant{Name: name, Actor: requirement.CO, Category: c, Breaks: breaks, Story: story},
		fault:  f,
	}
}

// owing makes the entry of a CO that owes a plugin something.
func owing(name string, c mutant.Category, breaks requirement.ID, story string, rule func(*Orchestrator)) Mutant {
	m := seat(name, c, breaks, story, func(*Plain, *Server) {})
	m.rule = rule
	return m
}

// around replaces one method of the service, known by the type of its
// request; next is the right one.
func around[Req, Resp any](f func(r *Req, next func() (*Resp, error)) (*Resp, error)) fault {
	return func(_ *Plain, s *Server) {
		s.faults = append(s.faults, func(ctx context.Context, request any, _ *grpc.UnaryServerInfo, h grpc.UnaryHandler) (any, error) {
			r, ok := request.(*Req)
			if !ok {
				return h(ctx, request)
			}
			resp, err := f(r, func() (*Resp, error) {
				answer, err := h(ctx, request)
				if err != nil {
					return nil, err
				}
				return answer.(*Resp), nil
			})
			if err != nil {
				return nil, err
			}
			return resp, nil
		})
	}
}

// plain is a fault of the Plain alone.
func plain(change func(*Plain)) fault { return func(p *Plain, _ *Server) { change(p) } }

// both makes one fault of two halves.
func both(faults ...fault) fault {
	return func(p *Plain, s *Server) {
		for _, f := range faults {
			f(p, s)
		}
	}
}

// Short names for the messages the faults are about.
type (
	performRequest  = testingv1alpha1.PerformRequest
	performResponse = testingv1alpha1.PerformResponse
	undoRequest     = testingv1alpha1.UndoRequest
	undoResponse    = testingv1alpha1.UndoResponse
)
