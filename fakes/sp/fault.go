package sp

import (
	"context"
	"maps"
	"sync"
	"time"

	"google.golang.org/grpc"

	"github.com/csi-prepare/csi-prepare/fakes/mutant"
	preparev1alpha1 "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// Short names for the messages the faults are about.
type (
	prepareRequest    = preparev1alpha1.NodePrepareVolumeRequest
	prepareResponse   = preparev1alpha1.NodePrepareVolumeResponse
	unprepareRequest  = preparev1alpha1.NodeUnprepareVolumeRequest
	unprepareResponse = preparev1alpha1.NodeUnprepareVolumeResponse
	listRequest       = preparev1alpha1.NodeListPreparedVolumesRequest
	listResponse      = preparev1alpha1.NodeListPreparedVolumesResponse
	capabilitiesReply = preparev1alpha1.NodePrepareGetCapabilitiesResponse
	capabilitiesQuery = preparev1alpha1.NodePrepareGetCapabilitiesRequest
)

// A Mutant is a Server with one fault, or a Plain.
type Mutant struct {
	mutant.Mutant
	fault fault
	plain plainFault
}

// New returns the fake that has the fault.
func (m Mutant) New(c Config) (Service, error) {
	if m.plain != nil {
		return buildPlain(c, m.plain)
	}
	return build(c, m.fault)
}

// fault makes a Server wrong in one way. It runs before the Server has any
// state; what it needs to remember lives in its own closure.
type fault func(*Server)

// instead replaces one method, known by the type of its request; next is the
// right one.
func instead[Req, Resp any](f func(ctx context.Context, s *Server, r *Req, next func() (*Resp, error)) (*Resp, error)) fault {
	return func(s *Server) {
		s.faults = append(s.faults, func(ctx context.Context, request any, _ *grpc.UnaryServerInfo, h grpc.UnaryHandler) (any, error) {
			r, ok := request.(*Req)
			if !ok {
				return h(ctx, request)
			}
			resp, err := f(ctx, s, r, func() (*Resp, error) {
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

// asked changes a request before anything looks at it.
func asked[Req any](change func(*Server, *Req)) fault {
	return func(s *Server) {
		s.faults = append(s.faults, func(ctx context.Context, request any, _ *grpc.UnaryServerInfo, h grpc.UnaryHandler) (any, error) {
			if r, ok := request.(*Req); ok {
				change(s, r)
			}
			return h(ctx, request)
		})
	}
}

// answered changes an answer that is OK.
func answered[Req, Resp any](change func(*Server, *Req, *Resp)) fault {
	return instead(func(_ context.Context, s *Server, r *Req, next func() (*Resp, error)) (*Resp, error) {
		answer, err := next()
		if err == nil {
			change(s, r, answer)
		}
		return answer, err
	})
}

// failed changes the error a preparation is answered with.
func failed(change func(*prepareRequest, error) error) fault {
	return instead(func(_ context.Context, _ *Server, r *prepareRequest, next func() (*prepareResponse, error)) (*prepareResponse, error) {
		answer, err := next()
		if err != nil {
			return nil, change(r, err)
		}
		return answer, nil
	})
}

// specs changes the one mount spec of a preparation.
func specs(change func(*Server, *prepareRequest, *preparev1alpha1.MountSpec)) fault {
	return answered(func(s *Server, r *prepareRequest, answer *prepareResponse) {
		change(s, r, answer.MountSpecs[0])
	})
}

// known reports whether the pair of a request is prepared already.
func (s *Server) known(volume, prepare string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.state.prepared[pair{volume, prepare}] != nil
}

// where returns the data directory of a volume that exists.
func (s *Server) where(volume string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.directory(s.state.volumes[volume])
}

// both makes one fault of two halves.
func both(faults ...fault) fault {
	return func(s *Server) {
		for _, f := range faults {
			f(s)
		}
	}
}

// later does something when a caller has long had its answer.
func later(f func()) { time.AfterFunc(300*time.Millisecond, f) }

// memory is what a fault remembers between calls.
type memory[K comparable, V any] struct {
	mu sync.Mutex
	m  map[K]V
}

// swap stores v and returns what was there.
func (m *memory[K, V]) swap(k K, v V) (was V, found bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.m == nil {
		m.m = make(map[K]V)
	}
	was, found = m.m[k]
	m.m[k] = v
	return was, found
}

// all returns what is stored.
func (m *memory[K, V]) all() map[K]V {
	m.mu.Lock()
	defer m.mu.Unlock()
	return maps.Clone(m.m)
}
