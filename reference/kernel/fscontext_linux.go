package kernel

import (
	"fmt"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// FSContext is a filesystem being configured: one fsopen(2) to one fsmount(2).
// It is for one goroutine. Close it when done, also after an error.
type FSContext struct {
	fd     int
	fstype string
	hidden []string
}

// FSError is a failed step of a filesystem context.
type FSError struct {
	// Call is fsopen, fsconfig or fsmount.
	Call string
	// FSType is the filesystem the context is for.
	FSType string
	// Key is the parameter that was being set; for a command it is empty.
	// The value is never kept.
	Key string
	// Errno is the result of the call.
	Errno unix.Errno
	// Messages are what the kernel wrote to the context's log, oldest first,
	// without the values of secret parameters. Often empty: not every
	// filesystem explains itself.
	Messages []Message
}

// Message is one line of the log of a filesystem context.
type Message struct {
	// Level is 'e' for an error, 'w' for a warning, 'i' for information.
	Level byte
	// Text is the line without its level, such as
	// "tmpfs: Unknown parameter 'bogus'".
	Text string
}

func (m Message) String() string { return string(m.Level) + " " + m.Text }

// Error names the call, the parameter if any, the errno and the kernel's words.
func (e *FSError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s %s", e.Call, e.FSType)
	if e.Key != "" {
		fmt.Fprintf(&b, " %q", e.Key)
	}
	fmt.Fprintf(&b, ": %v", e.Errno)
	for i, m := range e.Messages {
		sep := "; "
		if i == 0 {
			sep = " (kernel: "
		}
		b.WriteString(sep + m.Text)
	}
	if len(e.Messages) > 0 {
		b.WriteByte(')')
	}
	return b.String()
}

// Unwrap returns the errno.
func (e *FSError) Unwrap() error { return e.Errno }

// OpenFS starts the configuration of a new superblock of type fstype. A type
// the kernel does not know is ENODEV. fsopen(2); Linux 5.2.
func OpenFS(fstype string) (*FSContext, error) {
	for {
		fd, err := unix.Fsopen(fstype, unix.FSOPEN_CLOEXEC)
		switch err {
		case nil:
			return &FSContext{fd: fd, fstype: fstype}, nil
		case unix.EINTR:
		default:
			return nil, &FSError{Call: "fsopen", FSType: fstype, Errno: errnoOf(err)}
		}
	}
}

// FD returns the context's descriptor, which stays the context's.
func (c *FSContext) FD() int { return c.fd }

// Close gives the context up. A mount made from it stays.
func (c *FSContext) Close() error {
	if c.fd < 0 {
		return nil
	}
	fd := c.fd
	c.fd = -1
	return unix.Close(fd)
}

// SetString sets a parameter that has a value. The kernel takes at most 255
// bytes of each, and does not split the value at commas.
func (c *FSContext) SetString(key, value string) error {
	return c.set(key, func() error { return unix.FsconfigSetString(c.fd, key, value) })
}

// SetSecret is [FSContext.SetString] for a value that must not appear in an
// error: should the kernel repeat it, it is masked.
func (c *FSContext) SetSecret(key, value string) error {
	if value != "" {
		c.hidden = append(c.hidden, value)
	}
	return c.SetString(key, value)
}

// SetFlag sets a parameter that has no value.
func (c *FSContext) SetFlag(key string) error {
	return c.set(key, func() error { return unix.FsconfigSetFlag(c.fd, key) })
}

// SetFD sets a parameter to a descriptor of the calling process, for
// filesystems that take one so (FUSE does not: it wants the number as a string).
func (c *FSContext) SetFD(key string, fd int) error {
	return c.set(key, func() error { return unix.FsconfigSetFd(c.fd, key, fd) })
}

func (c *FSContext) set(key string, call func() error) error {
	for {
		switch errno := errnoOf(call()); errno {
		case 0:
			return nil
		case unix.EINTR:
		default:
			return c.fail("fsconfig", key, errno)
		}
	}
}

const fsconfigCreateExclusive = 8

// Create makes the superblock, or finds it: a filesystem on a block device that
// is mounted already is that superblock again, and parameters that differ are
// ignored without a word. This is the step that opens devices and talks to
// servers; it can block.
func (c *FSContext) Create() error { return c.create(unix.FSCONFIG_CMD_CREATE) }

// CreateExclusive is [FSContext.Create] that answers EBUSY instead of reusing
// a superblock. FSCONFIG_CMD_CREATE_EXCL; Linux 6.6, EOPNOTSUPP before.
func (c *FSContext) CreateExclusive() error { return c.create(fsconfigCreateExclusive) }

func (c *FSContext) create(command uintptr) error {
	interrupted := false
	for {
		_, _, errno := unix.Syscall6(unix.SYS_FSCONFIG, uintptr(c.fd), command, 0, 0, 0, 0)
		switch {
		case errno == 0:
			return nil
		case errno == unix.EINTR && !interrupted:
			// Either it had not begun, and can be asked again, or it was
			// broken off, and the context answers EBUSY from now on.
			interrupted = true
		case errno == unix.EBUSY && interrupted:
			return c.fail("fsconfig", "", unix.EINTR)
		default:
			return c.fail("fsconfig", "", errno)
		}
	}
}

// Mount returns a detached mount of the created superblock with attributes
// attr (MOUNT_ATTR_ bits; read-only, nosuid and their like belong here, not
// among the parameters). A context makes one mount. fsmount(2).
func (c *FSContext) Mount(attr int) (int, error) {
	for {
		fd, err := unix.Fsmount(c.fd, unix.FSMOUNT_CLOEXEC, attr)
		switch err {
		case nil:
			return fd, nil
		case unix.EINTR:
		default:
			return -1, c.fail("fsmount", "", errnoOf(err))
		}
	}
}

func (c *FSContext) fail(call, key string, errno unix.Errno) error {
	return &FSError{Call: call, FSType: c.fstype, Key: key, Errno: errno, Messages: c.Messages()}
}

// maxMessages bounds how much of the log is read; the kernel keeps eight lines.
const maxMessages = 64

// Messages takes the lines the kernel has logged on the context since the last
// call, also the warnings and notes of steps that succeeded.
func (c *FSContext) Messages() []Message {
	var messages []Message
	buf := make([]byte, 512)
	for len(messages) < maxMessages {
		n, err := unix.Read(c.fd, buf)
		switch {
		case err == unix.EINTR:
		case err == unix.EMSGSIZE && len(buf) < 1<<16:
			buf = make([]byte, 4*len(buf))
		case err != nil || n <= 0: // ENODATA: no more
			return messages
		default:
			messages = append(messages, c.message(buf[:n]))
		}
	}
	return messages
}

func (c *FSContext) message(line []byte) Message {
	text := strings.TrimRight(string(line), "\n\x00")
	for _, secret := range c.hidden {
		text = strings.ReplaceAll(text, secret, "***")
	}
	if len(text) > 2 && text[1] == ' ' {
		return Message{Level: text[0], Text: text[2:]}
	}
	return Message{Level: 'e', Text: text}
}

// PickFS opens the superblock of the mount open at fd for reconfiguration.
// Whoever else has the superblock mounted sees the change too. fspick(2).
func PickFS(fd int, fstype string) (*FSContext, error) {
	for {
		r, _, errno := unix.Syscall(unix.SYS_FSPICK, uintptr(fd), uintptr(unsafe.Pointer(&empty[0])),
			unix.FSPICK_CLOEXEC|unix.FSPICK_EMPTY_PATH|unix.FSPICK_NO_AUTOMOUNT)
		switch errno {
		case 0:
			return &FSContext{fd: int(r), fstype: fstype}, nil
		case unix.EINTR:
		default:
			return nil, &FSError{Call: "fspick", FSType: fstype, Errno: errno}
		}
	}
}

// Reconfigure applies the parameters set on a context from [PickFS].
func (c *FSContext) Reconfigure() error {
	return c.set("", func() error { return unix.FsconfigReconfigure(c.fd) })
}
