package main

import (
	"fmt"
	"os"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"preparectl": func() { os.Exit(run()) }})
}

func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{Dir: "testdata", Condition: func(name string) (bool, error) {
		if name != "root" {
			return false, fmt.Errorf("condition %q: there is none", name)
		}
		return os.Getuid() == 0, nil
	}})
}
