package sanity

import (
	"context"
	"fmt"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/spec/requirement"
	"github.com/csi-prepare/csi-prepare/spec/testingv1alpha1"
)

func (s *Suite) noteBroken(id requirement.ID, spec string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.broken[id] == "" {
		s.broken[id] = spec
	}
}

func (s *Suite) brokenIn(id requirement.ID) (spec string, known bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	spec, known = s.broken[id]
	return spec, known
}

// goneSince says why nothing can run any more, "" if it can.
func (s *Suite) goneSince() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.gone
}

// checkGone finds out whether the plugin still answers. If it does not, that
// is kept as the reason why no later spec can run.
func (s *Suite) checkGone(spec string) error {
	why := s.silence()
	if why == nil {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.gone == "" {
		s.gone = fmt.Sprintf("the plugin is gone since %q: %v", spec, why)
	}
	return why
}

func (s *Suite) silence() error {
	if s.process != nil {
		// The end of a process is seen a little after that of its socket.
		select {
		case <-s.process.ended:
			return s.process.gone()
		case <-time.After(100 * time.Millisecond):
		}
	}
	// This call is the suite's own, and in no spec's journal.
	ctx, cancel := context.WithTimeout(context.Background(), s.config.Timeout)
	defer cancel()
	var err error
	if s.actor == requirement.CO {
		_, err = s.clients.performer.Undo(ctx, &testingv1alpha1.UndoRequest{Id: "ready"})
	} else {
		_, err = s.clients.identity.Probe(ctx, &csi.ProbeRequest{})
	}
	switch status.Code(err) {
	case codes.Unavailable, codes.DeadlineExceeded:
		if s.process != nil && s.process.gone() != nil {
			return s.process.gone()
		}
		return fmt.Errorf("it answers nothing any more: %s", answered(err))
	}
	return nil
}
