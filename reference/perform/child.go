package perform

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
)

// What waits for a server or a device cannot be interrupted where it is: a
// thread in it cannot be ended. It is done in a child, which can be killed, or
// left alone if it cannot. The child is this program again; what it opens it
// sends back and ends.

// childName is the name the child is started under, as its argv[0].
const childName = "csi-prepare-perform-child"

// childSocket is the descriptor the child finds its socket at.
const childSocket = 3

// defaultTimeout is for what waits for a server or a device.
const defaultTimeout = 30 * time.Second

var childAvailable atomic.Bool

// MainIfChild has to be called first in main, before anything else is started
// or parsed, by a program that performs filesystems on a network or served by a
// plugin: such a filesystem is made in a child process, which is the program
// itself. In the child it does that and does not return. In any other process
// it returns at once, and lets Perform start children.
//
// Without the call such mount specs are refused, and filesystems on devices
// are made in the calling thread, which hangs if the device does.
func MainIfChild() {
	if len(os.Args) == 0 || os.Args[0] != childName {
		childAvailable.Store(true)
		return
	}
	if kind, err := unix.GetsockoptInt(childSocket, unix.SOL_SOCKET, unix.SO_TYPE); err != nil || kind != unix.SOCK_SEQPACKET {
		fmt.Fprintln(os.Stderr, childName+": is started by package perform only")
		os.Exit(2)
	}
	serveChild(childSocket)
	os.Exit(0)
}

// childTask is what a child is to do: to make a filesystem, to open or create
// something beneath the directory whose descriptor comes with it, or to undo
// in the namespace whose descriptor comes with it.
type childTask struct {
	FSType     string           `json:",omitempty"`
	Parameters []childParameter `json:",omitempty"`
	Exclusive  bool             `json:",omitempty"`
	Attr       uint64           `json:",omitempty"`
	// Network says that the descriptor is the network namespace to make the
	// filesystem in.
	Network bool `json:",omitempty"`

	Open           string `json:",omitempty"`
	Flags, Resolve uint64 `json:",omitempty"`

	Create string `json:",omitempty"`
	File   bool   `json:",omitempty"`

	// Undo comes with what the parent has found the kernel to offer; with
	// Force it is one receipt, whose mount is taken away by force.
	Undo     []Receipt        `json:",omitempty"`
	Force    Force            `json:",omitempty"`
	Features *kernel.Features `json:",omitempty"`
}

type childParameter struct {
	Key, Text    string
	Flag, Secret bool
}

// childAnswer comes with the descriptor, or tells why there is none.
type childAnswer struct {
	Reused  bool       // the superblock was there before
	Created bool       // what was to be created was not there before
	Undo    *childUndo `json:",omitempty"`

	Errno    syscall.Errno    `json:",omitempty"`
	Call     string           `json:",omitempty"`
	Key      string           `json:",omitempty"`
	Messages []kernel.Message `json:",omitempty"`
}

const maxChildMessage = 64 << 10

// serveChild does one task.
func serveChild(socket int) {
	body, fd, err := receive(socket)
	if err != nil {
		return
	}
	var task childTask
	var answer childAnswer
	result := -1
	if err := json.Unmarshal(body, &task); err != nil {
		answer.Errno = unix.EBADMSG
	} else {
		result = task.do(fd, &answer)
	}
	if body, err = json.Marshal(answer); err == nil {
		_ = send(socket, body, result)
	}
}

// do returns the descriptor to send back, -1 for none.
func (t *childTask) do(fd int, answer *childAnswer) (result int) {
	result = -1
	var err error
	switch {
	case t.Undo != nil:
		answer.Undo = t.undo(fd)
	case t.Open != "":
		result, err = kernel.Openat2(fd, t.Open, unix.OpenHow{Flags: t.Flags, Resolve: t.Resolve})
	case t.Create != "":
		result, answer.Created, err = create(fd, t.Create, t.File)
	default:
		result, answer.Reused, err = t.make(fd)
	}
	answer.fail(err)
	return result
}

func (a *childAnswer) fail(err error) {
	if err == nil {
		return
	}
	var fs *kernel.FSError
	if errors.As(err, &fs) {
		a.Call, a.Key, a.Messages = fs.Call, fs.Key, fs.Messages
	}
	if !errors.As(err, &a.Errno) {
		a.Errno = unix.EIO
	}
}

// error is the error of the child as if it had been made here.
func (a *childAnswer) error(task *childTask) error {
	switch {
	case a.Errno == 0:
		return nil
	case a.Call != "":
		return &kernel.FSError{Call: a.Call, FSType: task.FSType, Key: a.Key, Errno: a.Errno, Messages: a.Messages}
	}
	return &os.PathError{Op: "openat2", Path: task.Open + task.Create, Err: a.Errno}
}

// make makes the filesystem. device is the open device, -1 for none.
func (t *childTask) make(device int) (fd int, reused bool, err error) {
	if t.Network {
		if err := enterNetwork(device); err != nil {
			return -1, false, err
		}
		device = -1
	}
	for {
		fd, err = t.attempt(device, t.Exclusive && !reused)
		if errors.Is(err, unix.EBUSY) && t.Exclusive && !reused {
			reused = true
			continue
		}
		return fd, reused, err
	}
}

func (t *childTask) attempt(device int, exclusive bool) (int, error) {
	fs, err := kernel.OpenFS(t.FSType)
	if err != nil {
		return -1, err
	}
	defer func() { _ = fs.Close() }()
	for _, p := range t.Parameters {
		switch {
		case p.Key == "source" && device >= 0:
			err = fs.SetString(p.Key, "/proc/self/fd/"+strconv.Itoa(device))
		case p.Flag:
			err = fs.SetFlag(p.Key)
		case p.Secret:
			err = fs.SetSecret(p.Key, p.Text)
		default:
			err = fs.SetString(p.Key, p.Text)
		}
		if err != nil {
			return -1, err
		}
	}
	if exclusive {
		err = fs.CreateExclusive()
	} else {
		err = fs.Create()
	}
	if err != nil {
		return -1, err
	}
	return fs.Mount(int(t.Attr))
}

// inChild has a child do the task, with the descriptor fd or -1, and returns
// what it sends back. It returns when ctx ends or the timeout is over, whatever
// becomes of the child.
func inChild(ctx context.Context, task *childTask, fd int, timeout time.Duration) (int, childAnswer, error) {
	if timeout <= 0 {
		timeout = defaultTimeout
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, childAnswer{}, os.NewSyscallError("socketpair", err)
	}
	theirs := os.NewFile(uintptr(pair[1]), "child")
	child := &exec.Cmd{Path: "/proc/self/exe", Args: []string{childName}, Env: []string{}, ExtraFiles: []*os.File{theirs}}
	// On a thread of the process's own namespace, whose /proc it is.
	started := make(chan error)
	go func() { started <- child.Start() }()
	err = <-started
	_ = theirs.Close()
	if err != nil {
		_ = unix.Close(pair[0])
		return -1, childAnswer{}, fmt.Errorf("start a child: %w", err)
	}
	// Killing the child ends the waiting.
	type result struct {
		body []byte
		fd   int
		err  error
	}
	got := make(chan result, 1)
	go func() {
		r := result{fd: -1}
		body, err := json.Marshal(task)
		if err == nil {
			err = send(pair[0], body, fd)
		}
		if r.err = err; err == nil {
			r.body, r.fd, r.err = receive(pair[0])
		}
		_ = unix.Close(pair[0])
		got <- r
	}()
	ended := make(chan struct{})
	reap := func() { _ = child.Process.Kill(); _ = child.Wait(); close(ended) }
	select {
	case r := <-got:
		// It has nothing more to do, but to close its own descriptor of
		// what it made, which would keep that busy.
		go reap()
		select {
		case <-ended:
		case <-ctx.Done():
		}
		var answer childAnswer
		if r.err == nil {
			r.err = json.Unmarshal(r.body, &answer)
		}
		if r.err != nil {
			closeFD(&r.fd)
			return -1, answer, fmt.Errorf("the child ended without an answer: %w", r.err)
		}
		return r.fd, answer, answer.error(task)
	case <-ctx.Done():
		_ = child.Process.Kill()
		go func() {
			if r := <-got; r.err == nil {
				closeFD(&r.fd)
			}
			reap()
		}()
		return -1, childAnswer{}, fmt.Errorf("a server or device does not answer: %w", ctx.Err())
	}
}

func send(socket int, body []byte, fd int) error {
	var rights []byte
	if fd >= 0 {
		rights = unix.UnixRights(fd)
	}
	for {
		err := unix.Sendmsg(socket, body, rights, nil, unix.MSG_NOSIGNAL)
		if err != unix.EINTR {
			return os.NewSyscallError("sendmsg", err)
		}
	}
}

// receive reads one message and its descriptor, -1 if it has none.
func receive(socket int) ([]byte, int, error) {
	body, rights := make([]byte, maxChildMessage), make([]byte, unix.CmsgSpace(4))
	for {
		n, rn, _, _, err := unix.Recvmsg(socket, body, rights, unix.MSG_CMSG_CLOEXEC)
		if err == unix.EINTR {
			continue
		}
		if err == nil && n == 0 {
			err = unix.EPIPE
		}
		if err != nil {
			return nil, -1, os.NewSyscallError("recvmsg", err)
		}
		fd := -1
		if messages, err := unix.ParseSocketControlMessage(rights[:rn]); err == nil && len(messages) == 1 {
			if fds, err := unix.ParseUnixRights(&messages[0]); err == nil && len(fds) > 0 {
				fd = fds[0]
			}
		}
		return body[:n], fd, nil
	}
}

// makesInChild says whether a filesystem is made in a child, and fails where it
// would have to be and cannot.
func makesInChild(k *mountspec.Filesystem) (bool, error) {
	switch {
	case childAvailable.Load():
		return remoteTypes[k.Type] || k.Served || k.Device != nil, nil
	case remoteTypes[k.Type] || k.Served:
		return false, fmt.Errorf("%q waits for a server, and this program does not call perform.MainIfChild", k.Type)
	}
	return false, nil
}

// makeInChild makes the whole filesystem of a spec in a child.
func (x *performance) makeInChild(u *unit, s *mountspec.Step, fstype string) error {
	task := childTask{FSType: fstype, Attr: uint64(s.Set)}
	for i := range x.plan.Steps {
		p := &x.plan.Steps[i]
		if p.Spec != s.Spec {
			continue
		}
		switch p.Call {
		case mountspec.SetString, mountspec.SetFlag:
			text := p.Text
			if !p.Secret.IsZero() {
				text = p.Secret.Reveal()
			}
			task.Parameters = append(task.Parameters, childParameter{
				Key: p.Key, Text: text, Flag: p.Call == mountspec.SetFlag, Secret: !p.Secret.IsZero(),
			})
		case mountspec.CreateExclusive:
			task.Exclusive = true
		}
	}
	with := u.device
	if x.o.Network != nil && networkTypes[fstype] {
		network, done, err := descriptorOf(x.o.Network)
		if err != nil {
			return err
		}
		defer done()
		task.Network, with = true, network
	}
	fd, answer, err := inChild(x.ctx, &task, with, x.o.Timeout)
	if err != nil {
		return err
	}
	u.mount, u.reuse = fd, answer.Reused
	return nil
}
