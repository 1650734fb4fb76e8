package sanity

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// canary is random text that is looked for where it must not be. Reports do
// not show it, wherever it is found.
func (t *trial) canary() string {
	text := fmt.Sprintf("canary-%016x", t.draw())
	t.hide(text)
	return text
}

// nonce is random text that is written in one place and read in another.
func (t *trial) nonce() string { return fmt.Sprintf("nonce-%016x\n", t.draw()) }

// draw returns the next number of the run's random source.
func (s *Suite) draw() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.random.Uint64()
}

// write writes a file of the suite's own; that it cannot is no fault of who
// is tested.
func (t *trial) write(path, text string) {
	t.sysfail("writing a file of the suite", os.WriteFile(path, []byte(text), 0o600))
}

// holds reports whether a file has exactly this text, and what it has else.
func holds(path, text string) (bool, string) {
	b, err := os.ReadFile(path)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return false, "there is no such file"
	case err != nil:
		return false, errnoName(err)
	case string(b) != text:
		return false, fmt.Sprintf("it holds %q", clip(string(b)))
	}
	return true, ""
}

func clip(s string) string {
	if len(s) > 60 {
		return s[:60] + "…"
	}
	return s
}

func ignoreMissing(err error) error {
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

// exists reports whether there is anything at a path.
func exists(path string) bool {
	_, err := os.Lstat(path) //nolint:gosec // whoever runs the suite names it
	return !errors.Is(err, os.ErrNotExist)
}

// names lists a directory.
func names(dir string) []string {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil
	}
	var found []string
	for _, e := range entries {
		found = append(found, e.Name())
	}
	return found
}

// madeBySuite reports whether the suite made what is at a path in its own
// directories, or the plugin the socket it was told to make.
func (t *trial) madeBySuite(path string) bool {
	return slices.Contains(t.directories, path) ||
		filepath.Dir(path) == t.Suite.dir && (slices.Contains(t.furniture, filepath.Base(path)) || strings.HasPrefix(filepath.Base(path), "spec-"))
}

// exchange swaps two names.
func exchange(a, b string) error {
	return unix.Renameat2(unix.AT_FDCWD, a, unix.AT_FDCWD, b, unix.RENAME_EXCHANGE)
}
