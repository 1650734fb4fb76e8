package server

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

func TestSingleRunsOneCallAtATime(t *testing.T) {
	var (
		f       Flights
		inside  atomic.Int32
		ok, bad atomic.Int32
		all     sync.WaitGroup
	)
	hold := make(chan struct{})
	for range 100 {
		all.Go(func() {
			_, err := Single(t.Context(), &f, "v", func(context.Context) (int, error) {
				if inside.Add(1) != 1 {
					t.Error("two calls inside")
				}
				<-hold
				inside.Add(-1)
				return 1, nil
			})
			switch status.Code(err) {
			case codes.OK:
				ok.Add(1)
			case codes.Aborted:
				// The first of those that are refused lets the one inside go.
				if bad.Add(1) == 1 {
					close(hold)
				}
			default:
				t.Errorf("unexpected: %v", err)
			}
		})
	}
	all.Wait()
	if ok.Load() < 1 || ok.Load()+bad.Load() != 100 {
		t.Errorf("%d ok, %d aborted", ok.Load(), bad.Load())
	}
}

func TestSingleLetsOtherKeysPass(t *testing.T) {
	var f Flights
	entered, hold := make(chan struct{}), make(chan struct{})
	go Single(t.Context(), &f, "slow", func(context.Context) (int, error) {
		close(entered)
		<-hold
		return 0, nil
	})
	<-entered
	got, err := Single(t.Context(), &f, "other", func(context.Context) (int, error) { return 7, nil })
	if got != 7 || err != nil {
		t.Errorf("got %d, %v", got, err)
	}
	close(hold)
	f.Wait()
}

// A caller that gives up gets its answer at once; the key stays taken until
// the work it started has ended, and is free then.
func TestSingleCancelled(t *testing.T) {
	var f Flights
	ctx, cancel := context.WithCancel(t.Context())
	hold := make(chan struct{})
	_, err := Single(ctx, &f, "v", func(context.Context) (int, error) {
		cancel()
		<-hold
		return 0, nil
	})
	if status.Code(err) != codes.Canceled {
		t.Errorf("cancelled call: %v", err)
	}
	act := func(context.Context) (int, error) { return 1, nil }
	if _, err := Single(t.Context(), &f, "v", act); status.Code(err) != codes.Aborted {
		t.Errorf("while the work runs: %v", err)
	}
	close(hold)
	f.Wait()
	if _, err := Single(t.Context(), &f, "v", act); err != nil {
		t.Errorf("after it: %v", err)
	}
	if _, err := Single(ctx, &f, "v", act); status.Code(err) != codes.Canceled {
		t.Errorf("cancelled before it began: %v", err)
	}
}

func TestSingleFreesTheKeyAfterAnError(t *testing.T) {
	var f Flights
	for range 3 {
		_, err := Single(t.Context(), &f, "v", func(context.Context) (int, error) { return 0, errors.New("no") })
		if err == nil || err.Error() != "no" {
			t.Fatal(err)
		}
	}
}
