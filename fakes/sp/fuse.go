package sp

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/reference/handoff"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
	preparev1alpha1 "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// NewFUSE returns a Server whose volumes are served over FUSE, a process for
// each preparation, by go-fuse's own loopback: nothing is resumed, and what a
// restarted CO has lost is served anew. It needs a StateDir.
func NewFUSE(c Config) (*Server, error) { return build(c, overFUSE(serving{})) }

// serving is how a Server serves, and what it does wrong.
type serving struct {
	// order changes what a serving process is told.
	order func(*order)
	// spec changes the answer.
	spec func(*preparev1alpha1.FuseMount)
	// alive decides which handles are served still.
	alive func(dir string, r *prepareRequest) string
	// wait waits for the end of the processes of a preparation.
	wait func(dir, pair string) error
	// dies has processes end with the one behind the CSI socket.
	dies bool
}

// order is what a serving process is told, over its standard input.
type order struct {
	Socket   string      `json:"socket"`
	Token    []byte      `json:"token"`
	Key      handoff.Key `json:"key"`
	Handle   string      `json:"handle"`
	Dir      string      `json:"dir"`
	Lock     string      `json:"lock"`
	ShareKey string      `json:"share_key,omitempty"`
	Asks     string      `json:"asks,omitempty"`     // for this parameter too
	Early    bool        `json:"early,omitempty"`    // answers before it serves
	Lingers  bool        `json:"lingers,omitempty"`  // does not end with its mount
	HangsUp  bool        `json:"hangs_up,omitempty"` // closes its connection to the CO
	Pretends bool        `json:"pretends,omitempty"` // says that it can be resumed
}

// overFUSE has a Server answer a FUSE mount in the place of a BIND.
func overFUSE(how serving) fault {
	if how.alive == nil {
		how.alive = aliveAndHeld
	}
	if how.wait == nil {
		how.wait = untilGone
	}
	var pending memory[pair, bool] // one call a pair
	return both(
		func(s *Server) {
			s.rules.accepts = func(p *preparev1alpha1.Performer, _ *preparev1alpha1.MountSpec) bool {
				return p.GetKernel() == preparev1alpha1.Performer_NODE && slices.Contains(p.GetKinds(), preparev1alpha1.MountKind_MOUNT_KIND_FUSE)
			}
		},
		answered(func(_ *Server, _ *capabilitiesQuery, a *capabilitiesReply) {
			for _, c := range a.GetCapabilities() {
				if k := c.GetKind(); k != nil {
					k.Kind = preparev1alpha1.MountKind_MOUNT_KIND_FUSE
				}
			}
		}),
		instead(func(ctx context.Context, s *Server, r *prepareRequest, next func() (*prepareResponse, error)) (*prepareResponse, error) {
			key := pair{r.GetVolumeId(), r.GetPrepareId()}
			if busy, _ := pending.swap(key, true); busy {
				return nil, errPending
			}
			defer pending.swap(key, false)
			known := s.known(r.GetVolumeId(), r.GetPrepareId())
			answer, err := next()
			if err != nil {
				return nil, err
			}
			mount, err := how.mount(ctx, s, r)
			if err != nil {
				if !known {
					s.forget(r)
				}
				return nil, err
			}
			answer.MountSpecs[0].Kind = &preparev1alpha1.MountSpec_Fuse{Fuse: mount}
			return answer, nil
		}),
		instead(func(_ context.Context, s *Server, r *unprepareRequest, next func() (*unprepareResponse, error)) (*unprepareResponse, error) {
			key := pair{r.GetVolumeId(), r.GetPrepareId()}
			if busy, _ := pending.swap(key, true); busy {
				return nil, errPending
			}
			defer pending.swap(key, false)
			if s.known(r.GetVolumeId(), r.GetPrepareId()) && s.at(r.GetVolumeId(), r.GetPrepareId()) == r.GetPreparePath() {
				if err := how.wait(s.config.StateDir, digestOf(r.GetVolumeId(), r.GetPrepareId())); err != nil {
					return nil, err
				}
			}
			return next()
		}),
	)
}

var errPending = status.Error(codes.Aborted, "prepare_id: a call for it is pending")

// mount sees to it that a process serves a preparation.
func (how serving) mount(ctx context.Context, s *Server, r *prepareRequest) (*preparev1alpha1.FuseMount, error) {
	if r.GetHandleSocket() == "" {
		return nil, status.Error(codes.FailedPrecondition, "handle_socket: is needed for a FUSE mount")
	}
	m := &preparev1alpha1.FuseMount{HandleId: how.alive(s.config.StateDir, r)}
	if m.HandleId == "" {
		m.HandleId = fmt.Sprintf("h%x", time.Now().UnixNano())
		o := order{
			Socket: r.GetHandleSocket(), Token: r.GetHandoffToken(), Handle: m.HandleId,
			Key:  handoff.Key{VolumeID: r.GetVolumeId(), PrepareID: r.GetPrepareId()},
			Dir:  s.where(r.GetVolumeId()),
			Lock: lockFile(s.config.StateDir, digestOf(r.GetVolumeId(), r.GetPrepareId()), m.HandleId),
		}
		if how.order != nil {
			how.order(&o)
		}
		if err := startServing(ctx, o, how.dies); err != nil {
			return nil, status.Errorf(codes.Internal, "serving: %v", err)
		}
	}
	if how.spec != nil {
		how.spec(m)
	}
	return m, nil
}

// forget drops a preparation that came to nothing.
func (s *Server) forget(r *prepareRequest) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.state.prepared, pair{r.GetVolumeId(), r.GetPrepareId()})
	_ = s.save() // the answer is an error already
}

// at is the prepare_path of a preparation that is known.
func (s *Server) at(volume, prepare string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.state.prepared[pair{volume, prepare}].GetPreparePath()
}

func digestOf(volume, prepare string) string {
	sum := sha256.Sum256([]byte(volume + "/" + prepare))
	return hex.EncodeToString(sum[:8])
}

// lockFile is locked by the process that serves a handle for as long as it
// lives: that is how any process of the plugin knows.
func lockFile(dir, pair, handle string) string {
	return filepath.Join(dir, "fuse-"+pair+"."+handle)
}

func locked(file string) bool {
	f, err := os.Open(file)
	if err != nil {
		return false
	}
	defer f.Close()
	return errors.Is(unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB), unix.EWOULDBLOCK)
}

// aliveAndHeld is a handle that the CO holds and a process serves.
func aliveAndHeld(dir string, r *prepareRequest) string {
	for _, id := range r.GetHeldHandles() {
		if locked(lockFile(dir, digestOf(r.GetVolumeId(), r.GetPrepareId()), id)) {
			return id
		}
	}
	return ""
}

// untilGone waits until no process of a preparation lives: each ends with its
// mount, which the CO has to have let go.
func untilGone(dir, pair string) error {
	files, err := filepath.Glob(lockFile(dir, pair, "*"))
	if err != nil {
		return err
	}
	for _, f := range files {
		for end := time.Now().Add(2 * time.Second); locked(f); time.Sleep(2 * time.Millisecond) {
			if time.Now().After(end) {
				return status.Error(codes.FailedPrecondition, "the FUSE mount of the preparation lives; undo what is left of it")
			}
		}
		if err := os.Remove(f); err != nil {
			return err
		}
	}
	return nil
}

// startServing starts a serving process and waits until it says that it serves.
func startServing(ctx context.Context, o order, dies bool) error {
	text, err := json.Marshal(o)
	if err != nil {
		return err
	}
	cmd := exec.Command("/proc/self/exe", "serve-fuse")
	cmd.Stdin = strings.NewReader(string(text))
	cmd.Stderr = os.Stderr
	// Of a group of its own: what ends the plugin does not end it.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if dies {
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: unix.SIGKILL}
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	said := make(chan string, 1)
	go func() {
		line, err := bufio.NewReader(out).ReadString('\n')
		if err != nil {
			line = "the process ended before it served"
		}
		said <- strings.TrimSpace(line)
		_ = cmd.Wait() // that it ends is no news
	}()
	select {
	case line := <-said:
		if line != "" {
			return errors.New(line)
		}
		return nil
	case <-ctx.Done():
		_ = cmd.Process.Kill()
		return ctx.Err()
	}
}

// ServeFUSE is a serving process: it reads an order, serves, writes one line,
// empty if it does and the reason otherwise, and ends with its mount.
func ServeFUSE(in io.Reader, out io.Writer) error {
	unix.Umask(0)
	var o order
	if err := json.NewDecoder(in).Decode(&o); err != nil {
		return err
	}
	lock, err := os.OpenFile(o.Lock, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	say := func(err error) error {
		line := "\n"
		if err != nil {
			line = strings.ReplaceAll(err.Error(), "\n", " ") + "\n"
		}
		_, werr := io.WriteString(out, line)
		return errors.Join(err, werr)
	}
	conn, err := handoff.Dial(ctx, o.Socket, o.Key, o.Token)
	if err != nil {
		return say(err)
	}
	request := handoff.FUSERequest{
		Subtype: "fake", RootMode: unix.S_IFDIR | 0o777, Resumable: o.Pretends, ShareKey: o.ShareKey,
		Parameters: []mountspec.Parameter{{Key: "default_permissions"}, {Key: "allow_other"}},
	}
	if o.Asks != "" {
		request.Parameters = append(request.Parameters, mountspec.Parameter{Key: o.Asks, Text: "4096"})
	}
	device, err := conn.RequestFUSE(ctx, o.Handle, request)
	if err != nil || device == nil {
		return say(err)
	}
	if o.Early {
		if err := say(nil); err != nil {
			return err
		}
		time.Sleep(300 * time.Millisecond)
	}
	root, err := fs.NewLoopbackRoot(o.Dir)
	if err != nil {
		return say(err)
	}
	// go-fuse closes the descriptor it is given; ours says that we live.
	fd, err := unix.FcntlInt(device.Fd(), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return say(err)
	}
	none := time.Duration(0)
	server, err := fs.Mount(fmt.Sprintf("/dev/fd/%d", fd), root, &fs.Options{
		EntryTimeout: &none, AttrTimeout: &none, NegativeTimeout: &none,
		MountOptions: fuse.MountOptions{MaxWrite: 128 << 10, IDMappedMount: true},
	})
	if err != nil {
		return say(err)
	}
	if !o.Lingers {
		_ = device.Close()
	}
	session := handoff.Session{}
	if o.Pretends {
		session.Init = []byte("INIT")
	}
	err = conn.Serving(ctx, o.Handle, session)
	if !o.Early {
		err = say(err)
	}
	if err != nil {
		return err
	}
	if o.HangsUp {
		time.AfterFunc(200*time.Millisecond, func() { _ = conn.Close() })
	}
	server.Wait()
	if o.Lingers {
		time.Sleep(time.Second)
	}
	return lock.Close()
}
