package mountns

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// namespace is a private copy for one test, closed at its end.
func namespace(t testing.TB, options ...NewOption) *Namespace {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("making a mount namespace needs root")
	}
	n, err := New(t.Context(), options...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = n.Close() })
	return n
}

// inside runs fn in n and fails the test on an error.
func inside(t testing.TB, n *Namespace, fn func() error) {
	t.Helper()
	if err := n.Do(t.Context(), fn); err != nil {
		t.Fatal(err)
	}
}

func tableOf(t testing.TB, n *Namespace) *Table {
	t.Helper()
	table, err := n.Table(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return table
}

func mountTmpfs(point, data string) error {
	if err := os.MkdirAll(point, 0o700); err != nil {
		return err
	}
	return unix.Mount("tmpfs", point, "tmpfs", 0, data)
}

// must stops the test at an error of a step it does not test.
func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
