package co

import (
	"context"
	"errors"
	"path/filepath"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/reference/co"
	"github.com/csi-prepare/csi-prepare/reference/perform"
	testingv1alpha1 "github.com/csi-prepare/csi-prepare/spec/testingv1alpha1"
)

// ReferenceCO is the reference CO, package reference/co, behind the testing
// service. The program has to call co.Child first thing in main.
type ReferenceCO struct {
	testingv1alpha1.UnimplementedOrchestratorServer
	co *co.CO
}

// quick is a policy for a test, in which nothing is waited for long.
const quick = `{"apiVersion": "csi-prepare/v1alpha1", "kind": "Policy", "defaults": {"attempts": 4, "backoff": "10ms", "callDeadline": "10s"}}`

// NewReferenceCO opens the reference CO in a directory of its own.
func NewReferenceCO(directory string) (*ReferenceCO, error) {
	policy, err := co.ParsePolicy([]byte(quick))
	if err != nil {
		return nil, err
	}
	c, err := co.Open(co.Config{Dir: directory, Policy: policy})
	if err != nil {
		return nil, err
	}
	return &ReferenceCO{co: c}, nil
}

// NewReferenceServer returns a Server over the reference executor, with the
// reference CO.
func NewReferenceServer(directory string) (*Server, error) {
	s, err := New(new(Reference), directory)
	if err != nil {
		return nil, err
	}
	s.Orchestrator, err = NewReferenceCO(filepath.Join(directory, "co"))
	return s, err
}

// Up implements testingv1alpha1.OrchestratorServer.
func (r *ReferenceCO) Up(ctx context.Context, q *testingv1alpha1.UpRequest) (*testingv1alpha1.UpResponse, error) {
	ns, err := open(q.GetTarget().GetNamespace())
	if err != nil {
		return nil, status.Error(codes.FailedPrecondition, err.Error())
	}
	defer ns.Close()
	root, err := openRoot(ctx, ns, q.GetTarget().GetRoot())
	if err != nil {
		return nil, status.Error(codes.FailedPrecondition, err.Error())
	}
	defer root.Close()
	_, err = r.co.Up(ctx, co.Use{
		Endpoint: q.GetEndpoint(), VolumeID: q.GetVolumeId(), PrepareID: q.GetConsumer(),
		Capability: q.GetVolumeCapability(), Readonly: q.GetReadonly(),
		Target: perform.Target{Namespace: ns, Root: root, Path: q.GetTarget().GetPath()},
	})
	return &testingv1alpha1.UpResponse{}, coded(err)
}

// coded gives an error of the CO a code of the testing service.
func coded(err error) error {
	var absent *co.NoServiceError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &absent):
		return status.Error(codes.Unimplemented, err.Error())
	default:
		return status.Error(codes.FailedPrecondition, err.Error())
	}
}

// Down implements testingv1alpha1.OrchestratorServer.
func (r *ReferenceCO) Down(ctx context.Context, q *testingv1alpha1.DownRequest) (*testingv1alpha1.DownResponse, error) {
	records, err := r.co.Records()
	if err != nil {
		return nil, coded(err)
	}
	for _, record := range records {
		if record.Endpoint == q.GetEndpoint() && record.VolumeID == q.GetVolumeId() && record.PrepareID == q.GetConsumer() {
			err = errors.Join(err, r.co.Down(ctx, record.Key()))
		}
	}
	return &testingv1alpha1.DownResponse{}, coded(err)
}

// Resume implements testingv1alpha1.OrchestratorServer.
func (r *ReferenceCO) Resume(ctx context.Context, q *testingv1alpha1.ResumeRequest) (*testingv1alpha1.ResumeResponse, error) {
	_, err := r.co.Recover(ctx, q.GetEndpoints()...)
	return &testingv1alpha1.ResumeResponse{}, coded(err)
}
