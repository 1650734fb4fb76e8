package mountns

import (
	"context"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"time"
)

// patience is how long one process may take to be looked into before others are
// looked into beside it.
const patience = 50 * time.Millisecond

// eachProcess looks into every process of /proc and returns what was found. The
// kernel lets nobody look into a process that is in the middle of an execve(2),
// and one that hangs there, on a dead server perhaps, makes those who look hang
// too. So a process that does not answer does not keep the others from being
// looked into; when ctx ends first, the error names those that have not
// answered, and what was found in the others is returned with it.
func eachProcess[T any](ctx context.Context, look func(pid string) T) ([]T, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	pids, err := processes()
	if err != nil {
		return nil, err
	}
	queue := make(chan string, len(pids))
	pending := make(map[string]bool, len(pids))
	for _, pid := range pids {
		queue <- pid
		pending[pid] = true
	}
	close(queue)
	type result struct {
		pid   string
		found T
	}
	results := make(chan result, len(pids)) // room for all, so that nobody waits for us
	work := func() {
		for pid := range queue {
			if ctx.Err() != nil {
				return
			}
			results <- result{pid, look(pid)}
		}
	}
	go work()
	found := make([]T, 0, len(pids))
	tick := time.NewTicker(patience)
	defer tick.Stop()
	answered := true
	for len(pending) > 0 {
		select {
		case r := <-results:
			delete(pending, r.pid)
			found = append(found, r.found)
			answered = true
		case <-tick.C:
			if !answered && len(queue) > 0 {
				go work()
			}
			answered = false
		case <-ctx.Done():
			silent := slices.Sorted(maps.Keys(pending))
			return found, fmt.Errorf("%d processes did not answer (%s): %w", len(silent), shortList(silent), ctx.Err())
		}
	}
	return found, nil
}

// shortList names the first few.
func shortList(names []string) string {
	const few = 5
	if len(names) > few {
		return strings.Join(names[:few], ", ") + ", …"
	}
	return strings.Join(names, ", ")
}

// processes lists the process numbers in /proc.
func processes() ([]string, error) {
	names, err := entries("/proc")
	return slices.DeleteFunc(names, func(name string) bool { return name[0] < '0' || name[0] > '9' }), err
}

func entries(dir string) ([]string, error) {
	d, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	return d.Readdirnames(-1)
}
