package kill

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"github.com/csi-prepare/csi-prepare/fakes/mutant"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// Control is something that conforms, which the suite has to pass.
type Control struct {
	Name string
	// Seat, Volumes and Arguments are of a fake.
	Seat      requirement.Actor
	Volumes   mutant.Volumes
	Arguments []string
	// Reference is the command of the suite for a reference driver, if it is
	// one.
	Reference []string
}

// Controls returns all of them: the fakes, and the reference drivers.
func Controls() []Control {
	return []Control{
		{Name: "plugin", Seat: requirement.SP},
		{Name: "plugin that stages", Seat: requirement.SP, Arguments: []string{"--staging"}},
		{Name: "plugin of before the finer modes", Seat: requirement.SP, Arguments: []string{"--legacy-writers"}},
		{Name: "plugin whose name ends in a digit", Seat: requirement.SP, Arguments: []string{"--name", "csi.example.com.v2"}},
		{Name: "plugin with empty optional fields", Seat: requirement.SP, Arguments: []string{"--sparse"}},
		{Name: "plugin with raw devices", Seat: requirement.SP, Volumes: mutant.Raw},
		{Name: "plugin with formatted devices", Seat: requirement.SP, Volumes: mutant.Formatted},
		{Name: "reference CO", Seat: requirement.CO},
		{Name: "plain CO", Seat: requirement.CO, Arguments: []string{"--plain", "--allow-program", "sh=/bin/sh"}},
		{Name: "hostpath driver", Reference: []string{"run", "--driver", "hostpath"}},
		{Name: "block driver", Reference: []string{"run", "--driver", "block"}},
		{Name: "block driver, raw", Reference: []string{"run", "--driver", "block", "--csi.testvolumeaccesstype", "block"}},
		{Name: "FUSE driver", Reference: []string{"run", "--driver", "fuse"}},
	}
}

// Pass runs the whole suite against a control, in an order of its own.
func (c Commands) Pass(ctx context.Context, control Control, seed int64) error {
	if control.Reference == nil {
		return wrapControl(control, seed, c.Conformant(ctx, control.Seat, control.Volumes, seed, control.Arguments...))
	}
	directory, err := os.MkdirTemp("", "control-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(directory) //nolint:errcheck // a directory that stays is found by who looks for leftovers
	reports, work := filepath.Join(directory, "report"), filepath.Join(directory, "work")
	if err := errors.Join(os.Mkdir(reports, 0o755), os.Mkdir(work, 0o755)); err != nil {
		return err
	}
	o, err := c.suite(ctx, append(control.Reference, "--seed", strconv.FormatInt(seed, 10), "--report", reports, "--work-dir", work), reports)
	if err == nil && (o.code != 0 || o.late) {
		err = errors.New(o.String())
	}
	return wrapControl(control, seed, err)
}

func wrapControl(control Control, seed int64, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s, seed %d: %w", control.Name, seed, err)
}
