package server

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// maxSocketPath is the room for a path in struct sockaddr_un, less the final
// zero byte (unix(7)).
const maxSocketPath = 107

// SocketPath returns the path an endpoint names.
func SocketPath(endpoint string) (string, error) {
	path, hasScheme := strings.CutPrefix(endpoint, "unix://")
	if !hasScheme {
		path = strings.TrimPrefix(endpoint, "unix:")
	}
	switch {
	case endpoint == "":
		return "", errors.New("endpoint: required; for example unix:///run/prepare/csi.sock")
	case !filepath.IsAbs(path):
		return "", fmt.Errorf("endpoint %q: only Unix sockets with an absolute path are served; for example unix:///run/prepare/csi.sock", endpoint)
	case len(path) > maxSocketPath:
		return "", fmt.Errorf("endpoint: the path has %d bytes, a Unix socket allows %d; use a shorter one", len(path), maxSocketPath)
	}
	return filepath.Clean(path), nil
}

// Listen makes the socket of an endpoint, with mode 0600 from its first
// moment, and its directory with mode 0700 where that is missing. A socket
// left by a process that is gone is replaced. One that a process listens on,
// and a file that is no socket, are never touched: that is an error.
func Listen(ctx context.Context, endpoint string) (net.Listener, error) {
	path, err := SocketPath(endpoint)
	if err != nil {
		return nil, err
	}
	dir, err := openSocketDir(filepath.Dir(path))
	if err != nil {
		return nil, fmt.Errorf("endpoint %s: %w", endpoint, err)
	}
	defer dir.Close() // ends the lock
	// Two processes that both find the socket stale must not both replace
	// it: between the look and the bind the directory is locked.
	if err := lockUntil(ctx, dir); err != nil {
		return nil, fmt.Errorf("endpoint %s: lock %s: %w", endpoint, dir.Name(), err)
	}
	if err := removeStale(ctx, path); err != nil {
		return nil, fmt.Errorf("endpoint %s: %w", endpoint, err)
	}
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		// bind(2) gives the file the mode of the socket's own inode: set
		// before, there is no moment in which others may connect.
		var failed error
		if err := c.Control(func(fd uintptr) { failed = unix.Fchmod(int(fd), 0o600) }); err != nil {
			return err
		}
		return failed
	}}
	l, err := lc.Listen(ctx, "unix", path)
	if err != nil {
		return nil, fmt.Errorf("endpoint %s: %w", endpoint, err)
	}
	return l, nil
}

func openSocketDir(path string) (*os.File, error) {
	if err := os.Mkdir(path, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, fmt.Errorf("make the socket's directory: %w", err)
	}
	dir, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	info, err := dir.Stat()
	if err == nil && !info.IsDir() {
		err = fmt.Errorf("%s is not a directory", path)
	}
	if err == nil && info.Mode()&0o002 != 0 && info.Mode()&fs.ModeSticky == 0 {
		err = fmt.Errorf("anyone may replace files in %s (mode %04o); use a directory of mode 0700", path, info.Mode().Perm())
	}
	if err != nil {
		_ = dir.Close()
		return nil, err
	}
	return dir, nil
}

func lockUntil(ctx context.Context, f *os.File) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("another process holds the lock: %w", ctx.Err())
		case <-time.After(5 * time.Millisecond):
		}
	}
}

func removeStale(ctx context.Context, path string) error {
	info, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if info.Mode().Type() != fs.ModeSocket {
		return fmt.Errorf("%s exists and is not a socket; move it away or use another endpoint", path)
	}
	conn, err := (&net.Dialer{Timeout: time.Second}).DialContext(ctx, "unix", path)
	switch {
	case err == nil:
		_ = conn.Close()
		return fmt.Errorf("a running process serves %s; stop it or use another endpoint", path)
	case errors.Is(err, unix.ECONNREFUSED): // nobody has it open any more
		return os.Remove(path)
	default:
		return fmt.Errorf("%s exists and it cannot be told whether a process serves it: %w", path, err)
	}
}
