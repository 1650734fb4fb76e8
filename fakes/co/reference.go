package co

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/mountns"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
	"github.com/csi-prepare/csi-prepare/reference/perform"
)

// Reference is the reference executor, package perform, as an [Executor].
type Reference struct{ perform.Executor }

// policy is the default of the contract for a consumer's own place: links in
// it are resolved in the consumer's root, and what is missing is made.
var policy = mountspec.Policy{FollowLinks: true, CreateTarget: true}

// Perform implements [Executor].
func (e *Reference) Perform(ctx context.Context, p Performance, journal func([]string) error) ([]string, error) {
	ns, err := open(p.Target.Namespace)
	if err != nil {
		return nil, &StateError{"target.namespace", err}
	}
	defer ns.Close()
	root, err := openRoot(ctx, ns, p.Target.Root)
	if err != nil {
		return nil, &StateError{"target.root", err}
	}
	defer root.Close()
	done, err := e.Executor.Perform(ctx, perform.Target{Namespace: ns, Root: root, Path: p.Target.Path}, p.Specs, perform.Options{
		Request: p.Request, Staging: p.Staging, Prepare: p.Prepare, Grants: p.Grants, Policy: policy,
		Journal: func(receipts []perform.Receipt) error {
			texts, err := texts(receipts)
			if err != nil {
				return err
			}
			return journal(texts)
		},
	})
	if err != nil {
		return nil, inWords(err)
	}
	return texts(done.Receipts)
}

// Undo implements [Executor].
func (e *Reference) Undo(ctx context.Context, t Target, records []string) error {
	receipts, err := parse(records)
	if err != nil || len(receipts) == 0 {
		return err
	}
	ns, err := open(t.Namespace)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // it ended, and its mounts with it
	}
	if err != nil {
		return &StateError{"target.namespace", err}
	}
	defer ns.Close()
	return inWords(e.Executor.Undo(ctx, ns, receipts))
}

// Whole implements [Executor].
func (e *Reference) Whole(ctx context.Context, t Target, records []string) (bool, error) {
	receipts, err := parse(records)
	if err != nil {
		return false, err
	}
	ns, err := open(t.Namespace)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, &StateError{"target.namespace", err}
	}
	defer ns.Close()
	table, err := ns.Table(ctx)
	if err != nil {
		return false, err
	}
	boot, err := bootID()
	for _, r := range receipts {
		if _, found := table.ByID(r.MountID); !found || r.BootID != boot || r.MntnsID != ns.ID() {
			return false, err
		}
	}
	return true, err
}

// openRoot opens the consumer's root inside its namespace.
func openRoot(ctx context.Context, ns *mountns.Namespace, root string) (f *os.File, err error) {
	err = ns.Do(ctx, func() error {
		f, err = os.OpenFile(path.Join("/", root), unix.O_PATH|unix.O_DIRECTORY, 0)
		return err
	})
	return f, err
}

// inWords gives an error of perform the type that the Server answers by.
func inWords(err error) error {
	var invalid *perform.InvalidError
	if errors.As(err, &invalid) {
		return &RefusedError{Violations: invalid.Violations}
	}
	var busy *perform.BusyError
	var unsupported *mountspec.UnsupportedError
	if errors.As(err, &busy) || errors.As(err, &unsupported) {
		return &StateError{"", err}
	}
	// A target or a source that is not there, or is reached by a link.
	var step *perform.Error
	if errors.As(err, &step) && (step.Step == mountspec.OpenTarget.String() || step.Step == mountspec.OpenSource.String()) {
		return &StateError{"", err}
	}
	for _, state := range []error{
		perform.ErrTarget, perform.ErrSource, perform.ErrDevice, perform.ErrWritable, perform.ErrParameters,
		perform.ErrChanged, perform.ErrForeign, perform.ErrReceipt,
	} {
		if errors.Is(err, state) {
			return &StateError{"", err}
		}
	}
	return err
}

func texts(receipts []perform.Receipt) ([]string, error) {
	var all []string
	for _, r := range receipts {
		data, err := json.Marshal(r)
		if err != nil {
			return nil, err
		}
		all = append(all, string(data))
	}
	return all, nil
}

func parse(texts []string) ([]perform.Receipt, error) {
	var receipts []perform.Receipt
	for i, text := range texts {
		var r perform.Receipt
		if err := json.Unmarshal([]byte(text), &r); err != nil {
			return nil, &StateError{fmt.Sprintf("receipts[%d]", i), err}
		}
		receipts = append(receipts, r)
	}
	return receipts, nil
}
