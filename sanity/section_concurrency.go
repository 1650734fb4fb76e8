package sanity

import (
	"context"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// atOnce is how many calls are made at a time.
const atOnce = 16

func concurrencySpecs(s *section) {
	s.spec("calls at once for one pair come to one preparation", Covers(requirement.ConcurrencySamePair), func(t *trial) {
		r := t.request(t.volume())
		t.cleanup(func() error { return t.settled(r, true) })
		answers := make(chan *prepareResponse, atOnce)
		errs := parallel(t.ctx, func(ctx context.Context) error {
			answer, err := t.clients.prepare.NodePrepareVolume(ctx, clone(r))
			if err == nil {
				answers <- answer
			}
			return err
		})
		close(answers)
		t.allOKOrAborted(errs)
		final, err := t.prepareSettled(r)
		t.wantCode(requirement.ConcurrencySamePair, err, codes.OK)
		for a := range answers {
			t.want(requirement.ConcurrencySamePair, equivalent(a, final), "equivalent mount specs from all calls that were OK: "+specText(final, -1), "%s", specText(a, -1))
		}
		t.want(requirement.ConcurrencySamePair, t.entry(r) != nil, "one preparation in the list", "it is not listed")
		errs = parallel(t.ctx, func(ctx context.Context) error { return t.unprepareIn(ctx, r) })
		t.allOKOrAborted(errs)
		t.wantCode(requirement.ConcurrencySamePair, t.settled(r, false), codes.OK)
		t.want(requirement.ConcurrencySamePair, t.entry(r) == nil, "no such pair in the list after all are unprepared", "it is listed")
	})
	s.spec("a call that waits for nothing is not delayed by another volume", Covers(requirement.ConcurrencyOthersFree), func(t *trial) {
		busy, free := t.volume(), t.volume()
		begun := time.Now()
		alone := t.request(free)
		t.prepared(alone)
		t.unprepared(alone)
		limit := 10*time.Since(begun) + t.config.Timeout/4
		t.abandon(t.request(busy))
		ctx, cancel := context.WithTimeout(t.ctx, limit)
		defer cancel()
		r := t.request(free)
		t.cleanup(func() error { return t.settled(r, true) })
		_, err := t.clients.prepare.NodePrepareVolume(ctx, r)
		t.lacksGrant(err)
		t.want(requirement.ConcurrencyOthersFree, err == nil, "OK for one volume while calls for another are pending or were cancelled", "%s (within %v)", answered(err), limit.Round(time.Millisecond))
	})
	s.spec("a call that was cancelled can be repeated", Covers(requirement.ConcurrencyCancelled), func(t *trial) {
		r := t.request(t.volume())
		t.abandon(r)
		_, err := t.prepareSettled(r)
		t.wantCode(requirement.ConcurrencyCancelled, err, codes.OK)
		t.wantCode(requirement.ConcurrencyCancelled, t.settled(r, false), codes.OK)
		t.want(requirement.ConcurrencyCancelled, t.entry(r) == nil, "no such pair in the list after it was unprepared", "it is listed")
	})
}

// abandon makes calls for one pair and cancels each a little later than the
// one before, so that some are cancelled while the plugin is at work.
func (t *trial) abandon(r *prepareRequest) {
	t.cleanup(func() error { return t.settled(r, true) })
	for after := range 10 {
		ctx, cancel := context.WithTimeout(t.ctx, 125*time.Microsecond<<after)
		_, err := t.clients.prepare.NodePrepareVolume(ctx, r)
		cancel()
		if code := status.Code(err); code == codes.Unavailable {
			t.alive(err)
		}
	}
}

func (t *trial) allOKOrAborted(errs []error) {
	for _, err := range errs {
		t.wantCode(requirement.ConcurrencySamePair, err, codes.OK, codes.Aborted)
	}
}

// prepareSettled repeats a call until it is not ABORTED.
func (t *trial) prepareSettled(r *prepareRequest) (answer *prepareResponse, err error) {
	t.poll(t.config.Timeout, func() bool {
		answer, err = t.clients.prepare.NodePrepareVolume(t.ctx, r)
		return status.Code(err) != codes.Aborted
	})
	return answer, err
}

// settled repeats unprepare until it is not ABORTED. In a clean-up the error
// is put into words.
func (t *trial) settled(r *prepareRequest, cleaning bool) (err error) {
	t.poll(t.config.Timeout, func() bool {
		err = t.unprepare(r)
		return status.Code(err) != codes.Aborted
	})
	if cleaning {
		return wrap("NodeUnprepareVolume", err)
	}
	return err
}

func (t *trial) unprepareIn(ctx context.Context, r *prepareRequest) error {
	_, err := t.clients.prepare.NodeUnprepareVolume(ctx, &unprepareRequest{
		VolumeId: r.GetVolumeId(), PrepareId: r.GetPrepareId(),
		PreparePath: r.GetPreparePath(), StagingTargetPath: r.GetStagingTargetPath(),
	})
	return err
}
