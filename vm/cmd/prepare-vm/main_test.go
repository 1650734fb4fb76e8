package main

import (
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"testing"
	"time"

	"github.com/csi-prepare/csi-prepare/vm"
)

// The guests boot, and what they run in short form passes there.
func TestGuests(t *testing.T) {
	t.Chdir(filepath.Join("..", "..", ".."))
	o := options{out: t.TempDir(), short: true, timeout: 8 * time.Minute, console: t.Output()}
	err := o.run(t.Context())
	var unavailable *vm.UnavailableError
	if errors.As(err, &unavailable) {
		t.Skip("could not run: " + unavailable.Reason)
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, g := range selected(regexp.MustCompile(""), true) {
		if _, err := os.Stat(filepath.Join(o.out, "vm-"+g.name+".json")); err != nil {
			t.Error(err)
		}
	}
}

// Steps have names of their own, as their reports do.
func TestStepsHaveNames(t *testing.T) {
	seen := map[string]bool{}
	for _, g := range guests {
		for _, s := range g.steps {
			if s.name == "" || seen[s.name] || (s.test == "") == (s.command == "") {
				t.Errorf("step %+v of guest %s has no name of its own, or not one program", s, g.name)
			}
			seen[s.name] = true
		}
	}
}
