package sanity

import (
	"fmt"
	"os"
	"path"
	"slices"
	"strings"

	"github.com/csi-prepare/csi-prepare/reference/mountspec"
)

// performable ends the spec as could-not-run where a network filesystem of an
// answer cannot be mounted here, which is no fault of the plugin.
func (t *trial) performable(specs []mountspec.Spec) {
	for i := range specs {
		fs, ok := specs[i].Kind.(*mountspec.Filesystem)
		if !ok || !slices.Contains(networkFilesystems, fs.Type) {
			continue
		}
		if t.config.NoServer != "" {
			end(couldNotRun("%s", t.config.NoServer))
		}
		known, err := kernelKnows(fs.Type)
		t.sysfail("reading which filesystems the kernel knows", err)
		if !known {
			end(couldNotRun("the kernel has no %s, which mount_specs[%d] is; load its module, or use a guest that has it", fs.Type, i))
		}
	}
}

// kernelKnows reports whether a type is registered with the kernel.
func kernelKnows(fsType string) (bool, error) {
	text, err := os.ReadFile("/proc/filesystems")
	if err != nil {
		return false, err
	}
	for line := range strings.Lines(string(text)) {
		words := strings.Fields(line)
		if len(words) > 0 && words[len(words)-1] == fsType {
			return true, nil
		}
	}
	return false, nil
}

// exported is the directory of the server's that a source names, by what the
// configuration says of exports.
func (c Config) exported(source string) (dir string, known bool) {
	for export, dir := range c.Exports {
		if rest, ok := strings.CutPrefix(source, export); ok && (rest == "" || rest[0] == '/') {
			return path.Join(dir, rest), true
		}
	}
	return "", false
}

// checkExports refuses what exported could not use.
func (c Config) checkExports() error {
	for export, dir := range c.Exports {
		if host, at, ok := strings.Cut(export, ":/"); !ok || host == "" || path.Clean("/"+at) != "/"+at {
			return fmt.Errorf("export %q: write it as HOST:PATH, as the plugin's mount specs do", export)
		}
		if !path.IsAbs(dir) {
			return fmt.Errorf("export %s: %q is not an absolute path", export, dir)
		}
	}
	return nil
}
