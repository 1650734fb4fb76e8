package handoff

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/csi-prepare/csi-prepare/reference/mountspec"
)

func code(err error) codes.Code {
	var r *Refusal
	if errors.As(err, &r) {
		return r.Code
	}
	if err == nil {
		return codes.OK
	}
	return codes.Unknown
}

func finish(t *testing.T, c *Call, ids ...string) []Handle {
	t.Helper()
	h, err := c.Finish(ids...)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

func wantHandleError(t *testing.T, err error, reason error) {
	t.Helper()
	var e *HandleError
	if !errors.As(err, &e) || !errors.Is(err, reason) {
		t.Fatalf("got %v, want a HandleError of %q", err, reason)
	}
}

func TestAnOfferedMountIsHeldUntilReleased(t *testing.T) {
	r := newRig(t, nil)
	c := r.begin(preparation)
	conn := r.dial(c)
	mount := detachedTmpfs(t)
	if err := conn.Offer(t.Context(), "h1", mount); err != nil {
		t.Fatal(err)
	}
	mount.Close()

	h := finish(t, c, "h1")
	if len(h) != 1 || h[0].FUSE || h[0].ID != "h1" {
		t.Fatalf("handles: %+v", h)
	}
	if err := isMountRoot(h[0].Mount); err != nil {
		t.Error(err)
	}
	if flags, err := unix.FcntlInt(h[0].Mount.Fd(), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
		t.Errorf("the received descriptor is inherited by children: flags %#x, %v", flags, err)
	}
	if err := conn.Wait(t.Context()); !errors.Is(err, ErrClosed) {
		t.Errorf("a connection that serves nothing outlives its call: %v", err)
	}
	r.settle(1)
	r.Release(preparation)
	r.settle(0)
}

func TestAFUSEMountIsUsableOnceServed(t *testing.T) {
	r := newRig(t, nil)
	c := r.begin(preparation)
	conn := r.serve(c, "f", request)
	h := finish(t, c, "f")
	if !h[0].FUSE || h[0].Resumable || h[0].Server.PID != int32(os.Getpid()) {
		t.Fatalf("handle: %+v", h[0])
	}
	r.settle(2) // connection and mount; a copy of the device would turn death into a hang

	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := conn.Wait(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("the connection that serves did not outlive the call: %v", err)
	}
	conn.Close()
	if n := r.notice(); !n.Until.IsZero() || n.HandleID != "f" || n.Key != preparation {
		t.Errorf("notice: %+v", n)
	}
	r.Release(preparation)
	r.settle(0)
}

func TestNothingIsUsableBeforeServing(t *testing.T) {
	r := newRig(t, nil)
	c := r.begin(preparation)
	conn := r.dial(c)
	device, err := conn.RequestFUSE(t.Context(), "f", request)
	if err != nil {
		t.Fatal(err)
	}
	defer device.Close()
	_, err = c.Finish("f")
	wantHandleError(t, err, ErrNotServing)
	r.settle(0)
}

func TestAnIDThatDidNotComeIsAnError(t *testing.T) {
	r := newRig(t, nil)
	c := r.begin(preparation)
	if err := r.dial(c).Offer(t.Context(), "h", detachedTmpfs(t)); err != nil {
		t.Fatal(err)
	}
	_, err := c.Finish("h", "other")
	wantHandleError(t, err, ErrNotDelivered)
	r.settle(0)
}

func TestWhatTheAnswerDoesNotNameIsClosed(t *testing.T) {
	r := newRig(t, nil)
	c := r.begin(preparation)
	conn := r.dial(c)
	for _, id := range []string{"a", "b"} {
		if err := conn.Offer(t.Context(), id, detachedTmpfs(t)); err != nil {
			t.Fatal(err)
		}
	}
	finish(t, c, "b")
	r.settle(1)
}

func TestACallThatFailsDropsEverything(t *testing.T) {
	for name, end := range map[string]func(*Call, context.CancelFunc){
		"dropped":  func(c *Call, _ context.CancelFunc) { c.Drop() },
		"deadline": func(_ *Call, cancel context.CancelFunc) { cancel() },
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, nil)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			c, err := r.Begin(ctx, preparation)
			if err != nil {
				t.Fatal(err)
			}
			conn := r.serve(c, "f", resumable())
			end(c, cancel)
			r.settle(0)
			if err := conn.Wait(t.Context()); !errors.Is(err, ErrClosed) {
				t.Errorf("wait: %v", err)
			}
			if _, err := c.Finish("f"); !errors.Is(err, ErrClosed) {
				t.Errorf("finish of a call that ended: %v", err)
			}
		})
	}
}

func TestARepeatedCallNamesWhatIsHeld(t *testing.T) {
	r := newRig(t, nil)
	c := r.begin(preparation)
	r.serve(c, "f", request)
	finish(t, c, "f")

	c = r.begin(preparation)
	if diff := cmp.Diff([]string{"f"}, c.Held()); diff != "" {
		t.Errorf("held (-want +got):\n%s", diff)
	}
	conn := r.dial(c)
	if err := conn.Offer(t.Context(), "f", detachedTmpfs(t)); code(err) != codes.AlreadyExists {
		t.Errorf("an id twice: %v", err)
	}
	if h := finish(t, c, "f"); !h[0].FUSE {
		t.Errorf("handle: %+v", h[0])
	}
	c = r.begin(preparation)
	c.Drop()
	r.settle(2) // a failed repeat takes nothing away
}

func TestCallsOfOnePreparationAtOneTime(t *testing.T) {
	r := newRig(t, nil)
	one, other := r.begin(preparation), r.begin(preparation)
	conn := r.serve(one, "f", resumable())
	if err := r.dial(other).Offer(t.Context(), "f", detachedTmpfs(t)); code(err) != codes.AlreadyExists {
		t.Errorf("an id of the other call: %v", err)
	}
	if h := finish(t, other, "f"); !h[0].FUSE { // its answer names what the other one brought
		t.Errorf("handle: %+v", h[0])
	}
	one.Drop()
	r.settle(3) // and so keeps it
	conn.Close()
}

func TestASuccessorResumes(t *testing.T) {
	r := newRig(t, nil)
	c := r.begin(preparation)
	first := r.serve(c, "f", resumable())
	mount := finish(t, c, "f")[0].Mount
	r.settle(3)
	first.Close()
	if n := r.notice(); n.Until.IsZero() {
		t.Error("the end of a resumable server is not final")
	}

	c = r.begin(preparation)
	second := r.dial(c)
	device, got, err := second.Resume(t.Context(), "f")
	if err != nil {
		t.Fatal(err)
	}
	defer device.Close()
	if diff := cmp.Diff(session, got); diff != "" {
		t.Errorf("session (-want +got):\n%s", diff)
	}
	if err := second.Serving(t.Context(), "f", Session{Init: []byte("init"), State: []byte("new")}); err != nil {
		t.Fatal(err)
	}
	if h := finish(t, c, "f"); h[0].Mount != mount || !h[0].Resumable {
		t.Errorf("resuming changed the mount: %+v", h[0])
	}
	second.Close()
	r.notice()

	c = r.begin(preparation)
	third := r.dial(c)
	device, got, err = third.Resume(t.Context(), "f")
	if err != nil {
		t.Fatal(err)
	}
	device.Close()
	if string(got.State) != "new" {
		t.Errorf("state %q: want that of the last serving", got.State)
	}
	third.Close() // dies between resume and serving: the next one may still come
	fourth := r.dial(c)
	if device, _, err = fourth.Resume(t.Context(), "f"); err != nil {
		t.Fatal(err)
	}
	device.Close()
	_, err = c.Finish("f")
	wantHandleError(t, err, ErrNotServing)
	if err := fourth.Wait(t.Context()); !errors.Is(err, ErrClosed) {
		t.Errorf("a process that missed its call goes on: %v", err)
	}
	r.settle(2)
	if r.aborts != 0 {
		t.Errorf("%d aborts", r.aborts)
	}
}

func TestASuccessorMayBeFasterThanTheNews(t *testing.T) {
	r := newRig(t, nil)
	c := r.begin(preparation)
	first := r.serve(c, "f", resumable())
	finish(t, c, "f")
	c = r.begin(preparation)
	second := r.dial(c)
	time.AfterFunc(20*time.Millisecond, func() { first.Close() })
	device, _, err := second.Resume(t.Context(), "f")
	if err != nil {
		t.Fatal(err)
	}
	device.Close()
}

func TestALivingServerIsNotResumed(t *testing.T) {
	r := newRig(t, func(c *Config) { c.Silence = 50 * time.Millisecond })
	c := r.begin(preparation)
	r.serve(c, "f", resumable())
	finish(t, c, "f")
	c = r.begin(preparation)
	if _, _, err := r.dial(c).Resume(t.Context(), "f"); code(err) != codes.FailedPrecondition {
		t.Errorf("resume beside a living server: %v", err)
	}
	c.Drop()
	r.settle(3)
}

func TestNobodyResumesWithinTheDeadline(t *testing.T) {
	r := newRig(t, func(c *Config) { c.Failover = 20 * time.Millisecond })
	c := r.begin(preparation)
	first := r.serve(c, "f", resumable())
	finish(t, c, "f")
	first.Close()
	if n := r.notice(); n.Until.IsZero() {
		t.Errorf("first notice: %+v", n)
	}
	if n := r.notice(); !n.Until.IsZero() || n.Err != nil {
		t.Errorf("second notice: %+v", n)
	}
	r.settle(1) // the mount, until it is released
	if r.aborts != 1 {
		t.Errorf("%d aborts, want 1", r.aborts)
	}
	c = r.begin(preparation)
	if held := c.Held(); len(held) != 0 {
		t.Errorf("a dead mount is held out to the plugin: %q", held)
	}
	if _, _, err := r.dial(c).Resume(t.Context(), "f"); code(err) != codes.FailedPrecondition {
		t.Errorf("resume after the end: %v", err)
	}
	r.serve(c, "f", resumable()) // its name is free again
	finish(t, c, "f")
	r.settle(3)
}

func TestOnlyWhatIsResumableIsResumed(t *testing.T) {
	r := newRig(t, nil)
	c := r.begin(preparation)
	first := r.serve(c, "f", request)
	finish(t, c, "f")
	first.Close()
	r.notice()
	c = r.begin(preparation)
	if _, _, err := r.dial(c).Resume(t.Context(), "f"); code(err) != codes.FailedPrecondition {
		t.Errorf("resume: %v", err)
	}
	if _, _, err := r.dial(c).Resume(t.Context(), "g"); code(err) != codes.NotFound {
		t.Errorf("resume of an unknown id: %v", err)
	}
}

func TestPreparationsOfOneVolumeShare(t *testing.T) {
	r := newRig(t, nil)
	q := request
	q.ShareKey = "all"
	c1 := r.begin(preparation)
	other := Key{"v1", "p2"}
	c2 := r.begin(other)

	first := r.dial(c1)
	device, err := first.RequestFUSE(t.Context(), "f", q)
	if err != nil {
		t.Fatal(err)
	}
	defer device.Close()
	if _, err := first.RequestFUSE(t.Context(), "g", q); code(err) != codes.FailedPrecondition {
		t.Errorf("a connection would wait for itself: %v", err)
	}
	answered := make(chan error)
	second := r.dial(c2)
	go func() { // answered once the first one serves
		d, err := second.RequestFUSE(t.Context(), "f2", q)
		if d != nil {
			err = errors.New("a second device")
		}
		answered <- err
	}()
	time.Sleep(10 * time.Millisecond)
	if err := first.Serving(t.Context(), "f", Session{}); err != nil {
		t.Fatal(err)
	}
	if err := <-answered; err != nil {
		t.Fatal(err)
	}
	a, b := finish(t, c1, "f"), finish(t, c2, "f2")
	if a[0].Mount != b[0].Mount || r.mounts != 1 {
		t.Errorf("%d mounts for one share_key", r.mounts)
	}

	q.UserID = 7
	c3 := r.begin(Key{"v1", "p3"})
	if _, err := r.dial(c3).RequestFUSE(t.Context(), "f", q); code(err) != codes.FailedPrecondition {
		t.Errorf("other parameters under the same key: %v", err)
	}
	c3.Drop()
	q.UserID = 0
	c4 := r.begin(Key{"v2", "p1"})
	if d, err := r.dial(c4).RequestFUSE(t.Context(), "f", q); err != nil || d == nil {
		t.Errorf("the same key of another volume: %v, %v", d, err)
	}
	c4.Drop()

	r.settle(2)
	r.Release(preparation)
	r.settle(2)
	r.Release(other)
	r.settle(0)
}

func TestADeadServerIsSharedWithNobody(t *testing.T) {
	r := newRig(t, nil)
	q := request
	q.ShareKey = "all"
	c := r.begin(preparation)
	first := r.serve(c, "f", q)
	finish(t, c, "f")
	first.Close()
	r.notice()
	c = r.begin(Key{"v1", "p2"})
	r.serve(c, "f", q)
	finish(t, c, "f")
	if r.mounts != 2 {
		t.Errorf("%d mounts, want a new one after the death of the first server", r.mounts)
	}
}

func TestADepositStandsForWhatTheCOLost(t *testing.T) {
	device, mount := mounted(t)
	adopted := 0
	r := newRig(t, func(c *Config) {
		c.Adopt = func(context.Context, Key, string, *os.File) (*os.File, error) {
			adopted++
			return duplicate(mount)
		}
	})
	other := Key{"v1", "p2"}
	var server *Conn
	var gone []<-chan struct{}
	// The two share a mount, and one is asked again before it knew.
	for _, key := range []Key{preparation, other, preparation} {
		c := r.begin(key)
		last := server
		server = r.dial(c)
		if err := server.Deposit(t.Context(), "f", device, session); err != nil {
			t.Fatal(err)
		}
		if last != nil {
			last.Close()
		}
		h := finish(t, c, "f")
		if !h[0].Resumable {
			t.Errorf("handle: %+v", h[0])
		}
		gone = append(gone, h[0].Gone)
	}
	r.settle(3)
	if adopted != 1 {
		t.Errorf("%d mounts were looked for", adopted)
	}
	for _, g := range gone {
		select {
		case <-g:
			t.Error("a server that went over to another connection is gone")
		default:
		}
	}
	if c := r.begin(preparation); code(r.dial(c).Deposit(t.Context(), "g", device, Session{})) != codes.FailedPrecondition {
		t.Error("what can be resumed was deposited as if it could not")
	} else {
		c.Drop()
	}
	server.Close()
	r.notice()
	r.notice()
	c := r.begin(preparation)
	device, got, err := r.dial(c).Resume(t.Context(), "f")
	if err != nil {
		t.Fatal(err)
	}
	device.Close()
	if diff := cmp.Diff(session, got); diff != "" {
		t.Errorf("session (-want +got):\n%s", diff)
	}
}

func TestADepositWithoutINIT(t *testing.T) {
	device, mount := mounted(t)
	r := newRig(t, func(c *Config) {
		c.Adopt = func(context.Context, Key, string, *os.File) (*os.File, error) { return duplicate(mount) }
	})
	c := r.begin(preparation)
	server := r.dial(c)
	if err := server.Deposit(t.Context(), "f", device, Session{}); err != nil {
		t.Fatal(err)
	}
	if h := finish(t, c, "f"); h[0].Resumable {
		t.Errorf("handle: %+v", h[0])
	}
	r.settle(2) // no device: it would make a hang of the server's death
	server.Close()
	if n := r.notice(); !n.Until.IsZero() {
		t.Errorf("its end is not final: %+v", n)
	}
}

func TestADepositOfTheWrongThing(t *testing.T) {
	r := newRig(t, nil)
	c := r.begin(preparation)
	conn := r.dial(c)
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	if err := conn.Deposit(t.Context(), "f", null, session); code(err) != codes.InvalidArgument {
		t.Errorf("deposit of /dev/null: %v", err)
	}
	c.Drop()
	r.settle(0)
}

func TestWhatTheCODoesNotDoIsUnimplemented(t *testing.T) {
	r := newRig(t, func(c *Config) { c.Mount, c.Adopt = nil, nil })
	conn := r.dial(r.begin(preparation))
	if _, err := conn.RequestFUSE(t.Context(), "f", request); code(err) != codes.Unimplemented {
		t.Error(err)
	}
	if err := conn.Deposit(t.Context(), "f", openFUSE(t), session); code(err) != codes.Unimplemented {
		t.Error(err)
	}
}

func TestTheTextOfAnErrorStaysWithTheCO(t *testing.T) {
	for name, c := range map[string]struct {
		err  error
		want codes.Code
		text string
	}{
		"a refusal":       {&Refusal{codes.InvalidArgument, "max_read"}, codes.InvalidArgument, "max_read"},
		"any other error": {errors.New("open /etc/secret"), codes.Internal, "its log has the reason"},
		"a deadline":      {context.DeadlineExceeded, codes.DeadlineExceeded, "too long"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, func(f *Config) {
				f.Mount = func(context.Context, Key, FUSERequest) (*os.File, *os.File, error) { return nil, nil, c.err }
			})
			call := r.begin(preparation)
			conn := r.dial(call)
			_, err := conn.RequestFUSE(t.Context(), "f", request)
			if code(err) != c.want || !strings.Contains(err.Error(), c.text) {
				t.Errorf("got %v", err)
			}
			if err := conn.Offer(t.Context(), "f", detachedTmpfs(t)); err != nil {
				t.Errorf("the id of a failed request is not free again: %v", err)
			}
		})
	}
}

func TestARequestIsChecked(t *testing.T) {
	for name, change := range map[string]func(*FUSERequest){
		"subtype":        func(r *FUSERequest) { r.Subtype = "a.b" },
		"subtype length": func(r *FUSERequest) { r.Subtype = strings.Repeat("a", 33) },
		"no root_mode":   func(r *FUSERequest) { r.RootMode = 0o755 },
		"root is a link": func(r *FUSERequest) { r.RootMode = unix.S_IFLNK },
		"user_id":        func(r *FUSERequest) { r.UserID = 1<<32 - 1 },
		"share_key":      func(r *FUSERequest) { r.ShareKey = strings.Repeat("a", 129) },
		"fd":             func(r *FUSERequest) { r.Parameters = []mountspec.Parameter{{Key: "fd", Text: "3"}} },
		"max_read text":  func(r *FUSERequest) { r.Parameters = []mountspec.Parameter{{Key: "max_read", Text: "1,ro"}} },
		"flag value":     func(r *FUSERequest) { r.Parameters = []mountspec.Parameter{{Key: "allow_other", Text: "1"}} },
		"twice": func(r *FUSERequest) {
			r.Parameters = []mountspec.Parameter{{Key: "allow_other"}, {Key: "allow_other"}}
		},
	} {
		t.Run(name, func(t *testing.T) {
			q := request
			change(&q)
			if err := q.Check(); code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), ": fuse_request.") {
				t.Errorf("got %v", err)
			}
		})
	}
	q := request
	q.Parameters = []mountspec.Parameter{{Key: "max_read", Text: "131072"}, {Key: "allow_other"}, {Key: "default_permissions"}}
	if err := q.Check(); err != nil {
		t.Error(err)
	}
}

func TestTheSocketIsThePluginsAlone(t *testing.T) {
	dir := filepath.Join(shortDir(t), "handoff")
	r := newRig(t, func(c *Config) { c.Directory, c.UID, c.GID = dir, 12345, 12346 })
	for path, mode := range map[string]os.FileMode{dir: os.ModeDir | 0o700, r.Path(): os.ModeSocket | 0o600} {
		fi, err := os.Lstat(path)
		if err != nil {
			t.Fatal(err)
		}
		var s unix.Stat_t
		if err := unix.Lstat(path, &s); err != nil {
			t.Fatal(err)
		}
		if fi.Mode() != mode || s.Uid != 12345 || s.Gid != 12346 {
			t.Errorf("%s: %v of %d:%d", path, fi.Mode(), s.Uid, s.Gid)
		}
	}
	if _, err := Listen(Config{Directory: dir}); err == nil {
		t.Error("two Listeners in one directory")
	}
	left := filepath.Join(dir, "handoff-left.sock")
	if err := unix.Mknod(left, unix.S_IFSOCK|0o600, 0); err != nil {
		t.Fatal(err)
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	l, err := Listen(Config{Directory: dir})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if _, err := os.Lstat(left); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket of an earlier CO is left: %v", err)
	}
	long := Config{Directory: filepath.Join(dir, strings.Repeat("a", 100))}
	if _, err := Listen(long); err == nil || !strings.Contains(err.Error(), "107") {
		t.Errorf("a path that is too long: %v", err)
	}
}
