// Package nfsd runs the kernel's NFS server in a network namespace of its own,
// as another host would: without nfs-utils, whose part it plays for one
// directory tree. It is for guests: it opens the server to everybody who
// reaches its addresses.
package nfsd

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Server is the server of this process's network namespace.
type Server struct {
	mu       sync.Mutex
	exports  map[string]export
	next     uint32
	channels map[string]int // of the caches, by name
}

// control is where the kernel's control filesystem is mounted.
const control = "/proc/fs/nfsd"

// The kernel's caches, which ask us.
const (
	cacheOfClients = "auth.unix.ip"
	cacheOfExports = "nfsd.export"
	cacheOfHandles = "nfsd.fh"
)

var caches = []string{cacheOfClients, cacheOfExports, cacheOfHandles}

// serveHere makes this process, in namespaces of its own, the server of what
// is below root: it changes its root there, whose filesystem has to be one that
// can be exported. It returns when everything is ready.
func serveHere(ctx context.Context, root string) (*Server, error) {
	s := &Server{exports: map[string]export{}, channels: map[string]int{}, next: 1}
	// The kernel looks up paths of exports from here, and rpc_pipefs by
	// nobody but us.
	for _, m := range []struct{ fstype, target string }{
		{"proc", "/proc"}, {"nfsd", control}, {"rpc_pipefs", "/pipefs"},
	} {
		target := filepath.Join(root, m.target)
		if m.fstype != "nfsd" {
			if err := os.MkdirAll(target, 0o755); err != nil { //nolint:gosec // the root is the caller's own
				return nil, err
			}
		}
		if err := unix.Mount(m.fstype, target, m.fstype, 0, ""); err != nil {
			return nil, fmt.Errorf("mount %s: %w", m.fstype, err)
		}
	}
	if err := errors.Join(unix.Chroot(root), os.Chdir("/")); err != nil {
		return nil, err
	}
	answers := []func([]string) string{clientOf, s.exportOf, s.pathOf}
	for i, name := range caches {
		path := "/proc/net/rpc/" + name + "/channel"
		c, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err != nil {
			return nil, &fs.PathError{Op: "open", Path: path, Err: err}
		}
		s.channels[name] = c
		go answerUpcalls(c, answers[i])
	}
	for port, answer := range map[int]func(*call) ([]byte, error){portPortmap: portmap, portMount: mountd(s.handle)} {
		l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", ":"+strconv.Itoa(port))
		if err != nil {
			return nil, err
		}
		go serve(l, answer)
	}
	go keepClients(ctx, "/pipefs/nfsd/cld")
	// The root that NFS version 4 begins at.
	s.exports["/"] = export{"/", 0, exportReadonly | exportInsecurePort | exportNoSubtreeCheck | exportFSID | exportCrossMount | exportV4Root}
	return s, nil
}

// start starts the kernel's threads, and ends the time in which it waits for
// clients of an earlier life.
func (s *Server) start(ctx context.Context) error {
	err := errors.Join(
		s.control("versions", "-2 +3 +4 +4.0 +4.1 +4.2"),
		s.control("nfsv4leasetime", "10"), s.control("nfsv4gracetime", "10"))
	for _, network := range []string{"tcp4", "tcp6"} {
		err = errors.Join(err, s.listen(ctx, network))
	}
	if err = errors.Join(err, s.control("threads", "4")); err != nil {
		return err
	}
	if err := s.control("v4_end_grace", "Y"); err != nil && !errors.Is(err, unix.EBUSY) {
		return err
	}
	return nil
}

// listen gives the kernel a socket to serve on: by itself it takes IPv4 alone.
func (s *Server) listen(ctx context.Context, network string) error {
	l, err := (&net.ListenConfig{}).Listen(ctx, network, ":"+strconv.Itoa(portNFS))
	if err != nil {
		return err
	}
	f, err := l.(*net.TCPListener).File()
	if err != nil {
		return err
	}
	return errors.Join(s.control("portlist", strconv.Itoa(int(f.Fd()))), f.Close(), l.Close())
}

func (s *Server) stop() error { return s.control("threads", "0") }

func (s *Server) control(file, text string) error {
	if err := os.WriteFile(control+"/"+file, []byte(text+"\n"), 0); err != nil {
		return fmt.Errorf("write %q to nfsd's %s: %w", text, file, err)
	}
	return nil
}

// add exports a directory of the root, to be read and written by everybody as
// whoever they say they are.
func (s *Server) add(path string) error {
	s.mu.Lock()
	s.exports[path] = export{path, s.next, exportInsecurePort | exportNoSubtreeCheck | exportFSID}
	s.next++
	s.mu.Unlock()
	return s.flush()
}

func (s *Server) remove(path string) error {
	s.mu.Lock()
	delete(s.exports, path)
	s.mu.Unlock()
	return s.flush()
}

// flush has the kernel ask anew.
func (s *Server) flush() error {
	var all error
	// What is as old as the flush time is still valid.
	now := strconv.FormatInt(time.Now().Add(time.Second).Unix(), 10)
	for _, name := range caches {
		all = errors.Join(all, os.WriteFile("/proc/net/rpc/"+name+"/flush", []byte(now+"\n"), 0))
	}
	return all
}

func (s *Server) exportAt(path string) (export, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e, ok := s.exports[path]
	return e, ok
}

func (s *Server) pathWith(fsid uint32) (string, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range s.exports {
		if e.fsid == fsid {
			return e.path, true
		}
	}
	return "", false
}

// handle returns the file handle of an exported directory, or of one below it,
// for a client of NFS version 3.
func (s *Server) handle(path string) ([]byte, error) {
	path = filepath.Clean(path)
	// Told before it asks: whoever asks for a handle it would not let wait.
	// The domain exists by its clients.
	if _, err := unix.Write(s.channels[cacheOfClients], []byte(clientOf([]string{"nfsd", "127.0.0.1"})+"\n")); err != nil {
		return nil, fmt.Errorf("tell the kernel of a client: %w", err)
	}
	for at := path; ; at = filepath.Dir(at) {
		if _, err := unix.Write(s.channels[cacheOfExports], []byte(s.exportOf([]string{domain, at})+"\n")); err != nil {
			return nil, fmt.Errorf("tell the kernel of %s: %w", at, err)
		}
		if _, ok := s.exportAt(at); ok && at != "/" {
			break
		}
		if at == "/" {
			return nil, fs.ErrNotExist
		}
	}
	f, err := os.OpenFile(control+"/filehandle", os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	const longest = 64
	if _, err := fmt.Fprintf(f, "%s %s %d\n", domain, quote(path), longest); err != nil {
		return nil, fmt.Errorf("ask for the handle: %w", err)
	}
	buf := make([]byte, 4*longest)
	n, err := f.Read(buf)
	if err != nil {
		return nil, err
	}
	return hex.DecodeString(strings.TrimPrefix(strings.TrimSpace(string(buf[:n])), `\x`))
}
