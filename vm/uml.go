package vm

import (
	"os"
	"path/filepath"
)

// User-Mode Linux: the kernel as a process, of Debian's package user-mode-linux.
const (
	umlKernel  = "/usr/bin/linux.uml"
	umlModules = "/usr/lib/uml/modules"
)

// Find returns the directory of the guest kernel's modules, or an
// *UnavailableError where there is no such kernel.
func Find() (moduleDir string, err error) {
	if _, err := os.Stat(umlKernel); err != nil {
		return "", &UnavailableError{err.Error() + "; install the Debian package user-mode-linux"}
	}
	found, err := filepath.Glob(umlModules + "/*/modules.dep")
	if err != nil || len(found) != 1 {
		return "", &UnavailableError{"want one kernel's modules in " + umlModules + "; install the Debian package user-mode-linux"}
	}
	return filepath.Dir(found[0]), nil
}

// command boots a guest. dir is for what the kernel itself makes.
func command(dir, initramfs, results string) []string {
	return []string{
		umlKernel, "mem=1G", "initrd=" + initramfs, "ubd0=" + results,
		"con0=fd:0,fd:1", "con=null", "ssl=null", "console=tty0", "quiet", "panic=-1",
		"uml_dir=" + dir, "umid=guest",
	}
}
