package server

import (
	"context"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Flights lets one call at a time act for a key (a volume). A second one is
// answered ABORTED at once, and never waits; other keys are not touched.
// The zero value is ready.
type Flights struct {
	mu      sync.Mutex
	pending map[string]bool
	running sync.WaitGroup
}

// Single runs act for key, or answers ABORTED while another runs for it.
// If ctx ends first, Single returns at once; act, which has ctx too, keeps
// the key until it returns, so that no later call overlaps with what it may
// still be doing.
func Single[T any](ctx context.Context, f *Flights, key string, act func(context.Context) (T, error)) (T, error) {
	var none T
	if err := ctx.Err(); err != nil {
		return none, Status(err)
	}
	if !f.take(key) {
		return none, status.Error(codes.Aborted, "another call for this volume is pending; repeat after it has ended")
	}
	type outcome struct {
		value T
		err   error
	}
	done := make(chan outcome, 1)
	go func() {
		defer f.running.Done()
		var o outcome
		// The key is free before the caller knows the outcome: it may call
		// again at once.
		defer func() { done <- o }()
		defer f.release(key)
		o.value, o.err = act(ctx)
	}()
	select {
	case o := <-done:
		return o.value, o.err
	case <-ctx.Done():
		return none, Status(ctx.Err())
	}
}

// Wait returns when no act runs any more.
func (f *Flights) Wait() { f.running.Wait() }

func (f *Flights) take(key string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.pending[key] {
		return false
	}
	if f.pending == nil {
		f.pending = map[string]bool{}
	}
	f.pending[key] = true
	f.running.Add(1)
	return true
}

func (f *Flights) release(key string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.pending, key)
}
