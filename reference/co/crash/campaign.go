package crash

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/csi-prepare/csi-prepare/reference/mountns"
)

// patience is how long anything may take before it counts as stuck.
const patience = 3 * time.Minute

// Campaign says what is killed.
type Campaign struct {
	// Driver is the command of the reference drivers, without a driver's
	// name.
	Driver []string
	// Plugins are names of drivers: hostpath, block, fuse.
	Plugins []string
	// Random is how many random moments a CO is killed at, and as many
	// plugins.
	Random int
	// Boundaries kills at every boundary between two steps besides.
	Boundaries bool
	// Progress gets lines for people.
	Progress io.Writer

	dir       string
	plugins   []*plugin
	uses      []use
	nonces    map[string]string // by volume
	before    *mountns.Table
	driverLog *os.File
	co        *process[order, report]
	consumers *process[errand, outcome]
	next      map[string]uint64 // by target of a use that is steady
	writing   bool
	result    Result
}

// Result is what a campaign came to.
type Result struct {
	Runs          int   `json:"runs"`
	Kills         int   `json:"kills"`
	LeakedMounts  int   `json:"leaked_mounts"`
	LeakedDevices int   `json:"leaked_devices"`
	LostBytes     int64 `json:"lost_bytes"`
	WrongState    int   `json:"wrong_state"`
	Stuck         int   `json:"stuck"`
	// Acts, Calls and Written say that something was going on.
	Acts    int    `json:"acts"`
	Calls   int    `json:"calls"`
	Written uint64 `json:"written_bytes"`
	// Findings are the first of what is counted above, in words.
	Findings []string `json:"findings,omitempty"`
}

// OK says that nothing was found.
func (r *Result) OK() bool {
	return r.LeakedMounts == 0 && r.LeakedDevices == 0 && r.LostBytes == 0 && r.WrongState == 0 && r.Stuck == 0
}

// String is the counts in one line.
func (r *Result) String() string {
	return fmt.Sprintf("%d kills in %d runs, %d acts, %d calls, %d bytes written: %d leaked, %d lost, %d wrong, %d stuck",
		r.Kills, r.Runs, r.Acts, r.Calls, r.Written, r.LeakedMounts+r.LeakedDevices, r.LostBytes, r.WrongState, r.Stuck)
}

func (c *Campaign) say(format string, args ...any) {
	if c.Progress != nil {
		fmt.Fprintf(c.Progress, format+"\n", args...)
	}
}

// found counts one finding.
func (c *Campaign) found(counter *int, format string, args ...any) {
	*counter++
	text := fmt.Sprintf(format, args...)
	c.say("  %s", text)
	if len(c.result.Findings) < 50 {
		c.result.Findings = append(c.result.Findings, text)
	}
}

// Run makes the campaign. An error is one of its own; what it found is in the
// result.
func (c *Campaign) Run(ctx context.Context) (_ *Result, err error) {
	if err := c.prepare(ctx); err != nil {
		return nil, errors.Join(err, c.clean())
	}
	defer func() { err = errors.Join(err, c.clean()) }()
	if c.Boundaries {
		if err := c.killCOAtBoundaries(ctx); err != nil {
			return &c.result, err
		}
		if err := c.killPluginsAtBoundaries(ctx); err != nil {
			return &c.result, err
		}
	}
	if err := c.killCOAtRandom(ctx); err != nil {
		return &c.result, err
	}
	if err := c.killPluginsAtRandom(ctx); err != nil {
		return &c.result, err
	}
	return &c.result, c.finish(ctx)
}

// prepare makes volumes and brings up the uses that stay.
func (c *Campaign) prepare(ctx context.Context) (err error) {
	if c.dir, err = os.MkdirTemp("", "cr-"); err != nil {
		return err
	}
	if err := os.Chmod(c.dir, 0o711); err != nil {
		return err
	}
	if c.driverLog, err = os.Create(c.dir + "/drivers.log"); err != nil {
		return err
	}
	if err := os.Mkdir(c.dir+"/consumer", 0o755); err != nil {
		return err
	}
	if c.before, err = ownTable(ctx); err != nil {
		return err
	}
	c.nonces, c.next = map[string]string{}, map[string]uint64{}
	for _, name := range c.Plugins {
		p, err := c.newPlugin(name)
		if err != nil {
			return err
		}
		c.plugins = append(c.plugins, p)
		for n, steady := range []bool{true, false} {
			volume, err := p.create(ctx, fmt.Sprint("v", n))
			if err != nil {
				return fmt.Errorf("%s: create a volume: %w", name, err)
			}
			c.nonces[volume] = fmt.Sprint(name, n, rand.Text())
			ids := []string{"c1"}
			if steady {
				ids = []string{"stays", "c2"}
			}
			for _, id := range ids {
				c.uses = append(c.uses, use{
					Endpoint: p.endpoint(), VolumeID: volume, PrepareID: id, driver: p.driver,
					Target: filepath.Join(c.dir, "consumer", fmt.Sprint(name, n, id), "place"), Steady: id == "stays",
				})
			}
		}
	}
	if c.consumers, err = start[errand, outcome](roleConsumer); err != nil {
		return err
	}
	if err := c.life(); err != nil {
		return err
	}
	if _, err := c.co.answer(ctx); err != nil {
		return err
	}
	r, err := c.co.ask(ctx, order{Act: "up"})
	if err = errors.Join(err, textError(strings.Join(r.Errors, "; "))); err != nil {
		return err
	}
	for _, u := range c.uses {
		if o, err := c.consumers.ask(ctx, errand{Dir: u.Target, Make: true, Nonce: c.nonces[u.VolumeID]}); err != nil || o.Error != "" {
			return errors.Join(err, fmt.Errorf("write a nonce: %s", o.Error))
		}
	}
	c.write(ctx)
	return c.check(ctx, "at first")
}

// policy is the operator's.
func (c *Campaign) policy() string {
	var b strings.Builder
	fmt.Fprint(&b, "apiVersion: csi-prepare/v1alpha1\nkind: Policy\ndefaults: {attempts: 60, backoff: 2ms, callDeadline: 2m, stepDeadline: 2m, failover: 10m}\ndrivers:\n")
	for _, p := range c.plugins {
		fmt.Fprintf(&b, "  %q: {grants: {data: %q}, pluginUID: %d, pluginGID: %d}\n", p.driver, p.dir+"/data", p.owner(), p.owner())
	}
	return b.String()
}

// life starts a CO, which recovers.
func (c *Campaign) life() (err error) {
	for _, p := range c.plugins {
		p.calls.next()
	}
	if c.co, err = start[order, report](roleCO); err != nil {
		return err
	}
	return c.co.tell(c.opening())
}

func (c *Campaign) opening() order {
	o := order{Act: "open", Dir: c.dir + "/co", Policy: c.policy(), Uses: c.uses}
	for _, p := range c.plugins {
		o.Endpoints = append(o.Endpoints, p.endpoint())
	}
	return o
}

// recovered waits for a CO that was started.
func (c *Campaign) recovered(ctx context.Context, when string) error {
	r, err := c.co.answer(ctx)
	if err != nil {
		c.found(&c.result.Stuck, "%s: the next CO does not recover: %v", when, err)
		return err
	}
	for _, e := range r.Errors {
		c.found(&c.result.WrongState, "%s: %s", when, e)
	}
	return c.check(ctx, when)
}

func (c *Campaign) killCOAtBoundaries(ctx context.Context) error {
	for _, p := range c.plugins {
		for step := 1; ; step++ {
			r, err := c.co.ask(ctx, order{Act: "sequence", Step: step, Only: p.endpoint()})
			if err == nil {
				for _, e := range r.Errors {
					c.found(&c.result.WrongState, "undisturbed: %s", e)
				}
				c.result.Acts += r.Acts
				if err := c.check(ctx, "after all boundaries"); err != nil {
					return err
				}
				c.say("with %s the CO was killed at %d boundaries: %v", p.name, step-1, &c.result)
				break
			}
			if !errors.Is(err, errEnded) {
				return err
			}
			c.result.Kills++
			if err := c.life(); err != nil {
				return err
			}
			if err := c.recovered(ctx, fmt.Sprintf("with %s the CO killed at boundary %d", p.name, step)); err != nil {
				return err
			}
		}
	}
	return nil
}

func (c *Campaign) killPluginsAtBoundaries(ctx context.Context) error {
	for _, p := range c.plugins {
		for moment := 1; ; moment++ {
			p.killAt(moment)
			if err := c.sequence(ctx, p); err != nil {
				return err
			}
			p.mu.Lock()
			at := p.killed
			p.mu.Unlock()
			p.killAt(0)
			if at == "" {
				c.say("%s was killed at %d boundaries: %v", p.name, moment-1, &c.result)
				break
			}
			c.result.Kills++
			if err := c.settled(ctx, fmt.Sprintf("%s killed %s (moment %d)", p.name, at, moment)); err != nil {
				return err
			}
		}
	}
	return nil
}

func (c *Campaign) sequence(ctx context.Context, p *plugin) error {
	r, err := c.co.ask(ctx, order{Act: "sequence", Only: p.endpoint()})
	c.result.Acts += r.Acts
	return err
}

// settled has the CO that lives recover, and looks.
func (c *Campaign) settled(ctx context.Context, when string) error {
	if _, err := c.co.ask(ctx, order{Act: "go"}); err != nil {
		return err
	}
	r, err := c.co.ask(ctx, order{Act: "pause"})
	if err != nil {
		c.found(&c.result.Stuck, "%s: the CO does not recover: %v", when, err)
		return err
	}
	c.result.Acts += r.Acts
	for _, e := range r.Errors {
		c.found(&c.result.WrongState, "%s: %s", when, e)
	}
	return c.check(ctx, when)
}

// killCOAtRandom kills one in five while it recovers, the others while they
// act.
func (c *Campaign) killCOAtRandom(ctx context.Context) error {
	for n := 1; n <= c.Random; n++ {
		when := fmt.Sprintf("CO killed at random moment %d", n)
		if n%5 != 0 {
			if _, err := c.co.ask(ctx, order{Act: "go"}); err != nil {
				return err
			}
		}
		time.Sleep(chance(120 * time.Millisecond))
		c.co.kill()
		c.result.Kills++
		if err := c.life(); err != nil {
			return err
		}
		if (n+1)%5 == 0 && n < c.Random {
			continue // killed while it recovers
		}
		if err := c.recovered(ctx, when); err != nil {
			return err
		}
		if n%100 == 0 {
			c.say("%v", &c.result)
		}
	}
	return nil
}

func (c *Campaign) killPluginsAtRandom(ctx context.Context) error {
	for n := 1; n <= c.Random; {
		if _, err := c.co.ask(ctx, order{Act: "go"}); err != nil {
			return err
		}
		for range 10 {
			time.Sleep(chance(60 * time.Millisecond))
			if err := c.plugins[int(chance(time.Duration(len(c.plugins))))].kill(); err != nil {
				return err
			}
			c.result.Kills++
			n++
		}
		r, err := c.co.ask(ctx, order{Act: "pause"})
		when := fmt.Sprintf("plugins killed at random moments up to %d", n)
		if err != nil {
			c.found(&c.result.Stuck, "%s: the CO does not recover: %v", when, err)
			return err
		}
		c.result.Acts += r.Acts
		for _, e := range r.Errors {
			c.found(&c.result.WrongState, "%s: %s", when, e)
		}
		if err := c.check(ctx, when); err != nil {
			return err
		}
		if n/100 != (n-10)/100 {
			c.say("%v", &c.result)
		}
	}
	return nil
}

// finish takes everything down: nothing may be left then.
func (c *Campaign) finish(ctx context.Context) error {
	c.stopWriting(ctx)
	r, err := c.co.ask(ctx, order{Act: "end"})
	if err != nil {
		c.found(&c.result.Stuck, "at the end: %v", err)
		return nil
	}
	for _, e := range r.Errors {
		c.found(&c.result.WrongState, "at the end: %s", e)
	}
	if err := c.check(ctx, "at the end"); err != nil {
		return err
	}
	for _, p := range c.plugins {
		c.result.Calls += p.calls.count
		seen := map[string]bool{}
		for _, u := range c.uses {
			if u.Endpoint == p.endpoint() && !seen[u.VolumeID] {
				seen[u.VolumeID] = true
				if err := p.delete(ctx, u.VolumeID); err != nil {
					c.found(&c.result.WrongState, "at the end: delete a volume of %s: %v", p.name, err)
				}
			}
		}
	}
	return nil
}

// clean ends what was started and removes what is left.
func (c *Campaign) clean() error {
	if c.co != nil {
		c.co.kill()
	}
	if c.consumers != nil {
		c.consumers.kill()
	}
	var errs []error
	for _, p := range c.plugins {
		errs = append(errs, p.end())
	}
	if c.driverLog != nil {
		_ = c.driverLog.Close()
	}
	if c.dir == "" {
		return nil
	}
	// Nothing is removed below a mount: after findings there may be some.
	if now, err := ownTable(context.Background()); err != nil || len(now.Below(c.dir)) > 0 {
		return errors.Join(append(errs, err, fmt.Errorf("%s: mounts are left below it, so it is not removed", c.dir))...)
	}
	for _, loop := range c.loops() {
		errs = append(errs, fmt.Errorf("loop device %s is left", loop))
	}
	if !c.result.OK() {
		c.say("what drivers logged is in %s/drivers.log", c.dir)
		return errors.Join(errs...)
	}
	return errors.Join(append(errs, os.RemoveAll(c.dir))...)
}

// process is one that is told things and answers each.
type process[Ask, Answer any] struct {
	cmd     *exec.Cmd
	in      io.WriteCloser
	asks    *json.Encoder
	answers chan Answer
	late    bool // an answer was not waited for
}

var (
	errEnded = errors.New("the process has ended")
	errLate  = errors.New("no answer in time")
)

func start[Ask, Answer any](role string) (*process[Ask, Answer], error) {
	p := &process[Ask, Answer]{cmd: self(role), answers: make(chan Answer)}
	in, err := p.cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	p.in, p.asks = in, json.NewEncoder(in)
	go func() {
		defer close(p.answers)
		d := json.NewDecoder(out)
		for {
			var a Answer
			if d.Decode(&a) != nil {
				return
			}
			p.answers <- a
		}
	}()
	return p, nil
}

func (p *process[Ask, Answer]) tell(a Ask) error {
	if p.late {
		return errLate
	}
	if err := p.asks.Encode(a); err != nil {
		return errEnded
	}
	return nil
}

func (p *process[Ask, Answer]) answer(ctx context.Context) (a Answer, err error) {
	select {
	case a, alive := <-p.answers:
		if !alive {
			_ = p.cmd.Wait()
			return a, errEnded
		}
		return a, nil
	case <-time.After(2 * patience):
		p.late = true
		return a, errLate
	case <-ctx.Done():
		return a, ctx.Err()
	}
}

func (p *process[Ask, Answer]) ask(ctx context.Context, a Ask) (answer Answer, err error) {
	if err := p.tell(a); err != nil {
		return answer, err
	}
	return p.answer(ctx)
}

// kill kills the process, and forgets what it still says.
func (p *process[Ask, Answer]) kill() {
	_ = p.cmd.Process.Kill()
	for range p.answers { //nolint:revive // until its output ends
	}
	_ = p.cmd.Wait()
	_ = p.in.Close()
}
