package co

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// CallError is an RPC that failed. status.Code of it is the call's.
type CallError struct {
	Call string
	Err  error
}

// Error names the call, the code and the plugin's own words.
func (e *CallError) Error() string {
	s := status.Convert(e.Err)
	return fmt.Sprintf("%s: %s: %s", e.Call, s.Code(), s.Message())
}

// Unwrap returns the call's error.
func (e *CallError) Unwrap() error { return e.Err }

// GRPCStatus lets status.Code see the code.
func (e *CallError) GRPCStatus() *status.Status { return status.Convert(e.Err) }

// final says that after this error of a call the caller knows what happened
// (SPEC.md, "Final outcome").
func final(err error) bool {
	switch status.Code(err) {
	case codes.OK, codes.InvalidArgument, codes.NotFound, codes.AlreadyExists, codes.PermissionDenied,
		codes.FailedPrecondition, codes.OutOfRange, codes.Unimplemented, codes.Unauthenticated:
		return true
	}
	return false
}

// longestPause is the most that back-off grows to.
const longestPause = 30 * time.Second

// repeat makes attempts until one succeeds, fails for good, or there have been
// enough; between two it waits, longer each time. It ends with ctx.
func (s *Settings) repeat(ctx context.Context, again func(error) bool, attempt func(context.Context) error) error {
	pause := time.Duration(s.Backoff)
	for n := 1; ; n++ {
		err := attempt(ctx)
		if err == nil || n >= s.Attempts || !again(err) || ctx.Err() != nil {
			return err
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return errors.Join(err, ctx.Err())
		}
		pause = min(2*pause, longestPause)
	}
}

// call makes one RPC, again as long as its outcome is not final.
func (s *Settings) call(ctx context.Context, name string, rpc func(context.Context) error) error {
	return s.calls(ctx, name, func(err error) bool { return !final(err) }, rpc)
}

// callBack makes one RPC that takes something back. There FAILED_PRECONDITION
// says that it is in use, which may end.
func (s *Settings) callBack(ctx context.Context, name string, rpc func(context.Context) error) error {
	return s.calls(ctx, name, func(err error) bool {
		return !final(err) || status.Code(err) == codes.FailedPrecondition
	}, rpc)
}

func (s *Settings) calls(ctx context.Context, name string, again func(error) bool, rpc func(context.Context) error) error {
	return s.repeat(ctx, again, func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, time.Duration(s.CallDeadline))
		defer cancel()
		if err := rpc(ctx); err != nil {
			return &CallError{name, err}
		}
		return nil
	})
}
