package co

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/reference/mountns"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
	"github.com/csi-prepare/csi-prepare/reference/mountspec/oci"
	"github.com/csi-prepare/csi-prepare/reference/perform"
	"github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// The tests of this file are the rules that a study of reported failures of
// node-side storage came to, one each.

func TestRule1RecordBeforeTheAct(t *testing.T) {
	r := newRig(t)
	u := r.use(r.volume("v"))
	phase := map[string]Phase{
		"NodeStageVolume": Staging, "NodePrepareVolume": Preparing,
		"NodeUnprepareVolume": Unpreparing, "NodeUnstageVolume": Unstaging,
	}
	boot, err := bootID()
	r.must(err)
	r.answering(func(ctx context.Context, method string, _ any, next func(context.Context) (any, error)) (any, error) {
		if want, acts := phase[method]; acts {
			// As another process reads it, which would find it after a crash.
			records, err := ReadLedger(r.path("co"))
			if err != nil || len(records) != 1 || records[0].Phase != want || !records[0].Uncertain || records[0].BootID != boot {
				t.Errorf("during %s the ledger says %+v, %v; want %s, uncertain, boot %s", method, records, err, want, boot)
			}
		}
		return next(ctx)
	})
	journalled := false
	r.co.before = func(step string) {
		if step != "wrote performing" || journalled {
			return
		}
		if record := r.record(); len(record.Receipts) == 1 {
			journalled = true
			if _, found := r.table().ByID(record.Receipts[0].MountID); found {
				t.Error("the mount was visible before its receipt was durable")
			}
		}
	}
	record := r.up(u)
	if !journalled {
		t.Error("no receipt was written before the mount was attached")
	}
	r.down(record.Key())
	r.nothingLeft()
}

// TestRule1UncertainIsAState has a plugin finish what the caller no longer
// waits for.
func TestRule1UncertainIsAState(t *testing.T) {
	r := newRig(t)
	u := r.use(r.volume("v"))
	late := make(chan struct{})
	ctx, cancel := context.WithCancel(r.ctx)
	r.answering(func(c context.Context, method string, _ any, next func(context.Context) (any, error)) (any, error) {
		switch method {
		case "NodePrepareVolume":
			cancel()
			<-c.Done()
			defer close(late)
			return next(context.WithoutCancel(c))
		case "NodeUnprepareVolume":
			<-late
			return nil, status.Error(codes.Unavailable, "not now")
		}
		return next(c)
	})
	if _, err := r.co.Up(ctx, u); !errors.Is(err, context.Canceled) && status.Code(err) != codes.Canceled {
		t.Errorf("%v, want that the call was cancelled", err)
	}
	if got := r.record(); got.Phase != Unpreparing || !got.Uncertain || got.Error == "" {
		t.Errorf("record %+v, want unpreparing, uncertain, with the error", got)
	}
	r.answering(nil)
	_, err := r.co.Recover(r.ctx)
	r.must(err)
	r.nothingLeft()
}

func TestRule2SuccessOnlyFromAnswerAndVerification(t *testing.T) {
	t.Run("a mount at the target is no success", func(t *testing.T) {
		r := newRig(t)
		u := r.use(r.volume("v"))
		r.must(os.MkdirAll(u.Target.Path, 0o755))
		r.mount("data", u.Target.Path, "tmpfs", "")
		r.answering(func(ctx context.Context, method string, _ any, next func(context.Context) (any, error)) (any, error) {
			if method == "NodePrepareVolume" {
				return nil, status.Error(codes.Internal, "broken")
			}
			return next(ctx)
		})
		if _, err := r.co.Up(r.ctx, u); status.Code(err) != codes.Internal {
			t.Errorf("%v, want INTERNAL", err)
		}
		r.mountsAt(u.Target.Path, 1)
	})
	t.Run("a record of a mount that is not there is no success", func(t *testing.T) {
		r := newRig(t)
		u := r.use(r.volume("v"))
		r.up(u)
		r.must(unix.Unmount(u.Target.Path, 0))
		record := r.up(u)
		r.mountsAt(u.Target.Path, 1)
		r.down(record.Key())
		r.nothingLeft()
	})
}

// TestRule3NoAccessBelowATarget watches the volume's directories: whoever
// opens or reads one of a dead server would hang.
func TestRule3NoAccessBelowATarget(t *testing.T) {
	r := newRig(t)
	volume := r.volume("v")
	r.must(os.Mkdir(filepath.Join(r.data(volume), "sub"), 0o755))
	record := r.up(r.use(volume))
	watch, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	r.must(err)
	defer unix.Close(watch)
	for _, dir := range []string{r.data(volume), filepath.Join(r.data(volume), "sub")} {
		_, err = unix.InotifyAddWatch(watch, dir, unix.IN_OPEN|unix.IN_ACCESS|unix.IN_CLOSE)
		r.must(err)
	}
	r.down(record.Key())
	if n, err := unix.Read(watch, make([]byte, 4096)); err != unix.EAGAIN {
		t.Errorf("something below the target was opened: %d bytes of events, %v", n, err)
	}
	r.nothingLeft()
}

func TestRule4DirectoriesGoByOneRmdir(t *testing.T) {
	r := newRig(t)
	u := r.use(r.volume("v"))
	record := r.up(u)
	kept := filepath.Join(record.PreparePath, "precious")
	r.must(os.WriteFile(kept, []byte("data"), 0o600))
	err := r.co.Down(r.ctx, record.Key())
	var leftover *LeftoverError
	if !errors.As(err, &leftover) || leftover.Dir != record.PreparePath {
		t.Errorf("%v, want a LeftoverError for %s", err, record.PreparePath)
	}
	if text, err := os.ReadFile(kept); string(text) != "data" {
		t.Errorf("the file in it: %q, %v", text, err)
	}
	// The volume itself is free: it may move.
	if calls := r.called(); calls[len(calls)-1] != "NodeUnstageVolume" {
		t.Errorf("calls %v, want the volume unstaged", calls)
	}
	if text, err := os.ReadFile(filepath.Join(r.data(u.VolumeID), "file")); string(text) != "v" {
		t.Errorf("the volume's data: %q, %v", text, err)
	}
	r.must(os.Remove(kept))
	r.down(record.Key())
	r.nothingLeft()
}

func TestRule5TheTableIsReadAgain(t *testing.T) {
	r := newRig(t)
	u := r.use(r.volume("v"))
	record := r.up(u)
	r.called()
	// A bystander's mount on ours: whoever unmounts the target once and
	// looks no further takes that, and thinks he is done.
	r.must(unix.Mount("bystander", u.Target.Path, "tmpfs", 0, ""))
	err := r.co.Down(r.ctx, record.Key())
	var busy *perform.BusyError
	if !errors.As(err, &busy) || len(busy.Mounts) != 1 {
		t.Errorf("%v, want a BusyError that names the bystander's mount", err)
	}
	r.mountsAt(u.Target.Path, 2)
	if calls := r.called(); len(calls) > 0 {
		t.Errorf("calls %v although the performance is not undone", calls)
	}
	r.must(unix.Unmount(u.Target.Path, 0))
	r.down(record.Key())
	r.nothingLeft()
}

// TestRule5DevicesAreAskedToo has tables that are clean, or whose lines are in
// a namespace nobody thinks of, and a device that is in use.
func TestRule5DevicesAreAskedToo(t *testing.T) {
	for _, test := range []struct {
		name string
		keep func(r *rig, record *Record) (release func())
		seen int // mounts that the error names
	}{
		{"a copy of the mount in another namespace", func(r *rig, _ *Record) func() {
			other, err := mountns.New(r.ctx)
			r.must(err)
			return func() { other.Close() }
		}, 1},
		{"a mount that was detached while a file was open", func(r *rig, record *Record) func() {
			f, err := os.OpenFile(record.Target+"/file", os.O_CREATE|os.O_WRONLY, 0o600)
			r.must(err)
			r.must(unix.Unmount(record.Target, unix.MNT_DETACH))
			return func() { f.Close() }
		}, 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := newRig(t)
			r.set(func(s *Settings) { s.Attempts = 2 })
			d := r.loop()
			u := r.use(r.volume("v"))
			// What is there already stays, and with it the copies on it.
			r.must(os.MkdirAll(u.Target.Path, 0o755))
			r.specs(d.ext4(d.diskseq))
			record := r.up(u)
			if len(record.Devices) != 1 {
				t.Fatalf("record %+v, want its device", record)
			}
			release := test.keep(r, record)
			r.called()
			var busy *DeviceBusyError
			if err := r.co.Down(r.ctx, record.Key()); !errors.As(err, &busy) || len(busy.Mounts) != test.seen {
				t.Errorf("%v, want a DeviceBusyError with %d mounts", err, test.seen)
			}
			r.mountsAt(u.Target.Path, 0)
			if calls := r.called(); len(calls) > 0 {
				t.Errorf("calls %v although the device is in use", calls)
			}
			release()
			r.eventually("the device is free", func() bool { return r.co.Down(r.ctx, record.Key()) == nil })
			r.must(os.RemoveAll(r.path("consumer/c1")))
			r.nothingLeft()
		})
	}
	t.Run("a device that others had in use before", func(t *testing.T) {
		r := newRig(t)
		d := r.loop()
		// As a plugin may that has it mounted for itself.
		staged := r.path("co/staging/plugin")
		r.must(os.Mkdir(staged, 0o700))
		r.mount(d.path, staged, "ext4", "")
		u := r.use(r.volume("v"))
		r.specs(d.ext4(d.diskseq))
		record := r.up(u)
		r.down(record.Key())
		r.must(unix.Unmount(staged, 0))
		r.must(os.Remove(staged))
		r.nothingLeft()
	})
}

func TestRule6LeaksAreCountedBeforeRmdir(t *testing.T) {
	for _, test := range []struct {
		name string
		leak func(*Record) string // where another namespace has a mount
	}{
		{"what was created in the consumer", func(record *Record) string { return filepath.Dir(record.Target) }},
		{"the directory of the preparation", func(record *Record) string { return record.PreparePath }},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := newRig(t)
			record := r.up(r.use(r.volume("v")))
			other, err := mountns.New(r.ctx)
			r.must(err)
			leak := test.leak(record)
			r.must(other.Do(r.ctx, func() error { return unix.Mount("leak", leak, "tmpfs", 0, "") }))
			err = r.co.Down(r.ctx, record.Key())
			var leftover *LeftoverError
			if !errors.As(err, &leftover) || len(leftover.Mounts) != 1 || leftover.Mounts[0].Namespace != other.ID() {
				t.Errorf("%v, want a LeftoverError with the mount in namespace %d", err, other.ID())
			}
			table, err := other.Table(r.ctx)
			r.must(err)
			if len(table.At(leak)) != 1 {
				t.Error("the evidence is gone")
			}
			r.must(other.Close())
			for range 200 { // the kernel takes the namespace apart in its own time
				if err = r.co.Down(r.ctx, record.Key()); err == nil {
					break
				}
				time.Sleep(10 * time.Millisecond)
			}
			r.must(err)
			r.nothingLeft()
		})
	}
	t.Run("a copy of the performance", func(t *testing.T) {
		r := newRig(t)
		record := r.up(r.use(r.volume("v")))
		other, err := mountns.New(r.ctx) // with a copy
		r.must(err)
		defer other.Close()
		r.down(record.Key())
		if !strings.Contains(r.log.String(), "has a copy of the performance") {
			t.Error("the copy was not reported")
		}
		r.nothingLeft()
	})
}

func TestRule7BusyIsNeverHidden(t *testing.T) {
	r := newRig(t)
	u := r.use(r.volume("v"))
	record := r.up(u)
	f, err := os.OpenFile(u.Target.Path+"/file", os.O_WRONLY, 0)
	r.must(err)
	err = r.co.Down(r.ctx, record.Key())
	if !errors.Is(err, unix.EBUSY) {
		t.Errorf("%v, want EBUSY", err)
	}
	r.mountsAt(u.Target.Path, 1)
	if got := r.record(); got.Phase != Undoing || !strings.Contains(got.Error, "in use") {
		t.Errorf("record %+v, want undoing and in use", got)
	}
	r.must(f.Close())
	r.down(record.Key())
	r.nothingLeft()
}

func TestRule8ReadOnlyFromTheFirstMoment(t *testing.T) {
	r := newRig(t)
	u := r.use(r.volume("v"))
	u.Readonly = true
	r.must(os.MkdirAll(u.Target.Path, 0o755))
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			default:
			}
			if f, err := os.OpenFile(u.Target.Path+"/file", os.O_WRONLY, 0); err == nil {
				t.Error("the volume was writable for a moment")
				f.Close()
				return
			}
		}
	}()
	record := r.up(u)
	close(stop)
	<-stopped
	if err := os.WriteFile(u.Target.Path+"/file", nil, 0o644); !errors.Is(err, unix.EROFS) {
		t.Errorf("writing: %v, want EROFS", err)
	}
	r.down(record.Key())
}

func TestRule9WordsAndSizesBeforeTheFirstMount(t *testing.T) {
	r := newRig(t)
	u := r.use(r.volume("v"))
	filesystem := func(target, key, text string) *preparev1alpha1.MountSpec {
		p := &preparev1alpha1.FsParameter{Key: key}
		if text != "" {
			p.Value = &preparev1alpha1.FsParameter_Text{Text: text}
		}
		return &preparev1alpha1.MountSpec{Target: target, Kind: &preparev1alpha1.MountSpec_Filesystem{
			Filesystem: &preparev1alpha1.FilesystemMount{FsType: "tmpfs", Parameters: []*preparev1alpha1.FsParameter{p}},
		}}
	}
	r.specs(bind(u.VolumeID, ""), filesystem("a", "ro", ""), filesystem("b", "_netdev", ""),
		filesystem("c", "size", strings.Repeat("1", 300)), filesystem("d", "size", "1,mode=777"))
	r.co.before = func(step string) {
		if step == "wrote performing" {
			t.Error("performing began")
		}
	}
	_, err := r.co.Up(r.ctx, u)
	var invalid *perform.InvalidError
	if !errors.As(err, &invalid) || len(invalid.Violations) < 3 {
		t.Errorf("%v, want all violations", err)
	}
	r.nothingLeft()
}

func TestRule10AListIsAllOrNothing(t *testing.T) {
	r := newRig(t)
	u := r.use(r.volume("v"))
	r.specs(bind(u.VolumeID, ""), bind(u.VolumeID, "no-such-directory"))
	_, err := r.co.Up(r.ctx, u)
	var step *StepError
	if !errors.As(err, &step) || !errors.Is(err, unix.ENOENT) {
		t.Errorf("%v, want a StepError with ENOENT", err)
	}
	r.nothingLeft()
	if got := r.called(); !slices.Contains(got, "NodeUnprepareVolume") {
		t.Errorf("calls %v, want it unprepared", got)
	}
}

func TestRule12IdentityWhenPerforming(t *testing.T) {
	t.Run("a directory that should be a mount", func(t *testing.T) {
		r := newRig(t)
		u := r.use(r.volume("v"))
		spec := bind(u.VolumeID, "")
		spec.GetBind().MountFsType = "ext4"
		r.specs(spec)
		if _, err := r.co.Up(r.ctx, u); !errors.Is(err, perform.ErrSource) {
			t.Errorf("%v, want ErrSource", err)
		}
		r.nothingLeft()
	})
	t.Run("another device of the same number", func(t *testing.T) {
		r := newRig(t)
		d := r.loop()
		u := r.use(r.volume("v"))
		r.specs(d.ext4(d.diskseq + 1))
		if _, err := r.co.Up(r.ctx, u); !errors.Is(err, perform.ErrDevice) {
			t.Errorf("%v, want ErrDevice", err)
		}
		r.nothingLeft()
	})
}

func TestRule11EffectiveIsComparedWithRequested(t *testing.T) {
	r := newRig(t)
	d := r.loop()
	// As a plugin may that has it mounted for itself.
	r.mount(d.path, r.mkdir("co/staging/plugin"), "ext4", "commit=7")
	r.before = r.table()
	u := r.use(r.volume("v"))
	spec := d.ext4(d.diskseq)
	spec.GetFilesystem().Parameters = []*preparev1alpha1.FsParameter{{Key: "commit", Value: &preparev1alpha1.FsParameter_Text{Text: "9"}}}
	r.specs(spec)
	// The kernel would return the other mount's superblock and say nothing.
	if _, err := r.co.Up(r.ctx, u); !errors.Is(err, perform.ErrParameters) {
		t.Errorf("%v, want ErrParameters", err)
	}
	r.must(unix.Unmount(r.path("co/staging/plugin"), 0))
	r.must(os.Remove(r.path("co/staging/plugin")))
	r.before = mountns.NewTable(true, slices.DeleteFunc(r.before.Mounts, func(m mountns.Mount) bool { return m.Point == r.path("co/staging/plugin") })...)
	r.nothingLeft()
}

// TestRule13WhatBlocksIsKilled performs from a directory whose server never
// answers.
func TestRule13WhatBlocksIsKilled(t *testing.T) {
	r := newRig(t)
	hung := r.hang("hung")
	r.set(func(s *Settings) {
		s.Grants["hung"] = hung
		s.StepDeadline = Duration(3 * time.Second)
	})
	u := r.use(r.volume("v"))
	spec := bind("x", "")
	spec.GetBind().GetSource().Grant = "hung"
	r.answering(func(ctx context.Context, method string, request any, next func(context.Context) (any, error)) (any, error) {
		answer, err := next(ctx)
		if p, ok := request.(*preparev1alpha1.NodePrepareVolumeRequest); ok && p.GetVolumeId() == u.VolumeID {
			answer = &preparev1alpha1.NodePrepareVolumeResponse{MountSpecs: []*preparev1alpha1.MountSpec{spec}}
		}
		return answer, err
	})
	blocked := make(chan error, 1)
	go func() {
		_, err := r.co.Up(r.ctx, u)
		blocked <- err
	}()
	// Others are not held up.
	other := r.use(r.volume("w"))
	other.Target.Path = r.path("consumer/other")
	record := r.up(other)
	r.down(record.Key())
	if err := <-blocked; !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v, want that the deadline ended it", err)
	}
	r.nothingLeft()
}

// TestRule13OneStepAtATime has a step outlive its CO, as one does that waits
// in the kernel and cannot be killed.
func TestRule13OneStepAtATime(t *testing.T) {
	r := newRig(t)
	u := r.use(r.volume("v"))
	record := r.up(u)
	stuck, err := r.co.hold(r.ctx, record.Key())
	r.must(err)
	r.called()
	r.open()
	var pending *PendingError
	if err := r.co.Down(r.ctx, record.Key()); !errors.As(err, &pending) {
		t.Errorf("%v, want a PendingError", err)
	}
	if _, err := r.co.Up(r.ctx, u); !errors.As(err, &pending) {
		t.Errorf("%v, want a PendingError", err)
	}
	if calls := r.called(); len(calls) > 0 {
		t.Errorf("calls %v while a step is running", calls)
	}
	r.must(stuck.Close())
	r.down(record.Key())
	r.nothingLeft()
}

func TestRule14SecretsAreKeptNowhere(t *testing.T) {
	secret := "canary-" + rand.Text()
	r := newRig(t)
	u := r.use(r.volume("v"))
	u.Secrets, u.StageSecrets = map[string]string{"p": secret}, map[string]string{"q": secret}
	u.VolumeContext = map[string]string{"csi.storage.k8s.io/serviceAccount.tokens": secret}
	spec := &preparev1alpha1.MountSpec{Kind: &preparev1alpha1.MountSpec_Filesystem{Filesystem: &preparev1alpha1.FilesystemMount{
		FsType: "tmpfs", Parameters: []*preparev1alpha1.FsParameter{{Key: "nope", Value: &preparev1alpha1.FsParameter_Secret{Secret: secret}}},
	}}}
	look := func(what, text string) {
		t.Helper()
		if strings.Contains(text, secret) {
			t.Errorf("%s shows the secret", what)
		}
	}
	files := func() {
		t.Helper()
		r.must(filepath.WalkDir(r.path("co"), func(path string, e os.DirEntry, err error) error {
			if err == nil && e.Type().IsRegular() {
				text, err := os.ReadFile(path)
				look(path, string(text))
				return err
			}
			return err
		}))
	}
	r.co.before = func(string) {
		files()
		// Its own children alone: to look at a stranger that hangs, hangs.
		lists, err := filepath.Glob("/proc/self/task/*/children")
		r.must(err)
		for _, list := range lists {
			children, _ := os.ReadFile(list) // the thread may have ended
			for pid := range strings.FieldsSeq(string(children)) {
				for _, file := range []string{"/cmdline", "/environ"} {
					text, _ := os.ReadFile("/proc/" + pid + file)
					look(file, string(text))
				}
			}
		}
	}
	r.specs(spec)
	_, err := r.co.Up(r.ctx, u)
	if err == nil {
		t.Error("a parameter the kernel does not know was performed")
	} else {
		look("the kernel's error", err.Error())
	}
	r.answering(func(ctx context.Context, method string, _ any, next func(context.Context) (any, error)) (any, error) {
		if method == "NodePrepareVolume" || method == "NodeStageVolume" {
			return nil, status.Error(codes.Internal, "login with "+secret+" failed")
		}
		return next(ctx)
	})
	if _, err = r.co.Up(r.ctx, u); err == nil {
		t.Error("performed although the plugin refused")
	} else {
		look("the plugin's error", err.Error())
		if !strings.Contains(err.Error(), "login with "+shownInstead+" failed") {
			t.Errorf("%v lost the plugin's own words", err)
		}
	}
	// The token of a call is a secret too.
	var tokens []string
	r.answering(func(ctx context.Context, _ string, request any, next func(context.Context) (any, error)) (any, error) {
		if p, ok := request.(*preparev1alpha1.NodePrepareVolumeRequest); ok {
			for _, encode := range []func([]byte) string{hex.EncodeToString, base64.StdEncoding.EncodeToString, func(b []byte) string { return string(b) }} {
				tokens = append(tokens, encode(p.GetHandoffToken()))
			}
		}
		return next(ctx)
	})
	record := r.up(u)
	r.up(u) // a refresh
	files()
	for _, m := range r.table().Mounts {
		look("the mount table", m.SBOptions+m.Source)
	}
	found, err := Audit(r.ctx, r.path("co"))
	r.must(err)
	look("an audit", fmt.Sprint(found))
	r.down(record.Key())
	look("the log", r.log.String())
	for _, secret = range tokens {
		look("the log", r.log.String())
		files()
	}
	if len(tokens) == 0 {
		t.Error("no token was seen")
	}

	// Nor does a runtime get it, which would write it to a configuration.
	secret = "canary-" + rand.Text()
	parameters := []mountspec.Parameter{{Key: "password", Secret: mountspec.NewSecret(secret)}}
	specs := []mountspec.Spec{{Kind: &mountspec.Filesystem{Type: "tmpfs", Parameters: parameters}}}
	entries, err := oci.Convert(specs, make([]mountspec.Place, 1), oci.Options{Destination: "/data"})
	if err == nil {
		t.Errorf("converted to %+v", entries)
	}
	look("a configuration", fmt.Sprintf("%+v, %v", entries, err))
	r.nothingLeft()
}
