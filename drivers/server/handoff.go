package server

import (
	"errors"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/reference/handoff"
)

// HandoffStatus is the status of a call whose handoff came to err.
func HandoffStatus(err error) error {
	var refused *handoff.Refusal
	if !errors.As(err, &refused) {
		return err
	}
	switch refused.Code {
	case codes.Internal, codes.Unavailable, codes.DeadlineExceeded, codes.ResourceExhausted:
		return status.Errorf(refused.Code, "handle_socket: the CO answers: %s", refused.Message)
	default:
		return status.Errorf(codes.FailedPrecondition, "handle_socket: the CO answers %s: %s", refused.Code, refused.Message)
	}
}
