package crash

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"
)

// Held is what a CO needs for many performed volumes.
type Held struct {
	Volumes int `json:"volumes"`
	// Up is how long it took to perform them, RSS what the CO then has in
	// memory, in KiB, and Recover how long a successor takes from the start
	// of its process after SIGKILL, RecoveredRSS what that has in memory.
	Up           time.Duration `json:"up_ns"`
	RSS          int           `json:"rss_kib"`
	Recover      time.Duration `json:"recover_ns"`
	RecoveredRSS int           `json:"recovered_rss_kib"`
}

// String is the figures in one line.
func (h *Held) String() string {
	return fmt.Sprintf("%d volumes performed in %v; the CO has %.1f MiB in memory; its successor recovers them in %v after SIGKILL and has %.1f MiB",
		h.Volumes, h.Up.Round(time.Millisecond), float64(h.RSS)/1024, h.Recover.Round(time.Millisecond), float64(h.RecoveredRSS)/1024)
}

// Hold performs many volumes of the hostpath driver, kills the CO, and has the
// next recover them. The figures are there if something fails afterwards, when
// the volumes are taken down.
func Hold(ctx context.Context, driver []string, volumes int) (_ *Held, err error) {
	c := Campaign{Driver: driver, Plugins: []string{"hostpath"}}
	defer func() { err = errors.Join(err, c.clean()) }()
	if c.dir, err = os.MkdirTemp("", "cr-"); err != nil {
		return nil, err
	}
	if err := os.Chmod(c.dir, 0o711); err != nil {
		return nil, err
	}
	if c.driverLog, err = os.Create(c.dir + "/drivers.log"); err != nil {
		return nil, err
	}
	p, err := c.newPlugin("hostpath")
	if err != nil {
		return nil, err
	}
	c.plugins = []*plugin{p}
	for n := range volumes {
		volume, err := p.create(ctx, fmt.Sprint("v", n))
		if err != nil {
			return nil, err
		}
		c.uses = append(c.uses, use{
			Endpoint: p.endpoint(), VolumeID: volume, PrepareID: "c", driver: p.driver,
			Target: filepath.Join(c.dir, "consumer", fmt.Sprint(n)), Steady: true,
		})
	}
	h := &Held{Volumes: volumes}
	if err := c.life(); err != nil {
		return nil, err
	}
	if _, err := c.answered(ctx); err != nil {
		return nil, err
	}
	begin := time.Now()
	if err := c.co.tell(order{Act: "up"}); err != nil {
		return nil, err
	}
	r, err := c.answered(ctx)
	if err != nil {
		return nil, err
	}
	h.Up, h.RSS = time.Since(begin), r.RSS
	c.co.kill()
	begin = time.Now()
	if err := c.life(); err != nil {
		return nil, err
	}
	if r, err = c.answered(ctx); err != nil {
		return nil, err
	}
	h.Recover, h.RecoveredRSS = time.Since(begin), r.RSS
	if err := c.co.tell(order{Act: "end"}); err != nil {
		return h, err
	}
	_, err = c.answered(ctx)
	return h, err
}

// answered waits longer than a campaign does, and takes errors for its own.
func (c *Campaign) answered(ctx context.Context) (report, error) {
	for {
		select {
		case r, alive := <-c.co.answers:
			if !alive {
				return r, errEnded
			}
			if len(r.Errors) > 0 {
				return r, errors.New(r.Errors[0])
			}
			return r, nil
		case <-ctx.Done():
			return report{}, ctx.Err()
		}
	}
}
