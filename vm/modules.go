package vm

import (
	"bufio"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// closure returns the files of the named modules and of those they need, below
// dir, in the order to load them. A name that modules.builtin has is left out.
func closure(dir string, names []string) ([]string, error) {
	needs, err := readDep(filepath.Join(dir, "modules.dep"))
	if err != nil {
		return nil, err
	}
	builtin, err := os.ReadFile(filepath.Join(dir, "modules.builtin"))
	if err != nil {
		return nil, err
	}
	byName := map[string]string{}
	for file := range needs {
		byName[moduleName(file)] = file
	}
	for file := range strings.Lines(string(builtin)) {
		byName[moduleName(strings.TrimSpace(file))] = ""
	}
	var order []string
	for _, name := range names {
		file, ok := byName[name]
		switch {
		case !ok:
			return nil, fmt.Errorf("kernel module %s: is not in %s", name, dir)
		case file == "":
			continue
		}
		// modules.dep names the closest first, each after what needs it.
		needed := slices.Clone(needs[file])
		slices.Reverse(needed)
		for _, f := range append(needed, file) {
			if !slices.Contains(order, f) {
				order = append(order, f)
			}
		}
	}
	return order, nil
}

func readDep(path string) (map[string][]string, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	needs := map[string][]string{}
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		file, rest, ok := strings.Cut(lines.Text(), ":")
		if !ok {
			return nil, fmt.Errorf("%s: no colon in %q", path, lines.Text())
		}
		needs[file] = strings.Fields(rest)
	}
	return needs, lines.Err()
}

// moduleName is the name the kernel gives to the module of a file.
func moduleName(file string) string {
	name, _, _ := strings.Cut(filepath.Base(file), ".")
	return strings.ReplaceAll(name, "-", "_")
}
