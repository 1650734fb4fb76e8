package mountns

import (
	"context"
	"errors"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// One process that hangs keeps none of the others from being looked into.
func TestAProcessThatHangsDoesNotHideTheOthers(t *testing.T) {
	self := strconv.Itoa(os.Getpid())
	pids, err := processes()
	must(t, err)
	slices.Sort(pids)
	if i := slices.Index(pids, self); i < 0 {
		t.Fatalf("%s is not among the processes %v", self, pids)
	}
	ctx, cancel := context.WithCancel(t.Context())
	release := make(chan struct{})
	defer close(release)
	looked := make(chan string, 1<<16)
	go func() {
		for range len(pids) / 2 {
			<-looked
		}
		cancel()
	}()
	found, err := eachProcess(ctx, func(pid string) string {
		if pid == self {
			<-release
		}
		looked <- pid
		return pid
	})
	if !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "did not answer (") {
		t.Errorf("error %v, want the context's, naming processes", err)
	}
	if slices.Contains(found, self) || len(found) == 0 {
		t.Errorf("found %d of %d processes", len(found), len(pids))
	}
}
