package sanity

import (
	"context"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
	"github.com/csi-prepare/csi-prepare/spec/testingv1alpha1"
)

func recoverSpecs(s *section) {
	s.spec("what was performed is known after a crash", Covers(requirement.CrashReceiptDurable, requirement.CrashRecovered), func(t *trial) {
		g := t.rig()
		g.mayRestart()
		r := g.performance(bind("", "", nil), bind("dir", "other", nil))
		receipts := g.performed(r)
		ids := g.idsBelow()
		g.crash()
		answer := g.recovered()
		g.want(requirement.CrashReceiptDurable, slices.Contains(answer.GetPerformed(), r.GetId()), "the performance among those that are whole", "performed %v, undone %v", answer.GetPerformed(), answer.GetUndone())
		g.want(requirement.CrashRecovered, slices.Equal(ids, g.idsBelow()), "its mounts untouched", "%s of %d", count(len(g.idsBelow()), "mount"), len(ids))
		again, err := g.perform(r)
		g.want(requirement.CrashReceiptDurable, err == nil && slices.Equal(ids, g.idsBelow()), "OK to a repeat, and no more mounts", "%s, %s", answered(err), count(len(g.idsBelow()), "mount"))
		g.want(requirement.CrashReceiptDurable, slices.Equal(again, receipts), "the same receipts", "others")
		g.wantCode(requirement.CrashReceiptDurable, g.undoCall(r, receipts), codes.OK)
		g.wantNothing(requirement.CrashRecovered, "after undo")
	})
	s.spec("a performance that a crash cut short becomes whole or nothing", Covers(requirement.CrashRecovered), func(t *trial) {
		g := t.rig()
		g.mayRestart()
		// Killed a little later each time, on machines of any speed.
		for i := range 8 {
			r := g.performance(bind("", "", nil), tmpfsOf("dir", nil), bind("other", "dir", nil))
			ended := make(chan error, 1)
			go func() {
				ctx, cancel := context.WithTimeout(context.WithoutCancel(g.ctx), g.config.Timeout)
				defer cancel()
				_, err := g.clients.performer.Perform(ctx, r)
				ended <- err
			}()
			time.Sleep(250 * time.Microsecond << i)
			g.crash()
			err := <-ended
			answer := g.recovered()
			n := len(g.table().Below(g.target))
			switch {
			case slices.Contains(answer.GetPerformed(), r.GetId()):
				g.want(requirement.CrashRecovered, n == 3, "three mounts of a performance that is whole", "%s", count(n, "mount"))
			default:
				g.want(requirement.CrashRecovered, n == 0, "no mount of a performance that is not whole (the call: "+answered(err)+")", "%s", count(n, "mount"))
			}
			again, err := g.perform(r)
			g.need(requirement.PerformVerified, err, "OK to a repeat")
			g.need(requirement.UndoIdempotent, g.undoCall(r, again), "OK to undo")
			g.wantNothing(requirement.CrashRecovered, "after undo")
		}
	})
}

// recovered asks the performer to bring everything to an end.
func (g *rig) recovered() *testingv1alpha1.RecoverResponse {
	answer, err := g.clients.performer.Recover(g.ctx, &testingv1alpha1.RecoverRequest{})
	if status.Code(err) == codes.Unimplemented {
		g.unsupported("the performer does not serve Recover")
	}
	g.wantCode(requirement.CrashRecovered, err, codes.OK)
	return answer
}

func executorSecretSpecs(s *section) {
	s.spec("no secret of a mount spec shows in an error or a log", Covers(requirement.SecuritySecretsCO), func(t *trial) {
		g := t.rig()
		canary := t.canary()
		secret := &preparev1alpha1.FsParameter{Key: "password", Value: &preparev1alpha1.FsParameter_Secret{Secret: canary}}
		for what, r := range map[string]*performRequest{
			"a parameter the kernel does not know": g.performance(tmpfsOf("", nil, secret)),
			"a rule that is broken beside it":      g.performance(tmpfsOf("not-first", nil, secret)),
			"a parameter given twice":              g.performance(tmpfsOf("", nil, secret, secret)),
		} {
			_, err := g.perform(r)
			g.alive(err)
			g.want(requirement.SecuritySecretsCO, err != nil, "an error to "+what, "OK")
			g.want(requirement.SecuritySecretsCO, !strings.Contains(status.Convert(err).Message(), canary), "an error without the secret", "%s with the secret in it", codeName(status.Code(err)))
		}
		if t.process != nil {
			g.want(requirement.SecuritySecretsCO, !t.process.log.contains(canary), "no secret in the output of the performer", "it is in there")
		}
	})
}
