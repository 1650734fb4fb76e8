package handoff

import (
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// socketPrefix and socketSuffix mark our sockets, so that the next CO can
// remove those a killed one left behind.
const (
	socketPrefix = "handoff-"
	socketSuffix = ".sock"
)

// socket is the listening socket and the directory it lies in.
type socket struct {
	*net.UnixListener
	dir  *os.File
	path string
	name string
}

// listen makes a socket of a random name in the directory at path, and hands
// both to uid and gid. The directory is made if it is missing.
//
// An owner may rename what lies in its directory, so the directory is taken
// back first and everything is done through a descriptor of it, and it is
// given away as the last step. Connecting needs write permission on the
// socket and search permission on the directory (unix(7)); both are the
// Plugin's alone, and root's.
func listen(path string, uid, gid int) (_ *socket, err error) {
	fail := func(what string, err error) error { return fmt.Errorf("handoff: %s %s: %w", what, path, err) }

	s := &socket{name: socketPrefix + strings.ToLower(rand.Text()[:10]) + socketSuffix}
	s.path = filepath.Join(path, s.name)
	if !filepath.IsAbs(path) {
		return nil, fail("listen in", errors.New("the directory's path has to be absolute"))
	}
	if len(s.path) > MaxPath {
		return nil, fail("listen in", fmt.Errorf("the socket's path would have %d bytes, at most %d", len(s.path), MaxPath))
	}
	if err := os.Mkdir(path, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return nil, fail("make", err)
	}
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fail("open", err)
	}
	s.dir = os.NewFile(uintptr(fd), path)
	defer func() {
		if err != nil {
			_ = s.Close()
		}
	}()

	if err := unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, fail("lock (one Listener a directory)", err)
	}
	if err := s.dir.Chown(os.Geteuid(), os.Getegid()); err != nil {
		return nil, fail("take back", err)
	}
	if err := s.dir.Chmod(0o700); err != nil {
		return nil, fail("close to others", err)
	}
	if err := s.removeStale(); err != nil {
		return nil, fail("clean", err)
	}
	s.UnixListener, err = net.ListenUnix("unixpacket",
		&net.UnixAddr{Net: "unixpacket", Name: fmt.Sprintf("/proc/self/fd/%d/%s", fd, s.name)})
	if err != nil {
		return nil, fail("listen in", err)
	}
	s.SetUnlinkOnClose(false) // by name in the directory, in Close
	if err := unix.Fchmodat(fd, s.name, 0o600, 0); err != nil {
		return nil, fail("protect the socket in", err)
	}
	if err := unix.Fchownat(fd, s.name, uid, gid, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return nil, fail("give away the socket in", err)
	}
	if err := s.dir.Chown(uid, gid); err != nil {
		return nil, fail("give away", err)
	}
	return s, nil
}

func (s *socket) removeStale() error {
	names, err := s.dir.Readdirnames(-1)
	if err != nil {
		return err
	}
	for _, name := range names {
		if !strings.HasPrefix(name, socketPrefix) || !strings.HasSuffix(name, socketSuffix) {
			continue
		}
		var st unix.Stat_t
		err := unix.Fstatat(int(s.dir.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW)
		if err != nil || st.Mode&unix.S_IFMT != unix.S_IFSOCK {
			continue
		}
		if err := unix.Unlinkat(int(s.dir.Fd()), name, 0); err != nil {
			return err
		}
	}
	return nil
}

// Close stops listening and removes the socket; the directory stays.
func (s *socket) Close() error {
	var err error
	if s.UnixListener != nil {
		err = s.UnixListener.Close()
		// The Plugin may have removed or renamed it: its directory.
		_ = unix.Unlinkat(int(s.dir.Fd()), s.name, 0)
	}
	return errors.Join(err, s.dir.Close())
}

// Peer is who connected, as the kernel tells (SO_PEERCRED). It is for
// diagnostics: what authorises a message is its token.
type Peer struct {
	PID      int32
	UID, GID uint32
}

func peer(conn *net.UnixConn) Peer {
	var p Peer
	raw, err := conn.SyscallConn()
	if err != nil {
		return p
	}
	_ = raw.Control(func(fd uintptr) {
		if c, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err == nil {
			p = Peer{PID: c.Pid, UID: c.Uid, GID: c.Gid}
		}
	})
	return p
}
