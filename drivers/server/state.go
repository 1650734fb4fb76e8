package server

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// State is a driver's directory of durable records. One process at a time
// has it.
type State struct {
	dir  string
	log  *slog.Logger
	lock *os.File
}

// OpenState takes the directory for this process, and makes it with mode 0700
// where it is missing. It fails while another process has it, and where others
// than the owner may write to it. A nil log discards.
func OpenState(dir string, log *slog.Logger) (*State, error) {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	if !filepath.IsAbs(dir) {
		return nil, fmt.Errorf("state directory %q: is not an absolute path; begin it with '/'", dir)
	}
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, fmt.Errorf("make the state directory: %w", err)
	}
	info, err := os.Lstat(dir)
	if err != nil {
		return nil, fmt.Errorf("state directory: %w", err)
	}
	if !info.IsDir() {
		return nil, fmt.Errorf("state directory %s: is not a directory", dir)
	}
	if info.Mode().Perm()&0o022 != 0 {
		return nil, fmt.Errorf("state directory %s: others may write to it (mode %04o); chmod 0700 it, or name one that is the driver's alone", dir, info.Mode().Perm())
	}
	s := &State{dir: dir, log: log}
	if err := s.take(); err != nil {
		return nil, fmt.Errorf("state directory %s: %w", dir, err)
	}
	return s, nil
}

// take locks the directory. The lock is the kernel's and ends with the
// process; the pid in the file is for the reader of the message alone.
func (s *State) take() error {
	f, err := os.OpenFile(filepath.Join(s.dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		holder := make([]byte, 32)
		n, _ := f.Read(holder)
		_ = f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return fmt.Errorf("another driver process uses it (pid %s); stop that one, or give this one a directory of its own",
				bytes.TrimSpace(holder[:n]))
		}
		return fmt.Errorf("lock: %w", err)
	}
	s.lock = f
	if err := f.Truncate(0); err != nil {
		return err
	}
	_, err = f.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
	return err
}

// Close gives the directory up. Nothing may use its records any more.
func (s *State) Close() error { return s.lock.Close() }

// BootID is the kernel's id of this boot (random(4)).
func BootID() (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("read the boot id: %w", err)
	}
	return strings.TrimSpace(string(b)), nil
}

// isBootID tells a directory of one boot from what else may lie beside it.
func isBootID(name string) bool {
	return len(name) == 36 && strings.Trim(name, "0123456789abcdef-") == ""
}

func syncDir(path string) error {
	d, err := os.Open(path)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}
