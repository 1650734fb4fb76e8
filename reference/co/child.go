package co

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/csi-prepare/csi-prepare/reference/fusemount"
	"github.com/csi-prepare/csi-prepare/reference/master"
	"github.com/csi-prepare/csi-prepare/reference/mountns"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
	"github.com/csi-prepare/csi-prepare/reference/mountspec/wire"
	"github.com/csi-prepare/csi-prepare/reference/perform"
	"github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// childName is argv[0] of a child, by which it knows what it is.
const childName = "csi-prepare-step"

// firstInherited is the descriptor of the lock in a child.
const firstInherited = 3

var childReady bool

// Child has to be called first thing in main. In a process that a CO started
// of its own program for a step in the kernel it does that step and ends the
// process; in any other it returns at once. It includes perform.MainIfChild.
func Child() {
	perform.MainIfChild()
	if os.Args[0] == childName {
		os.Exit(runChild(os.Stdin, os.Stdout))
	}
	childReady = true
}

// The acts of a child.
const (
	actPerform = "perform"
	actUndo    = "undo"
	actReplace = "replace" // what Receipts[0] is of, by a clone of Handles[0]
	actProve   = "prove"   // that the servers of Handles answer
	actFree    = "free"    // whether nobody has Devices in use
)

// job is what a child is told to do, on its standard input: nothing of it is
// in an argument or the environment.
type job struct {
	Act string
	// Response is the NodePrepareVolumeResponse to perform.
	Response []byte
	Receipts []perform.Receipt
	Devices  []Device

	Request          mountspec.Request
	Staging, Prepare string
	Path             string
	Settings         Settings
	// Namespace and Root are the numbers of inherited descriptors, 0 for
	// none; Inherited is how many there are.
	Namespace, Root int
	Handles         []handleFD
	Inherited       int
}

// handleFD is a master in a child.
type handleFD struct {
	ID               string
	FUSE             bool
	Mount, Namespace int
}

// message is what a child says, on its standard output: what to make durable,
// which it waits for, and then how it ended.
type message struct {
	Receipts []perform.Receipt
	Devices  []Device
	Done     bool
	Fault    *fault
}

// runChild does one job. It ends with its parent, whose end closes its
// standard input: what it holds then is in no namespace, or in the ledger.
func runChild(in io.Reader, out io.Writer) int {
	d := json.NewDecoder(in)
	var j job
	if err := d.Decode(&j); err != nil {
		return 1
	}
	durable := make(chan struct{})
	go func() {
		for {
			var yes bool
			if d.Decode(&yes) != nil || !yes {
				os.Exit(1)
			}
			durable <- struct{}{}
		}
	}()
	// A child of this process, if a step needs one, is none of theirs.
	for fd := firstInherited; fd < firstInherited+j.Inherited; fd++ {
		unix.CloseOnExec(fd)
	}
	e := json.NewEncoder(out)
	done, err := j.do(context.Background(), func(m message) error { // the parent kills
		if err := e.Encode(m); err != nil {
			return err
		}
		<-durable
		return nil
	})
	done.Done, done.Fault = true, faultOf(err)
	if e.Encode(done) != nil {
		return 1
	}
	return 0
}

func (j *job) do(ctx context.Context, journal func(message) error) (done message, err error) {
	var ns *mountns.Namespace
	if j.Namespace != 0 {
		if ns, err = mountns.FromFile(os.NewFile(uintptr(j.Namespace), "namespace")); err != nil {
			return done, err
		}
	}
	masters, err := j.masters()
	if err != nil {
		return done, err
	}
	switch j.Act {
	case actPerform:
		done.Receipts, err = j.perform(ctx, ns, masters, journal)
	case actUndo:
		err = perform.Undo(ctx, ns, j.Receipts)
	case actReplace:
		done.Receipts, err = j.replace(ctx, ns, masters[j.Handles[0].ID], journal)
	case actProve:
		err = j.prove(ctx, masters)
	case actFree:
		for _, d := range j.Devices {
			busy, derr := d.busy()
			if busy {
				derr = &DeviceBusyError{Device: d}
			}
			err = errors.Join(err, derr)
		}
	default:
		err = fmt.Errorf("act %q: there is none", j.Act)
	}
	return done, err
}

func (j *job) masters() (map[string]*master.Mount, error) {
	masters := map[string]*master.Mount{}
	for _, h := range j.Handles {
		var ns *os.File
		if h.Namespace != 0 {
			ns = os.NewFile(uintptr(h.Namespace), "namespace of a master")
		}
		m, err := master.Inherited(os.NewFile(uintptr(h.Mount), "master"), ns)
		if err != nil {
			return nil, err
		}
		masters[h.ID] = m
	}
	return masters, nil
}

// prove waits for the servers of FUSE mounts: whoever says that it serves may
// not.
func (j *job) prove(ctx context.Context, masters map[string]*master.Mount) error {
	for _, h := range j.Handles {
		if !h.FUSE {
			continue
		}
		if err := fusemount.Prove(ctx, masters[h.ID].File()); err != nil {
			return err
		}
	}
	return nil
}

func (j *job) perform(ctx context.Context, ns *mountns.Namespace, masters map[string]*master.Mount, journal func(message) error) ([]perform.Receipt, error) {
	var response preparev1alpha1.NodePrepareVolumeResponse
	if err := proto.Unmarshal(j.Response, &response); err != nil {
		return nil, err
	}
	specs, violations := wire.Validate(response.GetMountSpecs(), j.Request)
	if violations != nil {
		return nil, &perform.InvalidError{Violations: violations}
	}
	if err := j.prove(ctx, masters); err != nil {
		return nil, err
	}
	devices := unused(specs)
	target := perform.Target{Namespace: ns, Path: j.Path}
	if j.Root != 0 {
		target.Root = os.NewFile(uintptr(j.Root), "root")
	}
	done, err := perform.Perform(ctx, target, specs, perform.Options{
		Request: j.Request, Staging: j.Staging, Prepare: j.Prepare, Masters: masters,
		Grants: j.Settings.Grants, Policy: j.Settings.Mount(), Timeout: time.Duration(j.Settings.StepDeadline),
		Journal: func(r []perform.Receipt) error {
			// Links may have led elsewhere: the place is looked at again.
			if err := j.Settings.CheckTarget(j.inRoot(r[0].Target), j.Request.Block); err != nil {
				return err
			}
			return journal(message{Receipts: r, Devices: devices})
		},
	})
	if err != nil {
		return nil, err
	}
	return done.Receipts, nil
}

func (j *job) replace(ctx context.Context, ns *mountns.Namespace, with *master.Mount, journal func(message) error) ([]perform.Receipt, error) {
	old := j.Receipts[0]
	now := old
	do := func() error {
		return fusemount.Replace(ctx, with.File(), old.Target, func(dead, clone uint64) error {
			if dead != old.MountID {
				return fmt.Errorf("%w: mount %d is on top there, not mount %d", perform.ErrChanged, dead, old.MountID)
			}
			now.MountID = clone
			below := old
			below.Created = nil // of the one that stays
			return journal(message{Receipts: []perform.Receipt{now, below}})
		})
	}
	var err error
	if ns == nil {
		err = do()
	} else {
		err = ns.Do(ctx, do)
	}
	return []perform.Receipt{now}, err
}

// inRoot returns a path of the namespace as the consumer sees it.
func (j *job) inRoot(place string) string {
	if j.Root == 0 {
		return place
	}
	root, err := os.Readlink("/proc/self/fd/" + strconv.Itoa(j.Root))
	if err != nil || root == "/" {
		return place
	}
	if below, ok := strings.CutPrefix(place, root+"/"); ok {
		return "/" + below
	}
	return place
}

// fault is an error on its way from the child.
type fault struct {
	Text        string
	Is          string // one of sentinels
	Errno       syscall.Errno
	Violations  []mountspec.Violation       `json:",omitempty"`
	Unsupported *mountspec.UnsupportedError `json:",omitempty"`
	Busy        *perform.BusyError          `json:",omitempty"`
	Device      *DeviceBusyError            `json:",omitempty"`
}

var sentinels = map[string]error{
	"target": perform.ErrTarget, "source": perform.ErrSource, "device": perform.ErrDevice,
	"parameters": perform.ErrParameters, "changed": perform.ErrChanged, "foreign": perform.ErrForeign,
	"receipt": perform.ErrReceipt, "protected": ErrProtected,
}

func faultOf(err error) *fault {
	if err == nil {
		return nil
	}
	f := &fault{Text: err.Error()}
	for name, sentinel := range sentinels {
		if errors.Is(err, sentinel) {
			f.Is = name
		}
	}
	_ = errors.As(err, &f.Errno)
	_ = errors.As(err, &f.Unsupported)
	_ = errors.As(err, &f.Busy)
	_ = errors.As(err, &f.Device)
	var invalid *perform.InvalidError
	if errors.As(err, &invalid) {
		f.Violations = invalid.Violations
	}
	return f
}

// StepError is a step in the kernel that failed. The errors of package perform
// that it was are found in it with errors.Is and errors.As.
type StepError struct {
	Text string
	Was  []error
}

// Error returns the text.
func (e *StepError) Error() string { return e.Text }

// Unwrap returns what it was.
func (e *StepError) Unwrap() []error { return e.Was }

func (f *fault) err() error {
	e := &StepError{Text: f.Text}
	if s := sentinels[f.Is]; s != nil {
		e.Was = append(e.Was, s)
	}
	if f.Errno != 0 {
		e.Was = append(e.Was, f.Errno)
	}
	if f.Violations != nil {
		e.Was = append(e.Was, &perform.InvalidError{Violations: f.Violations})
	}
	if f.Unsupported != nil {
		e.Was = append(e.Was, f.Unsupported)
	}
	if f.Busy != nil {
		e.Was = append(e.Was, f.Busy)
	}
	if f.Device != nil {
		e.Was = append(e.Was, f.Device)
	}
	return e
}
