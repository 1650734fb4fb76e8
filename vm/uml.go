package vm

import (
	"os"
	"path/filepath"

	"github.com/csi-prepare/csi-prepare/vm/job"
)

// UML is User-Mode Linux: the kernel as a process, of Debian's package
// user-mode-linux.
type UML struct{}

const (
	umlKernel  = "/usr/bin/linux.uml"
	umlModules = "/usr/lib/uml/modules"
)

// Name implements Machine.
func (UML) Name() string { return "uml" }

// Find implements Machine.
func (UML) Find() (string, error) {
	if _, err := os.Stat(umlKernel); err != nil {
		return "", &UnavailableError{err.Error() + "; install the Debian package user-mode-linux"}
	}
	found, err := filepath.Glob(umlModules + "/*/modules.dep")
	if err != nil || len(found) != 1 {
		return "", &UnavailableError{"want one kernel's modules in " + umlModules + "; install the Debian package user-mode-linux"}
	}
	return filepath.Dir(found[0]), nil
}

func (UML) hostRoot() bool { return true }

func (UML) device() string { return job.ResultsDeviceUML }

func (UML) command(dir, initramfs, results string) []string {
	return []string{
		umlKernel, "mem=1G", "initrd=" + initramfs, "ubd0=" + results,
		"con0=fd:0,fd:1", "con=null", "ssl=null", "console=tty0", "quiet", "panic=-1",
		"uml_dir=" + dir, "umid=guest",
	}
}
