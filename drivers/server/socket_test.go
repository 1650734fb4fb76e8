package server

import (
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestSocketPath(t *testing.T) {
	for endpoint, want := range map[string]string{
		"unix:///run/a/csi.sock":              "/run/a/csi.sock",
		"unix:/run/a/csi.sock":                "/run/a/csi.sock",
		"/run/a/csi.sock":                     "/run/a/csi.sock",
		"":                                    "",
		"unix://relative":                     "",
		"tcp://127.0.0.1:1":                   "",
		"dns:///host:1":                       "",
		"unix://":                             "",
		"/" + strings.Repeat("a", 106):        "/" + strings.Repeat("a", 106),
		"/" + strings.Repeat("a", 107):        "",
		"unix:///run/a/../b/./csi.sock":       "/run/b/csi.sock",
		"unix-abstract:whatever":              "",
		"unix://@abstract":                    "",
		"http://x/unix:///run/prepare/a.sock": "",
	} {
		got, err := SocketPath(endpoint)
		if got != want || (err == nil) != (want != "") {
			t.Errorf("%q: got %q, %v; want %q", endpoint, got, err, want)
		}
		if err != nil && !strings.HasPrefix(err.Error(), "endpoint") {
			t.Errorf("%q: error names no field: %v", endpoint, err)
		}
	}
}

// shortDir is a directory whose path leaves room for a socket's name.
func shortDir(t *testing.T) string {
	dir, err := os.MkdirTemp("", "server")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func staleSocket(t *testing.T, path string) {
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	l.Close()
}

func TestListenModes(t *testing.T) {
	old := unix.Umask(0)
	defer unix.Umask(old)
	path := filepath.Join(shortDir(t), "plugin", "csi.sock")
	l, err := Listen(t.Context(), "unix://"+path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for name, want := range map[string]os.FileMode{path: 0o600, filepath.Dir(path): 0o700} {
		info, err := os.Stat(name)
		if err != nil {
			t.Fatal(err)
		}
		if info.Mode().Perm() != want {
			t.Errorf("%s: mode %o, want %o", name, info.Mode().Perm(), want)
		}
	}
}

func TestListenReplacesAStaleSocketOnly(t *testing.T) {
	path := filepath.Join(shortDir(t), "csi.sock")
	staleSocket(t, path)
	l, err := Listen(t.Context(), path)
	if err != nil {
		t.Fatalf("stale socket: %v", err)
	}
	if _, err := Listen(t.Context(), path); err == nil || !strings.Contains(err.Error(), "running process serves") {
		t.Errorf("live socket: %v", err)
	}
	conn, err := net.Dial("unix", path)
	if err != nil {
		t.Fatalf("the live one was harmed: %v", err)
	}
	conn.Close()
	l.Close()
	if _, err := os.Lstat(path); !os.IsNotExist(err) {
		t.Errorf("socket left after close: %v", err)
	}

	if err := os.WriteFile(path, []byte("data"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Listen(t.Context(), path); err == nil || !strings.Contains(err.Error(), "not a socket") {
		t.Errorf("regular file: %v", err)
	}
	if data, _ := os.ReadFile(path); string(data) != "data" {
		t.Error("the file was touched")
	}
	os.Remove(path)
	if err := os.Symlink("/nowhere", path); err != nil {
		t.Fatal(err)
	}
	if _, err := Listen(t.Context(), path); err == nil {
		t.Error("a symbolic link was followed or replaced")
	}
}

// Of many processes that find the same stale socket, one gets it and none
// takes it from that one.
func TestListenRace(t *testing.T) {
	path := filepath.Join(shortDir(t), "csi.sock")
	staleSocket(t, path)
	var (
		all  sync.WaitGroup
		mu   sync.Mutex
		open []net.Listener
	)
	for range 16 {
		all.Go(func() {
			if l, err := Listen(t.Context(), path); err == nil {
				mu.Lock()
				open = append(open, l)
				mu.Unlock()
			}
		})
	}
	all.Wait()
	if len(open) != 1 {
		t.Fatalf("%d of 16 listen", len(open))
	}
	defer open[0].Close()
	go func() {
		conn, err := net.DialTimeout("unix", path, 5*time.Second)
		if err == nil {
			conn.Close()
		}
	}()
	// The others' probes come first in the queue; one of ours follows.
	if conn, err := open[0].Accept(); err != nil {
		t.Fatal(err)
	} else {
		conn.Close()
	}
}

func TestListenRefusesAnOpenDirectory(t *testing.T) {
	dir := filepath.Join(shortDir(t), "open")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	if _, err := Listen(t.Context(), filepath.Join(dir, "csi.sock")); err == nil || !strings.Contains(err.Error(), "anyone may replace") {
		t.Errorf("got %v", err)
	}
}
