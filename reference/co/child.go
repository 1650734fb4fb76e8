package co

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/csi-prepare/csi-prepare/reference/fusemount"
	"github.com/csi-prepare/csi-prepare/reference/master"
	"github.com/csi-prepare/csi-prepare/reference/mountns"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
	"github.com/csi-prepare/csi-prepare/reference/mountspec/wire"
	"github.com/csi-prepare/csi-prepare/reference/perform"
	"github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// childName is argv[0] of a child, by which it knows what it is.
const childName = "csi-prepare-step"

var childReady bool

// Child has to be called first thing in main. In a process that a CO started
// of its own program for a step in the kernel it does that step and ends the
// process; in any other it returns at once. It includes perform.MainIfChild.
func Child() {
	perform.MainIfChild()
	if os.Args[0] == childName {
		os.Exit(runChild())
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

// job is what a child is told to do, over its socket: nothing of it is in an
// argument or the environment.
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
	// Dir is the CO's, Known are its mounts of the volume.
	Dir   string
	Known []uint64
	// Namespace and Root are indexes of the files that came along, 0, which
	// is the lock, for none.
	Namespace, Root int
	Handles         []handleFD

	files []*os.File
}

// handleFD is a master in a child, by indexes of files.
type handleFD struct {
	ID               string
	FUSE             bool
	Mount, Namespace int
}

// message is what a child says: what to make durable, which it waits for, and
// then how its step ended.
type message struct {
	Receipts []perform.Receipt
	Devices  []Device
	Done     bool
	Fault    *fault
}

// runChild does jobs until its parent ends, and ends with it also in the middle
// of one: what it holds then is in no namespace, or in the ledger.
func runChild() int {
	conn, err := socketOf(childSocket)
	if err != nil {
		return 1
	}
	type received struct {
		text  []byte
		files []*os.File
	}
	next := make(chan received)
	go func() {
		for {
			text, files, err := receive(conn)
			if err != nil {
				os.Exit(0)
			}
			next <- received{text, files}
		}
	}()
	for r := range next {
		j := job{files: r.files}
		if json.Unmarshal(r.text, &j) != nil {
			return 1
		}
		done, err := j.do(context.Background(), func(m message) error { // the parent kills
			if err := send(conn, m); err != nil {
				return err
			}
			<-next // it is durable
			return nil
		})
		// The lock first of all: the parent may take it again at once.
		closeAll(j.files)
		done.Done, done.Fault = true, faultOf(err)
		if send(conn, done) != nil {
			return 1
		}
	}
	return 0
}

// file takes a file that came along, nil for index 0.
func (j *job) file(index int) *os.File {
	if index <= 0 || index >= len(j.files) {
		return nil
	}
	f := j.files[index]
	j.files[index] = nil
	return f
}

func (j *job) do(ctx context.Context, journal func(message) error) (done message, err error) {
	var ns *mountns.Namespace
	if f := j.file(j.Namespace); f != nil {
		if ns, err = mountns.FromFile(f); err != nil {
			return done, err
		}
		defer ns.Close()
	}
	masters, err := j.masters()
	defer func() {
		for _, m := range masters {
			_ = m.File().Close() // where it is received, Close does it again
			_ = m.Close()
		}
	}()
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
		mount := j.file(h.Mount)
		if mount == nil {
			return masters, fmt.Errorf("handle %q: no file came along", h.ID)
		}
		m, err := master.Inherited(mount, j.file(h.Namespace))
		if err != nil {
			return masters, err
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
	if err := notOfNode(ctx, specs, j.Dir, j.Known); err != nil {
		return nil, err
	}
	devices := unused(specs)
	root := j.file(j.Root)
	if root != nil {
		defer root.Close()
	}
	target := perform.Target{Namespace: ns, Root: root, Path: j.Path}
	done, err := perform.Perform(ctx, target, specs, perform.Options{
		Request: j.Request, Staging: j.Staging, Prepare: j.Prepare, Masters: masters,
		Grants: j.Settings.Grants, Policy: j.Settings.Mount(), Timeout: time.Duration(j.Settings.StepDeadline),
		Journal: func(r []perform.Receipt) error {
			// Links may have led elsewhere: the place is looked at again.
			if err := j.Settings.CheckTarget(inRoot(root, r[0].Target), j.Request.Block); err != nil {
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
func inRoot(root *os.File, place string) string {
	if root == nil {
		return place
	}
	dir, err := os.Readlink("/proc/self/fd/" + strconv.Itoa(int(root.Fd())))
	if err != nil || dir == "/" {
		return place
	}
	if below, ok := strings.CutPrefix(place, dir+"/"); ok {
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

// sentinel is an error of a kind, by a name that crosses to the parent, and the
// sentence of SPEC.md it is about, if it is one.
type sentinel struct {
	name string
	err  error
	rule requirement.ID
}

// sentinels has the more special of two first.
var sentinels = []sentinel{
	{"protected", ErrProtected, requirement.PerformProtectedTarget},
	{"target kernel", perform.ErrTargetKernel, requirement.PerformProtectedTarget},
	{"target type", perform.ErrTargetType, requirement.PerformTargetType},
	{"target", perform.ErrTarget, requirement.PerformTargetInRoot},
	{"source link", perform.ErrSourceLink, requirement.BindNoSymlink},
	{"source type", perform.ErrSourceType, requirement.BindTypeMatches},
	{"source mount", perform.ErrSourceMount, requirement.BindMountFSType},
	{"source", perform.ErrSource, requirement.BindResolveBeneath},
	{"node device", ErrNodeDevice, requirement.BlockNotOfNode},
	{"device", perform.ErrDevice, requirement.BlockDiskseqChecked},
	{"parameters", perform.ErrParameters, requirement.FilesystemExclusiveFirst},
	{"changed", perform.ErrChanged, requirement.PerformVerified},
	{"foreign", perform.ErrForeign, ""},
	{"receipt", perform.ErrReceipt, ""},
}

func sentinelOf(is func(sentinel) bool) (sentinel, bool) {
	i := slices.IndexFunc(sentinels, is)
	if i < 0 {
		return sentinel{}, false
	}
	return sentinels[i], true
}

func faultOf(err error) *fault {
	if err == nil {
		return nil
	}
	f := &fault{Text: err.Error()}
	if s, found := sentinelOf(func(s sentinel) bool { return errors.Is(err, s.err) }); found {
		f.Is = s.name
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
	// Requirement is the sentence of SPEC.md that the plugin's answer breaks
	// as it turned out only now, empty if none.
	Requirement requirement.ID
	Was         []error
}

// Error returns the text, with the requirement.
func (e *StepError) Error() string {
	if e.Requirement == "" {
		return e.Text
	}
	return fmt.Sprintf("%s [%s]", e.Text, e.Requirement)
}

// Unwrap returns what it was.
func (e *StepError) Unwrap() []error { return e.Was }

func (f *fault) err() error {
	e := &StepError{Text: f.Text}
	if s, found := sentinelOf(func(s sentinel) bool { return s.name == f.Is }); found {
		e.Requirement = s.rule
		e.Was = append(e.Was, s.err)
	} else if f.Errno == syscall.ELOOP || f.Errno == syscall.EXDEV {
		e.Requirement = requirement.PerformNoSymlink
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
