package co

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

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

// job is what a child is told to do, on its standard input: nothing of it is
// in an argument or the environment.
type job struct {
	// Response is a NodePrepareVolumeResponse to perform; nil undoes Receipts.
	Response []byte
	Receipts []perform.Receipt

	Request          mountspec.Request
	Staging, Prepare string
	Path             string
	Settings         Settings
	// Namespace and Root are the numbers of inherited descriptors, 0 for
	// none.
	Namespace, Root int
}

// answer is what a child says, on its standard output: receipts to make
// durable, which it waits for, and then how it ended.
type answer struct {
	Receipts []perform.Receipt
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
	for fd := firstInherited; fd <= max(firstInherited, j.Namespace, j.Root); fd++ {
		unix.CloseOnExec(fd)
	}
	e := json.NewEncoder(out)
	receipts, err := j.do(func(r []perform.Receipt) error {
		if err := e.Encode(answer{Receipts: r}); err != nil {
			return err
		}
		<-durable
		return nil
	})
	if e.Encode(answer{Receipts: receipts, Done: true, Fault: faultOf(err)}) != nil {
		return 1
	}
	return 0
}

func (j *job) do(journal func([]perform.Receipt) error) ([]perform.Receipt, error) {
	var ns *mountns.Namespace
	if j.Namespace != 0 {
		var err error
		if ns, err = mountns.FromFile(os.NewFile(uintptr(j.Namespace), "namespace")); err != nil {
			return nil, err
		}
	}
	ctx := context.Background() // the parent kills
	if j.Response == nil {
		return nil, perform.Undo(ctx, ns, j.Receipts)
	}
	var response preparev1alpha1.NodePrepareVolumeResponse
	if err := proto.Unmarshal(j.Response, &response); err != nil {
		return nil, err
	}
	specs, violations := wire.Validate(response.GetMountSpecs(), j.Request)
	if violations != nil {
		return nil, &perform.InvalidError{Violations: violations}
	}
	target := perform.Target{Namespace: ns, Path: j.Path}
	if j.Root != 0 {
		target.Root = os.NewFile(uintptr(j.Root), "root")
	}
	done, err := perform.Perform(ctx, target, specs, perform.Options{
		Request: j.Request, Staging: j.Staging, Prepare: j.Prepare,
		Grants: j.Settings.Grants, Policy: j.Settings.Mount(), Timeout: time.Duration(j.Settings.StepDeadline),
		Journal: func(r []perform.Receipt) error {
			// Links may have led elsewhere: the place is looked at again.
			if err := j.Settings.CheckTarget(j.inRoot(r[0].Target), j.Request.Block); err != nil {
				return err
			}
			return journal(r)
		},
	})
	if err != nil {
		return nil, err
	}
	return done.Receipts, nil
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
	return e
}
