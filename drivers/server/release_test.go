package server

import (
	"context"
	"slices"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// What a driver made for a preparation is freed before the preparation is
// forgotten, and a pair that is not known is freed too.
func TestUnprepareReleases(t *testing.T) {
	var (
		released []string
		refuse   error
	)
	p := newPlugin(t, Config{MultiWriter: true, Release: func(_ context.Context, volumeID, prepareID string) error {
		released = append(released, volumeID+"/"+prepareID)
		return refuse
	}})
	req := p.request("v1", "p1", multiWriter)
	p.prepareOK(req)

	refuse = status.Error(codes.FailedPrecondition, "in use")
	p.failed(p.unprepare("v1", "p1", req.PreparePath), codes.FailedPrecondition, "in use")
	p.lists("v1/p1")

	refuse = nil
	p.failed(p.unprepare("v1", "p1", req.PreparePath+"x"), codes.InvalidArgument)
	p.unprepareOK(req)
	p.lists()
	if known, err := p.PreparedAs("v1", "p1"); known || err != nil {
		t.Errorf("PreparedAs after Unprepare: %v, %v", known, err)
	}
	p.unprepareOK(req)
	if want := []string{"v1/p1", "v1/p1", "v1/p1"}; !slices.Equal(released, want) {
		t.Errorf("released %q, want %q", released, want)
	}
}
