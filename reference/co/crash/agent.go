package crash

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/csi-prepare/csi-prepare/reference/co"
	"github.com/csi-prepare/csi-prepare/reference/perform"
)

// use is one consumer's use of a volume.
type use struct {
	Endpoint, VolumeID, PrepareID string
	Target                        string
	// Steady says that the consumer stays.
	Steady bool
	driver string
}

func (u *use) key() co.Key {
	return co.Key{Driver: u.driver, VolumeID: u.VolumeID, PrepareID: u.PrepareID}
}

func (u *use) co() co.Use {
	return co.Use{
		Endpoint: u.Endpoint, VolumeID: u.VolumeID, PrepareID: u.PrepareID,
		Capability: capability(), Target: perform.Target{Path: u.Target},
	}
}

func capability() *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER},
	}
}

// orders are what a CO process is told, one after another.
type order struct {
	// Act is "open", which is the first and recovers, "sequence", "go",
	// "pause", "up" or "end".
	Act string
	// Dir, Policy, Endpoints and Uses are of "open".
	Dir, Policy string
	Endpoints   []string
	Uses        []use
	// Step is the step of a sequence at which the process kills itself, 0
	// for none; Only limits it to one endpoint.
	Step int
	Only string
}

// report is what it answers.
type report struct {
	Acts   int      // since the last report
	Errors []string // of acts, and of recovering
	RSS    int      // KiB
}

// agent is the CO process.
type agent struct {
	*co.CO
	endpoints []string
	uses      []use
	keys      sync.Map // by index of the use

	steps atomic.Int64 // to go until the end of the process, if positive

	mu     sync.Mutex
	acts   int
	errs   []string
	paused context.CancelFunc
	loops  sync.WaitGroup
}

func runCO(in io.Reader, out io.Writer) error {
	a := &agent{}
	orders, reports := json.NewDecoder(in), json.NewEncoder(out)
	for {
		var o order
		err := orders.Decode(&o)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err == nil {
			err = a.do(&o)
		}
		if err != nil {
			return err
		}
		a.mu.Lock()
		r := report{a.acts, a.errs, rss()}
		a.acts, a.errs = 0, nil
		a.mu.Unlock()
		if err := reports.Encode(r); err != nil {
			return err
		}
	}
}

func (a *agent) do(o *order) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	switch o.Act {
	case "open":
		return a.open(ctx, o)
	case "sequence":
		a.steps.Store(int64(o.Step))
		for i := range a.uses {
			if o.Only == "" || a.uses[i].Endpoint == o.Only {
				a.cycle(ctx, i)
			}
		}
		a.steps.Store(0)
	case "up":
		a.all(func(i int) { a.up(context.Background(), i) }) // a thousand take their time
	case "go":
		var running context.Context
		running, a.paused = context.WithCancel(context.Background())
		for i := range a.uses {
			a.loops.Go(func() {
				for running.Err() == nil {
					a.cycle(context.Background(), i)
					if a.uses[i].Steady {
						time.Sleep(chance(100 * time.Millisecond))
					}
				}
			})
		}
	case "pause":
		a.paused()
		a.loops.Wait()
		a.mu.Lock()
		a.errs = nil // a plugin was killed meanwhile
		a.mu.Unlock()
		a.recover(ctx)
	case "end":
		a.all(func(i int) { a.down(context.Background(), i) })
	}
	return nil
}

// all does something for each use, for several at a time.
func (a *agent) all(do func(int)) {
	var wg sync.WaitGroup
	turn := make(chan struct{}, 4)
	for i := range a.uses {
		wg.Go(func() {
			turn <- struct{}{}
			defer func() { <-turn }()
			do(i)
		})
	}
	wg.Wait()
}

func (a *agent) open(ctx context.Context, o *order) error {
	policy, err := co.ParsePolicy([]byte(o.Policy))
	if err != nil {
		return err
	}
	a.endpoints, a.uses = o.Endpoints, o.Uses
	a.CO, err = co.Open(co.Config{Dir: o.Dir, Policy: policy, Before: func(string) {
		if a.steps.Add(-1) == 0 {
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		}
	}})
	if err != nil {
		return err
	}
	a.recover(ctx)
	// The driver's part of each key.
	records, _ := a.Records()
	for i := range a.uses {
		for _, r := range records {
			if r.VolumeID == a.uses[i].VolumeID && r.PrepareID == a.uses[i].PrepareID {
				a.keys.Store(i, r.Key())
			}
		}
	}
	return nil
}

func (a *agent) recover(ctx context.Context) {
	if _, err := a.Recover(ctx, a.endpoints...); err != nil {
		a.fail(fmt.Errorf("recover: %w", err))
	}
}

// cycle is the whole stay of a consumer that comes and goes, and a refresh for
// one that stays.
func (a *agent) cycle(ctx context.Context, i int) {
	if !a.up(ctx, i) || a.uses[i].Steady {
		return
	}
	a.down(ctx, i)
}

func (a *agent) up(ctx context.Context, i int) bool {
	record, err := a.Up(ctx, a.uses[i].co())
	if err != nil {
		a.fail(fmt.Errorf("up: %w", err))
		return false
	}
	a.keys.Store(i, record.Key())
	a.count()
	return true
}

func (a *agent) down(ctx context.Context, i int) {
	k, known := a.keys.Load(i)
	if !known {
		return
	}
	if err := a.Down(ctx, k.(co.Key)); err != nil {
		a.fail(fmt.Errorf("down: %w", err))
		return
	}
	a.count()
}

func (a *agent) count() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.acts++
}

func (a *agent) fail(err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.errs) < 20 {
		a.errs = append(a.errs, err.Error())
	}
}

// rss is the memory this process has in use, in KiB (proc_pid_status(5)).
func rss() int {
	text, _ := os.ReadFile("/proc/self/status")
	for line := range strings.Lines(string(text)) {
		if value, found := strings.CutPrefix(line, "VmRSS:"); found {
			n, _ := strconv.Atoi(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(value), "kB")))
			return n
		}
	}
	return 0
}
